"""A fleet as fluids: real policies and real allotting, over thousands of workers and days, in minutes.

Nothing is queued, sent or computed: a job is a demand, a worker a rate, storage and the network between regions a
limit. Once a beat every job's figures go to its policy, the targets of all to `allot`, and workers that change hands
are lost for the time that a move takes. What is judged is what would run: `policies.scaling` and `policies.allotting`.

    made  = n x rate / (1 + contention x (n - 1))     n: its workers; those in another region by what the network gives
    given = max-min fair shares of the storage that jobs read from
    taken = min(made, given, demand)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from msgspec import structs

from penstock.policies.allotting import Allotment, JobClaim, PoolWorker, allot
from penstock.policies.scaling import model_first
from penstock.policies.scaling.records import Measured, ReaderPace, ScalingLimits, ScalingPolicy

FULL = 0.97
"""Workers that are busy for more of their time are not held back by credit."""
MOST_QUEUED = 16.0

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetJob:
    """A trainer and its pipeline. Rates are batches a second; for `contention` see the formula above."""

    name: str
    trainer_per_s: float
    worker_per_s: float
    contention: float = 0.0
    storage_per_s: float = np.inf
    """What the storage gives to this job alone."""
    storage: str = ""
    """The storage it shares with others; empty: none that could be a limit."""
    processor: float = 1.0
    """The share of its processor that a worker uses at full speed."""
    ranks: int = 1
    starts_s: float = 0.0
    ends_s: float = np.inf
    batches: float = np.inf
    """After so many it ends."""
    changes: tuple[tuple[float, float], ...] = ()
    """(when, the trainer's demand from then on), by the job's own time."""
    noise: float = 0.0
    """A window's demand is off by up to this share."""
    weight: float = 1.0
    priority: int = 0
    owner: str = ""
    kinds: frozenset[str] = frozenset()
    """The kinds of workers (regions) it may have; empty: all."""
    region: str = ""
    """Where its data is; empty: everywhere."""
    limits: ScalingLimits = field(default_factory=ScalingLimits)

    def demand_at(self, age_s: float) -> float:
        """
        >>> job = FleetJob(name="j", trainer_per_s=8.0, worker_per_s=1.0, changes=((60.0, 16.0),))
        >>> job.demand_at(59.0), job.demand_at(60.0)
        (8.0, 16.0)
        """
        demand = self.trainer_per_s
        for at_s, changed in self.changes:
            demand = changed if age_s >= at_s else demand
        return demand

    def made(self, workers: float) -> float:
        """Return what so many workers make, none of them far from the data.

        >>> FleetJob(name="j", trainer_per_s=8.0, worker_per_s=1.0, contention=0.1).made(11)
        5.5
        """
        return min(workers * self.worker_per_s / (1 + self.contention * max(workers - 1, 0)), self.storage_per_s)

    def taken(self, workers: float) -> float:
        """Return what its trainer gets of so many."""
        return min(self.made(workers), self.trainer_per_s)


@dataclass(slots=True)
class JobRecord:
    """What became of a job."""

    path: list[tuple[float, int, str]] = field(default_factory=list)
    """(when, workers wanted, why) of every change."""
    batches: float = 0.0
    reading_s: float = 0.0
    waiting_s: float = 0.0
    worker_s: float = 0.0
    used_s: float = 0.0
    """Of it, the share in which workers were busy."""
    ended_s: float | None = None

    def read(self, seconds: float, *, per_s: float, waiting: float, workers: float, busy: float) -> None:
        """It was read for so long: batches a second, the trainer's share of waiting, workers, and their use."""
        self.batches += per_s * seconds
        self.reading_s += seconds
        self.waiting_s += waiting * seconds
        self.worker_s += workers * seconds
        self.used_s += workers * busy * seconds

    def end(self, now: float) -> None:
        self.ended_s = now

    @property
    def workers(self) -> int:
        """The last number that was wanted."""
        return self.path[-1][1] if self.path else 0


@dataclass(slots=True)
class FleetRecord:
    """What became of a fleet, beat by beat."""

    jobs: dict[str, JobRecord]
    times: list[float] = field(default_factory=list)
    wanted: list[float] = field(default_factory=list)
    held: list[float] = field(default_factory=list)
    used: list[float] = field(default_factory=list)
    """Workers' worth of work that was done for trainers."""
    possible: list[float] = field(default_factory=list)
    """The same, had everybody known everything and moved nothing: fair shares of the pool by what jobs really need."""
    crossed: list[float] = field(default_factory=list)
    """Batches a second that were read from another region."""

    @property
    def utilization(self) -> float:
        """What was done of what was possible."""
        return sum(self.used) / max(sum(self.possible), 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLimits:
    """What all jobs of a fleet share besides workers."""

    storages: Mapping[str, float] = field(default_factory=dict)
    """What a storage gives in all, in batches a second."""
    crossing_per_s: float = np.inf
    """Batches a second that can be read from other regions, in all."""
    quotas: Mapping[str, float] = field(default_factory=dict)


class Fleet:
    """Runs jobs on a pool. `fixed` gives each job so many workers for good, instead of a policy."""

    def __init__(
        self,
        jobs: Sequence[FleetJob],
        pool: Sequence[PoolWorker],
        *,
        policy: ScalingPolicy[Any] = model_first,
        begin: Callable[[], Any] | None = None,
        beat_s: float = 60.0,
        move_s: float = 5.0,
        limits: FleetLimits | None = None,
        fixed: Mapping[str, int] | None = None,
        seed: int = 0,
    ) -> None:
        self.jobs, self.pool, self.policy, self.beat_s, self.move_s = tuple(jobs), tuple(pool), policy, beat_s, move_s
        self._limits, self._fixed = limits or FleetLimits(), fixed
        self._kinds = {worker.worker: worker.kind for worker in self.pool}
        self._sizes = {worker.worker: worker.size for worker in self.pool}
        self._memories = [(begin or policy.begin)() for _ in self.jobs]
        self._rng = np.random.default_rng(seed)
        self.allotment = Allotment({}, {})
        """Who has which worker now, and what could not be had."""
        self._claims: tuple[JobClaim, ...] = ()
        self._near, self._far = np.zeros(len(self.jobs)), np.zeros(len(self.jobs))
        self._moved = np.zeros(len(self.jobs))
        self._targets = np.zeros(len(self.jobs), np.int64)
        self.now = 0.0
        self.record = FleetRecord({job.name: JobRecord() for job in self.jobs})

    def run(self, until_s: float) -> FleetRecord:
        """Go on until then, or until every job has ended."""
        while self.now < until_s and any(self.record.jobs[job.name].ended_s is None for job in self.jobs):
            self._beat()
        return self.record

    def _beat(self) -> None:
        alive = np.array([self._alive(job) for job in self.jobs])
        exact = np.array([job.demand_at(self.now - job.starts_s) for job in self.jobs]) * alive
        noise = np.array([job.noise for job in self.jobs])
        demand = exact * (1 + noise * self._rng.uniform(-1, 1, len(exact)))
        made, crossed = self._made()
        taken = np.minimum(made, demand)
        self._count(alive, exact, demand, made, taken, crossed)
        for number, job in enumerate(self.jobs):
            if alive[number]:
                self._decide(number, job, demand[number], made[number], taken[number])
            else:
                self._targets[number] = 0
        self._allot()
        self.now += self.beat_s

    def _alive(self, job: FleetJob) -> bool:
        record = self.record.jobs[job.name]
        if record.ended_s is None and (self.now >= job.ends_s or record.batches >= job.batches):
            record.end(self.now)
        return job.starts_s <= self.now and record.ended_s is None

    def _made(self) -> tuple[Floats, float]:
        """Return what each job's workers make, and how much of it crosses between regions."""
        rate = np.array([job.worker_per_s for job in self.jobs])
        contention = np.array([job.contention for job in self.jobs])
        lost = self._moved * min(self.move_s / self.beat_s, 1.0)
        all_far = float((self._far * rate).sum())
        reached = min(1.0, self._limits.crossing_per_s / all_far) if all_far else 1.0
        workers = np.maximum(self._near + self._far * reached - lost, 0.0)
        made = workers * rate / (1 + contention * np.maximum(workers - 1, 0.0))
        made = np.minimum(made, [job.storage_per_s for job in self.jobs])
        for name, per_s in self._limits.storages.items():
            sharing = np.array([job.storage == name for job in self.jobs])
            made[sharing] = fair_shares(made[sharing], per_s)
        return made, all_far * reached

    def _count(self, alive: Any, exact: Floats, demand: Floats, made: Floats, taken: Floats, crossed: float) -> None:
        record, rate = self.record, np.array([job.worker_per_s for job in self.jobs])
        held = self._near + self._far
        record.times.append(self.now)
        record.wanted.append(float(self._targets.sum()))
        record.held.append(float(held.sum()))
        record.used.append(float((np.minimum(taken, exact) / rate).sum()))
        record.crossed.append(crossed)
        needed = np.array([useful_workers(job, d) for job, d in zip(self.jobs, exact)]) * alive
        size = sum(worker.size for worker in self.pool)
        possible = fair_shares(needed, size, np.array([job.weight for job in self.jobs]))
        worth = [min(job.made(n), d) / job.worker_per_s for job, n, d in zip(self.jobs, possible, exact)]
        record.possible.append(float(sum(worth)))
        waiting = np.where(demand > 0, 1 - taken / np.maximum(demand, 1e-12), 0.0)
        busy = np.where(made > 0, taken / np.maximum(made, 1e-12), 0.0)
        for number in np.flatnonzero(alive):
            record.jobs[self.jobs[number].name].read(
                self.beat_s,
                per_s=float(taken[number]),
                waiting=float(waiting[number]),
                workers=float(held[number]),
                busy=float(busy[number]),
            )

    def _decide(self, number: int, job: FleetJob, demand: float, made: float, taken: float) -> None:
        if self._fixed is not None:
            self._targets[number] = self._fixed[job.name]
            return
        measured = self._measure(number, job, demand, made, taken)
        self._memories[number], target = self.policy.decide(self._memories[number], measured, job.limits, self.now)
        path = self.record.jobs[job.name].path
        if not path or path[-1][1] != target.workers:
            path.append((self.now - job.starts_s, target.workers, target.reason))
        self._targets[number] = target.workers

    def _measure(self, number: int, job: FleetJob, demand: float, made: float, taken: float) -> Measured:
        held = float(self._near[number] + self._far[number])
        if not held:
            starting = ReaderPace(batches=0.0, step_s=job.ranks / demand, wait_s=0.0, ranks=job.ranks)
            return Measured(seconds=self.beat_s, workers=0, pace=starting, worker_per_s=None)
        alone = held * job.worker_per_s / (1 + job.contention * (held - 1))
        taken = max(taken, 1e-9)
        busy = taken / max(made, taken)
        step_s = job.ranks / demand
        pace = ReaderPace(
            batches=taken * self.beat_s, step_s=step_s, wait_s=max(job.ranks / taken - step_s, 0.0), ranks=job.ranks
        )
        ahead = made / taken - 1
        return Measured(
            seconds=self.beat_s,
            workers=held,
            pace=pace,
            worker_per_s=made / held if busy >= FULL else None,
            busy=busy,
            queue=min(10 * ahead, MOST_QUEUED),
            buffered=min(20 * ahead, MOST_QUEUED),
            processor=job.processor * taken / alone,
        )

    def _allot(self) -> None:
        """Give workers by the targets, where something changed since the last time."""
        claims = tuple(
            JobClaim(
                job=job.name,
                target=int(target),
                weight=job.weight,
                priority=job.priority,
                owner=job.owner,
                kinds=job.kinds,
            )
            for job, target in zip(self.jobs, self._targets)
        )
        self._moved[:] = 0
        if claims == self._claims:
            return
        before, self._claims = self.allotment, claims
        self.allotment = allot(claims, self.pool, before.workers, self._limits.quotas)
        sharers = self._sharers()
        for number, job in enumerate(self.jobs):
            names = self.allotment.workers.get(job.name, ())
            near = [name for name in names if not job.region or self._kinds[name] == job.region]
            self._near[number] = sum(self._sizes[name] / sharers[name] for name in near)
            self._far[number] = sum(self._sizes[name] / sharers[name] for name in names) - self._near[number]
            self._moved[number] = sum(self._sizes[name] for name in set(names) - set(before.workers.get(job.name, ())))

    def _sharers(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for names in self.allotment.workers.values():
            for name in names:
                found[name] = found.get(name, 0) + 1
        return found


def fair_shares(wanted: Floats, total: float, weights: Floats | None = None) -> Floats:
    """Return max-min fair shares of a total.

    >>> fair_shares(np.array([1.0, 5.0, 9.0]), 9.0).tolist()
    [1.0, 4.0, 4.0]
    """
    if wanted.sum() <= total:
        return wanted.copy()
    weights = np.ones_like(wanted) if weights is None else weights
    order = np.argsort(wanted / weights)
    shares = np.zeros_like(wanted)
    left, weight_left = total, float(weights.sum())
    for index in order:
        shares[index] = min(wanted[index], left * weights[index] / weight_left)
        left -= shares[index]
        weight_left -= weights[index]
    return shares


def useful_workers(job: FleetJob, demand: float) -> float:
    """Return how many workers a demand takes; where it cannot be met, how many bring what can be had.

    >>> useful_workers(FleetJob(name="j", trainer_per_s=8.0, worker_per_s=2.0, contention=0.1), 8.0)
    6.0
    """
    per_s = min(demand, job.storage_per_s)
    undisturbed = 1 - job.contention * per_s / job.worker_per_s
    if undisturbed <= 0:
        return float(job.limits.most)
    return float(per_s / job.worker_per_s * (1 - job.contention) / undisturbed)


def settle(job: FleetJob, *, policy: ScalingPolicy[Any], beat_s: float, until_s: float, **given: Any) -> JobRecord:
    """Run one job alone, on a pool without end, and return what became of it.

    >>> job = FleetJob(name="j", trainer_per_s=36.0, worker_per_s=10.0)
    >>> [workers for _, workers, _ in settle(job, policy=model_first, beat_s=2.0, until_s=60.0).path]
    [1, 4]
    """
    pool = [PoolWorker(worker=str(number)) for number in range(700)]
    lone = replace(job, limits=structs.replace(job.limits, most=min(job.limits.most, len(pool))))
    return Fleet([lone], pool, policy=policy, beat_s=beat_s, move_s=0.0, **given).run(until_s).jobs[job.name]
