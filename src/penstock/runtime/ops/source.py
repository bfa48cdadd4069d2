"""Reading: splits one after the other, or, where the source can be indexed, any order at all.

Which splits, and what a place in them looks like, is the affair of `ordinals`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache, partial
from typing import Any

import msgspec
import numpy as np

from penstock.core.errors import DataError
from penstock.runtime.contract import Chunk, Fixed, Idents, Origin, Selected, Stage, State
from penstock.runtime.flight import Flight
from penstock.runtime.keeping import PASS_END, SplitKeeping, SplitVisit
from penstock.runtime.keeping_elements import ElementKeeping
from penstock.runtime.kept_reader import KeptReader, LostEntryError
from penstock.runtime.quarantine import Quarantine
from penstock.runtime.randomness import Permutation, block_permutation, derive_key, derive_word
from penstock.runtime.stats import StageMeter
from penstock.runtime.streaming.ordinals import Ordinals, read_place
from penstock.sources.base import (
    FetchesAhead,
    IndexableSource,
    LocatesElements,
    LocatesRecords,
    MeasuresReading,
    Reader,
    Records,
    Source,
    Split,
    SplitPosition,
    tell_of_bad,
)

DRAWN_AT_ONCE = 1_024  # positions of a permutation, for a source that is told what is fetched


class RandomOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a shuffle asks of the source below it."""

    seed: int
    salt: int
    reshuffle: bool

    def key(self, pass_: int) -> tuple[int, int]:
        return derive_key("order", self.seed, self.salt, pass_ if self.reshuffle else 0)


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """How a source is read, of whatever kind it is."""

    number: int
    """The source's number in its graph."""
    identity_number: int
    """Of the source in what its elements' identities say."""
    splits: Sequence[Split]
    ordinals: Callable[[int], Ordinals]
    """Gives the ordinals of a pass's splits."""
    with_idents: bool
    order: RandomOrder | None
    quarantine: Quarantine | None
    dropped: Collection[tuple[int, int]] = ()
    """(split, index) of elements that are left out."""
    flight: Flight | None = None
    kept_splits: SplitKeeping | None = None
    """What is asked for splits that need not be made again; None: nothing is kept of this source."""
    kept_elements: ElementKeeping | None = None
    """The same, of a source that is read by index."""

    def drawn_in(self, pass_: int) -> int:
        """Return the pass whose random numbers functions get: the first, where a point above keeps what they drew."""
        kept = self.kept_splits or self.kept_elements
        return 0 if kept is not None and kept.frozen else pass_


class RunMarks(msgspec.Struct, frozen=True):
    """Consecutive elements of one split."""

    ordinals: Ordinals
    ordinal: int
    number: int
    split: Split
    first: SplitPosition
    indices: Sequence[int] | None
    offsets: Sequence[int] | None
    source: Source

    def at(self, k: int) -> State:
        offset = self.first.offset if k == 0 else None if self.offsets is None else int(self.offsets[k - 1])
        return self.ordinals.state(self.ordinal, self._index_after(k), offset)

    def _index_after(self, k: int) -> int:
        return int(self.indices[k - 1]) + 1 if k and self.indices is not None else self.first.index + k

    def origin(self, k: int) -> Origin:
        index = int(self.indices[k]) if self.indices is not None else self.first.index + k
        path, offset = self.split.files[0].path if len(self.split.files) == 1 else "", None
        if self.offsets is not None and isinstance(self.source, LocatesRecords):
            before = self.first.offset if k == 0 else int(self.offsets[k - 1])
            path, offset = self.source.locate(self.split, before, int(self.offsets[k]))
            if index != self._index_after(k):
                offset = None  # records were left out before this one: it does not begin where the last one ended
        return Origin(self.number, index, path, offset, self.ordinals.source)


