"""The eight workloads of `experiments/scaling.py`: what a worker does for a batch, and who trains.

Workers wait instead of computing (`threads=1`, which counts as processor time for every policy), so that twelve of
them fit on two cores. `workloads.toml` has the figures, fixed before any policy was tuned on them.
"""

from __future__ import annotations

import fcntl
import os
import random
import struct
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import penstock as ps
from penstock.control.scaling_rules import PolicyName

_FILE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("workloads.toml").read_text())
WORKLOADS: dict[str, dict[str, Any]] = _FILE["real"]
TRAINER_PER_H: float = _FILE["prices"]["tpu-v3-8"]
WORKER_PER_H: float = _FILE["prices"]["worker"]
POOL = 12
BATCHES = 20_000
"""An epoch: longer than three minutes of any workload, whatever is made and not taken."""


@dataclass(frozen=True)
class Work:
    """What a worker does for a batch: waits for its share of the storage, then for its processor."""

    seconds: float
    storage_gap_s: float
    contention: float
    folder: str

    def __call__(self, number: int) -> int:
        seconds = self.seconds
        if self.contention:
            mine = Path(self.folder, f"worker-{os.getpid()}")
            mine.touch()
            now = time.time()
            there = sum(now - path.stat().st_mtime < 1.0 for path in Path(self.folder).glob("worker-*"))
            seconds *= 1 + self.contention * max(there - 1, 0)
        began = time.perf_counter()
        if self.storage_gap_s:
            self._read_storage()
        time.sleep(max(0.0, seconds - (time.perf_counter() - began)))
        return number

    def _read_storage(self) -> None:
        """Wait for the next turn at a storage that gives so much in all."""
        path = Path(self.folder, "storage")
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            (free_at,) = struct.unpack("d", file.read(8))
            turn = max(time.monotonic(), free_at)
            file.seek(0)
            file.write(struct.pack("d", turn + self.storage_gap_s))
        time.sleep(max(0.0, turn - time.monotonic()))


class Decided(msgspec.Struct, frozen=True):
    """A decision: when, counted from the trainer's beginning, and for how many workers."""

    at_s: float
    target: int
    reason: str


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What a job did in some time."""

    batches: int
    seconds: float
    waited_s: float
    """Of a rank, on average."""
    worker_s: float
    """What its workers were held for, together."""
    path: tuple[Decided, ...] = ()
    """Every decision that changed the target."""

    @property
    def per_s(self) -> float:
        return self.batches / self.seconds

    @property
    def paid(self) -> float:
        """The trainer's host and the workers that were held, search included."""
        return (self.seconds * TRAINER_PER_H + self.worker_s * WORKER_PER_H) / 3600


def phases(name: str) -> list[tuple[float, float]]:
    """Return when a workload's trainer begins to take how many batches a second.

    >>> phases("halves")
    [(0.0, 60.0), (90.0, 30.0)]
    """
    figures = WORKLOADS[name]
    later = [(change["at_s"], change["trainer_per_s"]) for change in figures.get("changes", ())]
    return [(0.0, figures["trainer_per_s"]), *later]


