"""What every scaling policy is given, and what it answers.

Words. *Batch*: one output for one rank. *Step*: what a trainer does with a batch, without the time it waited for it.
*Demand*: the batches a second that readers would take if they never waited. *A worker's rate*: the batches a second
that it makes while it does not wait for credit.

A policy is a function `decide(memory, measured, limits, now) -> (memory, WorkerTarget)`, called once a window. It sees
nothing else: no cluster, no clock. `memory` is its own frozen record, that of a new job is `begin()`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol, TypeVar

import msgspec

Memory = TypeVar("Memory")

WORTHWHILE = 0.03
"""A gain in batch time below it is not worth a worker, where nobody says what either costs."""


class ReaderPace(msgspec.Struct, frozen=True, kw_only=True):
    """One trainer over a window."""

    batches: float
    """Taken by all of its ranks."""
    step_s: float
    """Seconds that a rank spent on one of them, waiting left out."""
    wait_s: float
    """Seconds that a rank waited for one of them."""
    ranks: int = 1


def leading_pace(trainers: Iterable[ReaderPace]) -> ReaderPace | None:
    """Return the trainer with the largest demand: of those that share what is made, it alone decides how much is made.

    >>> slow, fast = ReaderPace(batches=5, step_s=0.2, wait_s=0.0), ReaderPace(batches=9, step_s=0.1, wait_s=0.01)
    >>> leading_pace([slow, fast]) is fast, leading_pace([]) is None
    (True, True)
    """
    return max(trainers, key=lambda pace: pace.ranks / max(pace.step_s, 1e-9), default=None)


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What a job did over a window of time, by the clocks of those who counted."""

    seconds: float
    """The length of the window."""
    workers: float
    """Those that served the job all through the window, each by its size; 1 is the size of the pool's smallest."""
    pace: ReaderPace | None
    """The leading trainer. None: nobody reads."""
    worker_per_s: float | None
    """The rate of a worker of size 1, averaged over those that did not wait for credit. None: all of them did."""
    busy: float = 1.0
    """The share of the time in which workers worked, or waited for their input, and not for credit."""
    queue: float = 0.0
    """Batches that had arrived at a rank and were not taken, on average."""
    buffered: float = 0.0
    """Batches that were made and not sent, on average over workers."""
    processor: float = 0.0
    """The share that a worker uses of its processor; so for memory and network. 0: not known."""
    memory: float = 0.0
    network: float = 0.0
    filled: bool = True
    """Whether a worker's threads have grown as far as its host lets them."""

    @property
    def demand_per_s(self) -> float:
        """
        >>> pace = ReaderPace(batches=80, step_s=0.1, wait_s=0.025, ranks=2)
        >>> Measured(seconds=5, workers=2, pace=pace, worker_per_s=8.0).demand_per_s
        20.0
        """
        return 0.0 if self.pace is None else self.pace.ranks / max(self.pace.step_s, 1e-9)

    @property
    def taken_per_s(self) -> float:
        """The batches a second that readers really took."""
        return 0.0 if self.pace is None else self.pace.batches / max(self.seconds, 1e-9)

    @property
    def batch_s(self) -> float:
        """Seconds from one batch of a rank to its next; 0 where nobody reads."""
        return 0.0 if self.pace is None else self.pace.step_s + self.pace.wait_s

    @property
    def waiting(self) -> float:
        """The share of a trainer's time that it waits.

        >>> pace = ReaderPace(batches=80, step_s=0.1, wait_s=0.025)
        >>> Measured(seconds=10, workers=2, pace=pace, worker_per_s=8.0).waiting
        0.2
        """
        return 0.0 if self.pace is None or not self.batch_s else self.pace.wait_s / self.batch_s


class Rent(msgspec.Struct, frozen=True, kw_only=True):
    """What is paid an hour while a job runs."""

    trainer_per_h: float
    """All of its hosts and accelerators."""
    worker_per_h: float


class ScalingLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the user and the job allow."""

    least: int = 1
    most: int = 1 << 20
    streams: int | None = None
    """How many streams the job has, where that is fixed. None: one for each worker, as many as there are."""
    rent: Rent | None = None

    def clip(self, workers: int) -> int:
        """
        >>> [ScalingLimits(least=2, most=8, streams=6).clip(n) for n in (0, 3, 7, 100)]
        [2, 3, 6, 6]
        """
        most = self.most if self.streams is None else min(self.most, self.streams)
        return max(self.least, min(workers, most))

    def useful(self, workers: float) -> float:
        """Return how many workers' worth `workers` are: fixed streams are a staircase, since the fullest worker counts.

        >>> limits = ScalingLimits(streams=8)
        >>> [round(limits.useful(n), 2) for n in range(1, 9)]
        [1.0, 2.0, 2.67, 4.0, 4.0, 4.0, 4.0, 8.0]
        """
        if self.streams is None or workers <= 0:
            return workers
        return self.streams / math.ceil(self.streams / min(workers, self.streams))


class WorkerTarget(msgspec.Struct, frozen=True):
    """How many workers of size 1 a job should have, and why, with the numbers that were looked at."""

    workers: int
    reason: str


class ScalingPolicy(Protocol[Memory]):
    """What each module of this package is: two functions."""

    def begin(self) -> Memory: ...

    def decide(
        self, memory: Memory, measured: Measured, limits: ScalingLimits, now: float
    ) -> tuple[Memory, WorkerTarget]: ...
