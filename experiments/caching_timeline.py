"""Caching and scaling over time, by figures 2, 9 and 11 of Cachew (ATC 2022), beside Cachew's own policy.

python experiments/caching_timeline.py [--plot FILE]     or: make experiment E=caching_timeline

What decides is what runs in a service: `policies.cache_judging` for what is kept, `policies.scaling.model_first` for
the number of workers. Trainers, workers and storage are fluids, since the figures have TPUs and eight workers. A job
goes over its splits, each computed, put or got, at the pace of the slowest of workers, storage and trainer; what was
kept by one job another finds. Cachew's side is its rules as the paper has them: the table for the storage, the mode of
an epoch decided before it begins, workers found one by one, from one on after each change of mode.

Figure 2 is three pipelines in each mode: caching does not always help. Figure 9 is RetinaNet's first four epochs, with
as many workers as are wanted and with two. Figure 11 is two jobs on one pipeline, of which the second takes twice as
much. Printed is a table for each, and the claims beside what was seen. It ends with 1 if one does not hold.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from fleet_claims import Claim, Curve, at_most, near, plot
from msgspec import structs

from penstock.policies.cache_judging import CacheEvidence, CacheVerdict, judge
from penstock.policies.caching import (
    CacheDemand,
    PipelineProfile,
    PointProfile,
    StorageModel,
    StorageSpeed,
    cachew_choice,
)
from penstock.policies.scaling import cachew, model_first
from penstock.policies.scaling.records import Measured, ReaderPace, ScalingLimits

ROOT = Path(__file__).resolve().parent.parent
SPLITS = 200
WINDOW_S = 5.0  # after which figures go to a policy
MEASURE_S, TRY_S = 1.5, 1.0  # what a profile and a trial take
PROFILE_BATCHES = 100  # of Cachew's profile, on one worker
FULL = 0.97
LETTERS = "c computing, p putting, g getting"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A trainer and its pipeline. Rates are batches a second: of one worker, or, of storage, in all."""

    name: str
    trainer_per_s: float
    compute_per_s: float
    source_got_per_s: float
    """A worker's, where the source is kept and the rest computed."""
    got_per_s: float
    epoch_batches: float
    source_gives: float = 1e9
    cache_gives_source: float = 1e9
    cache_gives: float = 1e9
    batch_bytes: tuple[float, float] = (1e6, 1e6)
    """After the source, and at the end."""

    def made(self, mode: int, workers: float) -> float:
        """Return what workers make: computing (0), got at a point, or put there (its negative)."""
        rate = (self.compute_per_s, self.source_got_per_s, self.got_per_s)[max(0, mode)]
        storage = (self.source_gives, self.cache_gives_source, self.cache_gives)[max(0, mode)]
        return min(workers * rate, storage)

    def best(self, workers: float) -> float:
        return max(min(self.made(mode, workers), self.trainer_per_s) for mode in range(3))

    def needed(self, mode: int, most: int) -> int:
        """Return the oracle's number of workers: the fewest that bring what can be had, but for 3 %."""
        goal = min(self.made(mode, most), self.trainer_per_s) / 1.03
        return next(n for n in range(1, most + 1) if self.made(mode, n) >= goal)

    def storage(self) -> StorageModel:
        fastest = min(self.cache_gives * self.batch_bytes[1], self.cache_gives_source * self.batch_bytes[0])
        speed = StorageSpeed(nbytes=1 << 20, parallel=4, latency_s=0.001, bytes_per_s=fastest)
        return StorageModel(reads=(speed,), writes=(speed,))

    def profile(self, workers: float) -> PipelineProfile:
        whole = 1 / self.compute_per_s
        rests = (1 / self.source_got_per_s, 1 / self.got_per_s)
        return PipelineProfile(
            cpu_s=whole,
            gil_s=0.0,
            source_s=1 / self.source_gives,
            seen_s=workers / min(self.made(0, workers), self.trainer_per_s),
            trainer_s=1 / self.trainer_per_s,
            points=tuple(
                PointProfile(number=number, cpu_s=whole - rest, gil_s=0.0, nbytes=nbytes)
                for number, (rest, nbytes) in enumerate(zip(rests, self.batch_bytes), 1)
            ),
        )


