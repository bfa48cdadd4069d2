"""Where a stream's splits come from, as the engine asks for them, and which of them its cuts still need.

granted: one after the other from the dispatcher, the next ones asked for when half of a grant is taken, so that reading
does not wait for the answer of a busy dispatcher. While the dispatcher is away the feed waits, for as long as the
stream is open.
fed: units that the stream's reader sends: what each output is made of, by the indices of elements.
dealt, listed: known beforehand. tail: what the ended streams still had, one leftover after the other.

A list of granted splits for (source, pass) only grows, and is in the order in which the dispatcher granted. An engine
state names places in these lists. By rule 2 of `runtime.streams` what comes before the lowest place of a pass is done,
a pass before one that has a place is done, and everything else is still needed: a source without any place stands at
its beginning.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from time import monotonic
from typing import NamedTuple, TypeAlias

from penstock.core.ids import AttemptId, JobName, StreamId
from penstock.runtime.streams import PASS_ENDED, SplitFeed, SplitPlace, StreamStopped
from penstock.wire.frames import Units
from penstock.wire.jobs import FeedSpec, Leftover, Named
from penstock.wire.messages import Answer, Granted, GrantSplits, Refused

Post: TypeAlias = Callable[[GrantSplits, Callable[[Answer], None]], None]
"""Sends a request, again and again until it is answered, and calls back from another thread."""

PassKey: TypeAlias = tuple[int, int]
"""(source, pass)"""

ASK_AGAIN_S = 0.5  # after an answer that says neither yes nor no
MOST_PREFERRED = 16  # splits that are named in one question
MOST_UNITS = 1 << 20  # of one stream at a time; readers send a few hundred ahead
MOST_INDICES = 1 << 24  # in all units of a process, at about 40 bytes each: 64 batches of 65,536 are a fourth of that
LOOK_AGAIN_S = 1.0  # not a deadline: a trainer may take its time, and a reader that is gone closes the stream
UNKNOWN = -2
"""Answer of `GrantedSplits.following`: the dispatcher must be asked."""


class StaleStream(StreamStopped):
    """The stream has been bound elsewhere, its attempt is over, or its reader is further: nothing is granted here."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason


class Settled(NamedTuple):
    """What a cut still needs of what was handed to the engine, and what no cut from there on does."""

    named: tuple[Named, ...]
    done: tuple[Named, ...]


class StreamFeed(SplitFeed):
    """A feed as a pump has it. Most know their splits beforehand: then nobody ever waits, and cuts name none."""

    changes = 0
    """How often splits were granted, or given to the engine: what a cut needs follows from its places and from that. 0:
    none has to be named."""

    def known_split(self, source: int, pass_: int, after: int) -> int | None:
        return self.next_split(source, pass_, after)

    def prefer(self, source: int, pass_: int, ordinals: Sequence[int]) -> None:
        """There is no choice, but for what is granted."""

    def select(self, leftover: int) -> None:
        raise TypeError("only a tail has leftovers")

    def settle(self, places: Sequence[SplitPlace] | None) -> Settled:
        """Return what a cut with these places of the engine's needs. None: the stream has left nothing over."""
        return Settled((), ())

    def stop(self) -> None:
        """Let whoever waits for a split go, with `StreamStopped`."""


# Granted


