"""Reading an epoch: `next()` takes what has arrived on the data sockets, in the trainer's own thread.

In relaxed order what arrived first is served first. In deterministic order, and with coordinated reads, streams are
served in turn by the number of the round: the stream that is due is waited for, those that have ended are left out, and
the tail comes last.

Only the control thread runs beside the trainer: it puts views on the board and rings the bell. Everything else happens
inside `next()`; between two calls ZeroMQ's own thread goes on receiving, up to the credit given.
"""

from __future__ import annotations

import heapq
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from time import monotonic, perf_counter
from typing import Any, Self

from penstock.client.reading import Frame, StreamReading
from penstock.client.reception import Reception
from penstock.client.session import EpochSession
from penstock.client.sharing import SkipWarning, own_buffers, read_only
from penstock.client.state import Progress, StreamMark, Weights
from penstock.core.element import Element
from penstock.core.errors import ForkedLoaderError, InvalidArgumentError, JobFailedError, WaitTimeoutError
from penstock.wire.compression import decompress
from penstock.wire.failures import rebuild_failure
from penstock.wire.jobs import JobView
from penstock.wire.runs import decode_run

PUMP_EVERY_S = 0.001  # while something is ready, sockets are looked at no more often than this
POLL_S = 0.5
SAY_EVERY_S = 30.0

_log = logging.getLogger("penstock")