@dataclass
class Shared:
    """What is kept of a pipeline: by split, the point at which."""

    kept: dict[int, int] = field(default_factory=dict)


@dataclass
class Timeline:
    """What became of a job."""

    workload: Workload
    most: int
    now: float = 0.0
    workers: int = 1
    epochs: list[float] = field(default_factory=list)
    points: list[tuple[float, int, int, float]] = field(default_factory=list)
    """(when, workers, mode, seconds a batch), split by split."""
    computed: float = 0.0
    """How often the data was computed."""
    worker_s: float = 0.0
    switched_at: float | None = None
    """When the number of workers for getting was asked for."""
    _window: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def split(self, mode: int) -> float:
        """Go over a split; return how long it took."""
        load = self.workload
        taken = min(load.made(mode, self.workers), load.trainer_per_s)
        took = load.epoch_batches / SPLITS / taken
        self.now += took
        self.worker_s += self.workers * took
        self.computed += (mode <= 0) / SPLITS
        self.points.append((self.now, self.workers, mode, 1 / taken))
        began, batches, made = self._window
        self._window = began, batches + taken * took, made + load.made(mode, self.workers) * took
        return took

    def window(self) -> Measured | None:
        """Return the figures of a window that is full."""
        began, batches, made = self._window
        seconds = self.now - began
        if seconds < WINDOW_S:
            return None
        self._window = self.now, 0.0, 0.0
        taken, could = batches / seconds, made / seconds
        pace = ReaderPace(
            batches=batches,
            step_s=1 / self.workload.trainer_per_s,
            wait_s=max(0.0, 1 / taken - 1 / self.workload.trainer_per_s),
        )
        busy = taken / max(could, taken)
        rate = could / self.workers if busy >= FULL else None
        ahead = could / taken - 1
        return Measured(
            seconds=seconds,
            workers=self.workers,
            pace=pace,
            worker_per_s=rate,
            busy=busy,
            queue=min(10 * ahead, 16.0),
            buffered=min(20 * ahead, 16.0),
        )

    def path(self) -> str:
        found: list[str] = []
        for _, workers, mode, _ in self.points:
            name = f"{workers}{'c' if not mode else 'p' if mode < 0 else 'g'}"
            if not found or found[-1] != name:
                found.append(name)
        return " ".join(found)


def run_ours(load: Workload, *, epochs: int, most: int, shared: Shared, start_s: float = 0.0) -> Timeline:
    """The decisions of a service: judged from the first second on, split by split."""
    line = Timeline(load, most, now=start_s, _window=(start_s, 0.0, 0.0))
    limits, memory, verdict = ScalingLimits(most=most), model_first.begin(), CacheVerdict()
    measured_s = got_s = 0.0
    for epoch in range(epochs):
        began = line.now
        for split in range(SPLITS):
            point = verdict.point
            mode = point if point and shared.kept.get(split) == point else -point
            took = line.split(mode)
            if mode < 0:
                shared.kept[split] = point
            measured_s, got_s = (measured_s + took, 0.0) if mode <= 0 else (0.0, got_s + took)
            demand = CacheDemand(epochs_left=epochs - epoch, workers=line.workers, max_workers=most)
            evidence = CacheEvidence(number=verdict.number, storage=load.storage())
            if verdict.step == "trying" and measured_s >= TRY_S:
                speed = load.storage().reads[0].bytes_per_s
                evidence = structs.replace(evidence, read_back_bytes_per_s=speed)
            elif mode > 0 and got_s >= MEASURE_S:
                evidence = structs.replace(evidence, got_s={mode: line.workers / load.made(mode, line.workers)})
            elif mode == 0 and measured_s >= MEASURE_S:
                evidence = structs.replace(evidence, profile=load.profile(line.workers))
            was_getting = verdict.is_getting
            before, verdict = verdict.number, judge(verdict, evidence, demand)
            if verdict.number != before:
                measured_s = 0.0
            if verdict.is_getting and not was_getting:
                memory = model_first.with_rate(memory, load.made(verdict.point, 1))
                line.workers = limits.clip(memory.held or line.workers)
                line.switched_at = line.now
            if (measured := line.window()) is not None:
                memory, target = model_first.decide(memory, measured, limits, line.now)
                line.workers = max(1, target.workers)
        line.epochs.append(line.now - began)
    return line


