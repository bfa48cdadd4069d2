"""What kept images cost: getting them, cold, against the same bytes by pyarrow and by peers; putting against computing.

Each epoch is a process of its own, so that nothing is left of the last one; every byte is touched. Files are forgotten
by the page cache before they are read. What peers keep is written once a run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from harness import HERE, OUR_PYTHON, SOURCE, THEIR_PYTHON, Bench, BenchError, environment, main, say
from report import paired_costs

PAIRS = 8
GETTING, PUTTING = 0.9, 1 / 1.15
MODES = ("compute", "put", "get", "arrow", "get-batches")
PEERS = {"tf-snapshot": "tf.data snapshot()", "tf-cache": "tf.data cache()", "torch": "DataLoader, an array a file"}
TF, TORCH = 3.0, 2.0


def epoch_s(command: list[str], environ: dict[str, str]) -> float:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE, env=environ, timeout=300)
    if done.returncode:
        raise BenchError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    seconds: float = json.loads(done.stdout.splitlines()[-1])["s"]
    return seconds


def modes(source: Path, among: tuple[str, ...] = MODES) -> dict[str, float]:
    """Return what an epoch of each mode takes, each from an empty location on."""
    folder = temporary_folder()
    environ = environment(source) | {"PENSTOCK_CACHE": str(folder / "host")}
    try:
        return {mode: epoch_s([str(OUR_PYTHON), "-m", "ours.cache", mode, str(folder)], environ) for mode in among}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def temporary_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="penstock-bench-cache-", dir=os.environ.get("PENSTOCK_BENCH_DISK")))


def run(bench: Bench) -> None:
    if bench.options.against is not None:
        bench.alternate("s", modes, bench.options.against)
        return
    if not THEIR_PYTHON.exists():
        raise BenchError(f"no {THEIR_PYTHON}; `make bench` makes it")
    rounds = 3 if bench.options.quick else PAIRS
    theirs = temporary_folder()
    try:
        say("cache: what peers keep is written")
        modes(SOURCE)  # writes byte code
        for peer in PEERS:
            peer_s(peer, theirs)
        say(f"cache: {rounds} rounds of {len(MODES) + len(PEERS)} epochs")
        seen = [modes(SOURCE) | {peer: peer_s(peer, theirs) for peer in PEERS} for _ in range(rounds)]
    finally:
        shutil.rmtree(theirs, ignore_errors=True)
    better = min(("tf-snapshot", "tf-cache"), key=lambda peer: sum(each[peer] for each in seen))
    for case, mode, name, other, target in (
        ("getting, cold", "get", "pyarrow, the same bytes", "arrow", GETTING),
        ("putting", "put", "computing", "compute", PUTTING),
        ("getting, cold", "get", "computing", "compute", None),
        ("getting batches, cold", "get-batches", PEERS["torch"], "torch", TORCH),
        *(
            ("getting batches, cold", "get-batches", PEERS[peer], peer, TF if peer == better else None)
            for peer in ("tf-snapshot", "tf-cache")
        ),
    ):
        pairs = [(each[mode], each[other]) for each in seen]
        bench.add(paired_costs(bench.name, case, name, "s", pairs, target=target))


def peer_s(peer: str, folder: Path) -> float:
    return epoch_s([str(THEIR_PYTHON), "-m", "peers.kept", peer, str(folder)], dict(os.environ))


if __name__ == "__main__":
    main("cache", run, trees_by_case=True)
