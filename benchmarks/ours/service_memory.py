"""What every process of a job holds, by a trainer that is slower or faster than its workers. Prints one JSON line.

python -m ours.service_memory slow slabs|tcp BUDGET_BYTES BATCHES
python -m ours.service_memory fast EPOCHS BATCHES        # of 131 KB, at default budgets
python -m ours.service_memory hold            # reads until stdin is closed; first prints who is who
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from typing import Any

import transfers
from os_processes import resident_bytes, slab_bytes
from ours.service import batches_dataset, set_path

import penstock as ps

PAUSE_S = 0.01
FAST_WORKERS = 2
FAST_BATCH = 16_384  # numbers of 8 bytes
LOOK_EVERY = 100  # batches


def slow(path: str, budget_bytes: int, batches: int) -> dict[str, Any]:
    set_path(path)
    peaks: dict[str, dict[str, int]] = {"trainer": {}, "worker": {}}
    check = transfers.BatchCheck()
    with (
        ps.LocalService(workers=1, memory_bytes=budget_bytes) as service,
        batches_dataset(batches).distribute(service, limits=ps.Limits(memory_bytes=budget_bytes)) as loader,
    ):
        for step, batch in enumerate(loader):
            check(batch)
            time.sleep(PAUSE_S)
            if step % max(1, batches // 100) == 0:
                pids = {"trainer": os.getpid(), "worker": next(iter(service.worker_pids().values()))}
                for who, pid in pids.items():
                    for kind, held in resident_bytes(pid).items():
                        peaks[who][kind] = max(peaks[who].get(kind, 0), held)
    return peaks


def fast(epochs: int, batches: int) -> dict[str, Any]:
    """Read as fast as batches come; return the most that the slabs of any worker and the trainer took."""
    slabs = trainer = 0
    dataset = ps.range(batches * FAST_BATCH).batch(FAST_BATCH)
    with ps.LocalService(workers=FAST_WORKERS) as service, dataset.distribute(service) as loader:
        began = time.perf_counter()
        for epoch in range(epochs):
            loader.set_epoch(epoch)
            for step, _ in enumerate(loader):
                if step % LOOK_EVERY == 0:
                    slabs = max(slabs, *(slab_bytes(pid) for pid in service.worker_pids().values()))
                    trainer = max(trainer, resident_bytes(os.getpid())["rss"])
        seconds = time.perf_counter() - began
    return {"slabs": slabs, "trainer": trainer, "batches_per_s": epochs * batches / seconds}


def hold() -> None:
    # With a timeout, because one of those who are killed is the parent of all others: then nothing comes any more.
    with (
        ps.LocalService(workers=2) as service,
        batches_dataset(100_000).distribute(service, limits=ps.Limits(timeout_s=5)) as loader,
    ):
        iterator = iter(loader)
        kept = [next(iterator) for _ in range(3)]
        parties = {
            "trainer": os.getpid(),
            "dispatcher": service.dispatcher_pid,
            "worker": next(iter(service.worker_pids().values())),
        }
        nursery, *children = service.pids()
        (agent,) = set(children) - {service.dispatcher_pid, *service.worker_pids().values()}
        parties |= {"nursery": nursery, "agent": agent}
        print(json.dumps(parties), flush=True)
        while not select.select([sys.stdin], [], [], 0.02)[0]:
            kept = [*kept[1:], next(iterator)]


def main() -> None:
    match sys.argv[1:]:
        case ["slow", path, budget_bytes, batches]:
            print(json.dumps(slow(path, int(budget_bytes), int(batches))))
        case ["fast", epochs, batches]:
            print(json.dumps(fast(int(epochs), int(batches))))
        case ["hold"]:
            hold()
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
