"""One run of a stream: a thread that pulls the engine, and sends what it made as rounds.

A pull may take for ever (a slow function, a split nobody grants), so whatever is whole is sent before the next one, and
a pull asks for no more than fits into a moment and a frame. A thread of its own for sending would only add a hand-over
to every frame: where making and sending should overlap, the engine's prefetch sees that its reader is away.

A pump never goes back. A stream that must begin lower abandons its pump and starts another, whose thread does not wait
for the old one: that may be in the middle of a user's function, and what it still makes is given to nobody.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Protocol

from penstock.core.element import element_bytes
from penstock.core.ids import StreamId
from penstock.runtime.contract import State
from penstock.runtime.iterator import Run
from penstock.runtime.streams import StreamStopped, places
from penstock.stream.checkpoint import Weights
from penstock.stream.rounds import RoundMaker, Taken
from penstock.stream.serving import FRAME_BYTES, End, StartRun
from penstock.wire.jobs import Cut, Named
from penstock.worker.feeds import ClosableFeed, StaleStream
from penstock.worker.ledger import Ledger

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
    reopen: Callable[[State, Weights], Run] | None = None
    """Opens the run again, at a state, to mix by other weights."""


class Audience(Protocol):
    """Whom a pump works for; see `worker.streams`."""

    def wait_room(self, pump: Pump) -> int | None:
        """Wait until the next round may be sent; return how many bytes may be, None if the pump was abandoned."""

    def deliver(self, pump: Pump, taken: Taken, cut: Cut, done: tuple[Named, ...]) -> None:
        """Take rounds over; `cut` is the state after them, and `done` are splits that it does not need any more."""

    def ended(self, pump: Pump, end: End, done: tuple[Named, ...]) -> None: ...

    def failed(self, pump: Pump, error: BaseException) -> None: ...

    def stale(self, pump: Pump, reason: str) -> None: ...


class PullSizer:
    """How many outputs to ask the engine for: as many as lately fitted into time and frame, at most twice the last.

    >>> sizer = PullSizer(width=1)
    >>> [(sizer.want(), sizer.made(sizer.want(), 1e-5, 1000.0))[0] for _ in range(4)]
    [1, 2, 4, 8]
    """

    def __init__(self, width: int, frame_bytes: int = FRAME_BYTES) -> None:
        self._width = width
        self._frame_bytes = frame_bytes
        self._last = 0
        self._seconds = 0.0  # an output, lately
        self.bytes_each = 0.0

    def want(self) -> int:
        if not self._last:
            return self._width
        fits = [2.0 * self._last, float(MAX_ROUNDS * self._width)]
        if self.bytes_each:
            fits.append(self._frame_bytes * self._width / self.bytes_each)
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
        start: StartRun,
        *,
        width: int,
        makes_rounds: bool,
        open_run: Callable[[Pump], OpenedRun],
    ) -> None:
        """`makes_rounds`: the engine itself groups outputs into rounds. Frames are about `start.frame_bytes`."""
        self.number = start.number
        self._frame_bytes = start.frame_bytes
        self._audience = audience
        self._share = start.terms.share
        self._open_run = open_run
        first = start.start_round - start.start.since
        self.weights = next((weights for at, weights in reversed(start.mixes) if at <= first), None)
        """What the run mixes by when it opens; None: the pipeline's own."""
        self._changes = deque({(at - first) * width: weights for at, weights in start.mixes if at > first}.items())
        """After how many outputs of rounds others count, and which."""
        self._ledger: Ledger | None = None
        self.abandoned = False
        self.busy_s = 0.0
        self.outputs = 0
        self._opened: OpenedRun | None = None
        self._feed: ClosableFeed | None = None
        self._lock = threading.Lock()
        self._maker = RoundMaker(width=width, cut=start.start, next_round=start.start_round, coordinated=makes_rounds)
        self._sizer = PullSizer(width, start.frame_bytes)
        self._over = False
        """There is nothing more to pull: the end, or an error."""
        self._thread = threading.Thread(target=self._work, name=f"penstock stream {stream}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def abandon(self) -> None:
        """Stop as soon as possible, without waiting for it."""
        with self._lock:
            self.abandoned = True
            opened, feed = self._opened, self._feed
        if feed is not None:
            feed.stop()
        if opened is not None and not self._over:
            # Closing waits a moment for threads in user code, and nobody here has that moment.
            threading.Thread(target=opened.run.close, name="penstock close", daemon=True).start()

    def adopt(self, feed: ClosableFeed) -> None:
        """Take the feed of a run that is being opened: opening may wait for a split, and is abandoned too."""
        with self._lock:
            self._feed = feed
            abandoned = self.abandoned
        if abandoned:
            feed.stop()

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def run(self) -> Run | None:
        opened = self._opened
        return None if opened is None else opened.run

    # Its thread

    def _work(self) -> None:
        try:
            if self._make():
                self._finish()
        except StaleStream as stale:
            self._audience.stale(self, stale.reason)
        except StreamStopped:
            pass
        except BaseException as error:
            self._audience.failed(self, error)

    def _make(self) -> bool:
        """Make and send all there is; False if the pump was abandoned."""
        try:
            opened = self._open_run(self)
            with self._lock:
                self._opened = opened
                self._ledger = opened.ledger
            try:
                return self._pull_all(opened)
            finally:
                opened.feed.stop()
                assert self._opened is not None
                self._opened.run.close()
                # It refers back to this: without it all that a run holds is free as soon as the stream lets go.
                self._opened = replace(self._opened, reopen=None)
        finally:
            self._over = True

    def _pull_all(self, opened: OpenedRun) -> bool:
        run = opened.run
        while not self.abandoned:
            to_drop = min(self._maker.to_drop, DISCARD_CHUNK)
            want = to_drop or self._sizer.want()
            if self._changes:
                want = min(want, self._changes[0][0] - self._maker.counted)
            began = perf_counter()
            chunk = run.pull(want)
            took = perf_counter() - began
            count = len(chunk.elements)
            self.busy_s += took
            if not count:
                return True
            if not to_drop:
                self._sizer.made(count, took, element_bytes(chunk.elements[0]))
                self.outputs += count
            self._maker.add(chunk)
            changes = bool(self._changes) and self._maker.counted == self._changes[0][0]
            state = chunk.marks.at(count) if changes else None
            del chunk  # its memory is to be free for the next as soon as the reader is through with it
            while self._maker.ready:
                if not self._send():
                    return False
            if changes:
                run = self._change_weights(opened, state)
        return False

    def _change_weights(self, opened: OpenedRun, state: State) -> Run:
        """Go on from here with other weights. What the old run had made beyond is made anew."""
        assert opened.reopen is not None
        _, weights = self._changes.popleft()
        assert self._opened is not None
        self._opened.run.close()
        run = opened.reopen(state, weights)
        with self._lock:
            self._opened = replace(opened, run=run)
            abandoned = self.abandoned
        if abandoned:
            run.close()
        return run

    def _send(self) -> bool:
        """Send a frame of the rounds that are ready, when there is room; False if the pump was abandoned."""
        room = self._audience.wait_room(self)
        if room is None:
            return False
        most = max(1, int(min(room, self._frame_bytes) / max(self._sizer.bytes_each, 1.0)))
        taken = self._maker.take(min(most, MAX_ROUNDS))
        assert taken is not None
        self._audience.deliver(self, taken, *self._cut(taken.after))
        return True

    def _cut(self, after: Cut) -> tuple[Cut, tuple[Named, ...]]:
        """Return the cut with the splits it needs, and those that are done by it."""
        named: tuple[Named, ...] = ()
        done: tuple[Named, ...] = ()
        if self._ledger is not None:
            named, done = self._ledger.settle(places(after.engine))
        return Cut(after.engine, after.since, named, self._share, after.regroup), done

    def _finish(self) -> None:
        """Everything made was sent: tell the end."""
        opened, maker = self._opened, self._maker
        assert opened is not None
        leftover = False
        if opened.final:
            last = maker.take_rest(pad=opened.pad)
            if last is not None:
                if self._audience.wait_room(self) is None:
                    return
                self._audience.deliver(self, last, *self._cut(last.after))
        else:
            leftover = maker.incomplete > 0 or opened.run.has_rest
        cut, done = self._cut(maker.standing)
        if not leftover and self._ledger is not None:
            done += self._ledger.settle_all()
            cut = Cut(cut.engine, cut.since, (), cut.share, cut.regroup)
        self._audience.ended(self, End(maker.next_round, cut, leftover), done)
