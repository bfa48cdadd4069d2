"""Splits that need not be made again: what source stages and caching points share. (`keeping_elements`: elements.)

A source stage asks when it enters a split (`SplitKeeping.enter`) whether one of the points above it has an entry of it;
if so it reads that, and its chunks are *made* up to that point. All other chunks belong to a visit too, and the point
that is to keep them hands them to the writer. A split is complete for a point when as many elements have come as its
source gave, or when a chunk of a later visit, or the end of the pass, has come through: results come in order, and what
was filtered away does not come at all.

Of several runs that need an entry which is not there, one claims it, and the others wait for what it makes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.caching.claims import Claim
from penstock.caching.elsewhere import BeingMade, OtherHosts, RemoteEntry, RemoteKeeper
from penstock.caching.entries import DamagedEntryError, OpenEntry, encode_frame
from penstock.caching.names import subject_of
from penstock.caching.patience import PendingCall
from penstock.caching.writing import EntryWriting
from penstock.core.errors import CodecError
from penstock.runtime.contract import Chunk, Visit
from penstock.runtime.kept_reader import KeptReader
from penstock.runtime.rechecking import Recheck, is_due, read_on
from penstock.runtime.stats import StageMeter
from penstock.sources.base import Source, Split
from penstock.sources.stamps import split_stamp

if TYPE_CHECKING:
    from penstock.caching.store import CacheStore

EARLY_S = 60.0  # that an entry which is no longer needed may take to be opened, before it is left to its thread
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.05  # between two looks at an entry that another makes


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
        self.prefix = self.store.secret.prefix_name(self.key)

    def compute_s_each(self) -> float:
        """Return how long an element takes up to here, over all threads."""
        return sum(meter.busy_s + meter.work_s for meter in self.meters) / max(1, self.computed)

    def entry_name(self, subject: bytes) -> str:
        return self.store.secret.entry_name(self.key, subject)

    @property
    def asks_others(self) -> bool:
        """Whether other hosts may have what is not here: all of them see the same objects of a store."""
        return self.store.files.local


class Chooses(Protocol):
    """Says what is done with the next split, and is told what became of it."""

    @property
    def trying(self) -> bool:
        """Whether entries are written to see how fast they are read."""

    def point(self) -> int:
        """Return at which point elements are kept and asked for; 0: they are computed."""

    def passed(self, mode: int, count: int) -> None:
        """So many elements came through the last point: computed (0), got at a point, or put there (its negative)."""

    def disturbed(self) -> None:
        """What is got now is not there yet, and takes as long as it is made: this says nothing about getting."""

    def ended(self) -> None:
        """A pass has ended."""

    def close(self) -> None: ...


class SplitVisit(Visit):
    """A split that is being read; of a source that is read by index, some elements."""

    __slots__ = (
        *("claim", "compared_at", "ended", "keys", "made_at", "name", "number", "place", "put_at", "read", "recheck"),
        *("seen", "skipped", "whole", "writing"),
    )

    def __init__(self, place: int = 0, number: int = 0) -> None:
        self.place = place
        """The identity word of its elements above a frozen point."""
        self.number = number
        """The split's."""
        self.made_at = 0
        self.put_at = 0
        self.name = ""
        self.whole = False
        """Whether all elements of the split come."""
        self.claim: Claim | None = None
        """That this run makes its entry; the writer ends it with the entry."""
        self.writing: EntryWriting | None = None
        self.read = self.seen = 0
        """Elements that the source gave, and those that came to the point that keeps them."""
        self.ended = False
        """Whether the source has given all."""
        self.skipped = 0
        self.recheck: Recheck | None = None
        self.compared_at = 0
        """At which point what is made is compared with what is kept."""
        self.keys: dict[int, bytes] = {}
        """By index: what stands for an element in packs."""

    @property
    def is_kept(self) -> bool:
        return self.put_at > 0


PASS_END = SplitVisit()
"""Goes with the empty chunk that is the end of a pass, and with none that means that somebody stopped."""


