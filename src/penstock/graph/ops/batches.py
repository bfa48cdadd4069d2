"""Operators that make batches of elements that follow each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from msgspec.structs import replace

from penstock.core.errors import InvalidArgumentError
from penstock.graph.functions import UserFunction
from penstock.graph.ops.base import Unary, check_at_least
from penstock.graph.traits import Flow, GroupedBy, Inputs, Length, OnWorkers, Regroups, RoundGrouping, Traits, varied


class Batches(Unary, frozen=True, kw_only=True, eq=False):
    """Base of operators that make one output of each `size` elements that follow each other."""

    TRAITS: ClassVar[Traits] = Traits(
        flow=Flow.OWN,
        may_skip=False,
        regroups=Regroups(by=GroupedBy.ORDER, rounds=RoundGrouping.ANY),
        only_counts=False,
        holds_back=False,
        order_bound=False,
        on_workers=OnWorkers.RUNS,
        inputs=Inputs.ALL,
        same_columns=True,
        threads=0,
    )
    size: int
    drop_last: bool = False

    def __post_init__(self) -> None:
        check_at_least("size", self.size, 1)

    @property
    def drops_rest(self) -> bool:
        return self.drop_last

    def elements_given(self, inputs: Sequence[Length]) -> Length:
        return batches_of(inputs[0], self.size, drop_last=self.drop_last)


class Batch(Batches, frozen=True, kw_only=True, eq=False):
    """The leaves of the elements stacked into arrays; with `collate`, what that function makes of the list of them.

    With `mask` a short batch is filled up with copies of its last row, and the column of that name says which rows are
    elements.
    """

    collate: UserFunction | None = None
    mask: str | None = None

    def __post_init__(self) -> None:
        Batches.__post_init__(self)
        if self.mask is not None and (not isinstance(self.mask, str) or not self.mask):
            raise InvalidArgumentError(f"batch({self.size}, mask={self.mask!r}): it is the name of a column, a str")
        if self.mask is not None and self.drop_last:
            raise InvalidArgumentError(
                f"batch({self.size}, mask={self.mask!r}, drop_last=True): a short batch is filled up, or dropped; "
                "leave one of them out"
            )
        if self.collate is not None and self.collate.takes_rng:
            raise InvalidArgumentError(
                f"batch({self.size}, collate=...): a function that takes rng draws for one element; draw in a map() "
                "before the batch, or in one after it, which gets a generator for each batch"
            )

    @property
    def traits(self) -> Traits:
        plain = self.collate is None and self.mask is None
        return self.TRAITS if plain else varied(self.TRAITS, same_columns=False)


class PaddedBatch(Batches, frozen=True, kw_only=True, eq=False):
    """Arrays padded to the longest of the batch, to `length`, or to a multiple of `multiple_of`, along every axis."""

    TRAITS: ClassVar[Traits] = replace(
        Batches.TRAITS, regroups=Regroups(by=GroupedBy.ORDER, rounds=RoundGrouping.TOGETHER)
    )
    value: Any = 0
    length: int | None = None
    multiple_of: int | None = None

    def __post_init__(self) -> None:
        Batches.__post_init__(self)
        check_at_least("length", self.length, 1)
        check_at_least("multiple_of", self.multiple_of, 1)


class RaggedBatch(Batches, frozen=True, kw_only=True, eq=False):
    """One-dimensional leaves become `Ragged`; others are batched as usual."""


class Rebatch(Unary, frozen=True, kw_only=True, eq=False):
    """Batches of another size, cut and joined by columns without touching rows."""

    TRAITS: ClassVar[Traits] = replace(
        Batches.TRAITS, regroups=Regroups(by=GroupedBy.ROWS, rounds=RoundGrouping.ANY), holds_back=True
    )
    size: int
    drop_last: bool = False

    def __post_init__(self) -> None:
        check_at_least("size", self.size, 1)

    @property
    def drops_rest(self) -> bool:
        return self.drop_last


def batches_of(count: Length, size: int, *, drop_last: bool) -> Length:
    """
    >>> batches_of(7, 3, drop_last=False), batches_of(7, 3, drop_last=True)
    (3, 2)
    """
    if count is None:
        return None
    return count // size if drop_last else -(-count // size)
