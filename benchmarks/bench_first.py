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

from harness import HERE, Bench, BenchError, main, say
from report import ROOT, figures, paired_costs

RUNS = 10
LIMIT_S = 0.8
SHARE_OF_PEER = 0.4
PATIENCE_S = 120
OURS = str(ROOT / ".venv" / "bin" / "python")
THEIRS = str(ROOT / ".venv-peers" / "bin" / "python")


def time_to_first(command: Sequence[str], environment: Mapping[str, str]) -> float:
    begin = time.perf_counter()  # the monotonic clock of the machine: the child reads the same
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=HERE, env=environment, timeout=PATIENCE_S
    )
    if done.returncode:
        raise BenchError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    at: float = json.loads(done.stdout.splitlines()[-1])["at"]
    return at - begin


def run(bench: Bench) -> None:
    if not os.path.exists(THEIRS):
        raise BenchError(f"no {THEIRS}; `make bench` makes it")
    runs = 3 if bench.options.quick else RUNS
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    mine = [OURS, "-m", "ours.service", "first"]
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
        for command in (mine, theirs):
            time_to_first(command, plain)
        say(f"first: {runs} pairs")
        pairs = [(time_to_first(mine, plain), time_to_first(theirs, plain)) for _ in range(runs)]
    finally:
        servers.kill()
        servers.wait()
    seconds = [a for a, _ in pairs]
    bench.limit("start of Python to the first batch", seconds, LIMIT_S, unit="s", rounds=[figures(s) for s in seconds])
    peer = "tf.data service, servers running"
    bench.add(paired_costs(bench.name, "2 fresh local workers", peer, "s", pairs, target=1 / SHARE_OF_PEER))
    with tempfile.TemporaryDirectory() as nowhere:
        # A place for byte code that has none, and none is written: every module is compiled in this run.
        without = plain | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": nowhere}
        cold = [time_to_first(mine, without) for _ in range(runs)]
    bench.add(paired_costs(bench.name, "with byte code", "ours without", "s", list(zip(seconds, cold))))


if __name__ == "__main__":
    main("first", run)
