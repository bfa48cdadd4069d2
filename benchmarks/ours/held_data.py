"""A DataLoader of ours whose dataset holds a lot, read by some workers: their memory, and when the first batch came.

    python -m ours.held_data KIND WORKERS

prints one JSON line. KIND: nothing, array (one numpy array of 1 GB), strings (a list of five million).
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np
import torch

from penstock.torch import DataLoader

ARRAY_ROWS = 1 << 18  # of 4 KiB: 1 GiB
STRINGS = 5_000_000
BATCHES = 64
BATCH = 64


class Held(torch.utils.data.Dataset[Any]):
    """Gives rows that lie all over what it holds, so that every worker touches all of it."""

    def __init__(self, kind: str) -> None:
        self.rows: Any = {
            "nothing": lambda: None,
            "array": lambda: np.ones((ARRAY_ROWS, 4096), np.uint8),
            "strings": lambda: [f"/data/train/image-{i:08}.jpg" for i in range(STRINGS)],
        }[kind]()

    def __len__(self) -> int:
        return BATCHES * BATCH

    def __getitem__(self, index: int) -> int:
        if isinstance(self.rows, np.ndarray):
            part = len(self.rows) // len(self)
            return int(self.rows[index * part : (index + 1) * part].sum())
        return 0 if self.rows is None else len(self.rows[index])


def pss_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))


def running(parent: int) -> list[int]:
    """Return the processes below one."""
    below: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                below.setdefault(int(file.read().rsplit(")", 1)[1].split()[1]), []).append(int(name))
        except OSError:
            continue  # it ended meanwhile
    found, pending = [], [parent]
    while pending:
        children = below.get(pending.pop(), [])
        found += children
        pending += children
    return found


def main(kind: str, workers: int) -> None:
    dataset = Held(kind)
    began = time.perf_counter()
    loader = DataLoader(dataset, batch_size=BATCH, num_workers=workers, persistent_workers=True)
    batches = iter(loader)
    next(batches)
    first_s = time.perf_counter() - began
    for _ in batches:
        pass
    memory = sum(map(pss_bytes, running(os.getpid())))
    print(json.dumps({"kind": kind, "first_batch_s": first_s, "pss_bytes": memory}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
