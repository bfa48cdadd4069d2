"""The trainer's side of `experiments/offloading.py`: reads in the way it is told, as a training would, on its own host.

It is told by lines of JSON on its standard input, and answers by lines on its standard output: `ready` once the way of
reading is found and warm; then, told when to begin, how the outputs arrived. It ends with its input.

A host has so many processors and one disk, whoever uses them: they are locks on files, which a process that is killed
lets go. Work waits while it holds one, so that many hosts fit on two cores.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps

STEP_S = 0.1
PLACES = 2  # guests here, workers there: each side stands for 7 processors
PROCESSORS = 7
EPOCH = 100_000
FILES = 2_000
EPOCH_OF_CHANGES_S = 80.0  # with both places at work: an epoch that is read to its end
WARM_S = 3.0  # processes start, and what was made ahead is used up
FILES_HERE = "files only here"
CHANGES = ("slowed there", "killed there")
SLOWER = "slower"  # a host's file: how many times slower it is


def namespace() -> int:
    return os.stat("/proc/self/ns/net").st_ino


@dataclass(frozen=True)
class Hosts:
    """Two hosts as the work knows them: a folder of locks each."""

    folder: str
    trainer: int
    """The trainer's network namespace."""

    @property
    def side(self) -> str:
        return "here" if namespace() == self.trainer else "there"

    def slower(self) -> float:
        try:
            return float(Path(self.folder, self.side, SLOWER).read_text())
        except FileNotFoundError:
            return 1.0

    @contextmanager
    def processor(self) -> Iterator[None]:
        """Hold one of this host's processors."""
        names = [f"{self.folder}/{self.side}/processor-{n}" for n in range(PLACES)]
        random.shuffle(names)
        for name in names:
            with open(name) as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                yield
                return
        with self._held(names[0]):
            yield

    @contextmanager
    def _held(self, name: str) -> Iterator[None]:
        with open(name) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def disk(self) -> Iterator[None]:
        with self._held(f"{self.folder}/{self.side}/disk"):
            yield


@dataclass(frozen=True)
class Read:
    """Reads an output's raw bytes; waits for the disk of its side."""

    raw_bytes: int
    hosts: Hosts
    slow_side: str
    slow_bytes_per_s: float

    def __call__(self, number: int) -> dict[str, Any]:
        if self.hosts.side == self.slow_side:
            with self.hosts.disk():
                time.sleep(self.raw_bytes / self.slow_bytes_per_s)
        return {"id": int(number), "raw": np.zeros(self.raw_bytes, np.uint8)}


@dataclass(frozen=True)
class Prepare:
    seconds: float
    out_bytes: int
    hosts: Hosts

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        with self.hosts.processor():
            time.sleep(self.seconds * self.hosts.slower())
        return {"id": row.get("id", -1), "out": np.zeros(self.out_bytes, np.uint8)}


def seconds_each(workload: str, figures: dict[str, Any]) -> float:
    """Return how long an output keeps one of a host's processors busy."""
    return float(STEP_S * figures[workload]["processors"] * PLACES / PROCESSORS)


def rows_of(workload: str, condition: str, figures: dict[str, Any]) -> int:
    if condition not in CHANGES:
        return EPOCH
    return int(EPOCH_OF_CHANGES_S * min(1 / STEP_S, 2 * PLACES / seconds_each(workload, figures)))


def pipeline(workload: str, condition: str, figures: dict[str, Any], hosts: Hosts) -> ps.Dataset:
    own = figures[workload]
    slow = {"slow disk there": "there", "slow disk here": "here"}.get(condition, "")
    read = Read(int(own["raw_mb"] * 1e6), hosts, slow, figures["disk"]["slow_mb_per_s"] * 1e6)
    prepare = Prepare(seconds_each(workload, figures), int(own["out_mb"] * 1e6), hosts)
    if condition == FILES_HERE:
        return ps.read_files(f"/proc/self/cwd/{raw_files(workload, read.raw_bytes)}/*.bin").map(prepare, threads=PLACES)
    return ps.range(rows_of(workload, condition, figures)).map(read, threads=PLACES).map(prepare, threads=PLACES)


def raw_files(workload: str, raw_bytes: int) -> Path:
    """Return a folder of files below the working folder; they are one file, by many names."""
    folder = Path(f"raw {workload}")
    if not folder.exists():
        folder.mkdir()
        first = folder / "00000.bin"
        first.write_bytes(os.urandom(raw_bytes))
        for number in range(1, FILES):
            os.link(first, folder / f"{number:05}.bin")
    return folder


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


@dataclass
class Reading:
    """One way of reading, from the call of `offload` on."""

    loader: ps.OffloadLoader
    orders: queue.Queue[dict[str, Any]]
    rows: int
    """Of an epoch that is read to its end, and its elements counted; 0: it is not."""
    asked_at: float = field(default_factory=time.monotonic)
    ids: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    decided_s: float = 0.0

    def run(self) -> dict[str, Any]:
        begin, end, warm_at = float("inf"), float("inf"), 0.0
        for batch in self.loader:
            now = time.monotonic()
            self.ids.append(batch["id"])
            self.arrivals.append(now)
            if now > end and not self.rows:
                break
            if now < end:
                time.sleep(STEP_S)
            if not warm_at and self.loader.decision is not None:
                self.decided_s, warm_at = now - self.asked_at, now + WARM_S
            elif warm_at and now > warm_at:
                say(ready=True)
                warm_at = float("inf")
            if begin == float("inf") and not self.orders.empty():
                order = self.orders.get()
                begin, end = order["begin"], order["end"]
        return self.report()

    def report(self) -> dict[str, Any]:
        decision, profile = self.loader.decision, self.loader.profile
        assert decision is not None
        return {
            "asked_at": self.asked_at,
            "reconnects": self.loader.statistics().reconnects,
            "arrivals": self.arrivals,
            "decided_s": self.decided_s,
            "once": sorted(self.ids) == list(range(self.rows)) if self.rows else None,
            "chosen": f"{decision.cut or 'nothing'}, {decision.place}",
            "reason": decision.reason,
            "overheads": {pace.cut: pace.here_cpu_s for pace in (profile.cuts if profile is not None else ())},
        }


def listen(orders: queue.Queue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        orders.put(json.loads(line))
    os._exit(0)  # who started this is gone; guests end with it


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address")
    parser.add_argument("keys", help="of an agent")
    parser.add_argument("figures", help="as JSON")
    parser.add_argument("hosts", help="folder of the hosts' locks")
    arguments = parser.parse_args()
    figures, hosts = json.loads(arguments.figures), Hosts(arguments.hosts, namespace())
    orders: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=listen, args=(orders,), daemon=True).start()
    while True:
        order = orders.get()
        workload, condition = order["workload"], order["condition"]
        dataset = pipeline(workload, condition, figures, hosts)
        how: dict[str, Any] = {"cut": order["cut"], "place": order["place"]} if order["cut"] else {}
        offloading = ps.Offloading(
            guests=PLACES, keys=arguments.keys, model=f"{workload} {condition} {time.time()}", **how
        )
        try:
            with ps.offload(dataset, arguments.address, offloading=offloading) as loader:
                to_its_end = condition in CHANGES and not how
                rows = rows_of(workload, condition, figures) if to_its_end else 0
                found = Reading(loader, orders, rows).run()
            say(**found)
        except (ps.DataError, OSError) as error:  # the files are not there
            say(failed=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(main())
