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
from typing import TYPE_CHECKING, Self

from penstock.client.connection import Connections, RunnerConnection
from penstock.client.link import SAY_EVERY_S, News, Patience
from penstock.client.session import EpochSession
from penstock.core.element import Element
from penstock.core.errors import ForkedLoaderError, JobFailedError, WorkersLostError
from penstock.core.plain_text import plain_text
from penstock.runtime.stats import ReaderClock
from penstock.stream.checkpoint import ConsumerState, Weights
from penstock.stream.consuming import Consumer, TellRunner
from penstock.stream.position import Serving
from penstock.stream.reading import StreamReader
from penstock.wire.failures import rebuild_failure
from penstock.wire.frames import AskRows, OpenStream, Output, RemoteFailure, StreamLeft, Units
from penstock.wire.jobs import JobView

if TYPE_CHECKING:
    from penstock.client.ahead import NextEpoch

PUMP_EVERY_S = 0.001  # while something is ready, sockets are looked at no more often than this
POLL_S = 0.5
NEAR_END_S = 0.02  # so often is the next epoch looked after while this one's last streams are waited for
SHOWN_PARTS = 12  # of what is waited for
SKIPPED_SHARE = 0.01
FEW_ELEMENTS = 1_000  # before so many, a share says little
PIECE = 256  # elements are made so many at once: of small ones a frame has a thousand, and one `next()` waited for all

_log = logging.getLogger("penstock")


