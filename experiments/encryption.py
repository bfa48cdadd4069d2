"""What encryption costs: the ways between processes of one host, side by side.

    python experiments/encryption.py [--seconds 3] [--rounds 3]

Round trips of a small request, and batches of 64 KB and 4 MB through one worker process of one thread, in turns: by
Unix sockets with memory slabs (the default of one host), by Unix sockets with the bytes in them, and by loopback TCP,
which is CURVE like any other TCP. It prints a table of medians, and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import penstock as ps
from penstock.processes.service_processes import ServiceOptions, ServiceProcesses
from penstock.wire.addresses import Listening
from penstock.wire.control import ControlClient
from penstock.wire.messages import ListJobs

WAYS = {
    "Unix sockets and slabs": (None, ""),
    "Unix sockets": (None, "1"),
    "TCP, encrypted": (Listening(), "1"),
}
SIZES = {"64 KB": 64 << 10, "4 MB": 4 << 20}
READY_S = 60.0
MANY = 1 << 30


class Filled:
    """Makes batches of so many bytes, each filled with its number."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __call__(self, number: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        return np.full(self.nbytes, number % 251, np.uint8)


@contextmanager
def service(way: str) -> Iterator[tuple[ServiceProcesses, Path]]:
    listening, without_slabs = WAYS[way]
    os.environ["PENSTOCK_NO_SLABS"] = without_slabs
    if not without_slabs:
        del os.environ["PENSTOCK_NO_SLABS"]
    processes = ServiceProcesses(ServiceOptions(workers=1, threads=1, listening=listening))
    try:
        processes.wait_ready(READY_S)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "service.json"
            processes.service_file().write(file)
            yield processes, file
    finally:
        processes.close()


def round_trip_us(processes: ServiceProcesses, seconds: float) -> float:
    """Return the median of a small request's time to its answer."""
    times: list[float] = []
    file = processes.service_file()
    with ControlClient(file.address, file.credentials, name="experiment") as control:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            began = time.perf_counter()
            control.ask(ListJobs(), timeout_s=READY_S, what="a round trip")
            times.append(time.perf_counter() - began)
    return statistics.median(times[len(times) // 10 :]) * 1e6


def megabytes_per_s(file: Path, nbytes: int, seconds: float) -> float:
    """Return how much comes through; every batch is looked at."""
    dataset = ps.range(MANY).map(Filled(nbytes))
    with dataset.distribute(file, limits=ps.Limits(timeout_s=READY_S)) as loader:
        epoch, read = iter(loader), 0
        for number in range(20):
            assert next(epoch)[-1] == number % 251
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            batch = next(epoch)
            assert batch[0] == batch[-1] == (read + 20) % 251
            read += 1
        return read * nbytes / (time.monotonic() - began) / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {way: {} for way in WAYS}
    for _ in range(options.rounds):
        for way in WAYS:
            with service(way) as (processes, file):
                found[way].setdefault("round trip, us", []).append(round_trip_us(processes, options.seconds))
                for name, nbytes in SIZES.items():
                    rate = megabytes_per_s(file, nbytes, options.seconds)
                    found[way].setdefault(f"{name} batches, MB/s", []).append(rate)
    medians = {way: {name: round(statistics.median(seen)) for name, seen in row.items()} for way, row in found.items()}
    columns = list(medians["Unix sockets"])
    print("  ".join(["way".ljust(24), *columns]))
    for way, row in medians.items():
        print("  ".join([way.ljust(24), *(f"{row[name]:,}".rjust(len(name)) for name in columns)]))
    print(json.dumps({"experiment": "encryption", "medians": medians, "all": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
