"""Splits and elements that need not be made again: what source stages and caching points share.

A source stage asks when it enters a split (`SplitKeeping.enter`) whether one of the points above it has an entry of it;
if so it reads that, and its chunks are *made* up to that point. All other chunks belong to a visit too, and the point
that is to keep them hands them to the writer. A split is complete for a point when a chunk of a later visit, or the end
of the pass, has come through: results come in order, and what was filtered away does not come at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from penstock.caching.entries import DamagedEntryError, OpenEntry, encode_frame
from penstock.caching.packs import PACK_BYTES, PackIndex, pack_index
from penstock.caching.patience import PendingCall
from penstock.caching.store import CacheStore
from penstock.caching.writing import EntryWriting
from penstock.core.element import Element
from penstock.core.errors import CodecError
from penstock.runtime.contract import Chunk, Visit
from penstock.runtime.stats import StageMeter
from penstock.sources.base import IndexableSource, Records, Source, Split
from penstock.sources.stamps import element_stamps, split_stamp

WINDOW_BYTES = 1 << 20  # of an entry, read in one go: what holds one element holds so much
TRIED_BYTES = 1 << 20  # a pack's, when entries are written to see how fast they are


@dataclass(slots=True, kw_only=True)
class CachePoint:
    """One autocache() above a source."""

    number: int
    """From the source up, from 1 on."""
    store: CacheStore
    key: str
    """The prefix, and what else its elements depend on."""
    label: str
    frozen: bool
    meters: tuple[StageMeter, ...] = ()
    """Of the stages below it."""
    meter: StageMeter | None = None
    """Its own."""
    computed: int = 0
    """Elements that came through and were not made before."""
    prefix: str = field(init=False)

    def __post_init__(self) -> None:
        self.prefix = self.store.secret.name("prefix", self.key)

    def compute_s_each(self) -> float:
        """Return how long an element takes up to here, over all threads."""
        return sum(meter.busy_s + meter.work_s for meter in self.meters) / max(1, self.computed)

    def entry_name(self, stamp: str) -> str:
        return f"{self.prefix}/{self.store.secret.name(self.key, stamp)}.entry"


class Chooses(Protocol):
    """Says what is done with the next split, and is told what became of it."""

    @property
    def trying(self) -> bool:
        """Whether entries are written to see how fast they are read."""

    def point(self) -> int:
        """Return at which point elements are kept and asked for; 0: they are computed."""

    def passed(self, mode: int, count: int) -> None:
        """So many elements came through the last point: computed (0), got at a point, or put there (its negative)."""

    def ended(self) -> None:
        """A pass has ended."""

    def close(self) -> None: ...


class SplitVisit(Visit):
    """A split that is being read; of a source that is read by index, some elements."""

    __slots__ = ("keys", "made_at", "name", "place", "put_at", "skipped", "whole", "writing")

    def __init__(self, place: int = 0) -> None:
        self.place = place
        """The identity word of its elements above a frozen point."""
        self.made_at = 0
        self.put_at = 0
        self.name = ""
        self.whole = False
        """Whether all elements of the split come."""
        self.writing: EntryWriting | None = None
        self.skipped = 0
        self.keys: dict[int, bytes] = {}
        """By index: what stands for an element in packs."""

    @property
    def is_kept(self) -> bool:
        return self.put_at > 0


PASS_END = SplitVisit()
"""Goes with the empty chunk that is the end of a pass, and with none that means that somebody stopped."""


class LostEntryError(Exception):
    """An entry that was begun cannot be read on."""


class KeptReader:
    """Reads an entry as a source's reader reads a split; the next window is read while the last one is worked on."""

    def __init__(self, store: CacheStore, name: str, entry: OpenEntry, index: int) -> None:
        self._store, self._name, self._entry = store, name, entry
        firsts = np.concatenate([[0], np.cumsum(entry.counts)])
        passed = int(np.searchsorted(entry.indices, index))
        self._frame = int(np.searchsorted(firsts, passed, side="right")) - 1
        self._element = int(firsts[self._frame])
        self._drop = passed - self._element
        self._rest: deque[Element] = deque()
        self._asked: PendingCall[list[list[Element]]] | None = None
        self._ask()

    def _ask(self) -> None:
        entry, first = self._entry, self._frame
        self._frame = stop = entry.window(first, WINDOW_BYTES)
        self._asked = None if stop == first else self._store.ask(lambda: entry.frames(first, stop))
        self._asked_bytes = int(entry.sizes[first:stop].sum())

    def read(self, want: int) -> Records:
        while not self._rest and self._asked is not None:
            self._take()
        count = min(want, len(self._rest))
        elements = [self._rest.popleft() for _ in range(count)]
        indices: Any = self._entry.indices[self._element : self._element + count]
        self._element += count
        return Records(elements, None, indices)

    def _take(self) -> None:
        assert self._asked is not None
        try:
            frames = self._store.wait(self._asked)
        except DamagedEntryError as error:
            self._store.damaged(self._name)
            raise LostEntryError from error
        except CodecError as error:
            raise LostEntryError from error
        if frames is None:
            raise LostEntryError
        self._store.counts.count(got_bytes=self._asked_bytes)
        self._ask()
        for elements in frames:
            self._rest.extend(elements)
        for _ in range(min(self._drop, len(self._rest))):
            self._rest.popleft()
            self._drop -= 1
            self._element += 1

    def close(self) -> None:
        asked, self._asked = self._asked, None
        if asked is None:
            self._entry.close()
        else:
            self._store.ask(lambda: _close_after(asked, self._entry))


