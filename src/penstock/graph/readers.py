"""Every source: what to read, not how. `sources` has the implementations, one for each class here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self, TypeAlias

from msgspec.structs import replace

from penstock.core.errors import InvalidArgumentError, choice
from penstock.graph.expressions import Expression
from penstock.graph.functions import Payload, UserFunction
from penstock.graph.node import Node
from penstock.graph.ops import SkipErrors, check_at_least
from penstock.graph.traits import Columns, Flow, Inputs, OnWorkers, Traits, varied

FileCompression: TypeAlias = Literal["auto", "none", "gzip", "zstd", "bz2"]
COMPRESSIONS = ("auto", "none", "gzip", "zstd", "bz2")


class SourceNode(Node, frozen=True, kw_only=True, eq=False):
    """Base of everything without an input."""

    TRAITS: ClassVar[Traits] = Traits(
        flow=Flow.OWN,
        may_skip=False,
        regroups=None,
        only_counts=False,
        holds_back=False,
        order_bound=False,
        on_workers=OnWorkers.RUNS,
        inputs=Inputs.ALL,
        same_columns=False,
        threads=0,
    )
    IN_MEMORY: ClassVar[bool] = False
    """Whether its elements are in memory already, so that nothing is gained by asking for them early."""
    NARROWED: ClassVar[frozenset[str]] = frozenset()
    """Parameters by which passes ask for less than the user did."""

    @property
    def traits(self) -> Traits:
        return varied(self.TRAITS, may_skip=self.policy is not None)

    @property
    def stands_for(self) -> int:
        """Return how many sources there are in what it reads."""
        return 1

    @property
    def policy(self) -> SkipErrors | None:
        """Return what becomes of records that cannot be read; None: they are errors."""
        return None

    def projected(self, columns: tuple[str, ...]) -> Self | None:
        """Return a source of these columns only; None if it is one, or cannot leave out the others."""
        return None


class Range(SourceNode, frozen=True, kw_only=True, eq=False):
    """The numbers from `start` up to `stop`."""

    IN_MEMORY: ClassVar[bool] = True
    start: int
    stop: int
    step: int = 1

    def __post_init__(self) -> None:
        if self.step == 0:
            raise InvalidArgumentError("step=0: a range must move")


class FromItems(SourceNode, frozen=True, kw_only=True, eq=False):
    """The items of a list, which is shipped with the graph."""

    IN_MEMORY: ClassVar[bool] = True
    items: Payload


class FromGenerator(SourceNode, frozen=True, kw_only=True, eq=False):
    """`function(split)` is called for each declared split and yields its elements."""

    function: UserFunction
    splits: tuple[Any, ...]

    def __post_init__(self) -> None:
        if not self.splits:
            raise InvalidArgumentError("from_generator needs at least one split; for one only, leave splits= out")


class FromTorch(SourceNode, frozen=True, kw_only=True, eq=False):
    """A map-style dataset: `len(dataset)` and `dataset[i]` (or `__getitems__`)."""

    dataset: Payload


class FromHuggingface(SourceNode, frozen=True, kw_only=True, eq=False):
    dataset: Payload


class FileSource(SourceNode, frozen=True, kw_only=True, eq=False):
    """Files by path, glob, brace or URL. `storage_options` go to the file system and nowhere else."""

    PRIVATE: ClassVar[frozenset[str]] = frozenset({"storage_options"})
    paths: tuple[str, ...]
    storage_options: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if not self.paths or not all(isinstance(path, str) and path for path in self.paths):
            raise InvalidArgumentError(f"paths={self.paths!r}: at least one path is needed, and none may be empty")


class RecordFile(FileSource, frozen=True, kw_only=True, eq=False):
    """Files of records that may be compressed and of which single records may be bad."""

    compression: FileCompression = "auto"
    on_error: SkipErrors | None = None

    def __post_init__(self) -> None:
        FileSource.__post_init__(self)
        if self.compression not in COMPRESSIONS:
            raise choice("compression", self.compression, COMPRESSIONS)

    @property
    def policy(self) -> SkipErrors | None:
        return self.on_error


class ReadTFRecord(RecordFile, frozen=True, kw_only=True, eq=False):
    """Yields each record's bytes."""

    verify: bool = True


class ReadText(RecordFile, frozen=True, kw_only=True, eq=False):
    """Yields each line as `str`, without its line ending."""


class ReadJsonl(RecordFile, frozen=True, kw_only=True, eq=False):
    """Yields each line's JSON value; empty lines are passed over."""


class ReadCsv(RecordFile, frozen=True, kw_only=True, eq=False):
    """Yields each row as a dict, columns typed by pyarrow."""

    NARROWED: ClassVar[frozenset[str]] = frozenset({"columns"})
    columns: tuple[str, ...] | None = None
    delimiter: str = ","

    def columns_given(self, inputs: Sequence[Columns]) -> Columns:
        return self.columns

    def projected(self, columns: tuple[str, ...]) -> Self | None:
        return replace(self, columns=columns) if _may_read(columns, self.columns, self.on_error) else None


class ReadWebdataset(RecordFile, frozen=True, kw_only=True, eq=False):
    """Yields a dict per sample: `__key__` and, for each extension, the member's bytes."""


class ReadFiles(FileSource, frozen=True, kw_only=True, eq=False):
    """Yields `{path: str, data: bytes}` per file."""

    on_error: SkipErrors | None = None

    @property
    def policy(self) -> SkipErrors | None:
        return self.on_error