class SplitSource(Stage):
    """Splits in the source's order, or permuted under a shuffle."""

    def __init__(self, meter: StageMeter, source: Source, reading: Reading) -> None:
        super().__init__(meter)
        self._source = source
        self._splits = reading.splits
        self._how = reading
        self._ahead: dict[int, Reader] = {}
        self._reader: Reader | None = None
        self._visit: SplitVisit | None = None
        self.quarantine = reading.quarantine
        self._over_budget: Exception | None = None
        if isinstance(source, MeasuresReading):
            meter.reading = source.reading
        if reading.quarantine is not None:
            tell_of_bad(source, self._on_bad)

    def _on_bad(self, error: DataError, index: int) -> None:
        assert self.quarantine is not None and self._ordinal is not None
        number = self._split_number
        files = self._split.files
        path = error.path or (files[0].path if files else "")
        origin = Origin(number, index, path, error.offset, self._how.number)
        over = self.quarantine.record(error, origin, self._ordinals.state(self._ordinal, index))
        self._over_budget = over or self._over_budget

    def open(self, pass_: int, state: State) -> None:
        self.close()
        count, random = len(self._splits), self._how.order
        self._pass = pass_
        if self.quarantine is not None:
            self.quarantine.pass_ = pass_
        self._order = block_permutation(random.key(pass_), count) if random else np.arange(count)
        self._ordinals = self._how.ordinals(pass_)
        self._ordinal: int | None = None  # asking for the first one may take time, or claim it: not before it is read
        self._position = SplitPosition()
        if self._how.kept_splits is not None:
            self._how.kept_splits.reset()
            held = self._how.kept_splits.held
            if held:
                self._ordinals.prefer(np.flatnonzero(np.isin(self._order, list(held))).tolist())
        place = read_place(state)
        if place is not None:
            self._ordinal, self._position = place[0], SplitPosition(*place[1:])

    def _pull(self, want: int) -> Chunk:
        while True:
            if self._reader is None and not self._enter():
                end = None if self._how.kept_splits is None else PASS_END
                return Chunk((), Fixed(self._ordinals.state(self._ordinals.end, 0)), visit=end)
            assert self._reader is not None and self._ordinal is not None
            try:
                records = self._read(self._reader, want)
            except LostEntryError:
                self._compute_on()
                continue
            if self._over_budget is not None:
                raise self._over_budget
            if len(records.elements):
                if self.quarantine is not None:
                    self.quarantine.entered(len(records.elements))
                if self._visit is not None:
                    self._visit.read += len(records.elements)
                chunk = self._chunk_of(records.elements, records.indices, records.offsets)
                if len(chunk.elements):
                    return chunk
                continue
            self._reader.close()
            self._reader = None
            if self._how.kept_splits is not None and self._visit is not None:
                self._how.kept_splits.ended(self._visit)
            self._ordinal = self._ordinals.after(self._ordinal)
            self._position = SplitPosition()

    def _read(self, reader: Reader, want: int) -> Records:
        flight, number = self._how.flight, self._split_number
        if flight is None:
            return reader.read(want)
        if flight.suspects_split(self._how.number, number):
            want = 1
        origin = Origin(number, self._position.index, source=self._how.number)
        return flight.record(origin, want, lambda: reader.read(want))

    def _compute_on(self) -> None:
        """Read from the source what an entry no longer gives."""
        assert self._reader is not None and self._how.kept_splits is not None
        self._reader.close()
        self._visit = self._how.kept_splits.lost(self._visited_place)
        self._reader = self._source.open(self._split, SplitPosition(self._position.index))

    def _enter(self) -> bool:
        """Open the split that is next; False if there is none."""
        if self._ordinal is None:
            self._ordinal = self._ordinals.first()
        ordinal = self._ordinal
        if ordinal == self._ordinals.end:
            return False
        split_number = int(self._order[ordinal])
        self._split_number, self._split = split_number, self._splits[split_number]
        self._place = derive_word("split", self._how.identity_number, self._how.drawn_in(self._pass), split_number)
        self._dropped = {index for split, index in self._how.dropped if split == split_number}
        kept = self._kept_reader()
        self._reader = kept or self._ahead.pop(ordinal, None) or self._source.open(self._split, self._position)
        if self._source.remote and kept is None:
            for later in self._ordinals.ahead(ordinal):
                if later not in self._ahead:
                    self._ahead[later] = self._source.open(self._splits[int(self._order[later])], SplitPosition())
        return True

    def _kept_reader(self) -> Reader | None:
        """Return what reads the split as it was kept; None: it is to be read from the source."""
        keeping, number = self._how.kept_splits, self._split_number
        if keeping is None:
            return None
        self._visited_place = derive_word("split", self._how.identity_number, self._pass, number)
        self._visit, reader = keeping.enter(
            self._source, self._split, number, self._position.index, self._visited_place
        )
        self._visit.whole = self._visit.whole and not self._dropped
        assert self._ordinal is not None
        following = next(iter(self._ordinals.ahead(self._ordinal)), None) if reader is not None else None
        if following is not None:
            later = int(self._order[following])
            keeping.expect(self._source, self._splits[later], later)
        return reader

    def _chunk_of(
        self, elements: Sequence[object], indices: Sequence[int] | None, offsets: Sequence[int] | None
    ) -> Chunk:
        first, count = self._position, len(elements)
        assert self._ordinal is not None
        place = (self._ordinals, self._ordinal, self._split_number, self._split)
        marks = RunMarks(*place, first, indices, offsets, self._source)
        after = int(indices[-1]) + 1 if indices is not None else first.index + count
        self._position = SplitPosition(after, int(offsets[-1]) if offsets is not None else None)
        idents = None
        if self._how.with_idents:
            numbers = np.arange(first.index, first.index + count) if indices is None else np.asarray(indices)
            idents = make_idents(self._place, numbers)
        chunk = Chunk(elements, marks, idents, self._visit, isinstance(self._reader, KeptReader))
        if self._dropped:
            places = range(first.index, after) if indices is None else indices
            chunk = chosen(chunk, [k for k, index in enumerate(places) if index not in self._dropped])
        return chunk

    def close(self) -> None:
        readers = [*self._ahead.values(), *([self._reader] if self._reader else [])]
        self._ahead, self._reader = {}, None
        for reader in readers:
            reader.close()


