"""Plans of the structures of elements, kept as long as they are few."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

MOST_LEAVES = 1 << 16  # of all plans that are kept: some 10 MB of them

Plan = TypeVar("Plan")


class Plans(Generic[Plan]):
    """Plans by what they are for. When they become too many all are forgotten: where each element has a structure of
    its own, none helps. Any thread may use it."""

    def __init__(self) -> None:
        self._plans: dict[Any, Plan] = {}
        self._leaves = 0

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, key: Any) -> Plan | None:
        return self._plans.get(key)

    def keep(self, key: Any, plan: Plan, leaves: int) -> Plan:
        """Keep a plan for elements of so many leaves, and return it."""
        if self._leaves > MOST_LEAVES:
            self.forget()
        self._plans[key] = plan
        self._leaves += leaves + 1
        return plan

    def forget(self) -> None:
        self._plans, self._leaves = {}, 0
