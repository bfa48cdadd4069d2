"""What going through worker processes costs: the images pipeline in 2 local workers against the same in one process."""

from __future__ import annotations

import inputs
from harness import Bench, main, ours

SECONDS = 5


def run(bench: Bench) -> None:
    folder = str(inputs.images())
    bench.compare(
        "images through 2 local workers",
        ours("ours.service:images", folder=folder, workers=2),
        [ours("ours.service:images", name="the same in one process", folder=folder, workers=0)],
        unit="images/s",
        target=0.95,
        per_cpu_target=1 / 1.10,
        seconds=SECONDS,
    )


if __name__ == "__main__":
    main("overhead", run, trees_by_case=True)