def _close_after(asked: PendingCall[Any], entry: OpenEntry) -> None:
    try:
        asked.wait(60.0)
    except Exception:
        pass
    entry.close()


class SplitKeeping:
    """For a source that is read split by split."""

    def __init__(self, points: Sequence[CachePoint], choice: Chooses, skipped: Callable[[], int]) -> None:
        self._points = points
        self._choice = choice
        self._skipped = skipped
        """Counts elements that were left out because they failed: what is made without them is not kept."""
        self.visits: deque[SplitVisit] = deque()
        """Those that were entered and have not passed all points, in order."""
        self.frozen = any(point.frozen for point in points)
        self.highest = len(points)
        """The number of the last point on the way to the reader."""

    def reset(self) -> None:
        self.visits.clear()

    def enter(
        self, source: Source, split: Split, number: int, index: int, place: int
    ) -> tuple[SplitVisit, KeptReader | None]:
        """Return the visit of a split that is read from an index on, and what it is read from instead, if so."""
        visit = SplitVisit(place)
        self.visits.append(visit)
        chosen = self._choice.point()
        point = next((point for point in self._points if point.number == chosen), None)
        if point is None:
            return visit, None
        stamp = split_stamp(source, split)
        if stamp is None:
            return visit, None
        if point.frozen:
            stamp = f"{stamp}\n{number}"
        visit.name = point.entry_name(stamp)
        entry = point.store.open(visit.name)
        if entry is not None:
            point.store.counts.count(hits=1)
            visit.made_at = point.number
            return visit, KeptReader(point.store, visit.name, entry, index)
        point.store.counts.count(misses=1)
        if index == 0:
            visit.put_at, visit.whole, visit.skipped = point.number, True, self._skipped()
        return visit, None

    def lost(self, place: int) -> SplitVisit:
        """Return the visit of the rest of a split whose entry was lost."""
        visit = SplitVisit(place)
        self.visits.append(visit)
        return visit

    # What a point does

    def went_through(self, point: CachePoint, visit: SplitVisit, count: int) -> None:
        """Elements have passed a point; the last one tells what decides."""
        _tell(self._choice, self.highest, point, visit, count)

    def keep(self, point: CachePoint, chunk: Chunk, visit: SplitVisit) -> None:
        if visit.writing is None:
            visit.writing = point.store.write(point.prefix, visit.name, point.label, _saves(point, visit))
            if visit.writing is None:
                visit.put_at = 0
                point.store.counts.count(left=1)
                return
        assert chunk.idents is not None
        try:
            frame = encode_frame(chunk.elements)
        except CodecError:  # nothing that can be kept; what cannot be sent says so elsewhere
            self._give_up(visit)
            return
        if not visit.writing.add(frame, len(chunk.elements), indices=chunk.idents[:, 1]):
            visit.put_at = 0

    def finish(self, point: CachePoint, visit: SplitVisit) -> None:
        """All that a split gives has come through a point."""
        if visit.put_at != point.number:
            return
        visit.put_at = 0
        if not visit.whole or self._skipped() != visit.skipped:
            self._give_up(visit)
            return
        if visit.writing is None:  # a filter left nothing of it, which is worth knowing
            visit.writing = point.store.write(point.prefix, visit.name, point.label, _saves(point, visit))
        if visit.writing is not None:
            visit.writing.finish(visit.writing.elements * point.compute_s_each())

    def _give_up(self, visit: SplitVisit) -> None:
        visit.put_at = 0
        if visit.writing is not None:
            visit.writing.abandon()

    def passed(self, point: CachePoint, visit: SplitVisit) -> Sequence[SplitVisit]:
        """Return the visits before this one, which are complete; the highest point forgets them."""
        if self.visits and self.visits[0] is visit:
            return ()
        entered = list(self.visits)  # at once: another thread may be entering the next
        before = entered if visit is PASS_END else entered[: entered.index(visit)]
        if point.number == self.highest:
            for _ in before:
                self.visits.popleft()
        return before

    def interrupted(self) -> None:
        """Elements were passed over: what is under way is not whole."""
        for visit in self.visits:
            visit.whole = False

    def close(self, point: CachePoint) -> None:
        if point.number == self.highest:
            self._choice.close()