class ReadImages(FileSource, frozen=True, kw_only=True, eq=False):
    """Yields `{image: bytes, label: int, path: str}`: the folder an image lies in is its class."""

    classes: tuple[str, ...] | None = None
    on_error: SkipErrors | None = None

    @property
    def policy(self) -> SkipErrors | None:
        return self.on_error


class ReadNumpy(FileSource, frozen=True, kw_only=True, eq=False):
    """Yields rows of `.npy` files, or windows of `window` values of flat files (`.npy`, or raw with `dtype`)."""

    window: int | None = None
    stride: int | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        FileSource.__post_init__(self)
        check_at_least("window", self.window, 1)
        check_at_least("stride", self.stride, 1)


Nulls: TypeAlias = Any  # "error", "mask" or the value to put in
MASK_SUFFIX = "__mask"  # of the columns that nulls="mask" adds; they are not in the file


class ColumnarSource(FileSource, frozen=True, kw_only=True, eq=False):
    """Columnar files: rows as dicts, or with `batch` dicts of columns. `predicate` keeps the rows it is true for."""

    NARROWED: ClassVar[frozenset[str]] = frozenset({"columns", "predicate"})
    columns: tuple[str, ...] | None = None
    predicate: Expression | None = None
    batch: int | None = None
    nulls: Nulls = "error"
    on_error: SkipErrors | None = None

    def __post_init__(self) -> None:
        FileSource.__post_init__(self)
        check_at_least("batch", self.batch, 1)
        if self.columns is not None and not self.columns:
            raise InvalidArgumentError("columns=() reads nothing; leave it out to read all columns")

    @property
    def policy(self) -> SkipErrors | None:
        return self.on_error

    @property
    def masks_nulls(self) -> bool:
        """Return whether columns `<name>__mask` stand beside the others."""
        return isinstance(self.nulls, str) and self.nulls == "mask"

    def columns_given(self, inputs: Sequence[Columns]) -> Columns:
        return None if self.masks_nulls else self.columns

    def projected(self, columns: tuple[str, ...]) -> Self | None:
        if self.masks_nulls and any(column.endswith(MASK_SUFFIX) for column in columns):
            return None
        return replace(self, columns=columns) if _may_read(columns, self.columns, self.on_error) else None


def _may_read(needed: tuple[str, ...], given: Columns, policy: SkipErrors | None) -> bool:
    """Return whether reading the needed columns, instead of those that the user gave, leaves all errors in place."""
    if needed == given:
        return False
    if given is not None and not set(needed) <= set(given):
        return False  # an operator above asks for a column that the user did not: that is its error to raise
    return policy is None  # a record that is bad in another column would no longer be left out


class ReadParquet(ColumnarSource, frozen=True, kw_only=True, eq=False):
    """Splits are row groups. Hive partitions (`key=value` folders) are columns."""


class ReadArrow(ColumnarSource, frozen=True, kw_only=True, eq=False):
    """Arrow IPC files (or streams); splits are record batches."""


class ReadSaved(FileSource, frozen=True, kw_only=True, eq=False):
    """Folders that `Dataset.save` has written, or is writing."""

    PRIVATE: ClassVar[frozenset[str]] = frozenset({"storage_options", "wait_s"})
    wait_s: float = 60.0
    """How long a reader waits for the next part of what is still being written. Splits carry it to where they are
    read."""

    def __post_init__(self) -> None:
        FileSource.__post_init__(self)
        if not self.wait_s >= 0:
            raise InvalidArgumentError(f"wait={self.wait_s!r} must be a number of seconds, at least 0")


class ReadFeatures(FileSource, frozen=True, kw_only=True, eq=False):
    """Feature-major batches of a table at one version: `dense`, `sparse`, `scored`, and columns of the rows."""

    NARROWED: ClassVar[frozenset[str]] = frozenset({"dense", "sparse", "scored", "columns", "predicate"})
    version: int
    dense: tuple[str, ...] = ()
    sparse: tuple[str, ...] = ()
    scored: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    partitions: tuple[str, ...] | None = None
    predicate: Expression | None = None
    sample: float = 1.0
    seed: int = 0
    batch: int = 1024
    injected: tuple[tuple[str, int, tuple[str, ...]], ...] = ()
    """Side tables: each one's URL, version and the features that come from it."""
    tier: bool = True
    """Whether columns come from a faster tier where there is one."""
    appended: bool = False
    """Whether only the rows are read that came with the commit of that version."""

    def __post_init__(self) -> None:
        FileSource.__post_init__(self)
        check_at_least("batch", self.batch, 1)
        if not 0 < self.sample <= 1:
            raise InvalidArgumentError(f"sample={self.sample!r} is a share of the rows: above 0, at most 1")
        if not (self.dense or self.sparse or self.scored or self.columns):
            raise InvalidArgumentError("features= names none, and columns= neither: nothing would be read")

    def columns_given(self, inputs: Sequence[Columns]) -> Columns:
        return (*(kind for kind in FEATURE_KINDS if getattr(self, kind)), *self.columns)

    def projected(self, columns: tuple[str, ...]) -> Self | None:
        given = self.columns_given(()) or ()
        if not columns or set(columns) == set(given) or not set(columns) <= set(given):
            return None
        return replace(
            self,
            dense=self.dense if "dense" in columns else (),
            sparse=self.sparse if "sparse" in columns else (),
            scored=self.scored if "scored" in columns else (),
            columns=tuple(column for column in self.columns if column in columns),
        )


FEATURE_KINDS = ("dense", "sparse", "scored")