class GrantedSplits:
    """The splits of one pass that were granted and are not done, in order."""

    def __init__(self) -> None:
        self.ordinals: list[int] = []
        self.handed = 0
        """How many of them, from the front, the engine has been given."""
        self.ended = False
        self.last: int | None = None
        """The last ordinal ever known; it stays when the list is forgotten."""
        self._grant = 0
        """How many the last answer brought."""

    def _place_after(self, after: int | None) -> int:
        if after is None or after not in self.ordinals:
            return 0  # what was done is forgotten, so that what is kept begins right after it
        return self.ordinals.index(after) + 1

    def following(self, after: int | None) -> int | None:
        """Give the engine the ordinal after `after`; None: the list has ended, `UNKNOWN`: more may be granted."""
        at = self._place_after(after)
        if at < len(self.ordinals):
            self.handed = max(self.handed, at + 1)
            return self.ordinals[at]
        return None if self.ended else UNKNOWN

    def known_after(self, after: int) -> int | None:
        """Return the ordinal after `after`, if it is known, and do not count the split as opened."""
        at = self._place_after(after)
        return self.ordinals[at] if at < len(self.ordinals) else None

    def asked_after(self, after: int | None) -> int | None:
        """Return the last ordinal known, else `after`: what the dispatcher is asked to go on from."""
        return after if self.last is None else self.last

    def granted(self, after: int | None, ordinals: Sequence[int]) -> None:
        """Take an answer in; the same answer twice changes nothing."""
        if self.last is None or self.last == after:
            self.extend(ordinals)

    def extend(self, ordinals: Sequence[int], *, handed: bool = False) -> None:
        """The dispatcher granted these; none: there are no more."""
        self.ordinals.extend(ordinals)
        self._grant = len(ordinals)
        self.handed += len(ordinals) if handed else 0
        self.last = ordinals[-1] if ordinals else self.last
        self.ended = not ordinals

    def restore(self, named: Named) -> None:
        """Begin with what a cut names: all of it was handed to the engine."""
        self.extend(named.ordinals, handed=True)
        self.ended = named.ended

    def needed_from(self, ordinal: int) -> int:
        """Return how many come before a place of the engine's."""
        if ordinal == PASS_ENDED:
            return self.handed
        if ordinal not in self.ordinals:  # the stream was opened at a place that no list named: it is the first known
            self.ordinals.insert(0, ordinal)
            self.handed += 1
            self.last = ordinal if self.last is None else self.last
        return self.ordinals.index(ordinal)

    @property
    def runs_out(self) -> bool:
        """Whether the engine was given half of the last grant, and there may be more."""
        return not self.ended and len(self.ordinals) - self.handed <= self._grant // 2

    @property
    def is_through(self) -> bool:
        """Whether the engine was given all there is."""
        return self.ended and self.handed == len(self.ordinals)

    def forget(self, count: int) -> tuple[int, ...]:
        """Return the first `count`, which are done, and keep them no longer."""
        gone = tuple(self.ordinals[:count])
        del self.ordinals[:count]
        self.handed -= count
        return gone


class StreamLedger:
    """One stream's lists, from a cut on. No lock: the feed has one."""

    def __init__(self, named: Iterable[Named] = ()) -> None:
        self._lists: defaultdict[PassKey, GrantedSplits] = defaultdict(GrantedSplits)
        for entry in named:
            self._lists[entry.source, entry.pass_].restore(entry)

    def of(self, key: PassKey) -> GrantedSplits:
        return self._lists[key]

    def settle(self, places: Iterable[SplitPlace] | None) -> Settled:
        """Return what a cut with these places still needs, and what it does not need any more.

        None: the stream has ended and left nothing over, so that all is done; which lists had ended is named still.
        """
        if places is None:
            done = [named for key, found in self._lists.items() for named in self._forget(key, found.handed)]
            return Settled(self._named(), tuple(done))
        lowest: dict[PassKey, int] = {}
        latest: dict[int, int] = {}
        for source, pass_, ordinal in places:
            key = (source, pass_)
            at = self._lists[key].needed_from(ordinal)
            lowest[key] = min(at, lowest.get(key, at))
            latest[source] = max(pass_, latest.get(source, pass_))
        done = []
        for key in list(self._lists):
            if key in lowest:
                done += self._forget(key, lowest[key])
            elif key[1] < latest.get(key[0], key[1]):
                done += self._forget(key, self._lists[key].handed)
                del self._lists[key]
        return Settled(self._named(), tuple(done))

    def _named(self) -> tuple[Named, ...]:
        """Return what was handed to the engine and is not done. A list that has ended is named without a split too.

        Opened again before its end, the stream must not be granted more of it than it had: see `control.resuming`.
        """
        return tuple(
            Named(*key, tuple(found.ordinals[: found.handed]), found.is_through)
            for key, found in sorted(self._lists.items())
            if found.handed or found.is_through
        )

    def _forget(self, key: PassKey, count: int) -> list[Named]:
        return [Named(*key, gone)] if (gone := self._lists[key].forget(count)) else []


