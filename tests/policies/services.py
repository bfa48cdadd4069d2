"""A trainer, its workers and their host, simulated step by step, under the dispatcher's own core.

Windows are real ones: all that scaling sees comes about as it does in a service. Readers and processes count what they
do by their own clocks, and say so once a second, each at a moment of its own; the dispatcher ticks five times a second.
What was seen in `experiments/scaling.py` is in the model:

- A worker's process makes its first output 0.65 to 1.1 s after it was asked for.
- A stream has a thread. Streams of a worker that is stopped go on elsewhere, beside those that are there, so that a
  worker with two streams waits in both at once and makes twice as much; they retire when their splits are read.
- Storage is waited for in turns, which are taken when an element is begun: those who are stopped leave theirs behind.
- What is made and not taken waits in the trainer's memory: of small elements that has no end (`ahead`).
- A busy host makes all that runs on it slower, for seconds at a time, and not everything by the same share.
"""

from __future__ import annotations

import heapq
import math
import random
import tomllib
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from penstock.control.decide import tick
from penstock.control.scaling_rules import ScalingRules
from penstock.core.ids import AgentId, ClientId
from penstock.runtime.stats import ReaderClock
from penstock.wire.figures import RunnerFigures, StageFigures
from penstock.wire.jobs import delivery_of
from penstock.wire.messages import AgentBeat, Beat, RunnerPlace, RunnerReady, StartRunner
from tests.control.cluster import JOB, Cluster, spec

WORKLOADS: dict[str, dict[str, Any]] = tomllib.loads(
    (Path(__file__).parents[2] / "experiments" / "workloads.toml").read_text()
)["real"]
POOL = 12
TICK_S = 0.2
BEAT_S = 1.0
STARTS_S = (0.65, 1.1)
RETIRES_S = (20.0, 70.0)
OVERSLEEPS_S = 0.0003


@dataclass(frozen=True)
class Host:
    """When everything is slower: in bursts, with `every_s` of calm between them on average, beside `calm_s`."""

    every_s: float = math.inf
    lasts_s: tuple[float, float] = (1.0, 6.0)
    calm_s: float = 5.0
    """At least, between two of them."""
    slower: float = 2.0
    """A burst multiplies times by up to so much: trainers' and workers' each by a number of its own."""


IDLE, BUSY = Host(), Host(every_s=20.0)


@dataclass(eq=False, slots=True)
class _Stream:
    runner: str
    epoch: int = 0
    """Grows when it moves: what was under way elsewhere is made again."""
    ahead: int = 0
    blocked_at: float | None = None
    extra: bool = False


@dataclass(eq=False, slots=True)
class _Process:
    """What a worker's process has counted."""

    began_at: float
    rounds: int = 0
    busy_s: float = 0.0
    credit_wait_s: float = 0.0
    streams: list[_Stream] = field(default_factory=list)
    told: RunnerFigures | None = None


@dataclass(eq=False, slots=True)
class _Rank:
    client: ClientId
    clock: ReaderClock = field(default_factory=ReaderClock)
    ready: deque[_Stream] = field(default_factory=deque)
    batches: int = 0
    waiting: bool = False