def run_cachew(load: Workload, *, epochs: int, most: int, shared: Shared, start_s: float = 0.0) -> Timeline:
    """The paper's rules: an epoch has one mode, and scaling begins anew with each."""
    line = Timeline(load, most, now=start_s, _window=(start_s, 0.0, 0.0))
    limits = ScalingLimits(most=most)
    chosen, last = cachew_choice(load.profile(1)).point, None
    memory = cachew.begin()
    for epoch in range(epochs):
        began = line.now
        complete = chosen and all(shared.kept.get(split) == chosen for split in range(SPLITS))
        mode = chosen if complete else 0 if epoch == 0 else -chosen
        if mode != last:
            memory, line.workers, last = cachew.begin(), 1, mode
        profiled = 0.0
        for split in range(SPLITS):
            line.split(mode)
            if mode < 0:
                shared.kept[split] = chosen
            profiled += load.epoch_batches / SPLITS
            if mode == 0 and epoch == 0 and profiled < PROFILE_BATCHES:
                continue  # one worker is profiled, and scaling waits
            if (measured := line.window()) is not None:
                memory, target = cachew.decide(memory, measured, limits, line.now)
                line.workers = max(1, target.workers)
        line.epochs.append(line.now - began)
    return line


RETINANET = Workload(
    # Four workers feed the trainer by computing (figure 1); kept at the end, one worker and a half do.
    name="RetinaNet",
    trainer_per_s=4.0,
    compute_per_s=1.0,
    source_got_per_s=1.2,
    got_per_s=2.5,
    epoch_batches=4000,
)
RESNET = Workload(
    # Epochs of 366 s on three workers that compute, and of 253 s when the trainer is the bound (A.5.2).
    name="ResNet, first job",
    trainer_per_s=20.0,
    compute_per_s=4.6,
    source_got_per_s=5.0,
    got_per_s=10.0,
    epoch_batches=5060,
)
FIGURE_2 = (
    replace(RETINANET, name="function-bound"),
    replace(
        RETINANET,
        name="cache-bound",  # what the function makes is ten times larger than the source, on one disk
        trainer_per_s=20.0,
        compute_per_s=3.0,
        source_got_per_s=3.1,
        got_per_s=9.0,
        cache_gives=4.0,
        cache_gives_source=40.0,
        batch_bytes=(10e6, 100e6),
    ),
    replace(RETINANET, name="trainer-bound", trainer_per_s=1.5, compute_per_s=1.0),
)
FIGURE_2_WORKERS = 2


def figure_2(claims: list[Claim]) -> None:
    print(f"\nFigure 2: batches a second, {FIGURE_2_WORKERS} workers")
    print("pipeline         compute  source kept  end kept  chosen  of best  by the table  of best")
    for load in FIGURE_2:
        rates = [min(load.made(mode, FIGURE_2_WORKERS), load.trainer_per_s) for mode in range(3)]
        line = run_ours(load, epochs=12, most=FIGURE_2_WORKERS, shared=Shared())
        ours, table = line.points[-1][2], cachew_choice(load.profile(1)).point
        print(
            f"{load.name:15} {rates[0]:8.2f}  {rates[1]:11.2f}  {rates[2]:8.2f}  {ours:6}  "
            f"{rates[ours] / max(rates):7.2f}  {table:12}  {rates[table] / max(rates):7.2f}"
        )
        claims.append(at_most(f"figure 2, {load.name}: the best mode over the chosen", max(rates) / rates[ours], 1.05))


