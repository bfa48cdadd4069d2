"""Operators that hand on the elements they get: in another order, ahead of time, kept, shared out, or identified."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec
from msgspec.structs import replace

from penstock.graph.ops.base import MemorySlot, Unary, check_at_least
from penstock.graph.traits import Flow, Inputs, Length, OnWorkers, Traits, varied


class Prefetch(Unary, frozen=True, kw_only=True, eq=False):
    """Made ahead on a thread, up to `size` elements (None: as many as the memory budget allows)."""

    TRAITS: ClassVar[Traits] = Traits(
        flow=Flow.THROUGH,
        may_skip=False,
        regroups=None,
        only_counts=False,
        holds_back=False,
        order_bound=False,
        on_workers=OnWorkers.RUNS,
        inputs=Inputs.ALL,
        same_columns=True,
        threads=None,
    )
    size: int | None = None

    def __post_init__(self) -> None:
        check_at_least("size", self.size, 1)


class Shuffle(Unary, frozen=True, kw_only=True, eq=False):
    """A random order: of blocks of `size` elements, or of everything where the source below is indexable."""

    TRAITS: ClassVar[Traits] = replace(Prefetch.TRAITS, flow=Flow.OWN, order_bound=True, threads=0)
    size: int | None = None
    seed: int | None = None
    reshuffle: bool = True
    salt: int = 0

    def __post_init__(self) -> None:
        check_at_least("size", self.size, 1)
        check_at_least("seed", self.seed, 0)

    @property
    def traits(self) -> Traits:
        return varied(self.TRAITS, holds_back=self.size is not None)

    def elements_given(self, inputs: Sequence[Length]) -> Length:
        return inputs[0]


class Cache(Unary, frozen=True, kw_only=True, eq=False):
    """Computed in the first whole pass, read back afterwards: from memory, or from files below `path`.

    Other pipelines read the same cache and may need other columns, so that what is needed above says nothing below.
    """

    PRIVATE: ClassVar[frozenset[str]] = frozenset({"slot"})
    TRAITS: ClassVar[Traits] = replace(
        Prefetch.TRAITS, flow=Flow.OWN, on_workers=OnWorkers.REFUSED, same_columns=False, threads=0
    )
    path: str | None = None
    max_bytes: int | None = None
    slot: MemorySlot = msgspec.field(default_factory=lambda: MemorySlot())

    def __post_init__(self) -> None:
        check_at_least("max_bytes", self.max_bytes, 1)

    def elements_given(self, inputs: Sequence[Length]) -> Length:
        return inputs[0]


class Shard(Unary, frozen=True, kw_only=True, eq=False):
    """Marks where a job with `sharding="hint"` gives each worker its part of the elements. Alone, it does nothing."""

    TRAITS: ClassVar[Traits] = replace(Prefetch.TRAITS, flow=Flow.IN_PLACE, same_columns=False, threads=0)


class Identified(Unary, frozen=True, kw_only=True, eq=False):
    """Pairs `(element, identity)`: the end of what workers run where a function that takes `rng` stands behind it.

    No method makes it. `first_source` is the number of the graph's first source in the pipeline that reads it.
    """

    TRAITS: ClassVar[Traits] = replace(Prefetch.TRAITS, flow=Flow.STEP, same_columns=False, threads=0)
    first_source: int = 0

    def __post_init__(self) -> None:
        check_at_least("first_source", self.first_source, 0)
