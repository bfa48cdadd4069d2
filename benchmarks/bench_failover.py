"""How long does a trainer wait when something dies or lags? Real processes, SIGKILL, every element accounted for.

A pause is the longest time between two batches from the kill on. Each epoch is read to its end and compared with what
was to come: a quick recovery that loses something is an error.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import Bench, BenchError, main, say
from os_processes import kill, wait_until
from ours.interface import LISTEN_ANYWHERE
from report import figures, paired_costs

import penstock as ps

KILLS = 20
LIMIT_S = 1.0
WATCH_S = 2.0  # after a kill
BETWEEN_S = 0.5
WORK_S = 0.002
BATCH = 16
WORKERS = 3
EPOCH = 40_000
STREAMS = 16  # of a job in deterministic order
DOWN_S = 30.0
UNSTEADY_S = 0.5  # a pause beyond it is one that a trainer notices
SLOWER = 10
LAG = 1.2
PENSTOCK = [sys.executable, "-m", "penstock"]


class Work:
    """So many seconds of waiting for an element, in any process; ten times as many in the first one that claims it."""

    def __init__(self, seconds: float, claim: str | None = None) -> None:
        self.seconds, self.claim = seconds, claim
        self.claimed: bool | None = None

    def __call__(self, x: int) -> int:
        if self.claimed is None:
            self.claimed = self.claim is not None and _create(self.claim)
        time.sleep(self.seconds * (SLOWER if self.claimed else 1))
        return x


def _create(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Reading:
    """An epoch being read, with the time of every batch."""

    def __init__(self, loader: Any, elements: int) -> None:
        self._iterator = iter(loader)
        self._elements = elements
        self._ids: list[Any] = []
        self.ended = False
        self.last_s = time.monotonic()

    def watch(self, seconds: float) -> float:
        """Read for so long; return the longest time without a batch. A wait that is under way is seen to its end."""
        longest, until = 0.0, time.monotonic() + seconds
        while not self.ended and time.monotonic() < until:
            batch = next(self._iterator, None)
            now = time.monotonic()
            if batch is None:
                self._finish()
                break
            longest, self.last_s = max(longest, now - self.last_s), now
            self._ids.append(batch)
        return longest

    def _finish(self) -> None:
        self.ended = True
        ids = np.sort(np.concatenate(self._ids))
        if not np.array_equal(ids, np.arange(self._elements)):
            counts = np.bincount(ids, minlength=self._elements)
            lost, twice = np.flatnonzero(counts == 0), np.flatnonzero(counts > 1)
            raise BenchError(
                f"{len(lost)} elements lost ({lost[:5]} ...), {len(twice)} more than once ({twice[:5]} ...)"
            )


def kill_workers(bench: Bench, case: str, dataset: ps.Dataset, order: str, *, seed: int) -> None:
    kills = 3 if bench.options.quick else KILLS
    rng = random.Random(seed)
    pauses: list[float] = []
    quiet: list[float] = []
    with ps.LocalService(workers=WORKERS, threads=1) as service, dataset.distribute(service, order=order) as loader:
        while len(pauses) < kills:
            reading = Reading(loader, EPOCH)
            reading.watch(1.0)
            while len(pauses) < kills and not reading.ended:
                quiet.append(reading.watch(BETWEEN_S))
                if len(service.worker_pids()) < WORKERS:
                    continue
                kill(rng.choice(list(service.worker_pids().values())))
                pause = reading.watch(WATCH_S)
                if not reading.ended:
                    pauses.append(pause)
            reading.watch(1e9)
    bench.limit(
        case,
        pauses,
        LIMIT_S,
        unit="s",
        rounds=[figures(pause) for pause in pauses],
        longest_between_kills_s=figures(max(quiet)),
    )


class Numbers:
    """A part of the epoch: splits that take longer than the dispatcher is down."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, part: int) -> Any:
        return range(part * self.size, (part + 1) * self.size)


