"""Does a job get the workers it needs? Eight real workloads, the policies side by side, and what shrinking costs.

python experiments/scaling.py [--quick] [--only NAME]     or: make experiment E=scaling

Workers wait instead of computing (`threads=1`, which counts as processor time for every policy), so that twelve of
them fit on two cores; `workloads.toml` has the figures, fixed before any policy was tuned on them. The oracle is a
sweep over fixed numbers of workers in the same run: the smallest within 3 % of the best. Costs are per batch: the
trainer's host and the workers that were held, by the prices of `workloads.toml`, search included.

Beside the workloads there are bounds (`scaling_bounds.py`): `jsonl`, `texts` and `jpegs` are data sets on which eight
workers must make 0.9 of eight times what one does; `epochs` is how idle workers are between short epochs; `shrinking`
what 2 workers make after they were 16, and `repeated` what is made twice by that. `steady` is ten minutes of a trainer
whose steps take their time +- 20 %: a number of workers that was found is kept.

--quick (two minutes) takes three of the workloads and `model_first` alone, and sweeps around the number that is needed.
Printed is a table, then every claim beside what was seen; it ends with 1 if one does not hold.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import random
import struct
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scaling_bounds import SPLITS, WORKERS, idle_between_epochs, repeated_by_shrinking, speed_up

import penstock as ps
from penstock.control.scaling_rules import PolicyName

WORKLOADS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("workloads.toml").read_text())
TRAINER_PER_H, WORKER_PER_H = WORKLOADS["prices"]["tpu-v3-8"], WORKLOADS["prices"]["worker"]
POLICIES: tuple[PolicyName, ...] = ("model_first", "cachew", "utilization", "buffers")
POOL = 12
WITHIN = 0.03
BATCHES = 20_000
"""An epoch: longer than any run."""
QUICK = ("trainer-bound", "needs-4", "two-consumers")
BOUNDS = (*SPLITS, "epochs", "shrinking", "repeated", "steady")
SHRINK_FROM, SHRINK_TO = 16, 2
SHRINK_SPEED = 5.0
"""So that a split takes six seconds, which retired streams read on."""
STEADY, STEP_NOISE, CONVERGED_S = "needs-4", 0.2, 20.0


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


@dataclass(slots=True)
class Run:
    """What became of a job."""

    batches: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    worker_s: float = 0.0
    path: list[tuple[float, int, str]] = field(default_factory=list)
    """(when, target, reason) of every decision."""

    @property
    def cost(self) -> float:
        """Of a batch."""
        return (self.seconds * TRAINER_PER_H + self.worker_s * WORKER_PER_H) / 3600 / max(self.batches, 1)


class Trainer:
    """Reads a job with all its ranks, each a thread, and takes its time for a step."""

    def __init__(
        self, name: str, work: Work, service: ps.LocalService, placement: ps.Placement, speed: float, noise: float
    ) -> None:
        """A step takes its time x (1 +- `noise`), uniformly."""
        self._speed, self._noise, self._rng = speed, noise, random.Random(11)
        self._figures = WORKLOADS["real"][name]
        self._ranks = int(self._figures.get("ranks", 1))
        self._service, self.run = service, Run()
        self._stop = threading.Event()
        self._began = time.monotonic()
        pipeline = ps.range(BATCHES).map(work, threads=1)
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
        per_s = self._figures["trainer_per_s"]
        for change in self._figures.get("changes", ()):
            if time.monotonic() - self._began >= change["at_s"]:
                per_s = change["trainer_per_s"]
        return float(self._ranks / per_s / self._speed) * self._rng.uniform(1 - self._noise, 1 + self._noise)

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
        decided = self._service.why("job")
        return Run(
            batches=sum(self._taken) - taken,
            seconds=now - began,
            waited_s=(sum(self._waited_s) - waited_s) / self._ranks,
            worker_s=worker_s,
            path=[(time.monotonic() - self._began - each.ago_s, each.target, each.reason) for each in decided],
        )

    def wait_for(self, workers: int) -> None:
        deadline = time.monotonic() + 60
        while sum(line.workers for line in self._service.jobs()) != workers:
            if time.monotonic() > deadline:
                raise RuntimeError(f"waited 60 s for {workers} workers: {self._service.jobs()}")
            time.sleep(0.05)

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
) -> Iterator[Trainer]:
    """Start a service and a trainer of a workload; `workers` is what its placement asks for."""
    figures = WORKLOADS["real"][name]
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
            trainer = Trainer(name, work, service, ps.Placement(workers=workers), speed, noise)
            try:
                yield trainer
            finally:
                trainer.close()


def sweep(name: str, numbers: range, seconds: float) -> dict[int, Run]:
    """Return what each fixed number of workers gives. The trainer is at its last speed all along."""
    found = {}
    figures = WORKLOADS["real"][name]
    changes = figures.pop("changes", ())
    before = figures["trainer_per_s"]
    if changes:
        figures["trainer_per_s"] = changes[-1]["trainer_per_s"]
    try:
        for workers in numbers:
            with trainer_of(name, workers) as trainer:
                trainer.wait_for(workers)
                time.sleep(1.5)
                found[workers] = trainer.watch(seconds)
    finally:
        figures["trainer_per_s"] = before
        if changes:
            figures["changes"] = changes
    return found


def oracle_of(found: dict[int, Run]) -> int:
    """Return the smallest number of workers within 3 % of the best."""
    rates = {workers: run.batches / run.seconds for workers, run in found.items()}
    return min(workers for workers, rate in rates.items() if rate >= max(rates.values()) * (1 - WITHIN))


@dataclass(frozen=True)
class Claim:
    text: str
    holds: bool

    def line(self) -> str:
        return f"{'yes' if self.holds else 'NO '}  {self.text}"


def judge(name: str, policy: str, run: Run, found: dict[int, Run], *, whole: bool) -> tuple[str, list[Claim]]:
    """Return a row of the table, and what is claimed of `model_first`."""
    figures, oracle = WORKLOADS["real"][name], oracle_of(found)
    changed_at = figures["changes"][-1]["at_s"] if "changes" in figures else 0.0
    reached = run.path[-1][1]
    since = [at for at, _, _ in run.path[1:] if at >= changed_at]
    settled_s = since[-1] - changed_at if since else 0.0
    ratio = run.cost / found[oracle].cost
    path = " ".join(f"{target}@{at:.0f}s" for at, target, _ in run.path)
    row = (
        f"{name:<16} {policy:<12} oracle {oracle:>2}  ended {reached:>2}  changes {len(since)}  settled "
        f"{settled_s:5.1f} s  waited {run.waited_s / run.seconds:4.0%}  cost {ratio:4.2f}x  {path}"
    )
    if policy != "model_first":
        return row, []
    claims = [
        Claim(f"{name}: {reached} workers, where the oracle has {oracle} (within 1)", abs(reached - oracle) <= 1),
        Claim(f"{name}: {len(since)} changes (2 at most)", len(since) <= 2),
        Claim(f"{name}: settled after {settled_s:.1f} s (20 at most)", settled_s <= 20.0),
    ]
    if whole:
        claims.append(Claim(f"{name}: costs {ratio:.2f} times the oracle's (1.05 at most)", ratio <= 1.05))
    return row, claims


def shrunk(seconds: float) -> tuple[float, float]:
    """Return the batches a second that 2 workers make after they were 16, and those of 2 from the beginning."""
    with trainer_of("needs-8", SHRINK_FROM, pool=SHRINK_FROM, speed=SHRINK_SPEED) as trainer:
        trainer.wait_for(SHRINK_FROM)
        time.sleep(3.0)
        trainer._service.scale("job", SHRINK_TO)
        trainer.wait_for(SHRINK_TO)
        time.sleep(25.0)  # what was granted to retired streams is read, and what was buffered
        after = trainer.watch(seconds)
    with trainer_of("needs-8", SHRINK_TO, pool=SHRINK_FROM, speed=SHRINK_SPEED) as trainer:
        trainer.wait_for(SHRINK_TO)
        time.sleep(1.5)
        fresh = trainer.watch(seconds)
    return after.batches / after.seconds, fresh.batches / fresh.seconds


def bound(name: str, *, quick: bool) -> Iterator[Claim]:
    """Run one of the bounds, print what was seen, and yield what is claimed of it."""
    if name in SPLITS:
        alone_s, together_s, count = speed_up(name)
        ratio = alone_s / together_s / WORKERS
        print(f"{name:<16} {count} elements: one worker {alone_s:.1f} s, {WORKERS} workers {together_s:.1f} s")
        yield Claim(f"{name}: {WORKERS} workers make {ratio:.2f} of {WORKERS} times (0.9 at least)", ratio >= 0.9)
    elif name == "epochs":
        epochs = 6 if quick else 20
        short, long = idle_between_epochs(epochs, 3.0)
        print(f"{name:<16} workers are idle for {short:.1%} of {epochs} epochs of 3 s, for {long:.1%} of a long one")
        more = short - long
        yield Claim(f"epochs of 3 s: idle for {more:.1%} more than in a long one (3 % at most)", more <= 0.03)
    elif name == "repeated":
        twice, moved, most = repeated_by_shrinking(SHRINK_FROM, SHRINK_TO)
        print(
            f"{name:<16} {SHRINK_FROM} to {SHRINK_TO} workers: {twice} elements were made twice, {moved} streams moved"
        )
        yield Claim(f"a scale-down repeats {twice} elements ({most} at most: a split for each stream)", twice <= most)
    elif name == "steady":
        with trainer_of(STEADY, "auto", noise=STEP_NOISE) as trainer:
            run = trainer.watch(60.0 if quick else 600.0)
        late = [(at, target, reason) for at, target, reason in run.path[1:] if at > CONVERGED_S]
        print(f"{name:<16} " + " ".join(f"{target}@{at:.0f}s" for at, target, _ in run.path))
        text = f"steps of +- {STEP_NOISE:.0%} for {run.seconds:.0f} s: {len(late)} changes once converged (none)"
        yield Claim(text, not late)
    else:
        pairs = [shrunk(8.0) for _ in range(1 if quick else 6)]
        ratios = sorted(after / fresh for after, fresh in pairs)
        middle = ratios[len(ratios) // 2]
        print("shrinking        " + "  ".join(f"{after:.1f}/s against {fresh:.1f}/s" for after, fresh in pairs))
        text = f"{SHRINK_FROM} to {SHRINK_TO} workers: {middle:.2f} of a fresh {SHRINK_TO} (0.95 at least)"
        yield Claim(text, middle >= 0.95)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three workloads, model_first alone: two minutes")
    parser.add_argument("--only", choices=[*WORKLOADS["real"], *BOUNDS], help="one of the workloads, or a bound")
    given = parser.parse_args()
    names = [given.only] if given.only else list(QUICK) if given.quick else [*WORKLOADS["real"], *BOUNDS]
    claims: list[Claim] = []
    for name in names:
        if name in BOUNDS:
            claims += bound(name, quick=given.quick)
            continue
        needs = WORKLOADS["real"][name]["needs"]
        numbers = range(max(1, needs - 1), needs + 2) if given.quick else range(1, POOL + 1)
        found = sweep(name, numbers, 3.0 if given.quick else 10.0)
        print(f"{name:<16} " + "  ".join(f"{n}: {run.batches / run.seconds:.1f}/s" for n, run in found.items()))
        for policy in POLICIES[:1] if given.quick else POLICIES:
            with trainer_of(name, "auto", policy=policy) as trainer:
                run = trainer.watch(22.0 if given.quick else 180.0)
            row, more = judge(name, policy, run, found, whole=not given.quick)
            print(row, flush=True)
            claims += more
    print()
    for claim in claims:
        print(claim.line())
    return 0 if all(claim.holds for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
