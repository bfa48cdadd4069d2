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
from time import perf_counter
from typing import Protocol

from msgspec.structs import replace

from penstock.core.element import element_bytes
from penstock.core.ids import StreamId
from penstock.runtime.iterator import Run
from penstock.runtime.streams import StreamStopped
from penstock.stream.instructions import FRAME_BYTES, End, StartRun
from penstock.stream.rounds import RoundMaker, Taken
from penstock.wire.jobs import Cut, Named
from penstock.worker.feeds import StaleStream
from penstock.worker.opening import Opening

PULL_S = 0.004  # how long a pull should take: what it returns is sent no earlier
MAX_ROUNDS = 4_096  # in one frame
DISCARD_CHUNK = 1_024


class Audience(Protocol):
    """Whom a pump works for; see `worker.streams`."""

    def prepare(self, pump: Pump) -> Opening:
        """Return what the pump's run is opened with. Called by its thread: it may take a while."""

    def wait_room(self, pump: Pump) -> int | None:
        """Wait until the next round may be sent; return how many bytes may be, None if the pump was abandoned."""

    def deliver(self, pump: Pump, taken: Taken, cut: Cut, done: tuple[Named, ...]) -> None:
        """Take rounds over; `cut` is the state after them, and `done` are splits that it does not need any more."""

    def ended(self, pump: Pump, end: End, done: tuple[Named, ...]) -> None: ...

    def failed(self, pump: Pump, error: BaseException) -> None: ...

    def stale(self, pump: Pump, reason: str) -> None: ...


class PullSizer:
    """How many outputs to ask the engine for: as many as lately fitted into time and frame, at most twice the most yet.

    An answer with fewer than were asked for says where the engine's own chunk ended, and nothing of how many fit.

    >>> sizer = PullSizer(width=1)
    >>> [(sizer.want(), sizer.made(sizer.want(), 1e-5, 1000.0))[0] for _ in range(4)]
    [1, 2, 4, 8]
    >>> sizer.made(3, 3e-5, 1000.0); sizer.want()
    16
    """

    def __init__(self, width: int, frame_bytes: int = FRAME_BYTES) -> None:
        self._width = width
        self._frame_bytes = frame_bytes
        self._most = 0
        self._seconds = 0.0  # an output, lately
        self.bytes_each = 0.0

    def want(self) -> int:
        if not self._most:
            return self._width
        fits = [2.0 * self._most, float(MAX_ROUNDS * self._width)]
        if self.bytes_each:
            fits.append(self._frame_bytes * self._width / self.bytes_each)
        if self._seconds:
            fits.append(PULL_S / self._seconds)
        return max(self._width, int(min(fits)))

    def made(self, count: int, seconds: float, bytes_each: float) -> None:
        self._most = max(count, self._most, self._width)
        share = seconds / count
        self._seconds = share if not self._seconds else 0.5 * (self._seconds + share)
        self.bytes_each = bytes_each if not self.bytes_each else 0.5 * (self.bytes_each + bytes_each)


class Pump:
    def __init__(
        self, audience: Audience, stream: StreamId, start: StartRun, *, width: int, makes_rounds: bool
    ) -> None:
        """`makes_rounds`: the engine itself groups outputs into rounds. Frames are about `start.frame_bytes`."""
        self.start, self.number = start, start.number
        self.abandoned = False
        self.busy_s = 0.0
        self._audience = audience
        first = start.start_round - start.start.since
        self._weights = next((weights for at, weights in reversed(start.mixes) if at <= first), None)
        """What the run mixes by when it opens; None: the pipeline's own."""
        self._changes = deque({(at - first) * width: weights for at, weights in start.mixes if at > first}.items())
        """Changes of the weights: after how many outputs of rounds, and to which."""
        self._lock = threading.Lock()
        self._opening: Opening | None = None
        self._run: Run | None = None
        """What is to be closed, should the pump be abandoned."""
        self._maker = RoundMaker(width=width, cut=start.start, next_round=start.start_round, coordinated=makes_rounds)
        self._sizer = PullSizer(width, start.frame_bytes)
        self._thread = threading.Thread(target=self._work, name=f"penstock stream {stream}", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def abandon(self) -> None:
        """Stop as soon as possible, without waiting for it."""
        with self._lock:
            self.abandoned = True
            opening, run = self._opening, self._run
        if opening is not None:
            opening.stop()
        if run is not None and not run.closed:
            # Closing waits a moment for threads in user code, and nobody here has that moment.
            threading.Thread(target=run.close, name="penstock close", daemon=True).start()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    # Its thread

    def _work(self) -> None:
        try:
            opening = self._audience.prepare(self)
            with self._lock:
                self._opening = opening
            if not self.abandoned and self._make(opening):
                self._finish(opening)
        except StaleStream as stale:
            self._audience.stale(self, stale.reason)
        except StreamStopped:
            pass
        except BaseException as error:
            self._audience.failed(self, error)
        finally:
            with self._lock:
                self._opening = self._run = None  # they may refer back to this

    def _make(self, opening: Opening) -> bool:
        """Make and send all there is; False if the pump was abandoned."""
        try:
            return self._pull_all(opening, self._open(opening, self.start.start))
        finally:
            opening.stop()
            if self._run is not None:
                self._run.close()

    def _open(self, opening: Opening, cut: Cut) -> Run:
        run = opening.open(self, cut, self._weights)
        with self._lock:
            self._run = run
        return run

    def _pull_all(self, opening: Opening, run: Run) -> bool:
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
            self._maker.add(chunk)
            changes = bool(self._changes) and self._maker.counted == self._changes[0][0]
            cut = Cut(chunk.marks.at(count) if changes else None)
            del chunk  # its memory is to be free for the next as soon as the reader is through with it
            while self._maker.ready:
                if not self._send(opening):
                    return False
            if changes:  # go on from here with other weights: what the old run had made beyond is made anew
                _, self._weights = self._changes.popleft()
                run.close()
                run = self._open(opening, cut)
        return False

    def _send(self, opening: Opening) -> bool:
        """Send a frame of the rounds that are ready, when there is room; False if the pump was abandoned."""
        room = self._audience.wait_room(self)
        if room is None:
            return False
        most = max(1, int(min(room, self.start.frame_bytes) / max(self._sizer.bytes_each, 1.0)))
        taken = self._maker.take(min(most, MAX_ROUNDS))
        assert taken is not None
        self._audience.deliver(self, taken, *self._cut(opening, taken.after))
        return True

    def _cut(self, opening: Opening, after: Cut) -> tuple[Cut, tuple[Named, ...]]:
        """Return the cut with the splits it needs, and those that are done by it."""
        named, done = opening.feed.settle(after.engine)
        return Cut(after.engine, after.since, named, self.start.terms.share, after.regroup), done

    def _finish(self, opening: Opening) -> None:
        """Everything made was sent: tell the end."""
        maker = self._maker
        leftover = False
        if opening.final:
            last = maker.take_rest(pad=opening.pad)
            if last is not None:
                if self._audience.wait_room(self) is None:
                    return
                self._audience.deliver(self, last, *self._cut(opening, last.after))
        else:
            assert self._run is not None
            leftover = maker.incomplete > 0 or self._run.has_rest
        cut, done = self._cut(opening, maker.standing)
        if not leftover:
            settled = opening.feed.settle_all()
            cut, done = replace(cut, named=settled.named), done + settled.done
        self._audience.ended(self, End(maker.next_round, cut, leftover), done)