class SplitKeeping:
    """For a source that is read split by split."""

    def __init__(
        self,
        points: Sequence[CachePoint],
        choice: Chooses,
        skipped: Callable[[], int],
        hosts: OtherHosts | None,
        held: set[int],
    ) -> None:
        """`held`: the numbers of splits whose entries this host has, as far as this process knows; kept by it."""
        self._points = points
        self.held = held
        self._hosts = hosts
        self._choice = choice
        self._skipped = skipped
        """Counts elements that were left out because they failed: what is made without them is not kept."""
        self.visits: deque[SplitVisit] = deque()
        """Those that were entered and have not passed all points, in order."""
        self.frozen = any(point.frozen for point in points)
        self.highest = len(points)
        """The number of the last point on the way to the reader."""
        self._finishing = threading.Lock()
        self._closed = False
        self._early: EarlyEntry | None = None

    def reset(self) -> None:
        self._forget_early()
        for visit in self.visits:
            self._give_up(visit)
        self.visits.clear()
        self._closed = False

    def enter(
        self, source: Source, split: Split, number: int, index: int, place: int
    ) -> tuple[SplitVisit, KeptReader | None]:
        """Return the visit of a split that is read from an index on, and what it is read from instead, if so."""
        visit = SplitVisit(place, number)
        self.visits.append(visit)
        chosen = self._choice.point()
        point = next((point for point in self._points if point.number == chosen), None)
        subject = None if point is None else _subject(point, source, split, number)
        if point is None or subject is None:
            return visit, None
        visit.name = point.entry_name(subject)
        reader = self._opened_early(point, visit, index) or self._reader_or_claim(point, subject, visit, index)
        if reader is not None and not index and is_due(place):
            visit.recheck, visit.compared_at = Recheck(read_on(reader)), point.number
            return visit, None
        if reader is not None:
            point.store.counts.count(hits=1)
            visit.made_at = point.number
            return visit, reader
        point.store.counts.count(misses=1)
        if index == 0:
            visit.put_at, visit.whole, visit.skipped = point.number, True, self._skipped()
        return visit, None

    def expect(self, source: Source, split: Split, number: int) -> None:
        """Have the entry of the split that is entered next opened, and its beginning read, while another is read."""
        chosen = self._choice.point()
        point = next((point for point in self._points if point.number == chosen), None)
        if point is None or point.store.away:
            return
        self._forget_early()
        self._early = EarlyEntry(point, number, point.store.ask(lambda: _open_early(point, source, split, number)))

    def _opened_early(self, point: CachePoint, visit: SplitVisit, index: int) -> KeptReader | None:
        early = self._early
        if early is None or index or early.point is not point or early.number != visit.number:
            return None
        self._early, found = None, point.store.wait(early.asked)
        if found is None or found.name != visit.name:  # None: it may be there by now, or be damaged, which is told
            if found is not None:
                found.close()
            return None
        self.held.add(visit.number)
        return found

    def _forget_early(self) -> None:
        early, self._early = self._early, None
        if early is not None:
            early.point.store.ask(lambda: _close_early(early))

    def _reader_or_claim(self, point: CachePoint, subject: bytes, visit: SplitVisit, index: int) -> KeptReader | None:
        """Return what reads an entry; None: there is none, and this run makes it. What others make is waited for."""
        store, pause_s, began, overdue = point.store, FIRST_PAUSE_S, monotonic(), False
        while True:
            found = self._reader(point, subject, visit, index)
            if isinstance(found, KeptReader) or index or self._choice.trying or store.away:
                return found if isinstance(found, KeptReader) else None
            if found is None:
                claim = store.claim(visit.name)
                if isinstance(claim, OpenEntry):
                    return KeptReader(store, visit.name, claim, index)
                if claim is not None:
                    visit.claim = claim
                    return None
            if self._closed or not store.claims.may_wait:
                return None
            if found is None and not store.is_being_made(visit.name):
                if overdue:
                    store.claims.waited_in_vain(monotonic() - began)
                    return None
                overdue = True  # or made just now: another look tells
                continue
            self._choice.disturbed()
            point.meters[0].add_wait(pause_s)
            sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _reader(
        self, point: CachePoint, subject: bytes, visit: SplitVisit, index: int
    ) -> KeptReader | BeingMade | None:
        """Return what reads an entry, of this host or of another; None: there is none."""
        store, name = point.store, visit.name
        entry = store.open(name)
        if entry is not None:
            self.held.add(visit.number)
            return KeptReader(store, name, entry, index)
        self.held.discard(visit.number)
        remote = self._hosts.open(point.key, subject) if self._hosts is not None and point.asks_others else None
        if not isinstance(remote, RemoteEntry):
            return remote
        store.counts.count(fetched=1)
        return KeptReader(RemoteKeeper(store, remote.doubt), name, remote.entry, index)

    def lost(self, place: int) -> SplitVisit:
        """Return the visit of the rest of a split whose entry was lost."""
        visit = SplitVisit(place)
        self.visits.append(visit)
        return visit

    # What a point does

    def went_through(self, point: CachePoint, visit: SplitVisit, count: int) -> None:
        """Elements have passed a point; the last one tells what decides."""
        tell_choice(self._choice, self.highest, point, visit, count)

    def keep(self, point: CachePoint, chunk: Chunk, visit: SplitVisit) -> None:
        if visit.writing is None:
            self._begin(point, visit)
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
        if visit.claim is not None and visit.claim.is_due:
            visit.claim.made_some(len(chunk.elements) * point.compute_s_each())
        visit.seen += len(chunk.elements)
        self._finish_if_whole(visit)

    def _begin(self, point: CachePoint, visit: SplitVisit) -> None:
        visit.writing = point.store.write(point.prefix, visit.name, point.label, _saves(point, visit), visit.claim)

    def ended(self, visit: SplitVisit) -> None:
        """The source has given all of a split."""
        visit.ended = True
        self._finish_if_whole(visit)

    def _finish_if_whole(self, visit: SplitVisit) -> None:
        """Publish what is known to be all there: where something is left out of a split, its end is seen later."""
        if visit.ended and visit.seen == visit.read and visit.put_at:
            self.finish(self._points[visit.put_at - 1], visit)

    def finish(self, point: CachePoint, visit: SplitVisit) -> None:
        """All that a split gives has come through a point."""
        if visit.recheck is not None and visit.compared_at == point.number:
            visit.recheck.close()
        with self._finishing:  # the source's thread may see it, and the point's
            if visit.put_at != point.number:
                return
            visit.put_at = 0
        if not visit.whole or self._skipped() != visit.skipped:
            self._give_up(visit)
            return
        if visit.writing is None:  # a filter left nothing of it, which is worth knowing
            self._begin(point, visit)
        if visit.writing is not None:
            visit.writing.finish(visit.writing.elements * point.compute_s_each())
            self.held.add(visit.number)

    def _give_up(self, visit: SplitVisit) -> None:
        visit.put_at = 0
        self._let_go(visit)
        if visit.recheck is not None:
            visit.recheck.close()
        if visit.writing is not None:
            visit.writing.abandon()

    @staticmethod
    def _let_go(visit: SplitVisit) -> None:
        claim, visit.claim = visit.claim, None
        if claim is not None:
            claim.release()

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
            self._closed = True
            self._forget_early()
            self._choice.close()
            for visit in list(self.visits):
                self._give_up(visit)


class EarlyEntry(NamedTuple):
    """What is opened before it is entered."""

    point: CachePoint
    number: int
    """The split's."""
    asked: PendingCall[KeptReader | None]


def _open_early(point: CachePoint, source: Source, split: Split, number: int) -> KeptReader | None:
    try:
        subject = _subject(point, source, split, number)
    except Exception:  # of the source: entering the split raises it where it counts
        return None
    if subject is None:
        return None
    name = point.entry_name(subject)
    try:
        entry = point.store.open_here(name)
    except DamagedEntryError:
        return None
    return None if entry is None else KeptReader(point.store, name, entry, 0)


def _close_early(early: EarlyEntry) -> None:
    with suppress(Exception):
        found = early.asked.wait(EARLY_S)
        if found is not None:
            found.close()


def _subject(point: CachePoint, source: Source, split: Split, number: int) -> bytes | None:
    """Return what an entry of a split is about; None: the split cannot be read, or not be told from what it was."""
    stamp = split_stamp(source, split)
    return None if stamp is None else subject_of(point.key, stamp, str(number) if point.frozen else "")


def tell_choice(choice: Chooses, highest: int, point: CachePoint, visit: SplitVisit, count: int) -> None:
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
