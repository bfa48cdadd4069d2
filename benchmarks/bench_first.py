"""From starting Python to the first batch in the trainer's hands: `distribute(2)` with fresh workers.

Against tf.data service with its servers already running: its client imports TensorFlow and asks. A first run, which
writes the byte code and fills the page cache, is not counted, for either. Ours without any byte code is shown too.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness import HERE, OUR_PYTHON, SOURCE, THEIR_PYTHON, Bench, BenchError, environment, main, say
from report import figures, paired_costs

RUNS = 10
LIMIT_S = 0.8
SHARE_OF_PEER = 0.4
PATIENCE_S = 120
OURS, THEIRS = str(OUR_PYTHON), str(THEIR_PYTHON)
MINE = [OURS, "-m", "ours.service", "first"]


def time_to_first(command: Sequence[str], environment: Mapping[str, str]) -> float:
    begin = time.perf_counter()  # the monotonic clock of the machine: the child reads the same
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=HERE, env=environment, timeout=PATIENCE_S
    )
    if done.returncode:
        raise BenchError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    at: float = json.loads(done.stdout.splitlines()[-1])["at"]
    return at - begin


def plain(source: Path) -> dict[str, str]:
    """Return an environment in which byte code is written and found."""
    return {name: value for name, value in environment(source).items() if name != "PYTHONDONTWRITEBYTECODE"}


def run(bench: Bench) -> None:
    if bench.options.against is None:
        run_with_peer(bench)
        return
    bench.alternate(
        "s", lambda source: {"2 fresh local workers": time_to_first(MINE, plain(source))}, bench.options.against
    )


def run_with_peer(bench: Bench) -> None:
    if not os.path.exists(THEIRS):
        raise BenchError(f"no {THEIRS}; `make bench` makes it")
    runs = 3 if bench.options.quick else RUNS
    usual = plain(SOURCE)
    servers = subprocess.Popen(
        [THEIRS, "-m", "peers.tf_service", "serve", "2"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=HERE,
    )
    try:
        assert servers.stdout is not None
        address = servers.stdout.readline().strip()
        if not address:
            raise BenchError("tf.data service did not start")
        theirs = [THEIRS, "-m", "peers.tf_service", "first", address]
        for command in (MINE, theirs):
            time_to_first(command, usual)
        say(f"first: {runs} pairs")
        pairs = [(time_to_first(MINE, usual), time_to_first(theirs, usual)) for _ in range(runs)]
    finally:
        servers.kill()
        servers.wait()
    seconds = [a for a, _ in pairs]
    bench.limit("start of Python to the first batch", seconds, LIMIT_S, unit="s", rounds=[figures(s) for s in seconds])
    peer = "tf.data service, servers running"
    bench.add(paired_costs(bench.name, "2 fresh local workers", peer, "s", pairs, target=1 / SHARE_OF_PEER))
    with tempfile.TemporaryDirectory() as nowhere:
        # A place for byte code that has none, and none is written: every module is compiled in this run.
        without = usual | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": nowhere}
        cold = [time_to_first(MINE, without) for _ in range(runs)]
    bench.add(paired_costs(bench.name, "with byte code", "ours without", "s", list(zip(seconds, cold))))


if __name__ == "__main__":
    main("first", run, trees_by_case=True)
