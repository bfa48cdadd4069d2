"""A trainer pinned to one core, busy in Python or in matmul, while 200 MB/s made on the other core are handed to it.

Each round is a process; rounds with and without delivery take turns, and ratios are of neighbours. Without delivery the
other core makes the same batches and keeps them. The target is Penstock's; DataLoader's figure is from the same run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys

from harness import HERE, Bench, BenchError, main, say
from report import machine, our_versions

PAIRS = 10
SECONDS = 3.0
MOST_SLOWER = 1.03
LEAST_MB_PER_S = 190.0  # of 200 that are asked for: less, and nothing was shown


def run_once(fed: str, work: str, seconds: float) -> dict[str, float]:
    command = [sys.executable, "-W", "ignore", "-m", "ours.pinned_trainer", fed, work, str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=HERE, start_new_session=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it has started, too: some of it does not end by itself
    if not line:
        raise BenchError(f"{' '.join(command)} gave no answer; what it said is above")
    found: dict[str, float] = json.loads(line)
    return found


def run(bench: Bench) -> None:
    pairs = min(bench.options.pairs, PAIRS)
    seconds = 1.0 if bench.options.quick else SECONDS
    met = True
    for work in ("python", "matmul"):
        if bench.options.case not in work:
            continue
        slower: dict[str, list[float]] = {"penstock": [], "torch": []}
        rates: dict[str, list[float]] = {"penstock": [], "torch": []}
        for _ in range(pairs):
            for fed, ratios in slower.items():
                alone = run_once("nothing", work, seconds)["units_per_s"]
                beside = run_once(fed, work, seconds)
                ratios.append(alone / beside["units_per_s"])
                rates[fed].append(beside["mb_per_s"])
        middle = {fed: statistics.median(ratios) for fed, ratios in slower.items()}
        arrived = statistics.median(rates["penstock"])
        fits = middle["penstock"] <= MOST_SLOWER and arrived >= LEAST_MB_PER_S
        met = met and fits
        say(f"{work}: {middle['penstock']:.3f}x the time at {arrived:.0f} MB/s; DataLoader {middle['torch']:.3f}x")
        line = {"bench": "pinned-trainer", "case": work, "slower": middle, "rounds": slower, "mb_per_s": rates}
        print(
            json.dumps({**line, "target": MOST_SLOWER, "met": fits, "versions": our_versions(), "machine": machine()})
        )
    if not met:
        sys.exit(1)


if __name__ == "__main__":
    main("pinned-trainer", run)
