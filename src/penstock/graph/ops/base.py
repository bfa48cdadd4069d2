"""What operators are made of: their base, the records among their parameters, and how parameters are checked."""

from __future__ import annotations

from typing import TypeGuard

from penstock.core.errors import InvalidArgumentError
from penstock.core.records import UserRecord
from penstock.graph.node import Node

NEVER_ENDS = -1  # a count of -1 means "all" for take and "for ever" for repeat


class SkipErrors(UserRecord, frozen=True, kw_only=True):
    """Leave out failing elements, up to a budget: a count if it is an int, a fraction of the elements if a float."""

    budget: int | float = 0.01
    quarantine: str | None = None

    def __post_init__(self) -> None:
        whole = isinstance(self.budget, int) and not isinstance(self.budget, bool)
        if not (whole and self.budget >= 1) and not (isinstance(self.budget, float) and 0.0 < self.budget <= 1.0):
            raise InvalidArgumentError(
                f"budget={self.budget!r} must be a count (an int of at least 1) or a fraction (a float in (0, 1])"
            )


class MemorySlot:
    """Names what the runtime remembers for an operator between two iterations of one process; holds nothing itself."""


class Unary(Node, frozen=True, kw_only=True, eq=False):
    """An operator with one input."""

    upstream: Node

    @property
    def policy(self) -> SkipErrors | None:
        """Return what becomes of elements that its function fails for; None: they are errors."""
        return None

    @property
    def drops_rest(self) -> bool:
        """Return whether elements that fill no group at the end are left out."""
        return False


class Hole(Node, frozen=True, kw_only=True, eq=False):
    """Stands for the input of a fused step."""


def is_step(node: Node) -> TypeGuard[Unary]:
    """Return whether it can be a step of a fused operator."""
    return isinstance(node, Unary) and node.traits.fuses


def is_one_to_one(node: Node) -> TypeGuard[Unary]:
    """Return whether each of its outputs depends on one input alone and stands in its place."""
    return isinstance(node, Unary) and node.traits.one_to_one


def passes_states(node: Node) -> TypeGuard[Unary]:
    """Return whether groups and states below come through it one for one, or are left out."""
    return isinstance(node, Unary) and node.traits.passes_states


def check_at_least(argument: str, value: int | None, least: int) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidArgumentError(f"{argument}={value!r} must be an int of at least {least}")
    if value < least:
        raise InvalidArgumentError(f"{argument}={value} must be at least {least}")