class EpochReader:
    """One consumer's iterator over one epoch."""

    def __init__(
        self, session: EpochSession, *, memory_bytes: int, timeout_s: float | None, owner: object = None
    ) -> None:
        """`owner` is kept: with it the connection to the service lives, even if nobody holds the loader any more."""
        self.session = session
        self._owner = owner
        self.progress: Progress = session.progress
        self.epoch = session.epoch
        self.finished = False
        self._consumer = session.consumer
        self._in_turn = session.in_turn
        self._timeout_s = timeout_s
        self._reception = Reception(session, self.progress, memory_bytes=memory_bytes)
        self._readings = self._reception.readings
        self._resources = self._reception.resources
        self._board = session.board
        self._metrics = session.board.metrics
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._error: BaseException | None = None
        # What is being served: elements[at:size] of a frame
        self._elements: Sequence[Element] = ()
        self._at = self._size = 0
        self._from: StreamReading | None = None
        self._frame: Frame | None = None
        self._arrived = self._reception.arrived
        self._turns: list[tuple[int, int, StreamReading]] = []
        self._turn_taken = False
        self._all_there = False
        self._pumped_at = 0.0
        self._known_dropped = 0
        self._left_at: float | None = None
        self._skips = None if session.sharing is None else SkipWarning(session.job, session.trainer)
        self._finalizer = weakref.finalize(self, self._resources.close)
        self._follow(session.view)

    # The trainer's side

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Element:
        at = self._at
        if at < self._size:
            self._at = at + 1
            return self._elements[at]
        return self._refill()

    def _refill(self) -> Element:
        began = perf_counter()
        if self._left_at is not None:
            self._metrics.run_s += began - self._left_at
        try:
            with self._lock:
                self._serve()
        finally:
            self._left_at = perf_counter()
            self._metrics.wait_s += self._left_at - began
        if self._at >= self._size:
            raise StopIteration if self._error is None else self._error
        self._at += 1
        return self._elements[self._at - 1]

    def take(self, want: int) -> tuple[Sequence[Element], Callable[[int], Progress]]:
        """Return up to `want` elements (none: the end) and a way to ask for the progress after the first k of them."""
        with self._lock:
            if self._at >= self._size:
                self._serve()
            if self._at >= self._size and self._error is not None:
                raise self._error
            before = self._settled().copy()
            start, stop = self._at, min(self._size, self._at + want)
            reading, frame, elements = self._from, self._frame, self._elements[start:stop]
            self._at = stop
            feeder = self.session.feeder
            # Now: it forgets what was received.
            fed = [] if feeder is None else [feeder.place(before.step + k) for k in range(stop - start + 1)]

        def after(k: int) -> Progress:
            progress = before.copy()
            progress.fed = fed[k] if fed else None
            if reading is None or frame is None:
                return progress
            if k:
                _advance(progress, progress.streams[reading.number], frame, start + k, k)
            progress.next_stream = reading.number if k < len(elements) else None
            return progress

        return elements, after

    def state(self) -> Progress:
        """Return what the trainer has received so far."""
        with self._lock:
            return self._settled()

    def set_weights(self, weights: Weights) -> None:
        """Mix by others from the next element on; what has arrived beyond it is given up."""
        with self._lock:
            self._settled()
            if self.finished or self._closed or self._error is not None:
                self.progress.weights = weights
                return
            consumers = self.session.spec.consumers
            if consumers > 1 and not self._in_turn:
                raise InvalidArgumentError(
                    f"set_weights() in the middle of an epoch with {consumers} consumers in relaxed order: they stand "
                    "at different places, so none of them can say from where on. Set weights between epochs, or use "
                    "order='deterministic' or coordinated=True"
                )
            self.progress.set_weights(weights, keep_all=consumers > 1)
            self._elements, self._at, self._size = (), 0, 0
            self._from = self._frame = None
            self._reception.take_back()

    @property
    def dropped(self) -> tuple[str, ...]:
        return self._reception.view.dropped

    @property
    def reconnects(self) -> int:
        return self._reception.reconnects

    def buffered_bytes(self) -> int:
        return self._reception.buffered_bytes()

    def readings(self) -> list[StreamReading]:
        return list(self._readings.values())

    def close(self) -> None:
        """Let go of everything, at once. May be called from another thread while one waits in `next()`."""
        if os.getpid() != self._pid:
            return
        self._closed = True
        self._board.bell.ring()
        if self._lock.acquire(timeout=2.0):
            try:
                self._settled()
                self._resources.settled = True
                self._resources.finished = self.finished
                self._elements, self._at, self._size = (), 0, 0
                self._from = self._frame = None
                self._finalizer()
            finally:
                self._lock.release()

    def _settled(self) -> Progress:
        """Bring the marks up to the last element that was given."""
        reading, frame = self._from, self._frame
        if reading is None or frame is None or self._at == frame.at:
            return self.progress
        _advance(self.progress, reading.mark, frame, self._at, self._at - frame.at)
        reading.elements += self._at - frame.at
        self._metrics.batches += self._at - frame.at
        if frame.header.shared:
            self._metrics.shared += self._at - frame.at
        frame.at = self._at
        if frame.at == frame.header.count:
            reading.queue.popleft()
            frame.elements, frame.buffers = (), ()
            self._from = self._frame = None
            self._elements, self._at, self._size = (), 0, 0
        return self.progress

    # Serving

    def _serve(self) -> None:
        """Make `_elements[_at:_size]` what comes next; leave it empty at the end."""
        if os.getpid() != self._pid:
            raise ForkedLoaderError
        self._settled()
        if self._turn_taken:
            self._turn_taken = False
            _, number, served = self._turns[0]
            heapq.heapreplace(self._turns, (served.mark.round, number, served))
        self._elements, self._at, self._size = (), 0, 0
        self._from = self._frame = None
        wait = _Wait(self)
        while not self._closed and not self.finished and self._error is None:
            now = monotonic()
            if now - self._pumped_at >= PUMP_EVERY_S:
                self._pump(now)
            reading = self._choose()
            if reading is not None and self._begin(reading):
                return
            if reading is None:
                if self._at_end():
                    self._finish()
                    return
                self._check_job()
                if self._error is None:
                    self._reception.feed()
                    wait.once()

    def _finish(self) -> None:
        self.finished = True
        self._resources.finished = True
        self._check_skipped(ended=True)
        self._finalizer()

    def _check_skipped(self, *, ended: bool = False) -> None:
        if self._skips is not None and self._metrics.skipped:
            self._skips.check(self._metrics.batches, self._metrics.skipped, ended=ended)

    def _choose(self) -> StreamReading | None:
        """Return the stream whose turn it is, if it has something."""
        if not self._in_turn:
            arrived = self._arrived
            if self.progress.next_stream is not None and arrived:
                return self._choose_known()
            if arrived and arrived[0].is_tail and not all(r.exhausted or r.is_tail for r in self._readings.values()):
                # One that came back with an older state reads streams again that have ended for the others. A state
                # with rounds of the tail says that all of them have.
                found = next((reading for reading in arrived if not reading.is_tail), None)
                if found is not None:
                    arrived.remove(found)
                return found
            return arrived.popleft() if arrived else None
        self._arrived.clear()
        while self._turns:
            _, _, reading = self._turns[0]
            if not reading.exhausted:
                return reading if reading.ready and self._all_there else None
            heapq.heappop(self._turns)
        # The tail comes after all others, whatever its number.
        return next((r for r in self._readings.values() if r.is_tail and r.ready), None)

    def _choose_known(self) -> StreamReading | None:
        """The state said which stream comes first."""
        wanted = self.progress.next_stream
        if all(reading.exhausted for reading in self._readings.values() if reading.number == wanted):
            self.progress.next_stream = None
        found = next((r for r in self._arrived if wanted == r.number or self.progress.next_stream is None), None)
        if found is not None:
            self.progress.next_stream = None
            self._arrived.remove(found)
        return found

    def _begin(self, reading: StreamReading) -> bool:
        """Serve rounds of this stream; False if it had only its end to tell."""
        if not reading.queue:
            if reading.failure is not None:
                self._fail(rebuild_failure(reading.failure.failure))
            else:
                self._reception.end(reading)
            return False
        frame = reading.begin_frame()
        if frame.header.mixes and self._missed_weights(reading, frame):
            return False
        if frame.elements is None:
            self._metrics.nbytes += frame.header.nbytes
            frame.elements = self._decode(frame)
            self._reception.return_credit(reading)
            self._check_skipped()
        self._elements, self._at = frame.elements, frame.at
        alone = not self._in_turn or len(self._turns) <= 1
        self._size = frame.header.count if alone else frame.at + 1
        self._turn_taken = self._in_turn and bool(self._turns)
        self._from, self._frame = reading, frame
        return True

    def _missed_weights(self, reading: StreamReading, frame: Frame) -> bool:
        known = self.progress.mixes.get(reading.number, ())
        if self.session.spec.consumers == 1 or frame.header.mixes <= sum(at <= frame.header.seq for at, _ in known):
            return False
        self._fail(
            InvalidArgumentError(
                f"another consumer of job {self.session.job!r} changed the weights, and consumer {self._consumer} did "
                "not; call set_weights() with the same weights at the same step on all ranks"
            )
        )
        return True

    def _decode(self, frame: Frame) -> Sequence[Element]:
        header = frame.header
        if header.slab is not None:
            buffers: Sequence[Any] = frame.buffers[0].arrays()
        else:
            buffers = [part.buffer for part in frame.buffers]
        if header.compression:
            buffers = decompress(header.compression, buffers)
        if self.session.sharing is not None:
            buffers = own_buffers(buffers) if self.session.sharing.writable else read_only(buffers)
        frame.buffers = ()
        return decode_run(header.layout, buffers)

    def _at_end(self) -> bool:
        return self._reception.view.finished and all(
            r.exhausted or not self._reception.mine(r.view) for r in self._readings.values()
        )

    def _check_job(self) -> None:
        refusal = self._board.refusal
        if refusal is not None:
            self._fail(refusal)
        elif self._reception.view.failure:
            self._fail(JobFailedError(self.session.job, self._reception.view.failure))

    def _fail(self, error: BaseException) -> None:
        """An error is the end of this reader; its state stays that of the last element given."""
        self._error = error  # raised by whoever asked for an element, so that few of our frames are in its way
        self._finalizer()

    # The control thread's side

    def _pump(self, now: float) -> None:
        """Take in what has arrived on all sides, without waiting."""
        self._pumped_at = now
        forgotten = self._board.take_forgotten()
        if forgotten:
            self._reopen(forgotten)
        view = self._board.take_view()
        if view is not None:
            self._follow(view)
        self._reception.pump(now)

    def _follow(self, view: JobView) -> None:
        for element in view.dropped[self._known_dropped :]:
            _log.warning("job %r leaves out %s: processes died while they worked on it", view.job, element)
        self._known_dropped = len(view.dropped)
        self._reception.follow(view)
        if self._in_turn:
            in_turn = [reading for reading in self._readings.values() if not reading.is_tail]
            # Turns begin when all streams are there: which is first must not depend on which was seen first.
            self._all_there = len(in_turn) >= (len(self.session.spec.feeds) or self.session.spec.streams)
            self._turns = [(r.mark.round, r.number, r) for r in in_turn if not r.exhausted]
            heapq.heapify(self._turns)

    def _reopen(self, why: str) -> None:
        """The dispatcher lost its memory of this reader: open again, from where the trainer stands if need be."""
        _log.warning("opening epoch %d of job %r again: %s", self.epoch, self.session.job, why)
        if not self.session.rejoin():
            if self.session.sharing is not None:
                self._give_up_epoch()
                return
            self._reception.restart()
            self.session.resume(self.progress)
        self._follow(self.session.view)

    def _give_up_epoch(self) -> None:
        """The trainers that share the job are epochs ahead, so the window over this one is gone."""
        if self.session.spec.sharing == "wait":
            self._fail(JobFailedError(self.session.job, f"the service lost attempt {self._reception.view.attempt}"))
            return
        _log.warning(
            "the others are through with epoch %d of job %r: its rest is skipped", self.epoch, self.session.job
        )
        self._finish()

    # Waiting

    def poll(self, timeout_s: float) -> None:
        if self._resources.poll(timeout_s):
            self._board.bell.quiet()
        self._pumped_at = 0.0

    def waiting_for(self) -> str:
        now = monotonic()
        parts = [self._reception.view.waiting_for] if self._reception.view.waiting_for else []
        mine: Iterator[StreamReading] = (r for r in self._readings.values() if not r.exhausted)
        parts += [reading.describe(now) for reading in mine]
        if not self.session.connected:
            parts.append(f"the dispatcher at {self.session.link.address} cannot be reached")
        if not parts:
            parts.append("the epoch's end, which the other consumers have not reached" if self._readings else "streams")
        return "; ".join(parts[:12])


