"""One run of a stream: a thread that pulls the engine, and one that sends what it made as rounds.

Two threads, because a pull may take for ever (a slow function, a split nobody grants) and what was made before it must
not wait for it. The sending one takes all rounds there are: where the engine is slow they leave one by one, where it is
fast they gather while the last frame is sent.

A pump never goes back. A stream that must begin lower abandons its pump and starts another, whose threads do not wait
for the old ones: those may be in the middle of a user's function, and what they still make is given to nobody.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import Protocol

from penstock.core.element import element_bytes
from penstock.core.ids import StreamId
from penstock.runtime.iterator import Run
from penstock.runtime.streams import StreamStopped, places
from penstock.wire.messages import Cut, Named
from penstock.worker.feeds import ClosableFeed, StaleStream
from penstock.worker.grouping import RoundMaker, Standing, Taken
from penstock.worker.ledger import Ledger

FRAME_BYTES = 1 << 20
PULL_S = 0.004  # how long a pull should take: what it returns is sent no earlier
MAX_ROUNDS = 4_096  # in one frame
DISCARD_CHUNK = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun:
    """What a pump works with, made in its own thread because making it may take a while."""

    run: Run
    feed: ClosableFeed
    ledger: Ledger | None
    """None where splits are not granted: no cut has to name any."""
    final: bool
    """Nothing is left over at its end: a tail, or a stream that reads everything by itself."""
    pad: bool


@dataclass(frozen=True, slots=True)
class End:
    """How many rounds there were, where the stream stands after them, and whether there is more than they took."""

    seq: int
    cut: Cut
    leftover: bool


class Audience(Protocol):
    """Whom a pump works for; see `streams.Stream`."""

    def wait_room(self, pump: Pump) -> int | None:
        """Wait until the next round may be sent; return how many bytes may be, None if the pump was abandoned."""

    def deliver(self, pump: Pump, taken: Taken, cut: Cut) -> None: ...

    def ended(self, pump: Pump, end: End) -> None: ...

    def failed(self, pump: Pump, error: BaseException) -> None: ...

    def stale(self, pump: Pump, reason: str) -> None: ...


class PullSizer:
    """How many outputs to ask the engine for: as many as lately fitted into time and frame, at most twice the last.

    >>> sizer = PullSizer(width=1)
    >>> [(sizer.want(), sizer.made(sizer.want(), 1e-5, 1000.0))[0] for _ in range(4)]
    [1, 2, 4, 8]
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._last = 0
        self._seconds = 0.0  # an output, lately
        self.bytes_each = 0.0

    def want(self) -> int:
        if not self._last:
            return self._width
        fits = [2.0 * self._last, float(MAX_ROUNDS * self._width)]
        if self.bytes_each:
            fits.append(FRAME_BYTES * self._width / self.bytes_each)
        if self._seconds:
            fits.append(PULL_S / self._seconds)
        return max(self._width, int(min(fits)))

    def made(self, count: int, seconds: float, bytes_each: float) -> None:
        self._last = max(count, self._width)
        share = seconds / count
        self._seconds = share if not self._seconds else 0.5 * (self._seconds + share)
        self.bytes_each = bytes_each if not self.bytes_each else 0.5 * (self.bytes_each + bytes_each)