def _tell(choice: Chooses, highest: int, point: CachePoint, visit: SplitVisit, count: int) -> None:
    if point.number != highest:
        return
    if visit is PASS_END:
        choice.ended()
    elif count:
        choice.passed(visit.made_at or -visit.put_at, count)


def _saves(point: CachePoint, visit: SplitVisit) -> Callable[[], float]:
    def saves() -> float:
        writing = visit.writing
        return 0.0 if writing is None else writing.elements * point.compute_s_each() / max(1, writing.nbytes)

    return saves


class ElementKeeping:
    """For a source that is read by index."""

    def __init__(self, points: Sequence[CachePoint], choice: Chooses) -> None:
        self._points = points
        self._choice = choice
        self._indices: dict[int, PackIndex] = {p.number: pack_index(p.store, p.prefix) for p in points}
        self._packs: dict[int, EntryWriting | None] = {}
        self.frozen = any(point.frozen for point in points)
        self.highest = len(points)
        """The number of the last point on the way to the reader."""

    def reset(self) -> None:
        for index in self._indices.values():
            index.refresh()

    def at(
        self, source: IndexableSource, indices: Sequence[int], place: int
    ) -> tuple[SplitVisit, int, Sequence[Element] | None]:
        """Return the visit of the first of some elements, how many they are, and the elements, if they are kept.

        Either all of them are, or none.
        """
        visit = SplitVisit(place)
        chosen = self._choice.point()
        point = next((point for point in self._points if point.number == chosen), None)
        if point is None:
            return visit, len(indices), None
        keys = self._keys(point, source, indices)
        packs = self._indices[chosen]
        there = [key is not None and packs.has(key) for key in keys]
        count = next((k for k, found in enumerate(there) if found != there[0]), len(there))
        if there[0]:
            elements = packs.read([key for key in keys[:count] if key is not None])
            if elements is not None:
                point.store.counts.count(hits=count)
                visit.made_at = chosen
                return visit, count, elements
        point.store.counts.count(misses=count)
        visit.put_at = chosen
        visit.keys = {int(index): key for index, key in zip(indices[:count], keys) if key is not None}
        return visit, count, None

    def _keys(self, point: CachePoint, source: IndexableSource, indices: Sequence[int]) -> list[bytes | None]:
        short, key = point.store.secret.short, point.key
        return [
            None if stamp is None else short(key, stamp, str(index) if point.frozen else "")
            for index, stamp in zip(indices, element_stamps(source, indices))
        ]

    def went_through(self, point: CachePoint, visit: SplitVisit, count: int) -> None:
        """Elements have passed a point; the last one tells what decides."""
        _tell(self._choice, self.highest, point, visit, count)

    def keep(self, point: CachePoint, chunk: Chunk, visit: SplitVisit) -> None:
        assert chunk.idents is not None
        for element, index in zip(chunk.elements, chunk.idents[:, 1].tolist()):
            key = visit.keys.get(index)
            if key is None:
                continue
            pack = self._packs.get(point.number)
            if pack is None or pack.given_up:
                pack = self._packs[point.number] = self._begin(point)
            if pack is None:
                point.store.counts.count(left=1)
                return
            try:
                frame = encode_frame([element])
            except CodecError:
                return
            if pack.add(frame, 1, ids=[key]) and pack.nbytes >= (TRIED_BYTES if self._choice.trying else PACK_BYTES):
                self._end_pack(point)

    def _begin(self, point: CachePoint) -> EntryWriting | None:
        name = f"{point.prefix}/{point.store.new_name()}.entry"
        found: list[EntryWriting] = []

        def saves() -> float:
            return found[0].elements * point.compute_s_each() / max(1, found[0].nbytes) if found else 0.0

        made = point.store.write(point.prefix, name, point.label, saves)
        if made is not None:
            found.append(made)
        return made

    def _end_pack(self, point: CachePoint) -> None:
        pack = self._packs.pop(point.number, None)
        if pack is not None and pack.elements:
            pack.finish(pack.elements * point.compute_s_each())

    def finish(self, point: CachePoint, visit: SplitVisit) -> None:
        """Packs end when they are full."""

    def passed(self, point: CachePoint, visit: SplitVisit) -> Sequence[SplitVisit]:
        if visit is PASS_END:
            self._end_pack(point)
        return ()

    def interrupted(self) -> None:
        """An element is kept or not, whatever became of its neighbours."""

    def close(self, point: CachePoint) -> None:
        if point.number == self.highest:
            self._choice.close()
        self._end_pack(point)
        self._indices[point.number].close()
