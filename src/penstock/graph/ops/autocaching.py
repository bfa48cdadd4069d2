"""The operator that marks what may be kept between epochs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from msgspec.structs import replace

from penstock.core.errors import InvalidArgumentError
from penstock.graph.functions import UserFunction
from penstock.graph.node import Node
from penstock.graph.ops.base import Unary, check_at_least, is_one_to_one
from penstock.graph.ops.passing import Prefetch, Shuffle
from penstock.graph.traits import Flow, GroupedBy, Length, Traits


class Autocache(Unary, frozen=True, kw_only=True, eq=False):
    """A point up to which elements may be kept, split by split. It changes nothing but the time that they take.

    Other pipelines find the same entries and may need other columns, so that what is needed above says nothing below.
    """

    TRAITS: ClassVar[Traits] = replace(Prefetch.TRAITS, flow=Flow.IN_PLACE, same_columns=False, threads=0)
    location: str | None = None
    capacity_bytes: int | None = None
    always: bool = False
    frozen: bool = False
    epochs: int | None = None
    version: str | None = None
    prefix_key: str = ""
    """The fingerprint of what is below, as it was written; `passes.canonicalize` fills it in."""

    def __post_init__(self) -> None:
        check_at_least("capacity_bytes", self.capacity_bytes, 1)
        check_at_least("epochs", self.epochs, 1)
        if self.version is not None and not isinstance(self.version, str):
            raise InvalidArgumentError(f"version={self.version!r} must be a str: any name of yours for the data")

    def canonical(self) -> Node:
        """Return it before operators that only group or order what it keeps: those would mix splits.

        It passes a shuffle together with the one-to-one operators between them, which do the same after it as before.
        """
        passed: list[Unary] = []
        below = self.upstream
        while is_one_to_one(below):
            passed.append(below)
            below = below.upstream
        if isinstance(below, Shuffle) or (not passed and isinstance(below, Unary) and _only_groups(below)):
            kept = below.upstream
            for node in reversed(passed):
                kept = node.with_inputs(kept)
            return below.with_inputs(self.with_inputs(kept).canonical())
        return self

    def elements_given(self, inputs: Sequence[Length]) -> Length:
        return inputs[0]


def _only_groups(node: Unary) -> bool:
    regroups = node.traits.regroups
    if regroups is None or regroups.by is not GroupedBy.ORDER:
        return False
    return not any(isinstance(value, UserFunction) for _, value in node.parameters())
