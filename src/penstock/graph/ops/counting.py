"""Operators that count the elements they hand on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec
from msgspec.structs import replace

from penstock.graph.node import Node
from penstock.graph.ops.base import NEVER_ENDS, MemorySlot, Unary, check_at_least
from penstock.graph.traits import Flow, Inputs, Length, OnWorkers, Traits, varied


class Take(Unary, frozen=True, kw_only=True, eq=False):
    """The first `count` elements. -1 is all."""

    TRAITS: ClassVar[Traits] = Traits(
        flow=Flow.OWN,
        may_skip=False,
        regroups=None,
        only_counts=True,
        holds_back=False,
        order_bound=False,
        on_workers=OnWorkers.REFUSED,
        inputs=Inputs.ALL,
        same_columns=True,
        threads=0,
    )
    count: int

    def __post_init__(self) -> None:
        if self.count != NEVER_ENDS:
            check_at_least("count", self.count, 0)

    def canonical(self) -> Node:
        if self.count == NEVER_ENDS:
            return self.upstream
        if isinstance(self.upstream, Take):
            return replace(self, upstream=self.upstream.upstream, count=min(self.count, self.upstream.count))
        return self

    def elements_given(self, inputs: Sequence[Length]) -> Length:
        if self.count == NEVER_ENDS:
            return inputs[0]
        if inputs[0] is None:
            return 0 if self.count == 0 else None
        return min(inputs[0], self.count)

    def endless(self, inputs: Sequence[Node | None]) -> Node | None:
        return inputs[0] if self.count == NEVER_ENDS else None


class Skip(Unary, frozen=True, kw_only=True, eq=False):
    """All but the first `count` elements."""

    TRAITS: ClassVar[Traits] = Take.TRAITS
    count: int

    def __post_init__(self) -> None:
        check_at_least("count", self.count, 0)

    def canonical(self) -> Node:
        if self.count == 0:
            return self.upstream
        if isinstance(self.upstream, Skip):
            return replace(self, upstream=self.upstream.upstream, count=self.count + self.upstream.count)
        return self

    def elements_given(self, inputs: Sequence[Length]) -> Length:
        return None if inputs[0] is None else max(0, inputs[0] - self.count)


class Enumerate(Unary, frozen=True, kw_only=True, eq=False):
    """Pairs `(start + i, element)`."""

    TRAITS: ClassVar[Traits] = replace(Take.TRAITS, same_columns=False)
    start: int = 0

    def elements_given(self, inputs: Sequence[Length]) -> Length:
        return inputs[0]


class Repeat(Unary, frozen=True, kw_only=True, eq=False):
    """`count` passes over the input; each reshuffles. -1 is for ever."""

    TRAITS: ClassVar[Traits] = replace(Take.TRAITS, on_workers=OnWorkers.RUNS)
    count: int = NEVER_ENDS

    def __post_init__(self) -> None:
        if self.count != NEVER_ENDS:
            check_at_least("count", self.count, 0)

    @property
    def traits(self) -> Traits:
        return varied(self.TRAITS, inputs=Inputs.ALL_OR_WRONG if self.count == NEVER_ENDS else Inputs.ALL)

    @property
    def passes(self) -> int:
        return self.count

    def canonical(self) -> Node:
        return self.upstream if self.count == 1 else self

    def elements_given(self, inputs: Sequence[Length]) -> Length:
        return None if inputs[0] is None or self.count == NEVER_ENDS else inputs[0] * self.count

    def endless(self, inputs: Sequence[Node | None]) -> Node | None:
        if self.count == NEVER_ENDS:
            return self
        return inputs[0] if self.count else None


class WithLength(Unary, frozen=True, kw_only=True, eq=False):
    """Declares how many elements there are, for `len()`; more or fewer is an error at the end of the pass."""

    TRAITS: ClassVar[Traits] = replace(Take.TRAITS, on_workers=OnWorkers.LEFT_TO_READER)
    count: int

    def __post_init__(self) -> None:
        check_at_least("count", self.count, 0)

    def elements_given(self, inputs: Sequence[Length]) -> Length:
        return self.count


class WithEpoch(Unary, frozen=True, kw_only=True, eq=False):
    """Epochs of `count` elements; epoch e begins where e - 1 ended, passing over the input as often as needed."""

    PRIVATE: ClassVar[frozenset[str]] = frozenset({"slot"})
    TRAITS: ClassVar[Traits] = Take.TRAITS
    count: int
    slot: MemorySlot = msgspec.field(default_factory=lambda: MemorySlot())

    def __post_init__(self) -> None:
        check_at_least("count", self.count, 1)

    @property
    def passes(self) -> int:
        return NEVER_ENDS

    def elements_given(self, inputs: Sequence[Length]) -> Length:
        return self.count

    def endless(self, inputs: Sequence[Node | None]) -> Node | None:
        return None