class EpochReader:
    """One consumer's iterator over one epoch."""

    def __init__(
        self,
        session: EpochSession,
        *,
        memory_bytes: int,
        timeout_s: float | None,
        owner: object = None,
        successor: NextEpoch | None = None,
    ) -> None:
        """`owner` is kept: with it the connection to the service lives, even if nobody holds the loader any more.

        `successor` looks after the epoch that follows.
        """
        self.session = session
        self._successor = successor
        self.epoch = session.epoch
        self.finished = False
        self._owner = owner
        self._timeout_s = timeout_s
        self._board = session.board
        self._lock = threading.Lock()
        self._closed = False
        self._error: BaseException | None = None
        self._serving: Serving | None = None
        self._elements: Sequence[Element] = ()
        """A piece of what is being served; the first `_at` of them were given to the trainer."""
        self._before = self._at = self._size = 0
        """`_before`: how many elements of what is being served were given before that piece."""
        self._pumped_at = 0.0
        self._said_skips: bool | None = False if session.delivery.shared else None
        """Whether it was said that much is skipped; None: trainers do not share the job, so that nothing is."""
        self.consumer = session.consumer(memory_bytes, now=monotonic())
        self._connections = session.connections()
        self._finalizer = weakref.finalize(self, _let_go, session, self.consumer, self._connections)
        session.board.when_refused(weakref.WeakMethod(self._stop_giving))
        session.read_by(self.consumer, weakref.WeakMethod(self.given))
        _tell_dropped(session.opened.view)
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
        clock = self.session.clock
        clock.enter(perf_counter())
        try:
            with self._lock:
                self._make(PIECE)
        finally:
            clock.leave(perf_counter(), ended=not self._size)
        if self._at >= self._size:
            raise StopIteration if self._error is None else self._error
        self._at += 1
        return self._elements[self._at - 1]

    def take(self, want: int) -> tuple[Sequence[Element], Callable[[int], ConsumerState]]:
        """Return up to `want` elements (none: the end) and a way to ask for the state after the first k of them."""
        with self._lock:
            if self._at >= self._size:
                self._make(want)
            if self._at >= self._size and self._error is not None:
                raise self._error
            self._settle()
            elements = self._elements[self._at : self._at + want]
            start, self._at = self._before + self._at, self._at + len(elements)
            place, session = self.consumer.place(), self.session
            serving = self.consumer.serving if len(elements) else None
            # Now: the feeder forgets what was received.
            samplers = [] if session.feeder is None else session.feeder.places(place.step, len(elements))

        def after(k: int) -> ConsumerState:
            there = place if serving is None else place.after(serving, start + k, before=start)
            return session.state(there.progress(), sampler=samplers[k] if samplers else None)

        return elements, after

    def state(self) -> ConsumerState:
        """Return what the trainer has received so far."""
        return self.note()()

    def note(self) -> Callable[[], ConsumerState]:
        """Note down at little cost what the trainer has received: the function that is returned makes the state."""
        with self._lock:
            self._settle()
            place, session = self.consumer.place(), self.session
            # Now: the feeder forgets what was received, and a new attempt has another name.
            sampler = None if session.feeder is None else session.feeder.place(place.step)
            attempt = session.attempt
        return lambda: session.state(place.progress(), sampler=sampler, attempt=attempt)

    def set_weights(self, weights: Weights) -> None:
        """Mix by others from the next element on; what has arrived beyond it is given up."""
        with self._lock:
            self._settle()
            reading = not (self.finished or self._closed or self._error is not None)
            self.consumer.set_weights(weights, reading=reading, now=monotonic())
            if reading:
                self._drop_elements()
                self._carry_out()

    def streams(self) -> list[StreamReader]:
        """Return the streams as they stand now: what was given to the trainer and what has arrived is counted in."""
        # A thread that is in `next()` has settled what was before, and takes in what comes: it is not waited for.
        if os.getpid() == self.session.link.pid and self._lock.acquire(blocking=False):
            try:
                self._settle()
                for connection in self._connections.all():
                    self._receive(connection, monotonic())
            finally:
                self._lock.release()
        return list(self.consumer.readers.values())

    def given(self) -> int:
        """Return how many elements the trainer has that are not settled, as far as can be seen from any thread."""
        return max(0, self._before + self._at - self.consumer.settled)

    def close(self, why: Exception | None = None) -> None:
        """Let go of everything, at once. May be called from another thread while one waits in `next()`.

        `why` is raised to whoever reads on before the end; None: it is the end.
        """
        if os.getpid() != self.session.link.pid:
            return
        self._error = self._error or (None if self.finished else why)
        self._closed = True
        self._board.bell.ring()
        if self._lock.acquire(timeout=2.0):
            try:
                self._settle()
                self._drop_elements()
                self.session.clock.leave(perf_counter(), ended=True)
                self._end(settled=True)
            finally:
                self._lock.release()

    def _settle(self) -> None:
        """Count as received what was given to the trainer."""
        self.consumer.settle(self._before + self._at)

    def _drop_elements(self) -> None:
        self._serving, self._elements, self._at, self._size, self._before = None, (), 0, 0, 0

    # Ahead of being read

    def get_ready(self, now: float) -> bool:
        """Open its streams and take in what comes, while the epoch before is read; False: it cannot be read."""
        with self._lock:
            if self._board.unread:
                news = self._board.take()
                if news.refusal is not None or news.forgotten:
                    return False
                self.consumer.follow(news.view, now, changed=news.streams)
            self._pump(now)
            return not self._closed

    def arrive(self, clock: ReaderClock | None, owner: object, successor: NextEpoch) -> None:
        """The trainer has come to this epoch, which was opened ahead."""
        self._owner, self._successor = owner, successor
        self.consumer.arrive()
        self.session.arrive(clock)

    # Serving

    def _make(self, want: int) -> None:
        """Make `_elements` the next piece, of about so many; leave it empty at the end."""
        if self._serving is None or self._before + self._size == self._serving.size:
            self._serve()
        if self._serving is not None:
            self._elements = _elements_of(self._serving, self._before + self._size, want)
            self._at, self._before, self._size = 0, self._before + self._size, len(self._elements)

    def _serve(self) -> None:
        """Make `_serving` what comes next; leave it empty at the end."""
        if os.getpid() != self.session.link.pid:
            raise ForkedLoaderError
        self._settle()
        self._drop_elements()
        patience: Patience | None = None
        while not self._closed and not self.finished and self._error is None:
            now = monotonic()
            if self._board.unread:
                self._heed(self._board.take(), now)
                continue
            if now - self._pumped_at >= PUMP_EVERY_S:
                self._pump(now)
            self._serving = self.consumer.next(now)
            self._carry_out()
            if self._serving is not None:
                self._check_skipped()
                return
            if self.consumer.at_end:
                self._finish()
                return
            self._check_job()
            if self._error is None:
                self._feed()
                patience = patience or self._patience()
                self._wait(patience)

    def _finish(self) -> None:
        self.finished = True
        if self._successor is not None:
            self._successor.finished(self.epoch)
        self._check_skipped(ended=True)
        self._end(settled=True)

    def _check_skipped(self, *, ended: bool = False) -> None:
        """Say once what this trainer skipped, where that is more than a hundredth of its epoch."""
        if self._said_skips is None or not (skipped := self.consumer.skipped):
            return
        seen = self.consumer.step + skipped
        if self._said_skips or skipped <= SKIPPED_SHARE * (seen if ended else max(seen, FEW_ELEMENTS)):
            return
        self._said_skips = True
        _log.warning(
            "trainer %r skipped %d of %d elements of job %r (%.1f %%): others read faster than it, and the window has "
            "moved on. A larger window_bytes= skips less, and ps.Share('wait') nothing",
            self.session.seat.trainer,
            skipped,
            seen,
            self.session.seat.job,
            100 * skipped / seen,
        )

    def _check_job(self) -> None:
        failure = self.consumer.failure
        if failure is not None:
            self._fail(rebuild_failure(failure) if isinstance(failure, RemoteFailure) else failure)
        elif self.consumer.view.failure:
            self._fail(JobFailedError(self.session.seat.job, self.consumer.view.failure))
        elif (stream := self.session.stream_in_vain(self.consumer)) is not None:
            self._fail(WorkersLostError(stream.number, stream.failures))

    def _stop_giving(self) -> None:
        """In the control thread: of what has arrived nothing more is given, and `next()` finds the refusal.

        While the trainer's thread is in `next()` it looks for one itself.
        """
        if self._lock.acquire(blocking=False):
            self._serving, self._size = None, 0
            self._lock.release()

    def _fail(self, error: BaseException) -> None:
        """An error is the end of this reader; its state stays that of the last element given."""
        self._error = error  # raised by whoever asked for an element, so that few of our frames are in its way
        if self._successor is not None:
            self._successor.drop()
        self._end(settled=False)

    def _end(self, *, settled: bool) -> None:
        if self._finalizer.detach() is not None:
            _let_go(self.session, self.consumer, self._connections, settled=settled, finished=self.finished)

    # What comes in, and what goes out

    def _pump(self, now: float) -> None:
        """Take in what has arrived on all sides, without waiting."""
        self._pumped_at = now
        consumer, connections = self.consumer, self._connections
        for connection in connections.all():
            connection.outbox.flush()
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
        if consumer.ending and self._successor is not None:
            self._successor.prepare(now)

    def _receive(self, connection: RunnerConnection, now: float) -> None:
        for message, payload in connection.receive():
            if isinstance(message, Output):
                for line in plain_text(message.text).splitlines():
                    print(f"[worker {plain_text(message.worker)}] {line}", file=sys.stderr)
            elif not isinstance(message, (StreamLeft, AskRows)):
                self.consumer.receive(message, payload, connection.runner, now)

    def _carry_out(self) -> None:
        feeder = self.session.feeder
        for instruction in self.consumer.instructions():
            match instruction:
                case TellRunner():
                    self._connections.tell(instruction)
                    if feeder is not None and isinstance(instruction.message, OpenStream):
                        self._send_units(feeder.opened(self.consumer.readers[instruction.message.stream]))
                case request:
                    self.session.post(request)

    def _feed(self) -> None:
        """Draw and send what streams are to read next, where that is this consumer's affair."""
        if self.session.feeder is not None:
            for units in self.session.feeder.refill(self.consumer.step, self.consumer.readers.values()):
                self._send_units(units)

    def _send_units(self, units: Units) -> None:
        runner = self.consumer.readers[units.stream].runner
        if runner is not None:
            self._connections.send(runner, units)

    # The dispatcher

    def _heed(self, news: News, now: float) -> None:
        if news.refusal is not None:
            self._fail(news.refusal)
        elif news.forgotten:
            self._reopen(news.forgotten)
        else:
            _tell_dropped(news.view, known=len(self.consumer.view.dropped))
            self.consumer.follow(news.view, now, changed=news.streams)

    def _reopen(self, why: str) -> None:
        """The dispatcher lost its memory of this reader: open again, from where the trainer stands if need be."""
        session, consumer = self.session, self.consumer
        _log.warning("opening epoch %d of job %r again: %s", self.epoch, session.seat.job, why)
        if session.rejoin():
            consumer.follow(session.opened.view, monotonic())
        elif not session.delivery.shared:
            session.resume(session.state(consumer.place().progress()))
            self._connections.close()
            consumer.restart(session.opened.view, monotonic())
        elif session.delivery.skips:
            # The trainers that share the job are epochs ahead, so the window over this one is gone.
            job = session.seat.job
            _log.warning("the others are through with epoch %d of job %r: its rest is skipped", self.epoch, job)
            self._finish()
        else:
            self._fail(JobFailedError(session.seat.job, f"the service lost attempt {consumer.view.attempt}"))

    # Waiting

    def _patience(self) -> Patience:
        seat = self.session.seat
        return Patience(
            self._timeout_s,
            f"a batch of job {seat.job!r}, epoch {self.epoch}, consumer {seat.consumer}",
            first_word_s=SAY_EVERY_S,
        )

    def _wait(self, patience: Patience) -> None:
        if patience.is_due:
            patience.say(self._waiting_for())
        looks_ahead = self.consumer.ending and self._successor is not None
        wait_s = patience.at_most(NEAR_END_S if looks_ahead else POLL_S)
        if self._connections.poll(self._board.bell.descriptor, max(0.001, wait_s)):
            self._board.bell.quiet()
        self._pumped_at = 0.0

    def _waiting_for(self) -> str:
        link, parts = self.session.link, self.consumer.waiting_for(monotonic())
        if not link.control.connected:
            parts.append(f"the dispatcher at {link.address} cannot be reached")
        return "; ".join(parts[:SHOWN_PARTS])


def _elements_of(serving: Serving, before: int, want: int) -> Sequence[Element]:
    """Return some `want` elements after the first `before` of them, in whole rounds, as `before` is."""
    lanes, first = serving.lanes, before // len(serving.lanes)
    rounds = min(serving.rounds - first, -(-want // len(lanes)))
    lists: list[list[Element]] = [
        lane.frame.payload.elements(lane.frame.header, lane.start + first, lane.start + first + rounds)
        for lane in lanes
    ]
    return lists[0] if len(lists) == 1 else list(chain.from_iterable(zip(*lists)))


def _tell_dropped(view: JobView, known: int = 0) -> None:
    for element in view.dropped[known:]:
        _log.warning("job %r leaves out %s: processes died while they worked on it", view.job, element)


def _let_go(
    session: EpochSession,
    consumer: Consumer,
    connections: Connections,
    *,
    settled: bool = False,
    finished: bool = False,
) -> None:
    """Close all of a reader's, which may be gone. `settled`: what was taken is counted. `finished`: to its end."""
    if os.getpid() != session.link.pid:
        return  # a forked child owns none of it
    if session.delivery.shared:
        connections.leave(consumer.readers.values(), settled=settled)
    consumer.forget()
    connections.close()
    session.close(finished=finished)