def chosen(chunk: Chunk, kept: Sequence[int]) -> Chunk:
    """Return the chunk without what is not kept."""
    if len(kept) == len(chunk.elements):
        return chunk
    idents = None if chunk.idents is None else chunk.idents[list(kept)]
    marks = Selected(chunk.marks, kept, len(chunk.elements))
    return Chunk([chunk.elements[k] for k in kept], marks, idents, chunk.visit, chunk.made)


@cache
def _locates_elements(kind: type) -> bool:
    return issubclass(kind, LocatesElements)  # of a protocol, this takes longer than some user functions


class _IndexMarks(msgspec.Struct, frozen=True):
    """Consecutive positions of an indexable source; they may run over several splits."""

    ordinals: Ordinals
    ordinal: int
    starts: Sequence[int]
    first: int
    indices: Sequence[int]
    source: IndexableSource

    def at(self, k: int) -> State:
        return self.ordinals.at_position(self.ordinal, self.first + k, self.starts)

    def origin(self, k: int) -> Origin:
        index = int(self.indices[k])
        split = max(bisect_right(self.starts, index) - 1, 0)
        path = self.source.path_of(index) if _locates_elements(type(self.source)) else ""  # type: ignore[attr-defined]
        return Origin(split, index - self.starts[split], path, None, self.ordinals.source)


