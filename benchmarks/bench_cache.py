"""What kept images cost: getting them, cold, against reading the same bytes with pyarrow; putting against computing.

Each epoch is a process of its own, so that nothing is left of the last one; every byte is touched. Files are forgotten
by the page cache before they are read.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from harness import HERE, OUR_PYTHON, SOURCE, Bench, BenchError, environment, main, say
from report import paired_costs

PAIRS = 8
GETTING, PUTTING = 0.9, 1 / 1.15


def epoch_s(mode: str, folder: Path, source: Path) -> float:
    done = subprocess.run(
        [str(OUR_PYTHON), "-m", "ours.cache", mode, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        cwd=HERE,
        env=environment(source) | {"PENSTOCK_CACHE": str(folder / "host")},
        timeout=300,
    )
    if done.returncode:
        raise BenchError(f"{mode} failed:\n{done.stderr[-2000:]}")
    seconds: float = json.loads(done.stdout.splitlines()[-1])["s"]
    return seconds


def modes(source: Path) -> dict[str, float]:
    """Return what an epoch of each mode takes, each from an empty location on."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-bench-cache-", dir=os.environ.get("PENSTOCK_BENCH_DISK")))
    try:
        return {mode: epoch_s(mode, folder, source) for mode in ("compute", "put", "get", "arrow")}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(bench: Bench) -> None:
    if bench.options.against is not None:
        bench.alternate("s", modes, bench.options.against)
        return
    rounds = 3 if bench.options.quick else PAIRS
    say(f"cache: {rounds} rounds of four epochs")
    modes(SOURCE)  # writes byte code
    seen = [modes(SOURCE) for _ in range(rounds)]
    for case, mode, peer, other, target in (
        ("getting, cold", "get", "pyarrow, the same bytes", "arrow", GETTING),
        ("putting", "put", "computing", "compute", PUTTING),
        ("getting, cold", "get", "computing", "compute", None),
    ):
        pairs = [(each[mode], each[other]) for each in seen]
        bench.add(paired_costs(bench.name, case, peer, "s", pairs, target=target))


if __name__ == "__main__":
    main("cache", run, trees_by_case=True)