class Fleet:
    """A dispatcher and workers started by hand, so that a dead dispatcher stays dead until it is started again."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.service_file = folder / "service.json"
        journal = ["--journal", str(folder / "journal"), "--service-file", str(self.service_file)]
        self._dispatching = [*PENSTOCK, "dispatcher", *LISTEN_ANYWHERE, *journal]
        self._log = (folder / "log").open("ab")
        self.dispatcher = self._run(self._dispatching)
        wait_until(self.service_file.exists, "the dispatcher's file")
        many = ["--processes", str(workers), "--threads", "1"]
        self._workers = self._run([*PENSTOCK, "worker", "--dispatcher", str(self.service_file), *many])

    def _run(self, command: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log)

    def kill_dispatcher(self) -> None:
        self.dispatcher.kill()
        self.dispatcher.wait()

    def start_dispatcher(self) -> None:
        self.dispatcher = self._run(self._dispatching)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self._workers, self.dispatcher):
            process.kill()
            process.wait()
        self._log.close()


def dispatcher_down(bench: Bench, case: str, order: str, folder: Path) -> None:
    """In relaxed order there is work as long as a split lasts; in deterministic order all splits are dealt."""
    folder.mkdir()
    down_s = 5.0 if bench.options.quick else DOWN_S
    if order == "relaxed":
        size = int(1.3 * (down_s + 5) / WORK_S)
        elements = 4 * size
        source = ps.from_generator(Numbers(size), splits=range(4))
    else:
        elements = int(STREAMS * 1.3 * (down_s + 5) / WORK_S)  # streams wait side by side
        source = ps.range(elements)
    dataset = source.map(Work(WORK_S)).batch(BATCH)
    with Fleet(folder, 2) as fleet, dataset.distribute(str(fleet.service_file), order=order) as loader:
        reading = Reading(loader, elements)
        reading.watch(2.0)
        before = reading.watch(2.0)
        fleet.kill_dispatcher()
        back = threading.Timer(down_s, fleet.start_dispatcher)
        back.start()
        pause = reading.watch(down_s)
        back.join()
        if reading.ended:
            raise BenchError("the epoch ended while the dispatcher was down: there was no work left")
        after = reading.watch(10.0)
        reading.watch(1e9)
    details = {"down_s": down_s, "longest_before_s": figures(before), "longest_after_s": figures(after)}
    bench.limit(case, [pause], UNSTEADY_S, unit="s", **details)


def slow_worker(bench: Bench, case: str, folder: Path) -> None:
    """Four workers of one thread, one of which takes ten times as long; against 3.1 of the others."""
    elements = 20_000 if bench.options.quick else 100_000
    work_s = 0.001
    with ps.LocalService(workers=1, threads=1) as service:
        sample = elements // 20
        with ps.range(sample).map(Work(work_s)).batch(BATCH).distribute(service) as loader:
            iterator = iter(loader)
            next(iterator)
            begin = time.monotonic()
            count = sum(len(batch) for batch in iterator)
            per_s = count / (time.monotonic() - begin)
    dataset = ps.range(elements).map(Work(work_s, str(folder / "slow"))).batch(BATCH)
    with ps.LocalService(workers=4, threads=1) as service, dataset.distribute(service) as loader:
        reading = Reading(loader, elements)
        reading.watch(0.1)
        begin = time.monotonic()
        reading.watch(1e9)
        seconds = time.monotonic() - begin
    ideal_s = elements / (per_s * (3 + 1 / SLOWER))
    bench.add(paired_costs(bench.name, case, "3.1 workers", "s", [(seconds, ideal_s)], target=1 / LAG))


def run(bench: Bench) -> None:
    simple = ps.range(EPOCH).map(Work(WORK_S)).batch(BATCH)
    shuffled = ps.range(EPOCH).map(Work(WORK_S)).shuffle(10_000, seed=7).batch(BATCH)
    for name, dataset in {"map(2 ms)": simple, "map(2 ms).shuffle(10,000)": shuffled}.items():
        for order in ("relaxed", "deterministic"):
            case = f"worker killed, {name}, {order}: pause"
            if bench.wants(case):
                say(f"failover: {case}")
                kill_workers(bench, case, dataset, order, seed=7)
    with tempfile.TemporaryDirectory() as folder:
        for order in ("relaxed", "deterministic"):
            case = f"dispatcher down, {order}: pause"
            if bench.wants(case):
                say(f"failover: {case}")
                dispatcher_down(bench, case, order, Path(folder) / order)
        case = "one of 4 workers ten times slower: the epoch"
        if bench.wants(case):
            say(f"failover: {case}")
            slow_worker(bench, case, Path(folder))


if __name__ == "__main__":
    main("failover", run)