class Service:
    """Runs a workload. `noise`: a step takes its time x (1 +- so much); `ahead`: rounds a stream may be ahead."""

    def __init__(
        self,
        workload: dict[str, Any],
        *,
        seed: int,
        noise: float = 0.0,
        host: Host = IDLE,
        ahead: float = math.inf,
        pool: int = POOL,
        workers: Any = "auto",
        **rules: Any,
    ) -> None:
        self._workload, self._noise, self._ahead = workload, noise, ahead
        self._rng = random.Random(seed)
        self.now, self.paid_worker_s = 0.0, 0.0
        self._rules = ScalingRules(**rules)
        self._work_s = 1 / workload["worker_per_s"]
        storage_per_s = workload.get("storage_per_s")
        self._storage_gap_s = 1 / storage_per_s if storage_per_s else 0.0
        self._storage_free_at = 0.0
        self._contention = workload.get("contention", 0.0)
        changes = [(each["at_s"], each["trainer_per_s"]) for each in workload.get("changes", ())]
        self._speeds = [(0.0, workload["trainer_per_s"]), *changes]
        self.disturb(host)
        self._processes: dict[str, _Process] = {}
        self._streams: list[_Stream] = []
        self._order = count()
        self._agenda: list[tuple[float, int, Any]] = []
        self._cluster = Cluster()
        self._cluster.register(*(f"w{number:02}" for number in range(pool)))
        consumers = int(workload.get("ranks", 1))
        job = spec(workers=workers, consumers=consumers, order="relaxed", split_counts=(500,))
        self._width = delivery_of(job).width
        self._ranks: list[_Rank] = []
        for consumer in range(consumers):
            opening = self._cluster.opening(consumer, spec=job)
            self._cluster.ask(opening)
            self._ranks.append(_Rank(opening.client))
        self._attempt = next(reversed(self._cluster.state.jobs[JOB].iterations))
        self._begun_at = self._cluster.now
        for number, rank in enumerate(self._ranks):
            self._at(0.0, lambda rank=rank: self._ask(rank))
            self._at(self._rng.uniform(0.0, BEAT_S), lambda number=number: self._beat(number))
        self._at(self._rng.uniform(0.0, BEAT_S), self._agent_beat)
        self._at(0.0, self._tick)

    def run(self, until_s: float) -> Service:
        agenda = self._agenda
        while agenda[0][0] <= until_s:
            self.now, _, happens = heapq.heappop(agenda)
            happens()
        self.now = until_s
        return self

    def disturb(self, host: Host) -> None:
        """Let the host be so from now on."""
        self._bursts = _bursts(host, self._rng, self.now)
        self._burst_ends = [until for _, until, _, _ in self._bursts]

    def slow_workers(self, by: float) -> None:
        """Let all of them take so many times as long from now on."""
        self._work_s *= by

    @property
    def batches(self) -> int:
        return sum(rank.batches for rank in self._ranks)

    @property
    def path(self) -> list[tuple[float, int, str]]:
        """When a number of workers was decided, which, and why."""
        decisions = self._cluster.state.jobs[JOB].scaling.decisions
        path: list[tuple[float, int, str]] = []
        for each in decisions:
            if not path or path[-1][1] != each.target:
                path.append((each.at_s - self._begun_at, each.target, each.reason))
        return path

    # The host

    def _at(self, when: float, happens: Any) -> None:
        heapq.heappush(self._agenda, (when, next(self._order), happens))

    def _slower(self) -> tuple[float, float]:
        """Return what a trainer's and a worker's times are multiplied by now."""
        place = bisect_right(self._burst_ends, self.now)
        if place == len(self._bursts) or self.now < self._bursts[place][0]:
            return 1.0, 1.0
        return self._bursts[place][2:]

    # The trainer

    def _step_s(self) -> float:
        per_s: float = next(takes for at, takes in reversed(self._speeds) if self.now >= at)
        exact = len(self._ranks) / per_s * self._rng.uniform(1 - self._noise, 1 + self._noise)
        return (exact + self._rng.uniform(0.0, 2 * OVERSLEEPS_S)) * self._slower()[0]

    def _ask(self, rank: _Rank) -> None:
        rank.clock.enter(self.now)
        rank.waiting = True
        if rank.ready:
            self._take(rank)

    def _take(self, rank: _Rank) -> None:
        stream = rank.ready.popleft()
        stream.ahead -= 1
        if stream.blocked_at is not None and stream.ahead < self._ahead * self._width:
            process = self._processes[stream.runner]
            process.credit_wait_s += self.now - stream.blocked_at
            stream.blocked_at = None
            self._make(stream)
        rank.waiting = False
        rank.clock.leave(self.now)
        rank.batches += 1
        self._at(self.now + self._step_s(), lambda: self._ask(rank))

    def _beat(self, number: int) -> None:
        rank = self._ranks[number]
        wait_s, run_s = rank.clock.times(self.now)
        self._cluster.now = self._begun_at + self.now
        self._cluster.ask(
            Beat(
                job=JOB,
                client=rank.client,
                consumer=number,
                attempt=self._attempt,
                version=0,
                batches=rank.batches,
                wait_s=wait_s,
                run_s=run_s,
                at_s=self.now,
                buffered_elements=len(rank.ready),
            )
        )
        self._at(self.now + BEAT_S * self._late(), lambda: self._beat(number))

    def _late(self) -> float:
        return 1.0 + self._rng.uniform(0.0, 0.01) + 0.1 * (max(self._slower()) - 1)

    # Workers

    def _begin(self, stream: _Stream) -> None:
        if stream not in self._processes[stream.runner].streams:
            self._processes[stream.runner].streams.append(stream)
        stream.blocked_at = None
        self._make(stream)

    def _make(self, stream: _Stream) -> None:
        """Begin a round, or wait for credit."""
        if stream.ahead >= self._ahead * self._width:
            stream.blocked_at = self.now
            return
        rng, epoch, began = self._rng, stream.epoch, self.now
        seconds, free_at = 0.0, self.now
        for _ in range(self._width):
            work_s = self._work_s * (1 + self._contention * max(len(self._streams) - 1, 0))
            free_at += (work_s + rng.uniform(0.0, 2 * OVERSLEEPS_S)) * self._slower()[1]
            if self._storage_gap_s:
                turn = max(self.now + seconds, self._storage_free_at)
                self._storage_free_at = turn + self._storage_gap_s
                free_at = max(free_at, turn)
            seconds = free_at - self.now
        self._at(free_at, lambda: self._made(stream, epoch, began))

    def _made(self, stream: _Stream, epoch: int, began: float) -> None:
        if stream.epoch != epoch:
            return
        process = self._processes[stream.runner]
        process.rounds += 1
        process.busy_s += self.now - began
        stream.ahead += self._width
        for rank in self._ranks if self._width > 1 else [min(self._ranks, key=lambda rank: len(rank.ready))]:
            rank.ready.append(stream)
            if rank.waiting:
                self._take(rank)
        self._make(stream)

    def _look(self, runner: str) -> None:
        process = self._processes.get(runner)
        if process is None:
            return
        for stream in process.streams:
            if stream.blocked_at is not None:
                process.credit_wait_s += self.now - stream.blocked_at
                stream.blocked_at = self.now
        count = len(process.streams)
        process.told = RunnerFigures(
            at_s=self.now,
            streams=count,
            rounds=process.rounds,
            busy_s=round(process.busy_s, 3),
            credit_wait_s=round(process.credit_wait_s, 3),
            cpu_s=0.01 * process.busy_s,
            threads=1,
            stages=(StageFigures(1, "map", process.rounds, busy_s=round(process.busy_s, 3), threads=count),),
        )
        self._at(self.now + BEAT_S * self._late(), lambda: self._look(runner))

    def _agent_beat(self) -> None:
        told = {name: process.told for name, process in self._processes.items() if process.told is not None}
        runners = tuple(runner.runner for runner in self._cluster.state.runners.get(JOB, {}).values())
        self._cluster.now = self._begun_at + self.now
        self._cluster.ask(AgentBeat(agent=AgentId("A"), runners=runners, statistics=told), peer="peer of A")
        self._at(self.now + BEAT_S * self._late(), self._agent_beat)

    # The dispatcher

    def _tick(self) -> None:
        cluster = self._cluster
        cluster.now = self._begun_at + self.now
        cluster.take(tick(cluster.state, now=cluster.now, draw=cluster.draw, rules=self._rules))
        for push in cluster.pushes(StartRunner):
            starts_s = self._rng.uniform(*STARTS_S) * self._slower()[1]
            self._at(self.now + 0.7 * starts_s, lambda push=push: self._ready(push))
            self._at(self.now + starts_s, lambda push=push: self._join(push.runner))
        there = {runner.runner for runner in cluster.state.runners.get(JOB, {}).values()}
        for runner in self._processes.keys() - there:
            self._leave(runner, there)
        self.paid_worker_s += TICK_S * len(there)
        self._at(self.now + TICK_S, self._tick)

    def _ready(self, push: Any) -> None:
        self._cluster.now = self._begun_at + self.now
        place = RunnerPlace(push.runner, push.worker, push.job, f"tcp://{push.runner}")
        self._cluster.ask(RunnerReady(agent=AgentId("A"), place=place), peer="peer of A")

    def _join(self, runner: str) -> None:
        """A process begins to make: a stream of its own, or one that another worker has too many of."""
        if all(each.runner != runner for each in self._cluster.state.runners.get(JOB, {}).values()):
            return
        self._processes[runner] = _Process(self.now)
        spare = next((stream for stream in self._streams if stream.extra), None)
        if spare is None:
            self._streams.append(stream := _Stream(runner))
        else:
            stream = spare
            self._processes[stream.runner].streams.remove(stream)
            stream.runner, stream.extra, stream.epoch = runner, False, stream.epoch + 1
        self._begin(stream)
        self._at(self.now + self._rng.uniform(0.0, BEAT_S), lambda: self._look(runner))

    def _leave(self, runner: str, there: set[Any]) -> None:
        """Its streams go on elsewhere, beside those that are there, and retire when what they have is read."""
        left = self._processes.pop(runner)
        for stream in left.streams:
            stream.epoch += 1
            stays = [name for name in self._processes if name in there]
            if not stays:
                self._streams.remove(stream)
                continue
            stream.runner = min(stays, key=lambda name: len(self._processes[name].streams))
            stream.extra = True
            self._begin(stream)
            retires_s = self._rng.uniform(*RETIRES_S)
            self._at(self.now + retires_s, lambda stream=stream, epoch=stream.epoch: self._retire(stream, epoch))

    def _retire(self, stream: _Stream, epoch: int) -> None:
        if stream.epoch == epoch and stream.extra and stream.runner in self._processes:
            self._processes[stream.runner].streams.remove(stream)
            self._streams.remove(stream)
            stream.epoch += 1


def _bursts(host: Host, rng: random.Random, now: float) -> list[tuple[float, float, float, float]]:
    """Return (from, to, slower trainers, slower workers) for an hour from now on."""
    bursts: list[tuple[float, float, float, float]] = []
    if math.isinf(host.every_s):
        return bursts
    at = now + host.calm_s + rng.expovariate(1 / host.every_s)
    while at < now + 3600.0:
        until = at + rng.uniform(*host.lasts_s)
        bursts.append((at, until, rng.uniform(1.0, host.slower), rng.uniform(1.0, host.slower)))
        at = until + host.calm_s + rng.expovariate(1 / host.every_s)
    return bursts