class IndexedSource(Stage):
    """Elements by index: in order, or in a full permutation of all of them.

    Splits are ranges of positions. Under a shuffle position p holds element `permutation[p]`, so that any number of
    readers of disjoint splits together read one permutation. An element's identity is its index alone: the same
    whatever the order.
    """

    def __init__(self, meter: StageMeter, source: IndexableSource, reading: Reading) -> None:
        super().__init__(meter)
        self._source = source
        self._starts = [split.start for split in reading.splits] or [0]
        self._count = len(source)
        self._how = reading
        self.quarantine = reading.quarantine
        self._dropped = {self._starts[split] + index for split, index in reading.dropped}
        self._bad: set[int] = set()
        self._over_budget: Exception | None = None
        self._expecting = source if isinstance(source, FetchesAhead) and reading.kept_elements is None else None
        if reading.quarantine is not None:
            tell_of_bad(source, self._on_bad)

    def open(self, pass_: int, state: State) -> None:
        random = self._how.order
        self._permutation = Permutation(random.key(pass_), self._count) if random else None
        self._place = derive_word("source", self._how.identity_number, self._how.drawn_in(pass_))
        self._visited_place = derive_word("source", self._how.identity_number, pass_)
        if self.quarantine is not None:
            self.quarantine.pass_ = pass_
        self._ordinals = self._how.ordinals(pass_)
        self._ordinal: int | None = None
        self._position = self._stop = 0
        if self._how.kept_elements is not None:
            self._how.kept_elements.reset()
        place = read_place(state)
        if place is not None:
            self._stand_at(place[0], place[1])

    def _enter(self) -> bool:
        """Stand before an element, in the split at hand or in one that follows; False at the end of the pass."""
        ordinals = self._ordinals
        while self._position >= self._stop:
            if self._ordinal is None:
                ordinal = ordinals.first()
            elif self._ordinal == ordinals.end:
                return False
            else:
                ordinal = ordinals.after_stretch(self._ordinal)
            self._stand_at(ordinal, 0)
        return True

    def _stand_at(self, ordinal: int, index: int) -> None:
        self._ordinal = ordinal
        if ordinal != self._ordinals.end:
            self._position = self._starts[ordinal] + index
            self._stop = self._ordinals.stretch(ordinal, self._starts, self._count)

    def _pull(self, want: int) -> Chunk:
        while self._enter():
            assert self._ordinal is not None
            start, stop = self._position, min(self._position + want, self._stop)
            indices = self._indices(start, stop)
            if self._expecting is not None:
                self._expecting.expect(partial(self._coming, self._ordinal, start))
            self._marks = _IndexMarks(self._ordinals, self._ordinal, self._starts, start, indices, self._source)
            chunk, read = self._kept_or_fetched(indices)
            self._position = start + read
            if len(chunk.elements):
                return chunk
        end = None if self._how.kept_elements is None else PASS_END
        marks = _IndexMarks(self._ordinals, self._ordinals.end, self._starts, self._count, (), self._source)
        return Chunk((), marks, visit=end)

    def _indices(self, start: int, stop: int) -> Any:
        return range(start, stop) if self._permutation is None else self._permutation.at(start, stop)

    def _coming(self, ordinal: int, position: int) -> Iterator[int]:
        """Give the indices from a position on, over splits that follow for sure."""
        while True:
            begin, stop = self._starts[ordinal], self._ordinals.stretch(ordinal, self._starts, self._count)
            for start in range(position, stop, DRAWN_AT_ONCE):
                indices = map(int, self._indices(start, min(stop, start + DRAWN_AT_ONCE)))
                yield from (index for index in indices if index not in self._dropped)
            later = next(iter(self._ordinals.ahead(ordinal)), None)
            if later is None or begin <= self._starts[later] < stop:
                return
            ordinal, position = later, self._starts[later]

    def _kept_or_fetched(self, indices: Sequence[int]) -> tuple[Chunk, int]:
        """Return the elements of the first of some indices, and of how many."""
        keeping, visit = self._how.kept_elements, None
        if keeping is not None:
            visit, count, elements = keeping.at(self._source, indices, self._visited_place)
            indices = indices[:count]
            if elements is not None:
                idents = make_idents(self._place, np.asarray(indices, np.int64))
                chunk = Chunk(elements, self._marks, idents, visit, True)
                if self._dropped:
                    chunk = chosen(chunk, [k for k, index in enumerate(indices) if index not in self._dropped])
                return chunk, count
        flight = self._how.flight
        if flight is None:
            chunk = self._fetch(indices)
        else:
            indices = indices[: flight.reach(self._marks, len(indices))]
            chunk = flight.record(self._marks.origin(0), len(indices), partial(self._fetch, indices))
        chunk.visit = visit
        return chunk, len(indices)

    def _fetch(self, indices: Sequence[int]) -> Chunk:
        count = len(indices)
        kept = [k for k, index in enumerate(indices) if index not in self._dropped] if self._dropped else None
        wanted = indices if kept is None or len(kept) == count else [int(indices[k]) for k in kept]
        elements = self._source.fetch(wanted) if len(wanted) else ()
        if self._over_budget is not None:
            raise self._over_budget
        if self.quarantine is not None:
            self.quarantine.entered(len(elements))
        if self._bad:
            kept = [k for k in kept or range(count) if indices[k] not in self._bad]
            wanted = [int(indices[k]) for k in kept]
            self._bad.clear()
        marks = self._marks if len(wanted) == count else Selected(self._marks, kept or (), count)
        idents = make_idents(self._place, np.asarray(wanted, np.int64)) if self._how.with_idents else None
        return Chunk(elements, marks, idents)

    def _on_bad(self, error: DataError, index: int) -> None:
        assert self.quarantine is not None
        self._bad.add(index)
        k = list(self._marks.indices).index(index)
        self._over_budget = self.quarantine.admit(error, self._marks, k) or self._over_budget

    def skip(self, count: int) -> int:
        if self._dropped:
            return super().skip(count)
        passed = 0
        while passed < count and self._enter():
            step = min(count - passed, self._stop - self._position)
            self._position += step
            passed += step
        return passed


def make_idents(place: int, indices: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Idents:
    idents = np.zeros((len(indices), 3), np.uint64)
    idents[:, 0] = place
    idents[:, 1] = indices
    return idents
