"""An ImageNet script moved by its import: random crops from the global generators, batch 64, two worker processes."""

from __future__ import annotations

import inputs
from harness import Bench, main, ours, peer

SECONDS = 5
PROCESSES = 2


def run(bench: Bench) -> None:
    folder = str(inputs.images())
    mine = ours("ours.images_torch:moved", folder=folder, processes=PROCESSES)
    bench.compare(
        "moved script",
        mine,
        [peer("DataLoader", "peers.torch_loader:crops", folder=folder, processes=PROCESSES)],
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


if __name__ == "__main__":
    main("images-torch", run, trees_by_case=True)
