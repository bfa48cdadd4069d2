"""Measures a stage while it runs and asks `policies.parallelism` what to do about it."""

from __future__ import annotations

from resource import RUSAGE_THREAD, getrusage
from time import perf_counter, thread_time
from typing import Protocol

import msgspec

from penstock.policies.parallelism import (
    CallCost,
    first_threads,
    judge_threads,
    next_chunk_size,
    use_prefetch_thread,
)
from penstock.runtime.stats import StageMeter

CHUNK_TARGET_S = 2e-3  # a chunk costs some 50 µs by itself, hand-off included: 2 to 3 % of this
CHUNK_LIMIT = 4096
TRIAL_S = 0.02  # busy time after which a thread count is judged
TRIAL_CALLS = 4
RETRY_S = 2.0  # a verdict under load may be wrong: it is tried again, each time after twice as long


class Call(msgspec.Struct, frozen=True):
    """What one piece of work took, and how often the thread went to sleep by itself or lost its core."""

    elapsed_s: float
    cpu_s: float
    sleeps: int
    preemptions: int


class Stopwatch:
    """Measures a piece of work on the present thread."""

    __slots__ = ("_began", "_cpu", "_usage")

    def __init__(self) -> None:
        self._usage = getrusage(RUSAGE_THREAD)
        self._cpu = thread_time()
        self._began = perf_counter()

    def stop(self) -> Call:
        elapsed_s = perf_counter() - self._began
        cpu_s, usage = thread_time() - self._cpu, getrusage(RUSAGE_THREAD)
        sleeps, preemptions = usage.ru_nvcsw - self._usage.ru_nvcsw, usage.ru_nivcsw - self._usage.ru_nivcsw
        return Call(elapsed_s, cpu_s, sleeps, preemptions)


class Tuner(Protocol):
    """Decides threads and chunk size of one stage; called under the stage's lock."""

    threads: int
    chunk_size: int
    probing: bool
    """Whether the stage should also measure how long a thread waits for the GIL."""

    def worked(self, elements: int, call: Call, threads: int) -> None: ...


class ChunkSizer:
    """Follows the cost per element."""

    probing = False

    def __init__(self, limit: int = CHUNK_LIMIT) -> None:
        self.chunk_size = 1
        self._limit = limit
        self._cost: float | None = None
        self._cost_at_half: float | None = None

    def sized(self, elements: int, seconds: float) -> None:
        if elements * 2 < self.chunk_size:
            return  # a rest; it says little about a whole chunk
        cost = seconds / elements
        self._cost = cost if self._cost is None else 0.7 * self._cost + 0.3 * cost
        size = next_chunk_size(
            self.chunk_size, self._cost, cost_at_half_s=self._cost_at_half, target_s=CHUNK_TARGET_S, limit=self._limit
        )
        if size >= 2 * self.chunk_size:
            self._cost_at_half, self._cost = self._cost, None
        elif size < self.chunk_size:
            self._cost_at_half = None
        self.chunk_size = size


class WorkTuner(ChunkSizer):
    """Finds the thread count for a function that nobody knows anything about yet."""

    def __init__(self, meter: StageMeter, cores: int) -> None:
        super().__init__()
        self.threads = 0
        self.probing = True
        self._meter = meter
        self._cores = cores
        self._alone: CallCost | None = None
        self._settled = False
        self._retry_at = 0.0
        self._retry_after_s = RETRY_S
        self._reset()

    def _reset(self) -> None:
        self._calls = self._elements = self._sleeps = self._preemptions = 0
        self._call_s = self._cpu_s = 0.0

    def worked(self, elements: int, call: Call, threads: int) -> None:
        self.sized(elements, call.elapsed_s)
        if self._settled:
            if self._retry_at and perf_counter() > self._retry_at:
                self._settled, self._alone, self.probing = False, None, True
                self._retry_at = 0.0
                self.threads = self._meter.threads = 0
                self._reset()
            return
        if threads != self.threads:
            return  # it began under another setting
        self._calls += 1
        self._elements += elements
        self._call_s += call.elapsed_s
        self._cpu_s += call.cpu_s
        self._sleeps += call.sleeps
        self._preemptions += call.preemptions
        if self._call_s < CHUNK_TARGET_S or (self._calls < 2 and self._call_s < TRIAL_S):
            return
        cost = CallCost(
            threads=max(self.threads, 1),
            call_s=self._call_s / self._elements,
            cpu_s=self._cpu_s / self._elements,
            waits=self._sleeps >= self._calls,
            preempted=self._preemptions * 2 >= self._calls,
        )
        if self.threads == 0:
            self._alone = cost
            decision = first_threads(cost, cores=self._cores)
            self._settled = decision.threads == 0 or decision.holds_gil is not None
        elif self._calls < TRIAL_CALLS or self._call_s < TRIAL_S * self.threads or self._alone is None:
            return
        else:
            decision = judge_threads(self._alone, cost, cores=self._cores)
            self._settled = True
            if decision.holds_gil is not False:
                self._retry_at = perf_counter() + self._retry_after_s
                self._retry_after_s *= 2
        self.threads = decision.threads
        self.probing = not self._settled
        self._meter.threads = decision.threads
        if decision.holds_gil is not None:
            self._meter.holds_gil = decision.holds_gil
        self._reset()


class FixedTuner(ChunkSizer):
    """A thread count given by the user."""

    def __init__(self, meter: StageMeter, threads: int, limit: int = CHUNK_LIMIT) -> None:
        super().__init__(limit)
        self.threads = threads
        meter.threads = threads

    def worked(self, elements: int, call: Call, threads: int) -> None:
        self.sized(elements, call.elapsed_s)


class PrefetchTuner(ChunkSizer):
    """Moves the making of elements to a thread when the reader is busy elsewhere."""

    def __init__(self, meter: StageMeter) -> None:
        super().__init__()
        self.threads = 0
        self._meter = meter
        self._away_s = self._making_s = 0.0
        self._made = 0
        self._left_at: float | None = None

    def reader_came(self) -> None:
        if self._left_at is not None:
            self._away_s += perf_counter() - self._left_at

    def reader_left(self) -> None:
        self._left_at = perf_counter()

    def worked(self, elements: int, call: Call, threads: int) -> None:
        self.sized(elements, call.elapsed_s)
        self._making_s += call.elapsed_s
        self._made += elements
        if self._making_s + self._away_s < TRIAL_S:
            return
        threaded = use_prefetch_thread(
            reader_away_s=self._away_s, making_s=self._making_s, elements=self._made, threaded=self.threads > 0
        )
        self.threads = self._meter.threads = int(threaded)
        self._away_s, self._making_s, self._made = self._away_s / 2, self._making_s / 2, self._made // 2
