"""Reading what a unit feed names: elements by their index, as many as each unit has.

A unit is the elements of one output. Where a pipeline has a batch operator, each unit becomes one batch, whatever its
length; where it has none, a unit is one element. Which it is was checked when the job was made, as was that every other
operator gives one output for one input: so unit n of a stream is its output n. In a process of the sampler's own,
operators may leave elements out (`StreamPart.units`).

A place is `["@", source, pass, ordinal, index]` as in any stream. Just after a unit it is the beginning of the next
one, whether there is one or not.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import msgspec
import numpy as np

from penstock.core.element import Element
from penstock.core.errors import DataError, DeadlyElementError
from penstock.runtime.contract import Chunk, Fixed, Idents, Origin, Selected, Stage, State
from penstock.runtime.ops.source import Reading
from penstock.runtime.quarantine import Quarantine
from penstock.runtime.randomness import derive_word
from penstock.runtime.stats import StageMeter
from penstock.runtime.streaming.ordinals import read_place
from penstock.runtime.streams import PASS_ENDED, PLACE, UnitFeed
from penstock.sources.base import IndexableSource, LocatesElements, tell_of_bad

Sizes: TypeAlias = Callable[[State], Iterator[int]]
"""From where a stage is opened to the sizes of the batches that follow, each asked for when its first row is there."""

POSITION_BITS = 24  # of an identity, for the place in a unit; the rest is the unit's number


def unit_sizes(feed: UnitFeed) -> Sizes:
    """Return how long the units are that follow a state."""

    def sizes(state: State) -> Iterator[int]:
        place = read_place(state)
        ordinal = 0 if place is None else place[0]
        while True:
            yield len(feed.unit(ordinal))
            ordinal += 1

    return sizes


class _UnitMarks(msgspec.Struct, frozen=True):
    """Elements of consecutive units."""

    number: int
    pass_: int
    ordinal: int
    """The ordinal of the first element's unit."""
    index: int
    """The index of the first element in that unit."""
    ends: Sequence[int]
    """How many of the elements precede the end of each unit that ends here."""
    indices: Sequence[int]
    starts: Sequence[int]
    """The number of the first element of each of the source's splits."""
    source: IndexableSource

    def at(self, k: int) -> State:
        passed = bisect_right(self.ends, k)
        index = k - self.ends[passed - 1] if passed else self.index + k
        return [PLACE, self.number, self.pass_, self.ordinal + passed, index]

    def origin(self, k: int) -> Origin:
        index = self.indices[k]
        split = max(bisect_right(self.starts, index) - 1, 0)
        path = self.source.path_of(index) if isinstance(self.source, LocatesElements) else ""
        return Origin(split, index - self.starts[split], path, None, self.number)


class UnitSource(Stage):
    """Elements of the units in the feed's order.

    An index may come more than once in an epoch (sampling with replacement), and then is to get other random numbers
    each time: an element's identity is its index, its unit's number and its place there.
    """

    def __init__(self, meter: StageMeter, source: IndexableSource, reading: Reading, feed: UnitFeed) -> None:
        super().__init__(meter)
        self._source = source
        self._how = reading
        self._feed = feed
        self._starts = [split.start for split in reading.splits] or [0]
        self._dropped = {self._starts[split] + index for split, index in reading.dropped}
        self._bad: dict[int, DataError] = {}
        if reading.quarantine is not None:
            tell_of_bad(source, self._on_bad)

    def _on_bad(self, error: DataError, index: int) -> None:
        self._bad[index] = error

    def open(self, pass_: int, state: State) -> None:
        self._pass = pass_
        if self._how.quarantine is not None:
            self._how.quarantine.pass_ = pass_
        self._place = derive_word("source", self._how.identity_number, pass_)
        place = read_place(state)
        self._ordinal, self._index = (0, 0) if place is None else place[:2]

    def _pull(self, want: int) -> Chunk:
        number = self._how.number
        while self._ordinal != PASS_ENDED:
            after = self._ordinal - 1 if self._ordinal else None
            if self._feed.next_split(number, self._pass, after) is None:
                self._ordinal, self._index = PASS_ENDED, 0
            elif self._index < len(self._feed.unit(self._ordinal)):
                chunk = self._read(want)
                if chunk.elements:
                    return chunk
            else:
                self._ordinal, self._index = self._ordinal + 1, 0
        return Chunk((), Fixed([PLACE, number, self._pass, PASS_ENDED, 0]))

    def _read(self, want: int) -> Chunk:
        """Read the unit at hand, and those after it that are known already: nothing here waits."""
        first, index = self._ordinal, self._index
        indices = list(self._feed.unit(first)[index : index + want])
        ends = [len(indices)] if index + len(indices) == len(self._feed.unit(first)) else []
        ordinal = first
        while ends and len(indices) < want:
            found = self._feed.known_split(self._how.number, self._pass, ordinal)
            if found is None:
                break
            ordinal = found
            unit = self._feed.unit(ordinal)[: want - len(indices)]
            indices += unit
            if len(unit) < len(self._feed.unit(ordinal)):
                break
            ends.append(len(indices))
        marks = _UnitMarks(self._how.number, self._pass, first, index, ends, indices, self._starts, self._source)
        flight = self._how.flight
        if flight is None:
            chunk = self._fetch(indices, marks)
        else:
            indices = indices[: flight.reach(marks, len(indices))]
            chunk = flight.record(marks.origin(0), len(indices), partial(self._fetch, indices, marks))
        _, _, _, self._ordinal, self._index = marks.at(len(indices))
        return chunk

    def _fetch(self, indices: Sequence[int], marks: _UnitMarks) -> Chunk:
        deadly = self._dropped.intersection(indices) if self._dropped else ()
        if deadly:
            raise DeadlyElementError(
                f"element {min(deadly)} killed the processes that worked on it, and a unit of a sampler is given whole "
                "or not at all: mend the function that reads or decodes it, or leave the index out of the sampler"
            )
        elements = self._source.fetch(indices)
        idents = self._idents(indices, marks) if self._how.with_idents else None
        if self._how.quarantine is None:
            return Chunk(elements, marks, idents)
        return self._without_bad(elements, indices, marks, idents, self._how.quarantine)

    def _without_bad(
        self,
        elements: Sequence[Element],
        indices: Sequence[int],
        marks: _UnitMarks,
        idents: Idents | None,
        quarantine: Quarantine,
    ) -> Chunk:
        quarantine.entered(len(indices))
        bad, self._bad = self._bad, {}
        if not bad:
            return Chunk(elements, marks, idents)
        kept: list[int] = []
        for k, index in enumerate(indices):
            if index not in bad:
                kept.append(k)
            elif (over := quarantine.admit(bad[index], marks, k)) is not None:
                raise over
        return Chunk(elements, Selected(marks, kept, len(indices)), None if idents is None else idents[kept])

    def _idents(self, indices: Sequence[int], marks: _UnitMarks) -> Idents:
        idents = np.empty((len(indices), 3), np.uint64)
        idents[:, 0] = self._place
        idents[:, 1] = indices
        for k in range(len(indices)):
            _, _, _, ordinal, index = marks.at(k)
            idents[k, 2] = (self._feed.number(ordinal) << POSITION_BITS) + index + 1
        return idents