class Pump:
    def __init__(
        self,
        audience: Audience,
        stream: StreamId,
        *,
        start: Cut,
        start_round: int,
        share: int,
        width: int,
        open_run: Callable[[Pump], OpenedRun],
        coordinated: bool = False,
    ) -> None:
        self._audience = audience
        self._share = share
        self._open_run = open_run
        self.start_cut, self.start_round = start, start_round
        self.next_round = start_round
        """The first round not handed to the readers yet; written under the stream's lock."""
        self.remembers_from = start_round
        """Cuts of this round and later: what was done since them is known."""
        self.ledger: Ledger | None = None
        self.end: End | None = None
        self.failure: BaseException | None = None
        self.abandoned = False
        self.busy_s = 0.0
        self.outputs = 0
        self._opened: OpenedRun | None = None
        self._feed: ClosableFeed | None = None
        self._changed = threading.Condition()
        self._maker = RoundMaker(width=width, cut=start, next_round=start_round, coordinated=coordinated)
        self._sizer = PullSizer(width)
        self._over = False
        """There is nothing more to pull: the end, or an error."""
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=work, name=f"penstock stream {stream}", daemon=True)
            for work in (self._make, self._send)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def abandon(self) -> None:
        """Stop as soon as possible, without waiting for it."""
        with self._changed:
            self.abandoned = True
            opened, feed = self._opened, self._feed
            self._changed.notify_all()
        if feed is not None:
            feed.stop()
        if opened is not None and not self._over:
            # Closing waits a moment for threads in user code, and nobody here has that moment.
            threading.Thread(target=opened.run.close, name="penstock close", daemon=True).start()

    def adopt(self, feed: ClosableFeed) -> None:
        """Take the feed of a run that is being opened: opening may wait for a split, and is abandoned too."""
        with self._changed:
            self._feed = feed
            abandoned = self.abandoned
        if abandoned:
            feed.stop()

    def join(self, timeout_s: float) -> bool:
        deadline = monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def run(self) -> Run | None:
        opened = self._opened
        return None if opened is None else opened.run

    # The thread that makes

    def _make(self) -> None:
        error: BaseException | None = None
        try:
            opened = self._open_run(self)
            with self._changed:
                self._opened = opened
                self.ledger = opened.ledger
            try:
                self._pull_all(opened.run)
            finally:
                opened.feed.stop()
                opened.run.close()
        except BaseException as raised:
            error = raised
        with self._changed:
            self._error, self._over = error, True
            self._changed.notify_all()

    def _pull_all(self, run: Run) -> None:
        while self._wait_for_use():
            to_drop = min(self._maker.to_drop, DISCARD_CHUNK)
            began = perf_counter()
            chunk = run.pull(to_drop or self._sizer.want())
            took = perf_counter() - began
            count = len(chunk.elements)
            self.busy_s += took
            if not count:
                return
            if not to_drop:
                self._sizer.made(count, took, element_bytes(chunk.elements[0]))
                self.outputs += count
            with self._changed:
                self._maker.add(chunk)
                if self._maker.ready:
                    self._changed.notify_all()

    def _wait_for_use(self) -> bool:
        """Wait until less than a frame for each consumer is ready; False if the pump was abandoned."""
        with self._changed:
            while not self.abandoned:
                ready = self._maker.ready
                if ready < MAX_ROUNDS and ready * self._sizer.bytes_each < FRAME_BYTES:
                    return True
                self._changed.wait(1.0)
        return False

    # The thread that sends

    def _send(self) -> None:
        try:
            while (room := self._wait_for_rounds()) is not None:
                with self._changed:
                    most = max(1, int(min(room, FRAME_BYTES) / max(self._sizer.bytes_each, 1.0)))
                    taken = self._maker.take(most)
                    self._changed.notify_all()
                if taken is None:
                    self._finish()
                    return
                self._audience.deliver(self, taken, self._cut(taken.after))
        except StaleStream as stale:
            self._audience.stale(self, stale.reason)
        except StreamStopped:
            pass
        except BaseException as error:
            self._audience.failed(self, error)
            self.abandon()

    def _wait_for_rounds(self) -> int | None:
        """Wait for rounds, or the end, and for room to send them. None: the pump was abandoned."""
        with self._changed:
            while not self._maker.ready and not self._over and not self.abandoned:
                self._changed.wait(1.0)
            if self.abandoned:
                return None
            if not self._maker.ready:
                return 0
        return self._audience.wait_room(self)

    def _cut(self, standing: Standing) -> Cut:
        named: tuple[Named, ...] = ()
        if self.ledger is not None:
            named = self.ledger.settle(places(standing.engine))
        return Cut(standing.engine, standing.since, named, self._share, standing.regroup)

    def _finish(self) -> None:
        """Everything made was sent: raise what went wrong, or tell the end."""
        if self._error is not None:
            raise self._error
        opened, maker = self._opened, self._maker
        assert opened is not None
        leftover = False
        if opened.final:
            last = maker.take_rest(pad=opened.pad)
            if last is not None:
                if self._audience.wait_room(self) is None:
                    return
                self._audience.deliver(self, last, self._cut(last.after))
        else:
            leftover = maker.incomplete > 0 or opened.run.has_rest
        cut = self._cut(maker.standing)
        if not leftover and self.ledger is not None:
            self.ledger.settle_all()
            cut = Cut(cut.engine, cut.since, (), cut.share, cut.regroup)
        self._audience.ended(self, End(maker.next_round, cut, leftover))
