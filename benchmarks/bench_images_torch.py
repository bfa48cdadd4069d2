"""An ImageNet script moved by its import: random crops from the global generators, batch 64, two worker processes.

Memory is the PSS of trainer and workers together in the middle of an epoch, which counts a shared page once.
"""

from __future__ import annotations

from statistics import median

import inputs
from harness import Bench, Child, Side, main, ours, peer

SECONDS = 5
PROCESSES = 2
MEMORY_ROUNDS = 3


def run(bench: Bench) -> None:
    folder = str(inputs.images())
    mine = ours("ours.images_torch:moved", folder=folder, processes=PROCESSES)
    torchs = peer("DataLoader", "peers.torch_loader:crops", folder=folder, processes=PROCESSES)
    bench.compare(
        "moved script",
        mine,
        [torchs],
        unit="images/s",
        target=1.0,
        per_cpu_target=1.0,
        seconds=SECONDS,
    )
    bench.compare(
        "against the function alone",
        mine,
        [ours("ours.images_torch:bare_loop", name="bare loop", folder=folder, processes=PROCESSES)],
        unit="images/s",
        target=0.95,
        seconds=SECONDS,
    )
    if bench.wants("memory") and bench.options.against is None:
        theirs = median(memory_bytes(bench, torchs, "theirs"))
        bench.limit("memory", memory_bytes(bench, mine, "ours"), theirs, unit="bytes", peer="DataLoader")


def memory_bytes(bench: Bench, side: Side, name: str) -> list[float]:
    child = Child(side, bench.logs / f"{bench.name}-memory-{name}.log")
    try:
        return [child.round(child.first)["pss_bytes"] for _ in range(MEMORY_ROUNDS)]
    finally:
        child.close()


if __name__ == "__main__":
    main("images-torch", run, trees_by_case=True)
