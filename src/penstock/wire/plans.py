"""Plans of the structures of elements, kept as long as they are few."""

from __future__ import annotations

from typing import Any, TypeVar

MOST_LEAVES = 1 << 16  # of all plans that are kept: some 10 MB of them

Plan = TypeVar("Plan")


class Plans(dict[Any, Plan]):
    """Plans by what they are for. Any thread may use it.

    When they become too many all are forgotten: where each element has a structure of its own, none helps.
    """

    def __init__(self) -> None:
        super().__init__()
        self._leaves = 0

    def keep(self, key: Any, plan: Plan, leaves: int) -> Plan:
        """Keep a plan for elements of so many leaves, and return it."""
        if self._leaves > MOST_LEAVES:
            self.forget()
        self[key] = plan
        self._leaves += leaves + 1
        return plan

    def forget(self) -> None:
        self.clear()
        self._leaves = 0
