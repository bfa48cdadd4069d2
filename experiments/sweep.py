"""A sweep as both environments simulate it: what a batch costs to make, and how long a trainer needs for it.

Only the standard library and numpy: the peers' environment has no Penstock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

ROWS = 64
SHAPE = (224, 224, 3)
"""A batch has 64 images of 8 bits: 9.6 MB."""
ROW_CPU_S = 0.0016
"""An image costs 1.6 ms of CPU time, as one of `bench_overhead` does: 0.1 s a batch."""
STEP_S = 0.5
"""A trainer needs that long for a batch. So one job keeps a fifth of a core busy."""
WARM_UP = 6
PATIENCE_S = 300.0


@dataclass(frozen=True)
class Outcome:
    """What so many jobs took: CPU seconds of the service, the seconds of the mean job, and what they were given."""

    jobs: int
    cpu_s: float
    job_s: float
    batches: int

    @property
    def cpu_ms_a_batch(self) -> float:
        """CPU time for each batch that was delivered to somebody."""
        return 1000 * self.cpu_s / self.batches


def make_row(i: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Spend what an image costs, and return one."""
    end = time.thread_time() + ROW_CPU_S
    image = np.full(SHAPE, i % 251, np.uint8)
    scratch = np.zeros(4 << 10, np.float32)
    while time.thread_time() < end:
        np.add(scratch, 1, out=scratch)
    return image


def train(batches: Iterator[Any], step_s: float, took: Callable[[], None]) -> None:
    """Take batches for as long as there are any, sleeping after each; `took` is called when one was taken."""
    for _ in batches:
        took()
        time.sleep(step_s)


def measure(taken: Sequence[Sequence[float]], steps: int, cpu_s: Callable[[], float]) -> Outcome:
    """Return what `steps` steps of each job took, once all are warm. `taken` has for each the times of its steps.

    Nobody stops before everybody has got there: a job that waits lets its service read ahead, and that would be given
    to it later, at no cost. CPU time is for all batches that were taken meanwhile, and is told for the steps alone.
    """
    wait_until(lambda: all(len(one) >= WARM_UP for one in taken), "the first steps of all jobs")
    first, cpu_before_s = [len(one) for one in taken], cpu_s()
    wait_until(lambda: all(len(one) >= begin + steps for one, begin in zip(taken, first)), "the steps of all jobs")
    last, used_s = [len(one) for one in taken], cpu_s() - cpu_before_s
    batches = len(taken) * steps
    return Outcome(
        jobs=len(taken),
        cpu_s=used_s * batches / (sum(last) - sum(first)),
        job_s=sum(one[begin + steps - 1] - one[begin - 1] for one, begin in zip(taken, first)) / len(taken),
        batches=batches,
    )


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"waited {PATIENCE_S:.0f} s for {what}")
        time.sleep(0.01)


def cpu_seconds(pids: set[int]) -> float:
    """Return the CPU time of processes and of the children they have waited for."""
    total = 0.0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(map(int, fields[11:15])) / 100
    return total