def told(name: str, line: Timeline) -> None:
    epochs = "  ".join(f"{seconds:7.0f}" for seconds in line.epochs)
    print(
        f"{name:24} {epochs}   computed {line.computed:4.2f} x   {line.worker_s / 3600:5.2f} worker hours   "
        f"{line.path()}"
    )


def curve_of(panel: str, label: str, line: Timeline) -> Curve:
    times, workers = [at for at, *_ in line.points], [float(workers) for _, workers, *_ in line.points]
    return Curve(panel, label, times, workers, ("seconds", "workers"))


def figure_9(claims: list[Claim], curves: list[Curve]) -> None:
    for most in (8, 2):
        print(f"\nFigure 9: RetinaNet, at most {most} workers: seconds an epoch, then workers ({LETTERS})")
        ours = run_ours(RETINANET, epochs=4, most=most, shared=Shared())
        theirs = run_cachew(RETINANET, epochs=4, most=most, shared=Shared())
        told("ours", ours)
        told("Cachew's policy", theirs)
        floor = 4 * RETINANET.epoch_batches / RETINANET.best(most)
        claims.append(at_most(f"figure 9, {most} workers: four epochs against Cachew's", ours.now / theirs.now, 1.0))
        first = RETINANET.epoch_batches / min(RETINANET.made(0, most), RETINANET.trainer_per_s)
        possible = floor / 4 * 3 + first
        claims.append(
            at_most(
                f"figure 9, {most} workers: against the best mode, put in the first epoch", ours.now / possible, 1.05
            )
        )
        for name, line in (("ours", ours), ("Cachew", theirs)):
            curves.append(curve_of(f"Figure 9, at most {most} workers", name, line))
        if ours.switched_at is not None:
            after = next(n for at, n, *_ in ours.points if at >= ours.switched_at + WINDOW_S)
            off = abs(after - RETINANET.needed(2, most))
            claims.append(at_most(f"figure 9, {most} workers: off the oracle one report after the switch", off, 1))


def figure_11(claims: list[Claim], curves: list[Curve]) -> None:
    second = replace(RESNET, name="ResNet, second job", trainer_per_s=2 * RESNET.trainer_per_s)
    print("\nFigure 11: two jobs on one pipeline, at most 4 workers each; the second begins when the first gets")
    for name, run in (("ours", run_ours), ("Cachew", run_cachew)):
        shared = Shared()
        one = run(RESNET, epochs=4, most=4, shared=shared)
        other = run(second, epochs=4, most=4, shared=shared, start_s=sum(one.epochs[:2]))
        told(f"{name}, first job", one)
        told(f"{name}, second job", other)
        for line, label in ((one, "first"), (other, "second")):
            curves.append(curve_of(f"Figure 11, {label} job", name, line))
        if name == "ours":
            claims.append(at_most("figure 11: off two workers, the first job at its end", abs(one.workers - 2), 1))
            claims.append(at_most("figure 11: off four workers, the second job at its end", abs(other.workers - 4), 1))
            claims.append(at_most("figure 11: how often the second job computes", other.computed, 0.1))
            ours = one, other
        else:
            claims.append(
                near(
                    "figure 11, Cachew's first job by the paper's rules: a getting epoch",
                    one.epochs[-1],
                    253.0,
                    predicted=False,
                )
            )
            claims.append(at_most("figure 11, first job against Cachew's", sum(ours[0].epochs) / sum(one.epochs), 1.0))
            claims.append(
                at_most("figure 11, second job against Cachew's", sum(ours[1].epochs) / sum(other.epochs), 1.0)
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", type=Path, default=ROOT / "build" / "experiments" / "caching_timeline.png")
    options = parser.parse_args()
    claims: list[Claim] = []
    curves: list[Curve] = []
    figure_2(claims)
    figure_9(claims, curves)
    figure_11(claims, curves)
    print()
    for claim in claims:
        print(claim.line())
    plot(curves, claims, options.plot)
    print(f"plot: {options.plot}")
    return 0 if all(claim.holds for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
