"""Reading: splits one after the other, or, where the source can be indexed, any order at all.

A source's state is `[ordinal, index]`, or `[ordinal, index, offset]`: how many splits of the pass's order are behind,
how many elements of the present one, and the reader's own hint to get there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from penstock.core.errors import DataError
from penstock.runtime.contract import Chunk, Fixed, Idents, Origin, Selected, Stage, State
from penstock.runtime.quarantine import Quarantine
from penstock.runtime.randomness import Permutation, block_permutation, derive_key, derive_word
from penstock.runtime.stats import StageMeter
from penstock.sources.base import (
    IndexableSource,
    LocatesElements,
    LocatesRecords,
    Position,
    Reader,
    SkipsBadRecords,
    Source,
    Split,
)

OPEN_AHEAD = 6  # remote splits whose first requests are under way before they are needed


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomOrder:
    """What a shuffle asks of the source below it."""

    seed: int
    salt: int
    reshuffle: bool

    def key(self, pass_: int) -> tuple[int, int]:
        return derive_key("order", self.seed, self.salt, pass_ if self.reshuffle else 0)


@dataclass(frozen=True, slots=True)
class RunMarks:
    """Consecutive elements of one split."""

    ordinal: int
    number: int
    split: Split
    first: Position
    indices: Sequence[int] | None
    offsets: Sequence[int] | None
    source: Source

    def at(self, k: int) -> State:
        if k == 0:
            return _position(self.ordinal, self.first.index, self.first.offset)
        index = int(self.indices[k - 1]) + 1 if self.indices is not None else self.first.index + k
        return _position(self.ordinal, index, None if self.offsets is None else int(self.offsets[k - 1]))

    def origin(self, k: int) -> Origin:
        index = int(self.indices[k]) if self.indices is not None else self.first.index + k
        path, offset = self.split.files[0].path if len(self.split.files) == 1 else "", None
        if self.offsets is not None and isinstance(self.source, LocatesRecords):
            before = self.first.offset if k == 0 else int(self.offsets[k - 1])
            path, offset = self.source.locate(self.split, before, int(self.offsets[k]))
            if index != self.at(k)[1]:
                offset = None  # records were left out before this one: it does not begin where the last one ended
        return Origin(self.number, index, path, offset)


def _position(ordinal: int, index: int, offset: int | None) -> State:
    return [ordinal, index] if offset is None else [ordinal, index, offset]


class SplitSource(Stage):
    """Splits in the source's order, or permuted under a shuffle."""

    def __init__(
        self,
        meter: StageMeter,
        source: Source,
        *,
        number: int,
        with_idents: bool,
        order: RandomOrder | None,
        quarantine: Quarantine | None,
    ) -> None:
        super().__init__(meter)
        self._source = source
        self._splits = source.splits()
        self._number = number
        self._with_idents = with_idents
        self._random = order
        self._ahead: dict[int, Reader] = {}
        self._reader: Reader | None = None
        self.quarantine = quarantine
        self._over_budget: Exception | None = None
        if quarantine is not None:
            cast(SkipsBadRecords, source).on_bad = self._on_bad

    def _on_bad(self, error: DataError, index: int) -> None:
        assert self.quarantine is not None
        files = self._splits[self._split_number].files
        origin = Origin(self._split_number, index, error.path or (files[0].path if files else ""), error.offset)
        over = self.quarantine.record(error, origin, _position(self._ordinal, index, None))
        self._over_budget = over or self._over_budget

    def open(self, pass_: int, state: State) -> None:
        self.close()
        count = len(self._splits)
        self._pass = pass_
        if self.quarantine is not None:
            self.quarantine.pass_ = pass_
        self._order = block_permutation(self._random.key(pass_), count) if self._random else np.arange(count)
        ordinal, index, *offset = state or (0, 0)
        self._ordinal: int = ordinal
        self._position = Position(index, offset[0] if offset else None)

    def _pull(self, want: int) -> Chunk:
        while True:
            if self._ordinal >= len(self._splits):
                return Chunk((), Fixed([len(self._splits), 0]))
            if self._reader is None:
                self._enter()
            assert self._reader is not None
            records = self._reader.read(want)
            if self._over_budget is not None:
                raise self._over_budget
            if len(records.elements):
                if self.quarantine is not None:
                    self.quarantine.entered(len(records.elements))
                return self._chunk_of(records.elements, records.indices, records.offsets)
            self._reader.close()
            self._reader = None
            self._ordinal += 1
            self._position = Position()

    def _enter(self) -> None:
        ordinal = self._ordinal
        split_number = int(self._order[ordinal])
        self._split_number = split_number
        self._place = derive_word("split", self._number, self._pass, split_number)
        self._reader = self._ahead.pop(ordinal, None) or self._source.open(self._splits[split_number], self._position)
        if self._source.remote:
            for later in range(ordinal + 1, min(ordinal + 1 + OPEN_AHEAD, len(self._splits))):
                if later not in self._ahead:
                    self._ahead[later] = self._source.open(self._splits[int(self._order[later])], Position())

    def _chunk_of(
        self, elements: Sequence[object], indices: Sequence[int] | None, offsets: Sequence[int] | None
    ) -> Chunk:
        first, count = self._position, len(elements)
        number = self._split_number
        marks = RunMarks(self._ordinal, number, self._splits[number], first, indices, offsets, self._source)
        after = int(indices[-1]) + 1 if indices is not None else first.index + count
        self._position = Position(after, int(offsets[-1]) if offsets is not None else None)
        idents = None
        if self._with_idents:
            numbers = np.arange(first.index, first.index + count) if indices is None else np.asarray(indices)
            idents = make_idents(self._place, numbers)
        return Chunk(elements, marks, idents)

    def close(self) -> None:
        readers = [*self._ahead.values(), *([self._reader] if self._reader else [])]
        self._ahead, self._reader = {}, None
        for reader in readers:
            reader.close()