class GrantedFeed(StreamFeed):
    def __init__(
        self, ledger: StreamLedger, post: Post, *, job: JobName, attempt: AttemptId, stream: StreamId, binding: int
    ) -> None:
        self.changes = 1
        self._ledger = ledger
        self._post = post
        self._job, self._attempt, self._stream, self._binding = job, attempt, stream, binding
        self._changed = threading.Condition()
        self._asked: dict[PassKey, float] = {}
        """When a question may be asked again that was answered with neither yes nor no."""
        self._stopped = False
        self._refusal = ""
        self._taken_at: float | None = None
        self._seconds_per_split = 0.0
        self._plenty = False
        self._preferred: dict[PassKey, deque[int]] = {}
        """Splits of a pass that this host keeps, as far as they may still be had."""

    def prefer(self, source: int, pass_: int, ordinals: Sequence[int]) -> None:
        with self._changed:
            self._preferred[source, pass_] = deque(ordinals)

    def next_split(self, source: int, pass_: int, after: int | None) -> int | None:
        key = (source, pass_)
        began = monotonic()
        with self._changed:
            while not self._stopped and (found := self._ledger.of(key).following(after)) == UNKNOWN:
                self._ask(key, after)
                self._changed.wait(ASK_AGAIN_S)
            if self._stopped:
                raise StaleStream(self._refusal) if self._refusal else StreamStopped
            if found is not None:
                self.changes += 1
                self._measure(began)
                if self._plenty and self._ledger.of(key).runs_out:
                    self._ask(key, found)
        return found

    def known_split(self, source: int, pass_: int, after: int) -> int | None:
        with self._changed:
            return self._ledger.of((source, pass_)).known_after(after)

    def settle(self, places: Sequence[SplitPlace] | None) -> Settled:
        with self._changed:
            return self._ledger.settle(places)

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _measure(self, began: float) -> None:
        if self._taken_at is not None:
            took = began - self._taken_at  # without the wait for the answer
            self._seconds_per_split = took if not self._seconds_per_split else 0.5 * (self._seconds_per_split + took)
        self._taken_at = monotonic()

    def _ask(self, key: PassKey, read: int | None) -> None:
        if monotonic() < self._asked.get(key, 0.0):
            return
        self._asked[key] = float("inf")
        after = self._ledger.of(key).asked_after(read)
        preferred = tuple(islice(self._preferred.get(key, ()), MOST_PREFERRED))
        request = GrantSplits(
            job=self._job,
            attempt=self._attempt,
            stream=self._stream,
            binding=self._binding,
            source=key[0],
            pass_=key[1],
            after=after,
            seconds_per_split=self._seconds_per_split,
            preferred=preferred,
        )
        self._post(request, lambda answer: self._answered(key, after, preferred, answer))

    def _answered(self, key: PassKey, after: int | None, preferred: Sequence[int], answer: Answer) -> None:
        with self._changed:
            if isinstance(answer, Granted):
                self._ledger.of(key).granted(after, answer.ordinals)
                self.changes += 1
                self._forget_preferred(key, preferred, answer.ordinals)
                self._plenty = answer.plenty
                self._asked[key] = 0.0
            elif isinstance(answer, Refused):
                self._refusal, self._stopped = answer.reason, True
            else:
                self._asked[key] = monotonic() + ASK_AGAIN_S
            self._changed.notify_all()

    def _forget_preferred(self, key: PassKey, named: Sequence[int], granted: Sequence[int]) -> None:
        """Others have those before the last that was granted; where none was, all that were named."""
        last = max((at for at, ordinal in enumerate(named) if ordinal in granted), default=len(named) - 1)
        gone, waiting = set(named[: last + 1]), self._preferred.get(key)
        while waiting and waiting[0] in gone:
            waiting.popleft()


# Known beforehand


class DealtFeed(StreamFeed):
    """Ordinals `number`, `number + of`, `number + 2 of`, ... of every pass."""

    def __init__(self, number: int, of: int, split_counts: Sequence[int]) -> None:
        self._first, self._step = number % of, of
        self._counts = split_counts

    def next_split(self, source: int, pass_: int, after: int | None) -> int | None:
        ordinal = self._first if after is None else after + self._step
        return ordinal if ordinal < self._counts[source] else None


class ListedFeed(StreamFeed):
    """The splits of these lists, by (source, pass); by (source, None) where every pass has the same."""

    def __init__(self, lists: Mapping[tuple[int, int | None], Sequence[int]]) -> None:
        self._following = {key: dict(zip((None, *ordinals), ordinals)) for key, ordinals in lists.items()}

    def next_split(self, source: int, pass_: int, after: int | None) -> int | None:
        following = self._following.get((source, pass_)) or self._following.get((source, None), {})
        return following.get(after)


