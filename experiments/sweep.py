"""A sweep as both environments run it: how long a trainer needs for a batch, and what is measured meanwhile.

Only the standard library and numpy: the peers' environment has no Penstock.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))  # for whoever imports this, too

from tasks import SIDE_PX

BATCH = 64
BATCH_BYTES = BATCH * SIDE_PX * SIDE_PX * 3 * 4
"""64 images of 32-bit floats: 38.5 MB."""
STEP_S = 1.0
"""A trainer needs that long for a batch, which takes about 0.1 s of CPU time: one job keeps a tenth of a core busy."""
FILLING = 14
"""So many batches a job takes at once, for a window to be full: after that memory is used again, as in a long job."""
WARM_UP = FILLING + 2
PATIENCE_S = 300.0


@dataclass(frozen=True)
class Outcome:
    """What so many jobs took: CPU seconds of the service, the seconds of the mean job, and what they were given."""

    jobs: int
    cpu_s: float
    workers_s: float
    """That of all but the dispatcher; where it shares a process with them, all."""
    job_s: float
    batches: int

    @property
    def cpu_ms_a_batch(self) -> float:
        """CPU time for each batch that was delivered to somebody."""
        return 1000 * self.cpu_s / self.batches


def train(batches: Iterator[Any], step_s: float, took: Callable[[], None], *, filling: int = FILLING) -> None:
    """Take batches for as long as there are any, some at once, the others in steps; `took` is called for each."""
    for number, _ in enumerate(batches):
        took()
        if number >= filling:
            time.sleep(step_s)


def measure(taken: Sequence[Sequence[float]], steps: int, cpu_s: Callable[[], tuple[float, float]]) -> Outcome:
    """Return what `steps` steps of each job took, once all are warm. `taken` has for each the times of its steps.

    Nobody stops before everybody has got there: a job that waits lets its service read ahead, and that would be given
    to it later, at no cost. CPU time, of the service and of its workers, is for all batches that were taken meanwhile,
    and is told for the steps alone.
    """
    wait_until(lambda: all(len(one) >= WARM_UP for one in taken), "the first steps of all jobs")
    first, before = [len(one) for one in taken], cpu_s()
    wait_until(lambda: all(len(one) >= begin + steps for one, begin in zip(taken, first)), "the steps of all jobs")
    last, after = [len(one) for one in taken], cpu_s()
    batches = len(taken) * steps
    part = batches / (sum(last) - sum(first))
    return Outcome(
        jobs=len(taken),
        cpu_s=(after[0] - before[0]) * part,
        workers_s=(after[1] - before[1]) * part,
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
    """Return the CPU time of processes, all their threads together, to the microsecond.

    /proc counts in ticks of 10 ms, given to whoever runs at that moment: too coarse for threads that do a little often.
    """
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            total += time.clock_gettime((~pid << 3) | 2)  # what clock_getcpuclockid(3) returns
    return total
