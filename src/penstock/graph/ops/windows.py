"""Operators that hold elements until there are others to go with them."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeAlias

from msgspec.structs import replace

from penstock.core.errors import InvalidArgumentError, choice
from penstock.graph.functions import UserFunction
from penstock.graph.ops.base import Unary, check_at_least
from penstock.graph.traits import Columns, Flow, GroupedBy, Inputs, OnWorkers, Regroups, RoundGrouping, Traits


class BucketByLength(Unary, frozen=True, kw_only=True, eq=False):
    """Padded batches of elements of like length; `batch_sizes` has one entry a bucket (len(boundaries) + 1)."""

    TRAITS: ClassVar[Traits] = Traits(
        flow=Flow.OWN,
        may_skip=False,
        regroups=Regroups(by=GroupedBy.KEY, rounds=RoundGrouping.BUCKETS),
        only_counts=False,
        holds_back=True,
        order_bound=True,
        on_workers=OnWorkers.RUNS,
        inputs=Inputs.ALL,
        same_columns=False,
        threads=0,
    )
    length: UserFunction
    boundaries: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    drop_last: bool = False
    value: Any = 0
    pad_to_boundary: bool = False

    def __post_init__(self) -> None:
        if not self.boundaries or list(self.boundaries) != sorted(set(self.boundaries)):
            raise InvalidArgumentError(f"boundaries={self.boundaries} must be increasing and not empty")
        if len(self.batch_sizes) != len(self.boundaries) + 1:
            raise InvalidArgumentError(
                f"{len(self.boundaries)} boundaries make {len(self.boundaries) + 1} buckets, "
                f"but there are {len(self.batch_sizes)} batch sizes"
            )
        for size in self.batch_sizes:
            check_at_least("batch_size", size, 1)

    @property
    def drops_rest(self) -> bool:
        return self.drop_last


class GroupByWindow(Unary, frozen=True, kw_only=True, eq=False):
    """Lists of `size` elements with equal keys, each given to `reduce` (None keeps the list).

    With more than `max_pending` elements waiting, the window that waits longest is given short.
    """

    TRAITS: ClassVar[Traits] = replace(
        BucketByLength.TRAITS, regroups=Regroups(by=GroupedBy.KEY, rounds=RoundGrouping.TOGETHER)
    )
    key: UserFunction
    size: int
    reduce: UserFunction | None = None
    drop_last: bool = False
    max_pending: int = 65_536

    def __post_init__(self) -> None:
        check_at_least("size", self.size, 1)

    @property
    def drops_rest(self) -> bool:
        return self.drop_last


PackLong: TypeAlias = Literal["split", "truncate", "drop"]
PACK_LONGS = ("split", "truncate", "drop")


class Pack(Unary, frozen=True, kw_only=True, eq=False):
    """Sequences laid side by side into rows of `length`, with segment ids and positions.

    Sequences are gathered in blocks of `lookahead` and fitted within a block, so that the state is a position. A block
    that is short at the end of a stream is packed by itself.
    """

    TRAITS: ClassVar[Traits] = replace(BucketByLength.TRAITS, regroups=None)
    length: int
    key: str | None = None
    long: PackLong = "split"
    lookahead: int = 1024
    value: int = 0

    def __post_init__(self) -> None:
        check_at_least("length", self.length, 1)
        check_at_least("lookahead", self.lookahead, 1)
        if self.long not in PACK_LONGS:
            raise choice("long", self.long, PACK_LONGS)

    def columns_needed(self, asked: Columns, below: Columns) -> Columns:
        return None if self.key is None else (self.key,)