class TailFeed(StreamFeed):
    def __init__(self, leftovers: Sequence[Leftover], split_counts: Sequence[int]) -> None:
        self._feeds = [leftover_feed(leftover, split_counts) for leftover in leftovers]
        self._present = 0

    def next_split(self, source: int, pass_: int, after: int | None) -> int | None:
        return self._feeds[self._present].next_split(source, pass_, after) if self._feeds else None

    def select(self, leftover: int) -> None:
        self._present = leftover


def leftover_feed(leftover: Leftover, split_counts: Sequence[int]) -> StreamFeed:
    """Return the feed of an ended stream, from its last cut on: of granted splits those that the cut names."""
    if leftover.feed.kind == "granted":
        return ListedFeed({(named.source, named.pass_): named.ordinals for named in leftover.cut.named})
    return fixed_feed(leftover.feed, split_counts)


def fixed_feed(feed: FeedSpec, split_counts: Sequence[int]) -> StreamFeed:
    """Return a feed that needs nobody's answer."""
    if feed.kind == "listed":
        return ListedFeed({(source, None): ordinals for source, ordinals in enumerate(feed.listed)})
    if feed.kind == "tail":
        return TailFeed(feed.leftovers, split_counts)
    return DealtFeed(feed.number, feed.of, split_counts)


# Fed by the reader


class FedUnits:
    """What is known of one stream's units. Any thread may call.

    The reader sends units ahead, a bounded number of them, and all it still needs again with each opening. A unit's
    number in its stream says which it is, so nothing depends on when, how often or by which opening it came.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.start = 0
        """The number of the first unit, in the whole epoch."""
        self._units: dict[int, tuple[int, ...]] = {}
        self._end: int | None = None
        self.taken = 0
        """The reader has the outputs of the units before that one, and will not send those again."""
        self.indices = 0
        """How many there are in all units that are held."""

    def take(self, message: Units, room: int = MOST_INDICES) -> None:
        """Hear of units, and keep them if they fit; `room`: for so many more indices."""
        with self.changed:
            more = sum(map(len, message.units))
            if len(self._units) + len(message.units) <= MOST_UNITS and more <= room:
                for ordinal, unit in enumerate(message.units, message.first):
                    self.indices += len(unit) - len(self._units.get(ordinal, ()))
                    self._units[ordinal] = unit
            self.start = message.start
            if message.ended:
                self._end = message.first + len(message.units)
            # Those that are held are looked through, not those that were taken: nobody has checked that number.
            for ordinal in [held for held in self._units if held < message.taken]:
                self.indices -= len(self._units.pop(ordinal))
            self.taken = max(self.taken, message.taken)
            self.changed.notify_all()

    def get(self, ordinal: int) -> tuple[int, ...] | None:
        """Return a unit; None: it is not known yet, or there is none."""
        return self._units.get(ordinal)

    def ends_before(self, ordinal: int) -> bool:
        return self._end is not None and ordinal >= self._end


class FedFeed(StreamFeed):
    """Units 0, 1, 2, ... of a stream, as its reader sends them. Waits while it is behind."""

    def __init__(self, units: FedUnits, feed: FeedSpec) -> None:
        self._known = units
        self._feed = feed
        self._stopped = False

    def next_split(self, source: int, pass_: int, after: int | None) -> int | None:
        ordinal = 0 if after is None else after + 1
        known = self._known
        with known.changed:
            while known.get(ordinal) is None:
                if self._stopped:
                    raise StreamStopped
                if known.ends_before(ordinal):
                    return None
                if ordinal < known.taken:
                    raise _read(ordinal)
                known.changed.wait(LOOK_AGAIN_S)
        return ordinal

    def known_split(self, source: int, pass_: int, after: int) -> int | None:
        return after + 1 if self._known.get(after + 1) is not None else None

    def unit(self, ordinal: int) -> tuple[int, ...]:
        found = self._known.get(ordinal)
        if found is None:
            raise _read(ordinal)
        return found

    def number(self, ordinal: int) -> int:
        return self._known.start + ordinal * self._feed.of + self._feed.number

    def stop(self) -> None:
        with self._known.changed:
            self._stopped = True
            self._known.changed.notify_all()


def _read(ordinal: int) -> StaleStream:
    return StaleStream(f"unit {ordinal} has been read, and its reader does not have it any more")