@dataclass(frozen=True, slots=True)
class _IndexMarks:
    """Consecutive positions of an indexable source; they may run over several splits."""

    starts: Sequence[int]
    first: int
    indices: Sequence[int]
    source: IndexableSource

    def at(self, k: int) -> State:
        position = self.first + k
        ordinal = max(bisect_right(self.starts, position) - 1, 0)
        return [ordinal, position - self.starts[ordinal]]

    def origin(self, k: int) -> Origin:
        index = int(self.indices[k])
        split = max(bisect_right(self.starts, index) - 1, 0)
        path = self.source.path_of(index) if isinstance(self.source, LocatesElements) else ""
        return Origin(split, index - self.starts[split], path)


class IndexedSource(Stage):
    """Elements by index: in order, or in a full permutation of all of them.

    Splits are ranges of positions. Under a shuffle position p holds element `permutation[p]`, so that any number of
    readers of disjoint splits together read one permutation. An element's identity is its index alone: the same
    whatever the order.
    """

    def __init__(
        self,
        meter: StageMeter,
        source: IndexableSource,
        *,
        number: int,
        with_idents: bool,
        order: RandomOrder | None,
        quarantine: Quarantine | None,
    ) -> None:
        super().__init__(meter)
        self._source = source
        self._starts = [split.start for split in source.splits()] or [0]
        self._count = len(source)
        self._number = number
        self._with_idents = with_idents
        self._random = order
        self.quarantine = quarantine
        self._bad: set[int] = set()
        self._over_budget: Exception | None = None
        if quarantine is not None:
            cast(SkipsBadRecords, source).on_bad = self._on_bad

    def open(self, pass_: int, state: State) -> None:
        self._permutation = Permutation(self._random.key(pass_), self._count) if self._random else None
        self._place = derive_word("source", self._number, pass_)
        if self.quarantine is not None:
            self.quarantine.pass_ = pass_
        ordinal, index, *_ = state or (0, 0)
        self._position = self._starts[ordinal] + index

    def _pull(self, want: int) -> Chunk:
        while self._position < self._count:
            start, stop = self._position, min(self._position + want, self._count)
            indices: Any = range(start, stop) if self._permutation is None else self._permutation.at(start, stop)
            self._marks = _IndexMarks(self._starts, start, indices, self._source)
            elements = self._source.fetch(indices)
            if self._over_budget is not None:
                raise self._over_budget
            self._position = stop
            chunk = Chunk(elements, self._marks)
            if self.quarantine is not None:
                self.quarantine.entered(len(elements))
            if self._bad:
                kept = [k for k, index in enumerate(indices) if index not in self._bad]
                chunk.marks, indices = Selected(self._marks, kept, stop - start), np.asarray(indices)[kept]
                self._bad.clear()
            if self._with_idents:
                chunk.idents = make_idents(self._place, np.asarray(indices))
            if len(elements):
                return chunk
        return Chunk((), _IndexMarks(self._starts, self._count, (), self._source))

    def _on_bad(self, error: DataError, index: int) -> None:
        assert self.quarantine is not None
        self._bad.add(index)
        k = list(self._marks.indices).index(index)
        self._over_budget = self.quarantine.admit(error, self._marks, k) or self._over_budget

    def skip(self, count: int) -> int:
        step = min(count, self._count - self._position)
        self._position += step
        return step


def make_idents(place: int, indices: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Idents:
    idents = np.zeros((len(indices), 3), np.uint64)
    idents[:, 0] = place
    idents[:, 1] = indices
    return idents
