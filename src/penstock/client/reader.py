"""Reading an epoch: `next()` takes what has arrived on the data sockets, in the trainer's own thread.

What to open, take and say is decided by `stream.consuming`; this is its hands: sockets, decoding, waiting. Only the
control thread runs beside the trainer: it puts views on the board and rings the bell. Everything else happens inside
`next()`; between two calls ZeroMQ's own thread goes on receiving, up to the credit given.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from time import monotonic, perf_counter
from typing import Self

from penstock.client.connection import Payload, RunnerConnection
from penstock.client.connections import Connections
from penstock.client.session import EpochSession
from penstock.client.sharing import SkipWarning
from penstock.core.element import Element
from penstock.core.errors import ForkedLoaderError, JobFailedError, WaitTimeoutError
from penstock.stream.checkpoint import ConsumerState, Weights
from penstock.stream.consuming import Ask, Tell
from penstock.stream.position import Lane, Serving
from penstock.stream.reading import StreamReader
from penstock.wire.failures import rebuild_failure
from penstock.wire.frames import OpenStream, Output, RemoteFailure, StreamLeft
from penstock.wire.jobs import JobView

PUMP_EVERY_S = 0.001  # while something is ready, sockets are looked at no more often than this
POLL_S = 0.5
SAY_EVERY_S = 30.0
SHOWN_PARTS = 12  # of what is waited for

_log = logging.getLogger("penstock")


class EpochReader:
    """One consumer's iterator over one epoch."""

    def __init__(
        self, session: EpochSession, *, memory_bytes: int, timeout_s: float | None, owner: object = None
    ) -> None:
        """`owner` is kept: with it the connection to the service lives, even if nobody holds the loader any more."""
        self.session = session
        self.epoch = session.epoch
        self.finished = False
        self._owner = owner
        self._timeout_s = timeout_s
        self._metrics = session.board.metrics
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._error: BaseException | None = None
        self._elements: Sequence[Element] = ()
        """What is being served; the first `_at` of them were given to the trainer."""
        self._at = self._size = 0
        self._pumped_at = 0.0
        self._left_at: float | None = None
        self._known_dropped = 0
        self._skips = None if not session.delivery.shared else SkipWarning(session.job, session.trainer)
        self._consumer = session.consumer_of(memory_bytes, now=monotonic())
        self._connections = Connections(session, self._consumer)
        self._finalizer = weakref.finalize(self, self._connections.close)
        session.board.when_refused(weakref.WeakMethod(self._stop_giving))
        self._tell_dropped(session.view)
        self._carry_out()

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
            self._metrics.ran(began - self._left_at)
        try:
            with self._lock:
                self._serve()
        finally:
            self._left_at = perf_counter()
            self._metrics.waited(self._left_at - began)
        if self._at >= self._size:
            raise StopIteration if self._error is None else self._error
        self._at += 1
        return self._elements[self._at - 1]

    def take(self, want: int) -> tuple[Sequence[Element], Callable[[int], ConsumerState]]:
        """Return up to `want` elements (none: the end) and a way to ask for the state after the first k of them."""
        with self._lock:
            serving = self._consumer.serving
            if self._at >= self._size:
                serving = self._serve()
            if self._at >= self._size and self._error is not None:
                raise self._error
            self._settle()
            start, stop = self._at, min(self._size, self._at + want)
            elements = self._elements[start:stop]
            self._at = stop
            place, session = self._consumer.place(), self.session
            samplers = session.sampler_places(place.step, stop - start)  # now: it forgets what was received

        def after(k: int) -> ConsumerState:
            there = place if serving is None else place.after(serving, start + k, before=start)
            return session.state(there.progress(), sampler=samplers[k] if samplers else None)

        return elements, after

    def state(self) -> ConsumerState:
        """Return what the trainer has received so far."""
        with self._lock:
            self._settle()
            return self.session.state(self._consumer.place().progress())

    def set_weights(self, weights: Weights) -> None:
        """Mix by others from the next element on; what has arrived beyond it is given up."""
        with self._lock:
            self._settle()
            reading = not (self.finished or self._closed or self._error is not None)
            self._consumer.set_weights(weights, reading=reading, now=monotonic())
            if reading:
                self._elements, self._at, self._size = (), 0, 0
                self._carry_out()

    @property
    def dropped(self) -> tuple[str, ...]:
        return self._consumer.view.dropped

    @property
    def reconnects(self) -> int:
        return self._consumer.reconnects

    def streams(self) -> list[StreamReader]:
        """Return the streams as they stand now, what was given to the trainer counted in."""
        with self._lock:
            self._settle()
            return list(self._consumer.readers.values())

    def close(self) -> None:
        """Let go of everything, at once. May be called from another thread while one waits in `next()`."""
        if os.getpid() != self._pid:
            return
        self._closed = True
        self.session.board.bell.ring()
        if self._lock.acquire(timeout=2.0):
            try:
                self._settle()
                self._elements, self._at, self._size = (), 0, 0
                self._connections.settled(finished=self.finished)
                self._finalizer()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        """Count as received what was given to the trainer."""
        consumer = self._consumer
        before, shared = consumer.step, consumer.made_for_others
        consumer.settle(self._at)
        self._metrics.took(consumer.step - before, shared=consumer.made_for_others - shared)

    # Serving

    def _serve(self) -> Serving | None:
        """Make `_elements[_at:_size]` what comes next; leave it empty at the end."""
        if os.getpid() != self._pid:
            raise ForkedLoaderError
        self._settle()
        self._elements, self._at, self._size = (), 0, 0
        wait = _Wait(self)
        while not self._closed and not self.finished and self._error is None:
            now = monotonic()
            refusal = self.session.board.refusal
            if refusal is not None:
                self._fail(refusal)
                break
            if now - self._pumped_at >= PUMP_EVERY_S:
                self._pump(now)
            serving = self._consumer.next(now)
            if serving is not None:
                self._elements, self._size = self._decoded(serving), serving.size
                self._carry_out()
                self._check_skipped()
                return serving
            self._carry_out()
            if self._consumer.at_end:
                self._finish()
                return None
            self._check_job()
            if self._error is None:
                self._feed()
                wait.once()
        return None

    def _decoded(self, serving: Serving) -> Sequence[Element]:
        if len(serving.lanes) == 1:
            return self._rounds_of(serving.lanes[0], serving.rounds)
        lists = [self._rounds_of(lane, serving.rounds) for lane in serving.lanes]
        return list(chain.from_iterable(zip(*lists)))

    def _rounds_of(self, lane: Lane, rounds: int) -> Sequence[Element]:
        payload: Payload = lane.frame.payload
        header = lane.frame.header
        if not payload.decoded:
            self._metrics.received(header.nbytes)
        elements = payload.elements(header)
        if lane.start == 0 and rounds == header.count:
            return elements
        return elements[lane.start : lane.start + rounds]

    def _finish(self) -> None:
        self.finished = True
        self._connections.settled(finished=True)
        self._check_skipped(ended=True)
        self._finalizer()

    def _check_skipped(self, *, ended: bool = False) -> None:
        if self._skips is not None and self._consumer.skipped:
            self._metrics.missed(self._consumer.skipped)
            self._skips.check(self._consumer.step, self._consumer.skipped, ended=ended)

    def _check_job(self) -> None:
        failure = self._consumer.failure
        if failure is not None:
            self._fail(rebuild_failure(failure) if isinstance(failure, RemoteFailure) else failure)
        elif self._consumer.view.failure:
            self._fail(JobFailedError(self.session.job, self._consumer.view.failure))

    def _stop_giving(self) -> None:
        """In the control thread: of what has arrived nothing more is given, and `next()` finds the refusal.

        While the trainer's thread is in `next()` it looks for one itself.
        """
        if self._lock.acquire(blocking=False):
            self._size = 0
            self._lock.release()

    def _fail(self, error: BaseException) -> None:
        """An error is the end of this reader; its state stays that of the last element given."""
        self._error = error  # raised by whoever asked for an element, so that few of our frames are in its way
        self._finalizer()

    # What comes in, and what goes out

    def _pump(self, now: float) -> None:
        """Take in what has arrived on all sides, without waiting."""
        self._pumped_at = now
        consumer, connections = self._consumer, self._connections
        forgotten = self.session.board.take_forgotten()
        if forgotten:
            self._reopen(forgotten)
        news = self.session.board.take_news()
        if news is not None:
            self._tell_dropped(news.view)
            consumer.follow(news.view, now, changed=news.streams)
        for connection in connections.all():
            connection.flush()
            self._receive(connection, now)
            reason = connection.lost(now)
            if reason is not None:
                self._receive(connection, now)  # what is still in the socket's queue came before the loss, and counts
                connections.drop(connection)
                consumer.lose(connection.runner, reason, now)
        consumer.look_after(now)
        self._carry_out()
        self._feed()
        connections.return_memory(idle=not consumer.has_ready)

    def _receive(self, connection: RunnerConnection, now: float) -> None:
        for message, payload in connection.receive():
            if isinstance(message, Output):
                for line in message.text.splitlines():
                    print(f"[worker {message.worker}] {line}", file=sys.stderr)
            elif not isinstance(message, StreamLeft):
                self._consumer.receive(message, payload, connection.runner, now)

    def _carry_out(self) -> None:
        for instruction in self._consumer.instructions():
            match instruction:
                case Tell():
                    self._connections.tell(instruction)
                    if self.session.feeder is not None and isinstance(instruction.message, OpenStream):
                        self._connections.feed(
                            self.session.feeder.opened(self._consumer.readers[instruction.message.stream])
                        )
                case Ask():
                    self.session.post(instruction.message)

    def _feed(self) -> None:
        """Draw and send what streams are to read next, where that is this consumer's affair."""
        if self.session.feeder is not None:
            readers = self._consumer.readers.values()
            for units in self.session.feeder.refill(self._consumer.step, readers):
                self._connections.feed(units)

    # The dispatcher

    def _tell_dropped(self, view: JobView) -> None:
        for element in view.dropped[self._known_dropped :]:
            _log.warning("job %r leaves out %s: processes died while they worked on it", view.job, element)
        self._known_dropped = len(view.dropped)

    def _reopen(self, why: str) -> None:
        """The dispatcher lost its memory of this reader: open again, from where the trainer stands if need be."""
        session, consumer = self.session, self._consumer
        _log.warning("opening epoch %d of job %r again: %s", self.epoch, session.job, why)
        if session.rejoin():
            consumer.follow(session.view, monotonic())
        elif session.delivery.shared:
            self._give_up_epoch()
        else:
            session.resume(session.state(consumer.place().progress()))
            self._connections.close_all()
            consumer.restart(session.view, monotonic())

    def _give_up_epoch(self) -> None:
        """The trainers that share the job are epochs ahead, so the window over this one is gone."""
        session = self.session
        if not session.delivery.skips:
            self._fail(JobFailedError(session.job, f"the service lost attempt {self._consumer.view.attempt}"))
            return
        _log.warning("the others are through with epoch %d of job %r: its rest is skipped", self.epoch, session.job)
        self._finish()

    # Waiting

    def poll(self, timeout_s: float) -> None:
        if self._connections.poll(timeout_s):
            self.session.board.bell.quiet()
        self._pumped_at = 0.0

    def waiting_for(self) -> str:
        parts = self._consumer.waiting_for(monotonic())
        if not self.session.connected:
            parts.append(f"the dispatcher at {self.session.link.address} cannot be reached")
        return "; ".join(parts[:SHOWN_PARTS])


class _Wait:
    """One wait of `next()`: it looks at the clock, speaks now and then, and gives up at the loader's timeout."""

    def __init__(self, reader: EpochReader) -> None:
        self._reader = reader
        self._began = monotonic()
        self._say_at = self._began + SAY_EVERY_S

    def once(self) -> None:
        reader, now = self._reader, monotonic()
        session = reader.session
        what = f"a batch of job {session.job!r}, epoch {reader.epoch}, consumer {session.consumer}"
        timeout_s = reader._timeout_s
        if timeout_s is not None and now - self._began >= timeout_s:
            raise WaitTimeoutError(what, reader.waiting_for(), now - self._began)
        if now >= self._say_at:
            self._say_at = now + SAY_EVERY_S
            _log.warning("still waiting for %s (%.0f s): %s", what, now - self._began, reader.waiting_for())
        left_s = POLL_S if timeout_s is None else min(POLL_S, timeout_s - (now - self._began))
        reader.poll(max(0.001, left_s))
