"""How long does a trainer pause when processes of its service are killed: each kind alone, and two one after the other?

A pause is the longest time without a batch, from the first kill on until reading has been steady again for a while. A
second kill comes so long after the first that it meets what the first set in motion: a process that starts, a lease
that runs, a pause between two tries. Then many are killed, one after the other, by the dice. Every case has a service
of its own, so that nothing is left over from the one before. Ends with 1 if a pause exceeds the limit.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from harness import Bench, BenchError, main, say
from os_processes import kill, wait_until

import penstock as ps

LIMIT_S = 5.0
KINDS = ("runner", "agent", "nursery", "dispatcher")
GAPS_S = (0.2, 1.0, 3.0)
QUICK_GAPS_S = (0.2,)
MANY = 20
MANY_GAPS_S = (0.2, 3.0)
SEEDS = (1, 2, 3)
WORKERS = 3
WORK_S = 0.001
BATCH = 8
EPOCH = 1_000_000_000
STEADY_S = 2.0  # without a longer pause than this, nothing is left of the kills
WATCH_S = 8.0  # at least so long after the last kill
SUPERVISOR_S = 0.5
ORDERS = ("relaxed", "deterministic")


def work(number: int) -> int:
    time.sleep(WORK_S)
    return number


@dataclass(frozen=True, slots=True)
class Kill:
    kind: str
    after_s: float = 0.0
    """Since the one before."""


class Victims:
    """The processes of a service, by kind."""

    def __init__(self, service: ps.LocalService) -> None:
        self._service = service

    def kill(self, kind: str) -> None:
        """Kill one of a kind; where there is none at the moment, because another kill took it, the next that is."""
        wait_until(lambda: any(kill(pid) for pid in self._pids(kind)[:1]), f"a {kind} to kill", pause_s=0.01)

    def _pids(self, kind: str) -> list[int]:
        nursery, *others = self._service.pids()
        runners = sorted(self._service.worker_pids().values())
        match kind:
            case "nursery":
                return [nursery]
            case "runner":
                return runners
            case "dispatcher":
                return self._dispatcher()
            case _:
                return [pid for pid in others if pid not in (*runners, *self._dispatcher())]

    def _dispatcher(self) -> list[int]:
        try:
            return [self._service.dispatcher_pid]
        except ps.PenstockError:
            return []  # it is being started


class Hosts:
    """A dispatcher and two hosts with workers, as commands. A dispatcher that is killed is started again, as whatever
    supervises it would; a host is not."""

    def __init__(self, folder: Path) -> None:
        self.service_file = str(folder / "service.json")
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._dispatcher = self._start_dispatcher()
        self._hosts = [
            self._run("worker", "--dispatcher", self.service_file, "--processes", str(WORKERS), "--threads", "1")
            for _ in range(2)
        ]

    def _start_dispatcher(self) -> subprocess.Popen[bytes]:
        journal = str(self._folder / "journal")
        return self._run("dispatcher", "--port", "0", "--journal", journal, "--service-file", self.service_file)

    def _run(self, *command: str) -> subprocess.Popen[bytes]:
        with (self._folder / "log").open("ab") as log:
            started = subprocess.Popen([sys.executable, "-m", "penstock", *command], stdout=log, stderr=log)
        self._processes.append(started)
        return started

    def kill(self, kind: str) -> None:
        process = self._dispatcher if kind == "dispatcher" else self._hosts.pop()
        process.kill()
        process.wait()
        if kind == "dispatcher":
            time.sleep(SUPERVISOR_S)
            self._dispatcher = self._start_dispatcher()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def pause_after(kills: Sequence[Kill], order: str) -> float:
    """Return the longest pause of a trainer while these processes are killed, one after the other."""
    if any(each.kind == "host" for each in kills):
        with tempfile.TemporaryDirectory() as scratch, contextlib.closing(Hosts(Path(scratch))) as hosts:
            return read_through(hosts.service_file, kills, hosts, order, workers=2 * WORKERS)
    with ps.LocalService(workers=WORKERS, threads=1) as service:
        return read_through(service, kills, Victims(service), order, workers=WORKERS)


def read_through(
    service: ps.LocalService | str, kills: Sequence[Kill], victims: Victims | Hosts, order: str, *, workers: int
) -> float:
    numbers = ps.range(EPOCH).map(work).batch(BATCH)
    with numbers.distribute(service, order=order, limits=ps.Limits(timeout_s=120)) as loader:
        batches = iter(loader)
        deadline = time.monotonic() + 60.0
        while (count := len({stream.worker for stream in loader.statistics().streams})) < workers:
            next(batches)
            if time.monotonic() > deadline:
                raise BenchError(f"{count} of {workers} workers after 60 s")
        failed: list[BaseException] = []
        killed_s: list[float] = []

        def strike() -> None:
            try:
                for each in kills:
                    time.sleep(each.after_s)
                    victims.kill(each.kind)
                    killed_s.append(time.monotonic())
            except BaseException as error:
                failed.append(error)

        striking = threading.Thread(target=strike)
        begin = last = time.monotonic()
        steady_since = begin
        longest = 0.0
        striking.start()
        while True:
            next(batches)
            now = time.monotonic()
            longest = max(longest, now - last)
            if now - last > STEADY_S / 4:
                steady_since = now
            last = now
            over = len(killed_s) == len(kills) and now - killed_s[-1] > WATCH_S
            if failed or (over and now - steady_since > STEADY_S):
                break
        striking.join()
        if failed:
            raise BenchError(f"{kills}: {failed[0]}")
    return longest


def cases(*, quick: bool) -> Iterator[tuple[str, list[Kill]]]:
    for kind in KINDS:
        yield f"{kind} killed", [Kill(kind)]
    for gap_s, (first, second) in product(QUICK_GAPS_S if quick else GAPS_S, product(KINDS, KINDS)):
        yield f"{first}, then {second} {gap_s:g} s later", [Kill(first), Kill(second, gap_s)]
    yield "host lost", [Kill("host")]
    for gap_s in QUICK_GAPS_S if quick else GAPS_S:
        yield f"host lost, then dispatcher {gap_s:g} s later", [Kill("host"), Kill("dispatcher", gap_s)]
        yield f"dispatcher, then host lost {gap_s:g} s later", [Kill("dispatcher"), Kill("host", gap_s)]
    for seed in SEEDS[:1] if quick else SEEDS:
        rng = random.Random(seed)
        kills = [Kill(rng.choice(KINDS), rng.uniform(*MANY_GAPS_S)) for _ in range(MANY)]
        yield f"{MANY} kills of all kinds, seed {seed}", kills


def run(bench: Bench) -> None:
    missed: list[str] = []
    for order in ORDERS:
        for name, kills in cases(quick=bench.options.quick):
            case = f"{order}: {name}"
            if bench.options.case not in case:
                continue
            say(f"pauses: {case}")
            result = bench.limit(case, [pause_after(kills, order)], LIMIT_S, unit="s", workers=WORKERS)
            if result.ratio < 1.0:
                missed.append(case)
    if missed:
        raise BenchError(f"a pause of more than {LIMIT_S:g} s: {'; '.join(missed)}")


if __name__ == "__main__":
    main("pauses", run)
