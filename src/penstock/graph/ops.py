"""Every operator that transforms, combines or regroups elements. Sources are in `readers`.

Adding one takes five edits: the class here, a file in `runtime/ops/`, a method of `Operators`, a line in the
conformance table, a golden plan. `tests/test_totality.py` fails until all five exist.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

from penstock.core.errors import InvalidArgumentError, choice
from penstock.graph.expressions import Expression
from penstock.graph.functions import UserFunction
from penstock.graph.node import Node

NEVER_ENDS = -1  # a count of -1 means "all" for take and "for ever" for repeat


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipErrors:
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Unary(Node):
    """An operator with one input."""

    upstream: Node


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hole(Node):
    """Stands for the input of a fused step."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Map(Unary):
    """One output for one input. With `batch_size`, the function is called with a list of up to that many elements."""

    ONE_TO_ONE: ClassVar[bool] = True
    function: UserFunction
    batch_size: int | None = None
    threads: int | None = None
    on_error: SkipErrors | None = None
    salt: int = 0

    @property
    def holds_back(self) -> bool:
        return self.batch_size is not None

    def __post_init__(self) -> None:
        _at_least("batch_size", self.batch_size, 1)
        _at_least("threads", self.threads, 1)
        if self.batch_size is not None and self.on_error is not None:
            raise InvalidArgumentError("on_error='skip' needs one call per element; it cannot be used with batch_size")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Filter(Unary):
    """Keeps the elements for which the function, or the expression on columns, is true."""

    predicate: UserFunction | Expression
    threads: int | None = None
    on_error: SkipErrors | None = None
    salt: int = 0

    def __post_init__(self) -> None:
        _at_least("threads", self.threads, 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlatMap(Unary):
    """Zero or more outputs, any iterable, for one input."""

    HOLDS_BACK: ClassVar[bool] = True
    function: UserFunction
    salt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Interleave(Unary):
    """Iterables made from `cycle` inputs at a time, read in turns of `block` elements."""

    HOLDS_BACK: ClassVar[bool] = True
    function: UserFunction
    cycle: int = 8
    block: int = 1
    salt: int = 0

    def __post_init__(self) -> None:
        _at_least("cycle", self.cycle, 1)
        _at_least("block", self.block, 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shuffle(Unary):
    """A random order: of blocks of `size` elements, or of everything where the source below is indexable."""

    size: int | None = None
    seed: int | None = None
    reshuffle: bool = True
    salt: int = 0

    @property
    def holds_back(self) -> bool:
        return self.size is not None

    def __post_init__(self) -> None:
        _at_least("size", self.size, 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch(Unary):
    size: int
    drop_last: bool = False

    def __post_init__(self) -> None:
        _at_least("size", self.size, 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PaddedBatch(Unary):
    """Arrays padded to the longest of the batch, to `length`, or to a multiple of `multiple_of`, along every axis."""

    size: int
    drop_last: bool = False
    value: Any = 0
    length: int | None = None
    multiple_of: int | None = None

    def __post_init__(self) -> None:
        _at_least("size", self.size, 1)
        _at_least("length", self.length, 1)
        _at_least("multiple_of", self.multiple_of, 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RaggedBatch(Unary):
    """One-dimensional leaves become `Ragged`; others are batched as usual."""

    size: int
    drop_last: bool = False

    def __post_init__(self) -> None:
        _at_least("size", self.size, 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Unbatch(Unary):
    """The rows of each batch."""

    HOLDS_BACK: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rebatch(Unary):
    """Batches of another size, cut and joined by columns without touching rows."""

    HOLDS_BACK: ClassVar[bool] = True
    size: int
    drop_last: bool = False

    def __post_init__(self) -> None:
        _at_least("size", self.size, 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Select(Unary):
    ONE_TO_ONE: ClassVar[bool] = True
    columns: tuple[str, ...]

    def __post_init__(self) -> None:
        _names("select", self.columns)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drop(Unary):
    ONE_TO_ONE: ClassVar[bool] = True
    columns: tuple[str, ...]

    def __post_init__(self) -> None:
        _names("drop", self.columns)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rename(Unary):
    ONE_TO_ONE: ClassVar[bool] = True
    names: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        _names("rename", tuple(old for old, _ in self.names))
        _names("rename", tuple(new for _, new in self.names))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Repeat(Unary):
    """`count` passes over the input; each reshuffles. -1 is for ever."""

    count: int = NEVER_ENDS

    def __post_init__(self) -> None:
        if self.count != NEVER_ENDS:
            _at_least("count", self.count, 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Take(Unary):
    count: int

    def __post_init__(self) -> None:
        if self.count != NEVER_ENDS:
            _at_least("count", self.count, 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Skip(Unary):
    count: int

    def __post_init__(self) -> None:
        _at_least("count", self.count, 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Enumerate(Unary):
    """Pairs `(start + i, element)`."""

    start: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Zip(Node):
    """Tuples of one element of each input; ends with the shortest."""

    upstreams: tuple[Node, ...]

    def __post_init__(self) -> None:
        _several("zip", self.upstreams)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Concatenate(Node):
    upstreams: tuple[Node, ...]

    def __post_init__(self) -> None:
        _several("concatenate", self.upstreams)


MixStop: TypeAlias = Literal["first", "all", "never"]
MIX_STOPS = ("first", "all", "never")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mix(Node):
    """Elements of the inputs in proportion to the weights; `unit` measures an element (None counts elements)."""

    upstreams: tuple[Node, ...]
    weights: tuple[float, ...]
    unit: UserFunction | None = None
    stop: MixStop = "first"

    def __post_init__(self) -> None:
        _several("mix", self.upstreams)
        if len(self.weights) != len(self.upstreams):
            raise InvalidArgumentError(f"mix has {len(self.upstreams)} sources and {len(self.weights)} weights")
        if any(not weight >= 0 for weight in self.weights) or sum(self.weights) <= 0:
            raise InvalidArgumentError(f"weights={self.weights} must not be negative, nor all zero")
        if self.stop not in MIX_STOPS:
            raise choice("stop", self.stop, MIX_STOPS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BucketByLength(Unary):
    """Padded batches of elements of like length; `batch_sizes` has one entry a bucket (len(boundaries) + 1)."""

    HOLDS_BACK: ClassVar[bool] = True
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
            _at_least("batch_size", size, 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupByWindow(Unary):
    """Lists of `size` elements with equal keys, each given to `reduce` (None keeps the list).

    With more than `max_pending` elements waiting, the window that waits longest is given short.
    """

    HOLDS_BACK: ClassVar[bool] = True
    key: UserFunction
    size: int
    reduce: UserFunction | None = None
    drop_last: bool = False
    max_pending: int = 65_536

    def __post_init__(self) -> None:
        _at_least("size", self.size, 1)


PackLong: TypeAlias = Literal["split", "truncate", "drop"]
PACK_LONGS = ("split", "truncate", "drop")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pack(Unary):
    """Sequences laid side by side into rows of `length`, with segment ids and positions.

    Sequences are gathered in blocks of `lookahead` and fitted within a block, so that the state is a position.
    """

    HOLDS_BACK: ClassVar[bool] = True
    length: int
    key: str | None = None
    long: PackLong = "split"
    lookahead: int = 1024
    value: int = 0

    def __post_init__(self) -> None:
        _at_least("length", self.length, 1)
        _at_least("lookahead", self.lookahead, 1)
        if self.long not in PACK_LONGS:
            raise choice("long", self.long, PACK_LONGS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cache(Unary):
    """Computed in the first whole pass, read back afterwards: from memory, or from files below `path`."""

    PRIVATE: ClassVar[frozenset[str]] = frozenset({"slot"})
    path: str | None = None
    max_bytes: int | None = None
    slot: MemorySlot = field(default_factory=lambda: MemorySlot(), repr=False)

    def __post_init__(self) -> None:
        _at_least("max_bytes", self.max_bytes, 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prefetch(Unary):
    """Made ahead on a thread, up to `size` elements (None: as many as the memory budget allows)."""

    size: int | None = None

    def __post_init__(self) -> None:
        _at_least("size", self.size, 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard(Unary):
    """Marks where a job with `sharding="hint"` gives each worker its part of the elements. Alone, it does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WithLength(Unary):
    """Declares how many elements there are, for `len()`; more or fewer is an error at the end of the pass."""

    count: int

    def __post_init__(self) -> None:
        _at_least("count", self.count, 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WithEpoch(Unary):
    """Epochs of `count` elements; epoch e begins where e - 1 ended, passing over the input as often as needed."""

    PRIVATE: ClassVar[frozenset[str]] = frozenset({"slot"})
    count: int
    slot: MemorySlot = field(default_factory=lambda: MemorySlot(), repr=False)

    def __post_init__(self) -> None:
        _at_least("count", self.count, 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fused(Unary):
    """Steps that run over a chunk in one go, made by a pass. Each step stands on a `Hole`."""

    steps: tuple[Node, ...] = field(default=())

    def __post_init__(self) -> None:
        if not self.steps:
            raise InvalidArgumentError("a fused operator needs at least one step")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FusedBatch(Unary):
    """One-to-one steps whose results are written straight into the batch's buffer, made by a pass."""

    steps: tuple[Node, ...]
    size: int
    drop_last: bool = False


def _at_least(argument: str, value: int | None, least: int) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidArgumentError(f"{argument}={value!r} must be an int of at least {least}")
    if value < least:
        raise InvalidArgumentError(f"{argument}={value} must be at least {least}")


def _names(operator: str, columns: tuple[str, ...]) -> None:
    if not columns or not all(isinstance(column, str) for column in columns):
        raise InvalidArgumentError(f"{operator} needs at least one column name, all strings; got {columns!r}")
    if len(set(columns)) != len(columns):
        raise InvalidArgumentError(f"{operator} names a column twice: {columns!r}")


def _several(operator: str, upstreams: tuple[Node, ...]) -> None:
    if not upstreams:
        raise InvalidArgumentError(f"{operator} needs at least one dataset")
