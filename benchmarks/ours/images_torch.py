"""The script of `peers.torch_loader:crops` with another import, and its function without any loader."""

from __future__ import annotations

import multiprocessing
import time

import layout
import tasks
from side import Workload

PACKAGES = ("penstock", "torch", "numpy")


def moved(folder: str, processes: int) -> Workload:
    from peers.torch_loader import crops_with

    from penstock.torch import DataLoader

    made = crops_with(DataLoader, folder, processes)
    return Workload(open=made.open, first=made.first, packages=PACKAGES, weighed=made.weighed)


def bare_loop(folder: str, processes: int) -> Workload:
    """The function called in as many processes: no batches, nothing sent, no order."""
    files = layout.image_files(folder)
    function = tasks.CropFromGlobals(files)

    def run(indices: range) -> None:
        for index in indices:
            function(index)

    def measure(n: int) -> dict[str, float]:
        context = multiprocessing.get_context("fork")
        count = tasks.passes(n, len(files)) * len(files)
        began = time.perf_counter()
        started = [context.Process(target=run, args=(range(k, count, processes),)) for k in range(processes)]
        for process in started:
            process.start()
        for process in started:
            process.join()
        seconds = time.perf_counter() - began
        return {"elements": count, "seconds": seconds, "rate": count / seconds}

    return Workload(measure=measure, first=len(files), packages=("numpy",))
