"""The one stage that uses threads: work on chunks side by side, results in order.

Any thread that has time takes the next chunk from the input (one at a time, under `_feed`), works on it, and puts the
result into the slot it reserved. The reader takes slots from the front. With 0 threads the reader does all of it
itself; a prefetch is the same without work. Rejected: a feeder thread of its own (one more hand-off per chunk) and
futures (15 µs each).

Locks: `_feed` is held while pulling from the input, `_lock` for a few instructions; never `_feed` inside `_lock`.

The reader waits for `_reader`, holding nothing (`sources.interruptible_waits` says why). A signal handler or a
finalizer may call `stop` in the middle of what this very thread does under `_lock`, which therefore can be entered
again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from time import perf_counter, sleep
from typing import Any

import msgspec
from msgspec.structs import replace

from penstock.core.element import element_bytes
from penstock.runtime.contract import Chunk, Fixed, Stage, State
from penstock.runtime.flight import Flight
from penstock.runtime.pool import ThreadPool
from penstock.runtime.stats import StageMeter
from penstock.runtime.tuning import Call, PrefetchTuner, Stopwatch, Tuner
from penstock.sources.interruptible_waits import Wakeup

WAIT_S = 5.0  # how long a wait lasts before it looks again; not a deadline: work may take as long as it takes
SLOTS_PER_THREAD = 8
UNDER_WAY_SHARE = 0.25  # of a stage's memory, for what its threads are making
HAND_OVER_S = 5e-5


class Outcome(msgspec.Struct):
    """What became of a chunk: the results so far and, if a user function failed, its error."""

    chunk: Chunk
    error: BaseException | None = None


class _Slot(msgspec.Struct):
    outcome: Outcome | None = None
    nbytes: int = 0


class Buffering(msgspec.Struct, kw_only=True):
    """How far a stage may run ahead of its reader."""

    max_bytes: int
    max_elements: int | None = None
    cores: int = 1
    """So many chunks may be worked on at once, however large they are."""


class Ordered(Stage):
    """Subclasses define `_work`, and may define `_gather` and `_admit`."""

    def __init__(
        self,
        meter: StageMeter,
        upstream: Stage,
        pool: ThreadPool | None,
        tuner: Tuner,
        room: Buffering,
        flight: Flight | None = None,
    ) -> None:
        super().__init__(meter, upstream)
        self.upstream = upstream
        self._pool = pool
        self._tuner = tuner
        self._room = room
        self._flight = flight
        self._feed = threading.Lock()
        self._lock = threading.RLock()
        self._reader = Wakeup()
        self._generation = 0
        self._closed = False
        self._may_run_ahead = True
        self._rest: Chunk | None = None
        self._chunk_bytes = 0  # made of a chunk, lately
        self._bytes_each = 0.0  # and of an element of it
        self._reset()

    def _reset(self) -> None:
        self._slots: deque[_Slot] = deque()
        self._buffered_bytes = 0
        self._buffered_elements = 0
        self._active = 0
        self._end: Chunk | None = None
        self._error: BaseException | None = None
        self.meter.buffers(0, 0)

    # What subclasses say

    def _gather(self, want: int) -> Chunk:
        """Take the next input; called by one thread at a time, in order."""
        return self.upstream.pull(want) if self._flight is None else self._flight.take(self.upstream, want)

    def _admit(self, chunk: Chunk) -> Any:
        """Turn an input into a task; called by one thread at a time, in order."""
        return chunk

    def _work(self, task: Any) -> Outcome:
        """Do the work; called by several threads at once."""
        return Outcome(task)

    def _bytes_of(self, made: Sequence[Any]) -> int:
        """Return about how much memory results hold: one is weighed for all."""
        return element_bytes(made[0]) * len(made) if len(made) else 0

    def _open_upstream(self, pass_: int, state: State) -> None:
        self.upstream.open(pass_, state)

    # The contract

    def open(self, pass_: int, state: State) -> None:
        with self._lock:
            self._generation += 1
        with self._feed:  # whoever is still pulling for the generation before ends first
            with self._lock:
                self._reset()
                self._rest = None
                if self._flight is not None:
                    self._flight.reset()
            self._open_upstream(pass_, state)

    def _pull(self, want: int) -> Chunk:
        tuner = self._tuner
        if isinstance(tuner, PrefetchTuner):
            tuner.reader_came()
        chunk = self._rest or self._next_chunk(want)
        head, self._rest = chunk.head_and_rest(want)
        if isinstance(tuner, PrefetchTuner):
            tuner.reader_left()
        return head

    def run_ahead(self, allowed: bool) -> None:
        with self._lock:
            self._may_run_ahead = allowed
        super().run_ahead(allowed)

    def stop(self) -> None:
        with self._lock:
            self._closed = True
            self._generation += 1
            self._slots = deque()  # the old one may be in use further down this thread's own stack
            self.meter.buffers(0, 0)
            self._rest = None
            self._reader.wake()
        super().stop()

    def close(self) -> None:
        if self._feed.locked():
            return  # whoever is pulling right now closes the input itself when it comes back
        with self._feed:  # nobody keeps it for long any more: `stop` came before
            self.upstream.close()

    # The reader's side

    def _next_chunk(self, want: int) -> Chunk:
        while True:
            with self._lock:
                slots = self._slots
                if slots and slots[0].outcome is not None:
                    outcome = self._received(slots.popleft())
                    if outcome.error is not None:
                        self._error = outcome.error
                        self._slots.clear()
                    if outcome.chunk.elements:
                        return outcome.chunk
                    continue
                if self._error is not None:
                    raise self._error
                if self._end is not None and not self._slots:
                    return self._end
                if self._closed:
                    return Chunk((), Fixed(None))
                self._schedule()
                under_way = bool(self._active or self._slots)
                generation = self._generation
            if under_way:
                waited = perf_counter()
                self._reader.wait(WAIT_S)
                self.meter.add_wait(perf_counter() - waited)
            else:
                self._step(generation, 0, want)

    def _received(self, slot: _Slot) -> Outcome:
        outcome = slot.outcome
        assert outcome is not None
        self._buffered_bytes -= slot.nbytes
        self._buffered_elements -= self._count_of(outcome.chunk.elements)
        self.meter.buffers(self._buffered_elements, self._buffered_bytes)
        self._schedule()
        return outcome

    def _schedule(self) -> None:
        if self._pool is None or self._end is not None or self._error is not None or self._closed:
            return
        threads, generation = self._tuner.threads, self._generation
        while self._active < threads and self._has_room():
            self._active += 1
            self._pool.submit(lambda: self._run(generation, threads))

    def _has_room(self) -> bool:
        if not self._may_run_ahead:
            return False
        if not self._slots and not self._active:
            return True  # one at least, however large it is
        room = self._room
        under_way = self._active * self._chunk_bytes if self._active >= room.cores else 0
        if self._buffered_bytes + under_way >= room.max_bytes:
            return False
        if room.max_elements is not None and self._buffered_elements + len(self._slots) > room.max_elements:
            return False
        return len(self._slots) < self._slot_limit()

    def _slot_limit(self) -> int:
        return SLOTS_PER_THREAD * max(self._tuner.threads, 1)

    def _chunk_limit(self) -> int:
        """Return how many elements a chunk may have: what the threads work on takes room as well."""
        if not self._bytes_each:
            return self._tuner.chunk_size
        return max(1, int(UNDER_WAY_SHARE * self._room.max_bytes / (max(self._tuner.threads, 1) * self._bytes_each)))

    def _to_take(self, want: int | None) -> int:
        """Return how many elements to take: for a thread, or for a reader that asks for `want`."""
        size = min(self._tuner.chunk_size, self._chunk_limit())
        return size if want is None else min(want, size)

    # The working side

    def _run(self, generation: int, threads: int) -> None:
        threading.current_thread().name = f"penstock {self.meter.label}"  # what a stack dump or a warning shows
        while True:
            more = self._step(generation, threads, None)
            with self._lock:
                if generation != self._generation:
                    return  # whoever opened anew counts its own
                if not more or self._active > self._tuner.threads or not self._has_room():
                    self._active -= 1
                    self._reader.wake()
                    return

    def _step(self, generation: int, threads: int, want: int | None) -> bool:
        """Take, work, deliver. False: there is nothing more to take."""
        watch = None if self.WORKS else Stopwatch()
        try:
            with self._feed:
                taken = self._take(generation, threads, want)
        finally:
            if self._closed:
                self.close()
        if taken is None:
            return False
        slot, task, elements = taken
        if not self.WORKS:
            outcome = Outcome(task)
        else:
            watch = Stopwatch()
            try:
                outcome = self._work(task)
            except BaseException as error:
                if threads == 0:
                    self._slots.clear()
                    raise
                outcome = Outcome(Chunk((), Fixed(None)), error)
        assert watch is not None
        call = watch.stop()
        if self._tuner.probing:
            call = _judged_by_gil(call, alone=threads == 0)
        made = outcome.chunk.elements
        nbytes = self._bytes_of(made)
        with self._lock:
            if generation == self._generation:
                self._measure(elements, call, threads)
                slot.outcome, slot.nbytes = outcome, nbytes
                self._chunk_bytes, self._bytes_each = nbytes, nbytes / elements
                self._buffered_bytes += nbytes
                count = self._count_of(made)
                self._buffered_elements += count
                if count:
                    self.meter.weighed(nbytes / count)
                self.meter.buffers(self._buffered_elements, self._buffered_bytes)
                if self._slots and self._slots[0] is slot:  # the reader waits for no other
                    self._reader.wake()
        return outcome.error is None

    def _take(self, generation: int, threads: int, want: int | None) -> tuple[_Slot, Any, int] | None:
        """Take the next input and reserve its slot: slot, task, how many elements. Called with `_feed` held."""
        if generation != self._generation or self._end is not None or self._error is not None:
            return None
        if threads and not self._may_run_ahead:
            return None
        try:
            chunk = self._gather(self._to_take(want))
            task = self._admit(chunk) if chunk.elements else None
        except BaseException as error:
            if threads == 0:
                raise
            self._deliver_last(generation, Outcome(Chunk((), Fixed(None)), error))
            return None
        slot = _Slot()
        with self._lock:
            if generation != self._generation:
                return None
            if task is None:
                self._end = chunk
                self._reader.wake()
                return None
            self._slots.append(slot)
        return slot, task, len(chunk.elements)

    WORKS = True
    """False for a plain prefetch, whose work is pulling."""

    def _measure(self, elements: int, call: Call, threads: int) -> None:
        if self.WORKS:
            self.meter.add_work(call.elapsed_s, call.cpu_s, inline=threads == 0)
        self._tuner.worked(elements, call, threads)

    def _deliver_last(self, generation: int, outcome: Outcome) -> None:
        with self._lock:
            if generation == self._generation:
                self._slots.append(_Slot(outcome))
                self._end = Chunk((), Fixed(None))
                self._reader.wake()


def _judged_by_gil(call: Call, *, alone: bool) -> Call:
    """Give the GIL up for a moment, and return the call as judged by how long it takes to get it back.

    Beside its like: calls shorter than the interpreter's switch interval run undisturbed; that they take turns shows
    only between them. Alone: where other threads of the process hold the GIL, each sleep may have been for that, and a
    function that computes must not be taken for one that waits for something outside.
    """
    if alone and not call.sleeps:
        return call
    began = perf_counter()
    sleep(HAND_OVER_S)
    waited_s = max(0.0, perf_counter() - began - 4 * HAND_OVER_S)
    elapsed_s = max(call.cpu_s, call.elapsed_s - call.sleeps * waited_s) if alone else call.elapsed_s + waited_s
    return replace(call, elapsed_s=elapsed_s)


class Prefetching(Ordered):
    """Makes elements ahead on a thread."""

    WORKS = False

    def _to_take(self, want: int | None) -> int:
        """A reader that makes them itself knows best: smaller chunks would only be more of them."""
        return super()._to_take(want) if want is None else min(want, self._chunk_limit())
