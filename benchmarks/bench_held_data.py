"""A dataset that holds one numpy array of 1 GB, or five million strings, in four workers: memory and the first batch.

Memory is the processes' PSS together, which counts a shared page once, above four workers with an empty dataset. The
time of the first batch is beyond that of an empty dataset, which is torch's import. It ends with 1 where a target is
missed; the strings have none: they are objects, and objects cannot be mapped.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

from harness import HERE, Bench, BenchError, main, say
from report import machine, our_versions

WORKERS = 4
REPEATS = 3
MOST_BYTES = 1.25e9
FIRST_BATCH_S = 3.0


def run_once(kind: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", "ours.held_data", kind, str(WORKERS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE, timeout=600)
    if done.returncode:
        raise BenchError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def run(bench: Bench) -> None:
    repeats = 1 if bench.options.quick else REPEATS
    runs = {kind: [run_once(kind) for _ in range(repeats)] for kind in ("nothing", "array", "strings")}
    middle = {
        kind: {key: statistics.median(one[key] for one in found) for key in ("pss_bytes", "first_batch_s")}
        for kind, found in runs.items()
    }
    met = True
    for kind in ("array", "strings"):
        above = middle[kind]["pss_bytes"] - middle["nothing"]["pss_bytes"]
        later_s = middle[kind]["first_batch_s"] - middle["nothing"]["first_batch_s"]
        fits = kind == "strings" or (above <= MOST_BYTES and later_s <= FIRST_BATCH_S)
        met = met and fits
        say(f"{kind}: {above / 1e9:.2f} GB above an empty dataset, first batch {later_s:.1f} s later")
        line = {"bench": "held-data", "case": kind, "above_bytes": above, "later_s": later_s, "met": fits}
        print(json.dumps({**line, "runs": runs[kind], "versions": our_versions(), "machine": machine()}))
    if not met:
        sys.exit(1)


if __name__ == "__main__":
    main("held-data", run)