class _Wait:
    """One wait of `next()`: it looks at the clock, speaks now and then, and gives up at the loader's timeout."""

    def __init__(self, reader: EpochReader) -> None:
        self._reader = reader
        self._began = monotonic()
        self._say_at = self._began + SAY_EVERY_S

    def once(self) -> None:
        reader, now = self._reader, monotonic()
        what = f"a batch of job {reader.session.job!r}, epoch {reader.epoch}, consumer {reader._consumer}"
        timeout_s = reader._timeout_s
        if timeout_s is not None and now - self._began >= timeout_s:
            raise WaitTimeoutError(what, reader.waiting_for(), now - self._began)
        if now >= self._say_at:
            self._say_at = now + SAY_EVERY_S
            _log.warning("still waiting for %s (%.0f s): %s", what, now - self._began, reader.waiting_for())
        left_s = POLL_S if timeout_s is None else min(POLL_S, timeout_s - (now - self._began))
        reader.poll(max(0.001, left_s))


def _advance(progress: Progress, mark: StreamMark, frame: Frame, at: int, rounds: int) -> None:
    """Count rounds of a frame as received; `at` is how many of its rounds are taken then."""
    mark.round += rounds
    progress.step += rounds
    if at == frame.header.count:
        mark.reach(frame.header.cut)
        progress.add_done(mark, frame.header.done)
    else:
        mark.opened = (*frame.header.done, *frame.header.cut.named)
