"""Where a stream's splits come from, as the engine asks for them.

granted: one after the other from the dispatcher, the next ones asked for when the last known one is taken, so that
reading does not wait for an answer. While the dispatcher is away the feed waits, for as long as the stream is open.
dealt, listed: known beforehand. tail: what the ended streams still had, one leftover after the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Protocol, TypeAlias

from penstock.core.ids import AttemptId, JobName, StreamId
from penstock.runtime.streams import SplitFeed, StreamStopped
from penstock.wire.jobs import Feed, Leftover
from penstock.wire.messages import Answer, Granted, GrantSplits, Refused
from penstock.worker.ledger import UNKNOWN, Ledger, PassKey

Post: TypeAlias = Callable[[GrantSplits, Callable[[Answer], None]], None]
"""Sends a request, again and again until it is answered, and calls back from another thread."""

ASK_AGAIN_S = 0.5  # after an answer that says neither yes nor no


class ClosableFeed(SplitFeed, Protocol):
    def stop(self) -> None:
        """Let whoever waits for a split go, with `StreamStopped`."""


class StaleStream(StreamStopped):
    """The dispatcher refuses to grant: the stream has been bound elsewhere, or its attempt is over."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason


class GrantedFeed:
    def __init__(
        self, ledger: Ledger, post: Post, *, job: JobName, attempt: AttemptId, stream: StreamId, binding: int
    ) -> None:
        self._ledger = ledger
        self._post = post
        self._job, self._attempt, self._stream, self._binding = job, attempt, stream, binding
        self._changed = threading.Condition()
        self._asked: dict[PassKey, float] = {}
        """When a question may be repeated: it was answered with neither yes nor no."""
        self._stopped = False
        self._refusal: str | None = None
        self._taken_at: float | None = None
        self._seconds_per_split = 0.0
        self._plenty = False
        self.waited_s = 0.0

    def next_split(self, source: int, pass_: int, after: int | None) -> int | None:
        key = (source, pass_)
        began = monotonic()
        with self._changed:
            while True:
                if self._refusal is not None:
                    raise StaleStream(self._refusal)
                if self._stopped:
                    raise StreamStopped
                found = self._ledger.following(key, after)
                if found != UNKNOWN:
                    break
                self._ask(key, after)
                self._changed.wait(ASK_AGAIN_S)
            now = monotonic()
            self.waited_s += now - began
            if found is not None:
                self._measure(began, now)
                if self._plenty and self._ledger.all_handed(key):
                    self._ask(key, found)
        return found

    def known_split(self, source: int, pass_: int, after: int) -> int | None:
        found = self._ledger.known_after((source, pass_), after)
        return None if found == UNKNOWN else found

    def select(self, leftover: int) -> None:
        raise TypeError("only a tail has leftovers")

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _measure(self, began: float, now: float) -> None:
        if self._taken_at is not None:
            took = began - self._taken_at  # without the wait for the answer
            self._seconds_per_split = took if not self._seconds_per_split else 0.5 * (self._seconds_per_split + took)
        self._taken_at = now

    def _ask(self, key: PassKey, read: int | None) -> None:
        now = monotonic()
        if now < self._asked.get(key, 0.0):
            return
        self._asked[key] = float("inf")
        after = self._ledger.last(key, read)
        request = GrantSplits(
            job=self._job,
            attempt=self._attempt,
            stream=self._stream,
            binding=self._binding,
            source=key[0],
            pass_=key[1],
            after=after,
            seconds_per_split=self._seconds_per_split,
        )
        self._post(request, lambda answer: self._answered(key, after, answer))

    def _answered(self, key: PassKey, after: int | None, answer: Answer) -> None:
        with self._changed:
            self._asked[key] = 0.0
            if isinstance(answer, Granted):
                self._ledger.granted(key, after, answer.ordinals)
                self._plenty = answer.plenty
            elif isinstance(answer, Refused):
                self._refusal = answer.reason
            else:
                self._asked[key] = monotonic() + ASK_AGAIN_S
            self._changed.notify_all()


class KnownFeed(ClosableFeed):
    """All its splits are known beforehand."""

    def known_split(self, source: int, pass_: int, after: int) -> int | None:
        return self.next_split(source, pass_, after)

    def select(self, leftover: int) -> None:
        raise TypeError("only a tail has leftovers")

    def stop(self) -> None:
        """Nobody ever waits here."""


class DealtFeed(KnownFeed):
    """Ordinals `number`, `number + of`, `number + 2 of`, ... of every pass."""

    def __init__(self, number: int, of: int, split_counts: Sequence[int]) -> None:
        self._first, self._step = number % of, of
        self._counts = split_counts

    def next_split(self, source: int, pass_: int, after: int | None) -> int | None:
        ordinal = self._first if after is None else after + self._step
        return ordinal if ordinal < self._counts[source] else None


class ListedFeed(KnownFeed):
    """The same list in every pass."""

    def __init__(self, listed: Sequence[Sequence[int]]) -> None:
        self._listed = listed
        self._places = [{ordinal: place for place, ordinal in enumerate(ordinals)} for ordinals in listed]

    def next_split(self, source: int, pass_: int, after: int | None) -> int | None:
        ordinals = self._listed[source]
        at = 0 if after is None else self._places[source][after] + 1
        return ordinals[at] if at < len(ordinals) else None


class NamedFeed(KnownFeed):
    """The splits a cut named, and no others."""

    def __init__(self, leftover: Leftover) -> None:
        self._lists = {(named.source, named.pass_): named.ordinals for named in leftover.cut.named}

    def next_split(self, source: int, pass_: int, after: int | None) -> int | None:
        ordinals = self._lists.get((source, pass_), ())
        at = 0 if after is None else ordinals.index(after) + 1 if after in ordinals else len(ordinals)
        return ordinals[at] if at < len(ordinals) else None


class TailFeed(KnownFeed):
    def __init__(self, leftovers: Sequence[Leftover], split_counts: Sequence[int]) -> None:
        self._feeds = [leftover_feed(leftover, split_counts) for leftover in leftovers]
        self._present = 0

    def next_split(self, source: int, pass_: int, after: int | None) -> int | None:
        return self._feeds[self._present].next_split(source, pass_, after) if self._feeds else None

    def select(self, leftover: int) -> None:
        self._present = leftover


def leftover_feed(leftover: Leftover, split_counts: Sequence[int]) -> SplitFeed:
    """Return the feed of an ended stream, from its last cut on."""
    feed = leftover.feed
    if feed.kind == "granted":
        return NamedFeed(leftover)
    return fixed_feed(feed, split_counts)


def fixed_feed(feed: Feed, split_counts: Sequence[int]) -> ClosableFeed:
    """Return a feed that needs nobody's answer."""
    if feed.kind == "listed":
        return ListedFeed(feed.listed)
    if feed.kind == "tail":
        return TailFeed(feed.leftovers, split_counts)
    return DealtFeed(feed.number, feed.of, split_counts)
