"""WebDataset shards in an object store, every request 50 ms late: are reads kept in flight?

One server for all sides, behind a proxy that adds the latency, and behind one that adds none. 640 MB in 32 shards.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import inputs
from harness import DATA, HERE, Bench, BenchError, main, ours, peer

LATENCY_MS = 50


@contextmanager
def server(script: str, *arguments: str | Path) -> Iterator[int]:
    """Run a script of ours that prints its port, and end it afterwards."""
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    with (DATA / "logs" / f"{script}.log").open("w") as log:  # moto writes a line for each request
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        while line and not line.strip().isdigit():  # moto greets first
            line = process.stdout.readline()
        if not line:
            raise BenchError(f"{script} ended without giving a port")
        yield int(line)
    finally:
        process.kill()
        process.wait()


def run(bench: Bench) -> None:
    shards = inputs.shards()
    for kind in ("files", "moto"):
        with ExitStack() as stack:
            upstream = stack.enter_context(server("s3_server.py", kind, shards))
            near, far = (
                f"http://127.0.0.1:{stack.enter_context(server('latency_proxy.py', str(upstream), str(delay)))}"
                for delay in (0, LATENCY_MS)
            )
            mine = ours("ours.shards:samples", endpoint=far)
            peers = [
                peer("WebDataset, in process", "peers.web_dataset:samples", endpoint=far, processes=0),
                peer("WebDataset, 2 processes", "peers.web_dataset:samples", endpoint=far, processes=2),
            ]
            # moto itself is the limit (half the other's rate), which hides latency: its lines are without a target.
            held = kind == "files"
            bench.compare(f"{kind}, 50 ms", mine, peers, unit="samples/s", target=1.0 if held else None, seconds=4)
            without = ours("ours.shards:samples", name="ours without latency", endpoint=near)
            bench.compare(f"{kind}, 50 ms", mine, [without], unit="samples/s", target=0.8 if held else None, seconds=4)


if __name__ == "__main__":
    main("s3", run, trees_by_case=True)
