"""A trainer pinned to one core, fed by workers on the other: how fast its own work goes on.

    python -m ours.pinned_trainer FED WORK SECONDS

FED: penstock, torch (DataLoader, one process) or nothing: then the other core makes the same batches and keeps them.
WORK: python or matmul. Prints one JSON line: units of work a second, and MB/s that arrived.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

ROWS, ROW = 64, 65_536  # uint8: batches of 4 MiB
MB_PER_S = 200.0
SETTLE_S = 1.0


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> np.ndarray[Any, Any]:
        return np.full(ROW, index & 255, np.uint8)


def batches(fed: str) -> Iterator[Any]:
    if fed == "penstock":
        from penstock.torch import DataLoader
    else:
        from torch.utils.data import DataLoader
    sampler = torch.utils.data.BatchSampler(range(1 << 40), ROWS, drop_last=True)
    return iter(DataLoader(Rows(), batch_sampler=sampler, num_workers=1))


def make_and_keep(core: int) -> None:
    """Make as much on the other core, for nobody."""
    os.sched_setaffinity(0, {core})
    rows, due, index = Rows(), time.perf_counter(), 0
    while True:
        torch.utils.data.default_collate([rows[index + k] for k in range(ROWS)])
        index += ROWS
        due += ROWS * ROW / (MB_PER_S * 1e6)
        time.sleep(max(0.0, due - time.perf_counter()))


def work_python() -> None:
    total = 0
    for value in range(2_000):
        total += value * value


_matrix = torch.ones(96, 96)


def work_matmul() -> None:
    torch.mm(_matrix, _matrix)


def main(fed: str, kind: str, seconds: float) -> None:
    torch.set_num_threads(1)
    here, there = sorted(os.sched_getaffinity(0))[:2]
    work = work_python if kind == "python" else work_matmul
    source = None
    if fed == "nothing":
        other = multiprocessing.get_context("fork").Process(target=make_and_keep, args=(there,), daemon=True)
        other.start()
    else:
        os.sched_setaffinity(0, {there})  # what is started now is, and stays, there
        source = batches(fed)
        next(source)
    for thread in os.listdir("/proc/self/task"):  # all of the trainer, the threads that feed it too
        os.sched_setaffinity(int(thread), {here})
    units = received = 0
    begin = time.perf_counter() + SETTLE_S
    due, now = time.perf_counter(), 0.0
    while (now := time.perf_counter()) < begin + seconds:
        work()
        units += now >= begin
        if source is not None and now >= due:
            batch = next(source)
            received += batch.numel() if now >= begin else 0
            due += ROWS * ROW / (MB_PER_S * 1e6)
    print(json.dumps({"units_per_s": units / seconds, "mb_per_s": received / 1e6 / seconds}), flush=True)
    os._exit(0)  # workers end with this process


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