class Trainer:
    """Reads a job with all its ranks, each a thread, and takes its time for a step."""

    def __init__(
        self,
        name: str,
        work: Work,
        service: ps.LocalService,
        placement: ps.Placement,
        *,
        speed: float,
        noise: float,
        batches: int,
    ) -> None:
        """A step takes its time x (1 +- `noise`), uniformly."""
        self._speed, self._noise, self._rng = speed, noise, random.Random(11)
        self._phases = phases(name)
        self.takes_per_s: float | None = None
        """Set: at this speed all along, whatever the workload says."""
        self._ranks = int(WORKLOADS[name].get("ranks", 1))
        self._service = service
        self._stop = threading.Event()
        self._began = time.monotonic()
        self._batches = batches
        pipeline = ps.range(batches).map(work, threads=1)
        self._loaders = [
            pipeline.distribute(
                service,
                job="job",
                ranks=ps.Ranks(self._ranks, rank),
                placement=placement,
                limits=ps.Limits(timeout_s=60),
            )
            for rank in range(self._ranks)
        ]
        self._taken, self._waited_s = [0] * self._ranks, [0.0] * self._ranks
        self._threads = [threading.Thread(target=self._read, args=(rank,)) for rank in range(self._ranks)]
        for thread in self._threads:
            thread.start()

    def _step_s(self) -> float:
        since = time.monotonic() - self._began
        per_s = self.takes_per_s or [takes for at, takes in self._phases if since >= at][-1]
        return self._ranks / per_s / self._speed * self._rng.uniform(1 - self._noise, 1 + self._noise)

    def _read(self, rank: int) -> None:
        batches = iter(self._loaders[rank])
        while not self._stop.is_set():
            asked = time.perf_counter()
            next(batches)
            self._waited_s[rank] += time.perf_counter() - asked
            self._taken[rank] += 1
            time.sleep(self._step_s())

    def watch(self, seconds: float) -> Run:
        """Let it run for so long; return what happened in that time."""
        taken, waited_s, worker_s = sum(self._taken), sum(self._waited_s), 0.0
        began = last = time.monotonic()
        while (now := time.monotonic()) - began < seconds:
            time.sleep(0.25)
            held = sum(line.workers for line in self._service.jobs())
            worker_s += held * (time.monotonic() - last)
            last = time.monotonic()
        if not all(thread.is_alive() for thread in self._threads):
            raise RuntimeError(f"an epoch of {self._batches} batches was read to its end")
        return Run(
            batches=sum(self._taken) - taken,
            seconds=now - began,
            waited_s=(sum(self._waited_s) - waited_s) / self._ranks,
            worker_s=worker_s,
            path=self._path(),
        )

    def _path(self) -> tuple[Decided, ...]:
        path: list[Decided] = []
        for each in self._service.why("job"):
            if not path or each.target != path[-1].target:
                at_s = time.monotonic() - self._began - each.ago_s
                path.append(Decided(at_s, each.target, each.reason))
        return tuple(path)

    def wait_for(self, workers: int) -> None:
        deadline = time.monotonic() + 60
        while sum(line.workers for line in self._service.jobs()) != workers:
            if time.monotonic() > deadline:
                raise RuntimeError(f"waited 60 s for {workers} workers: {self._service.jobs()}")
            time.sleep(0.05)

    def scale(self, workers: int) -> None:
        self._service.scale("job", workers)
        self.wait_for(workers)

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
        for loader in self._loaders:
            loader.close()


@contextmanager
def trainer_of(
    name: str,
    workers: Any,
    *,
    pool: int = POOL,
    policy: PolicyName = "model_first",
    speed: float = 1.0,
    noise: float = 0.0,
    batches: int = BATCHES,
) -> Iterator[Trainer]:
    """Start a service and a trainer of a workload; `workers` is what its placement asks for, `batches` an epoch."""
    figures = WORKLOADS[name]
    storage = figures.get("storage_per_s")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "storage").write_bytes(struct.pack("d", 0.0))
        work = Work(
            seconds=1 / figures["worker_per_s"] / speed,
            storage_gap_s=1 / storage if storage else 0.0,
            contention=figures.get("contention", 0.0),
            folder=folder,
        )
        with ps.LocalService(workers=pool, threads=1, scaling={"policy": policy}) as service:
            placement = ps.Placement(workers=workers)
            trainer = Trainer(name, work, service, placement, speed=speed, noise=noise, batches=batches)
            try:
                yield trainer
            finally:
                trainer.close()


def sweep(name: str, numbers: range, seconds: float) -> dict[int, list[Run]]:
    """Return what each fixed number of workers gives, at each speed the trainer ever has. Numbers go up.

    Each speed has a trainer of its own: what is made for a slow one and not taken would feed the fast one after it.
    """
    found: dict[int, list[Run]] = {workers: [] for workers in numbers}
    for _, per_s in phases(name):
        with trainer_of(name, numbers[0]) as trainer:
            trainer.takes_per_s = per_s
            trainer.wait_for(numbers[0])
            for workers in numbers:
                trainer.scale(workers)
                time.sleep(1.5)
                found[workers].append(trainer.watch(seconds))
    return found
