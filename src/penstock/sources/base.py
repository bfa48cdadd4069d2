"""The contract of a source.

A source lists its splits once, in an order that depends on the data alone, and reads any of them from any position.
Rules: a split is self-contained and small (it travels to other machines as bytes); reading the same split from the
same position gives the same elements, whatever was read before; an error names the file and the byte offset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias, cast, runtime_checkable

import msgspec

from penstock.core.element import Element
from penstock.core.errors import DataError
from penstock.sources.coalescing import ReadingStatistics

OnBad: TypeAlias = Callable[[DataError, int], None]
"""Is told of a record that cannot be read, and of its index in the split."""


class FileRange(msgspec.Struct, frozen=True, array_like=True):
    """A file, or a part of it. `start` and `stop` are bytes, rows or row groups, as the format says; stop=-1: all."""

    path: str
    size: int
    etag: str = ""
    start: int = 0
    stop: int = -1


class Split(msgspec.Struct, frozen=True, array_like=True):
    """The unit of source work. `start` and `stop` are element indices for sources without files.

    `note` is what the source learned from all files together and needs to read this one; its own affair.
    """

    files: tuple[FileRange, ...] = ()
    start: int = 0
    stop: int = -1
    note: str = ""


class SplitPosition(msgspec.Struct, frozen=True):
    """Where to begin in a split: after `index` elements; `offset` is the reader's own hint how to get there fast."""

    index: int = 0
    offset: int | None = None


class Records(msgspec.Struct):
    """Up to `want` elements in order. An empty list is the end of the split.

    `offsets[i]` is the hint for the position just after element i; None where an index alone is enough.
    `indices[i]` is the index of element i in its split, where some were left out (by a predicate, or as bad): an
    element keeps its index, and so its random numbers, whatever became of its neighbours. None: consecutive from the
    reader's position. The position after element i is `SplitPosition(indices[i] + 1, offsets[i])`.
    """

    elements: Sequence[Element]
    offsets: Sequence[int] | None = None
    indices: Sequence[int] | None = None


class Reader(Protocol):
    """Reads one split forward. For remote files the constructor starts the first requests and does not wait."""

    def read(self, want: int) -> Records: ...

    def close(self) -> None: ...


class Source(Protocol):
    """Made from a node by `sources.registry.open_source`."""

    remote: bool
    """Whether reads have latency, so that the runtime opens the next splits ahead."""

    def splits(self) -> Sequence[Split]: ...

    def open(self, split: Split, at: SplitPosition) -> Reader: ...


class SkipsBadRecords(Protocol):
    """A source whose node has `on_error`: it tells `on_bad` of a bad record, and passes over it."""

    on_bad: Callable[[DataError, int], None] | None


def tell_of_bad(source: Source, on_bad: OnBad) -> None:
    """Have a source whose node has `on_error` tell this reader of bad records from now on."""
    cast(SkipsBadRecords, source).on_bad = on_bad


@runtime_checkable
class LocatesRecords(Protocol):
    """A source that can say in which file a record lies, and at which byte, from the hints around it."""

    def locate(self, split: Split, before: int | None, after: int) -> tuple[str, int | None]: ...


@runtime_checkable
class LocatesElements(Protocol):
    """An indexable source that can say in which file an element lies."""

    def path_of(self, index: int) -> str: ...


@runtime_checkable
class CountedSource(Source, Protocol):
    """A source that may know its number of elements from its listing alone."""

    def count(self) -> int | None: ...


@runtime_checkable
class IndexableSource(Source, Protocol):
    """Any element can be read by its index at about the cost of the next one: a shuffle permutes the indices.

    Its splits are ranges of element indices (`Split.start`, `Split.stop`), in order and without gaps.
    """

    def __len__(self) -> int: ...

    def fetch(self, indices: Sequence[int]) -> Sequence[Element]: ...


@runtime_checkable
class FetchesAhead(Protocol):
    """An indexable source that has elements under way before they are fetched, if it is told of them."""

    def expect(self, coming: Callable[[], Iterable[int]]) -> None:
        """Be told what is fetched next and after that, as far as it is known; it is asked for if need be."""


@runtime_checkable
class MeasuresReading(Protocol):
    """A source that counts what it asks of its storage."""

    def reading(self) -> ReadingStatistics: ...
