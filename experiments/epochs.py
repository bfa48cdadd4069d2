"""Does a service that reads epoch after epoch keep its size? 2,000 epochs of a small job on 2 workers.

python experiments/epochs.py [--quick]     or: make experiment E=epochs

Printed is the private memory of every process after each tenth of the epochs. All but the first tenth count: none may
end above 1.05 times its size at the first tenth. It ends with 1 where one does.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import penstock as ps

EPOCHS = 2_000
BATCHES = 8
GROWTH = 1.05


def private_bytes(pid: int) -> int:
    """Return what a process holds and shares with nobody by intention: its heap, stacks and copies of its parent's."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) << 10
    raise OSError(f"process {pid} has no line for anonymous memory")


def parties(service: ps.LocalService) -> dict[str, int]:
    """Return everybody's pid by name."""
    nursery, *children = service.pids()
    workers = service.worker_pids()
    known = {service.dispatcher_pid, *workers.values()}
    (agent,) = (pid for pid in children if pid not in known)
    named = {f"worker {number}": pid for number, pid in enumerate(workers.values())}
    return {"trainer": os.getpid(), "dispatcher": service.dispatcher_pid, "agent": agent, "nursery": nursery, **named}


def run(epochs: int) -> dict[str, list[int]]:
    """Read epochs; return what each process held after every tenth of them."""
    dataset = ps.range(BATCHES * 16).map(lambda x: x * 2).batch(16)
    held: dict[str, list[int]] = {}
    began = time.perf_counter()
    with ps.LocalService(workers=2) as service, dataset.distribute(service, limits=ps.Limits(timeout_s=60)) as loader:
        for epoch in range(epochs):
            loader.set_epoch(epoch)
            read = sum(1 for _ in loader)
            if read != BATCHES:
                raise RuntimeError(f"epoch {epoch} had {read} batches, not {BATCHES}")
            if (epoch + 1) % (epochs // 10) == 0:
                now = {name: private_bytes(pid) for name, pid in parties(service).items()}
                for name, size in now.items():
                    held.setdefault(name, []).append(size)
                sizes = "  ".join(f"{name} {size / 1e6:6.2f}" for name, size in now.items())
                print(f"{epoch + 1:6} epochs, {time.perf_counter() - began:5.0f} s, MB:  {sizes}", flush=True)
    return held


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="200 epochs: shows that it runs, and nothing about growth")
    options = parser.parse_args()
    held = run(EPOCHS // 10 if options.quick else EPOCHS)
    print(f"\n{'process':12} {'first tenth':>12} {'end':>8} {'growth':>8} {'at most':>8}")
    missed = False
    for name, sizes in held.items():
        growth = sizes[-1] / sizes[0]
        missed |= growth > GROWTH
        print(f"{name:12} {sizes[0] / 1e6:9.2f} MB {sizes[-1] / 1e6:5.2f} MB {growth:7.3f}x {GROWTH:7.2f}x")
    return int(missed and not options.quick)


if __name__ == "__main__":
    sys.exit(main())
