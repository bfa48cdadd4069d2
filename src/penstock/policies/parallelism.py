"""How many threads a stage should run on.

Words. *Call seconds*: time inside the user's function, per element. *Processor seconds*: what of it the thread really
ran. *Stretch*: call seconds over processor seconds. Alone, a function that computes has a stretch of 1, one that waits
for a disk or a network a larger one.

The one idea: run the work on k threads at once and look at its stretch again. If it grew k-fold the calls took turns:
the function holds the GIL, and the reader's own thread is the best place for it. Processor seconds cancel the warm-up
of first calls, which elapsed time would not.
"""

from __future__ import annotations

import math

import msgspec

WORTHWHILE_GAIN = 1.3  # below it, threads cost more in hand-offs and contention than they bring
WORSE = 0.75  # what runs side by side gains something however busy the machine is; calls that take turns gain nothing
WAITING_STRETCH = 3.0  # a function that waits two thirds of its time can use more threads than cores
MAX_WAITING_THREADS = 64
SHORT_CALL_S = 3e-6  # releasing the GIL and getting it back takes about as long: nothing to gain, and a trial costs
WORTH_DOUBLING = 0.75  # a chunk twice as long should save a quarter per element
LONGEST_CHUNK_S = 0.02


class CallCost(msgspec.Struct, frozen=True, kw_only=True):
    """What one thread mode was measured to cost."""

    threads: int
    call_s: float
    cpu_s: float
    waits: bool = False
    """Whether the thread gave up its core of its own accord: on a busy machine a computing one is stretched too."""
    preempted: bool = False
    """Whether its core was taken from it: then a stretch says little about the function."""

    @property
    def stretch(self) -> float:
        return self.call_s / max(self.cpu_s, 1e-9)

    @property
    def disturbed(self) -> bool:
        """Whether a function that does not wait, alone, was stretched: by others, and how much they will is unknown."""
        return not self.waits and self.stretch >= WORTHWHILE_GAIN


class RunOn(msgspec.Struct, frozen=True, kw_only=True):
    """A decision: `threads` 0 is the reader's own thread."""

    threads: int
    holds_gil: bool | None
    reason: str


def first_threads(alone: CallCost, *, cores: int) -> RunOn:
    """Choose after the first calls in the reader's thread.

    >>> first_threads(CallCost(threads=1, call_s=0.1, cpu_s=0.01, waits=True), cores=2).threads
    20
    >>> first_threads(CallCost(threads=1, call_s=0.1, cpu_s=0.01), cores=2).threads
    2
    >>> first_threads(CallCost(threads=1, call_s=0.001, cpu_s=0.001), cores=2).reason
    'try'
    >>> first_threads(CallCost(threads=1, call_s=2e-7, cpu_s=2e-7), cores=2).threads
    0
    """
    if alone.waits and alone.stretch >= WAITING_STRETCH:
        threads = min(math.ceil(cores * alone.stretch), MAX_WAITING_THREADS)
        return RunOn(threads=threads, holds_gil=False, reason="it waits")
    if alone.call_s < SHORT_CALL_S:
        return RunOn(threads=0, holds_gil=None, reason="too short to share")
    if cores == 1:
        return RunOn(threads=0, holds_gil=None, reason="one core")
    return RunOn(threads=cores, holds_gil=None, reason="try")


def judge_threads(alone: CallCost, together: CallCost, *, cores: int) -> RunOn:
    """Choose after a trial on several threads.

    >>> alone = CallCost(threads=1, call_s=0.001, cpu_s=0.001)
    >>> judge_threads(alone, CallCost(threads=2, call_s=0.00101, cpu_s=0.001), cores=2).threads
    2
    >>> judge_threads(alone, CallCost(threads=2, call_s=0.00195, cpu_s=0.001), cores=2)
    RunOn(threads=0, holds_gil=True, reason='calls take turns')
    >>> judge_threads(alone, CallCost(threads=2, call_s=0.006, cpu_s=0.001, preempted=True), cores=2).threads
    0
    >>> disturbed = CallCost(threads=1, call_s=0.005, cpu_s=0.001)
    >>> judge_threads(disturbed, CallCost(threads=2, call_s=0.006, cpu_s=0.001), cores=2).reason
    'the machine is busy'
    """
    gain = together.threads * alone.stretch / together.stretch
    if together.preempted and gain < WORSE:
        return RunOn(threads=0, holds_gil=None, reason="the machine is busy, and calls take turns")
    if together.preempted if gain < WORTHWHILE_GAIN else alone.disturbed:
        return RunOn(threads=together.threads, holds_gil=None, reason="the machine is busy")
    if gain < WORTHWHILE_GAIN:
        return RunOn(threads=0, holds_gil=True, reason="calls take turns")
    return RunOn(threads=together.threads, holds_gil=False, reason="calls run side by side")


def use_prefetch_thread(*, reader_away_s: float, making_s: float, elements: int, threaded: bool) -> bool:
    """Say whether elements should be made on a thread while the reader is away.

    A thread costs a hand-off per chunk, and fights for the GIL with the reader; it pays as soon as the reader spends
    a noticeable part of its time elsewhere. One that is back after a few microseconds was nowhere: it is a loop in
    Python over small elements, and holds the GIL all the time.

    >>> use_prefetch_thread(reader_away_s=0.001, making_s=0.1, elements=10, threaded=False)
    False
    >>> use_prefetch_thread(reader_away_s=0.02, making_s=0.1, elements=10, threaded=False)
    True
    >>> use_prefetch_thread(reader_away_s=0.02, making_s=0.1, elements=100_000, threaded=False)
    False
    """
    if reader_away_s < SHORT_CALL_S * elements:
        return False
    share = reader_away_s / max(reader_away_s + making_s, 1e-9)
    return share > (0.01 if threaded else 0.05)


def next_chunk_size(
    current: int, cost_s: float, *, cost_at_half_s: float | None = None, target_s: float, limit: int
) -> int:
    """Return how many elements make `target_s` of work; at most doubling, so that one fast call does not mislead.

    Where a chunk costs much by itself, an element became cheaper with the last doubling: then it goes on growing.

    >>> next_chunk_size(4, 1e-6, target_s=1e-3, limit=4096), next_chunk_size(4, 1e-2, target_s=1e-3, limit=4096)
    (8, 1)
    >>> next_chunk_size(4, 1e-3, cost_at_half_s=1.9e-3, target_s=1e-3, limit=4096)
    8
    """
    amortizes = cost_at_half_s is not None and cost_s < WORTH_DOUBLING * cost_at_half_s
    if amortizes and current * cost_s < LONGEST_CHUNK_S:
        return min(current * 2, limit)
    ideal = int(target_s / max(cost_s, 1e-9))
    return max(1, min(ideal, current * 2, limit))
