"""Penstock on ints, and the same calls without any library: the most that Python can do here."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import tasks
from side import Workload

PACKAGES = ("penstock", "numpy")


def trivial(task: str) -> Workload:
    import penstock as ps

    function = getattr(tasks, task)

    def open_pipeline(n: int) -> Iterator[int]:
        return (tasks.BATCH for _ in ps.range(n).map(function).batch(tasks.BATCH))

    return Workload(open=open_pipeline, first=500_000, packages=PACKAGES)


def bare_loop(task: str) -> Workload:
    """No pipeline, no order, no state: call the function 256 times, make the arrays."""
    function = getattr(tasks, task)
    leaves = {key: np.asarray(value).dtype for key, value in function(0).items()} if task == "three_leaves" else None

    def open_pipeline(n: int) -> Iterator[int]:
        for start in range(0, n, tasks.BATCH):
            results = map(function, range(start, start + tasks.BATCH))
            if leaves is None:
                np.fromiter(results, np.int64, tasks.BATCH)
            else:
                rows = list(results)
                {key: np.fromiter([row[key] for row in rows], dtype, tasks.BATCH) for key, dtype in leaves.items()}
            yield tasks.BATCH

    return Workload(open=open_pipeline, first=500_000, packages=("numpy",))
