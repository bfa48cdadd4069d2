"""A sweep as both environments simulate it: what a batch costs to make, and how long a trainer needs for it.

Only the standard library and numpy: the peers' environment has no Penstock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

ROWS = 64
SHAPE = (224, 224, 3)
"""A batch has 64 images of 8 bits: 9.6 MB."""
ROW_CPU_S = 0.0024
"""An image costs 2.4 ms of CPU time, as decoding and augmenting a small photograph does: 0.15 s a batch."""
STEP_S = 0.5
"""A trainer needs that long for a batch. So one job keeps a third of a core busy."""
WARM_UP = 3


@dataclass(frozen=True)
class Outcome:
    """What so many jobs took: CPU seconds of the service, the seconds of the mean job, and what it was given."""

    jobs: int
    cpu_s: float
    job_s: float
    batches: int
    skipped: int = 0

    @property
    def cpu_ms_a_batch(self) -> float:
        """CPU time for each batch that was delivered to somebody."""
        return 1000 * self.cpu_s / self.batches


def make_row(i: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Spend what an image costs, and return one."""
    end = time.thread_time() + ROW_CPU_S
    scratch = np.zeros(64 << 10, np.float32)
    while time.thread_time() < end:
        np.add(scratch, 1, out=scratch)
    return np.full(SHAPE, i % 251, np.uint8)


def train(batches: Iterator[Any], steps: int, step_s: float, warmed: Callable[[], None]) -> float:
    """Take batches, sleeping between them; return the seconds after the first few. `warmed` is called before those."""
    for _ in range(WARM_UP):
        next(batches)
        time.sleep(step_s)
    warmed()
    began = time.perf_counter()
    for _ in range(steps):
        next(batches)
        time.sleep(step_s)
    return time.perf_counter() - began


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
