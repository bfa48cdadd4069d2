"""Scaling policies, each against jobs whose right answer is known."""

from __future__ import annotations

import math
import random
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.policies.scaling import buffers, cachew, model_first, utilization
from penstock.policies.scaling.records import Measured, ReaderPace, Rent, ScalingLimits

WORKLOADS = tomllib.loads((Path(__file__).parents[2] / "experiments" / "workloads.toml").read_text())
WINDOW_S = 2.0


@dataclass
class Job:
    """A job of which all is known, run under a policy window by window."""

    trainer_per_s: float
    worker_per_s: float
    contention: float = 0.0
    storage_per_s: float = math.inf
    processor: float = 1.0
    waits_inside: bool = False
    """Who waits for storage does so in a function of one thread, which looks busy."""
    ranks: int = 1
    noise: float = 0.02
    pool: int = 1 << 20
    policy: Any = model_first
    limits: ScalingLimits = field(default_factory=lambda: ScalingLimits(most=64))
    memory: Any = None
    workers: int = 1
    now: float = 0.0
    path: list[tuple[float, int, str]] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    """What was asked for, each change once, whatever the pool has."""
    reason: str = ""
    rng: random.Random = field(default_factory=lambda: random.Random(7))

    def made(self, workers: int) -> float:
        useful = self.limits.useful(workers)
        return min(self.worker_per_s * useful / (1 + self.contention * (useful - 1)), self.storage_per_s)

    def oracle(self, most: int = 64) -> int:
        """Return the smallest number within 3 % of the best."""
        best = min(self.made(most), self.trainer_per_s)
        return next(n for n in range(1, most + 1) if min(self.made(n), self.trainer_per_s) * 1.03 >= best)

    def measure(self) -> Measured:
        demand = self.trainer_per_s * (1 + self.rng.uniform(-self.noise, self.noise))
        made = self.made(self.workers) * (1 + self.rng.uniform(-self.noise, self.noise) / 2)
        taken = min(made, demand)
        alone = self.worker_per_s * self.workers / (1 + self.contention * (self.workers - 1))
        step_s, batch_s = self.ranks / demand, self.ranks / taken
        pace = ReaderPace(batches=taken * WINDOW_S, step_s=step_s, wait_s=batch_s - step_s, ranks=self.ranks)
        return Measured(
            seconds=WINDOW_S,
            workers=self.workers,
            pace=pace,
            worker_per_s=made / self.limits.useful(self.workers) if taken > 0.97 * made else None,
            busy=taken / made,
            queue=min(10 * (made / taken - 1), 16.0),
            buffered=4.0 if taken < made else 0.0,
            processor=taken / made if self.waits_inside else self.processor * taken / alone,
        )

    def run(self, seconds: float) -> Job:
        if self.memory is None:
            self.memory = self.policy.begin()
        until = self.now + seconds
        while self.now < until:
            self.now += WINDOW_S
            self.memory, target = self.policy.decide(self.memory, self.measure(), self.limits, self.now)
            self.reason = target.reason
            if self.targets[-1:] != [target.workers]:
                self.targets.append(target.workers)
            given = min(target.workers, self.pool)
            if given != self.workers:
                self.workers = given
                self.path.append((self.now, given, target.reason))
        return self


def known(name: str, **changes: Any) -> Job:
    table = WORKLOADS["real"][name]
    fields = {key: value for key, value in table.items() if key not in ("needs", "changes")}
    return Job(**fields, limits=ScalingLimits(most=12), **changes)


@pytest.mark.parametrize("name", WORKLOADS["real"])
def test_model_first_is_right_within_two_adjustments_and_twenty_seconds_and_then_holds(name: str) -> None:
    job = known(name).run(90)
    assert len(job.path) <= 2 and (not job.path or job.path[-1][0] <= 20)
    assert abs(job.workers - job.oracle(12)) <= 1
    for change in WORKLOADS["real"][name].get("changes", ()):
        adjusted = len(job.path)
        job.trainer_per_s = change["trainer_per_s"]
        job.run(20)
        assert len(job.path) - adjusted <= 2
    job.path.clear()
    job.noise = 0.2 / math.sqrt(WINDOW_S * job.trainer_per_s)  # 20 % a step, averaged over those of a window
    job.run(600)
    assert job.path == []
    assert job.workers == WORKLOADS["real"][name]["needs"] == job.oracle(12)


@pytest.mark.parametrize("seed", range(40))
def test_model_first_finds_a_number_that_is_good_and_keeps_it(seed: int) -> None:
    rng = random.Random(seed)
    job = Job(
        trainer_per_s=rng.uniform(3, 300),
        worker_per_s=10.0,
        contention=rng.choice((0.0, 0.01)),
        storage_per_s=rng.choice((math.inf, rng.uniform(20, 200))),
        noise=0.03,
        rng=rng,
    )
    job.run(60)
    found = job.workers
    job.path.clear()
    job.run(900)
    assert job.path == []
    best = min(job.made(64), job.trainer_per_s)
    assert min(job.made(found), job.trainer_per_s) >= 0.92 * best
    assert found <= job.oracle() + max(1, math.ceil(0.12 * job.oracle()))


def test_a_second_run_starts_at_the_answer_of_the_first() -> None:
    first = known("needs-8").run(60)
    learned = model_first.learned_by(first.memory)
    assert learned is not None and learned.workers == 8
    second = known("needs-8", memory=model_first.begin(learned)).run(60)
    assert [workers for _, workers, _ in second.path] == [8]
    assert model_first.learned_by(model_first.begin()) is None


def test_a_second_run_of_a_faster_trainer_leaves_what_the_first_learned() -> None:
    learned = model_first.Learned(workers=3, demand_per_s=30.0, worker_per_s=10.0)
    assert known("needs-8", memory=model_first.begin(learned)).run(60).workers == 8


def test_a_pool_that_is_exhausted_changes_nothing_about_what_is_wanted() -> None:
    job = known("needs-8", pool=3).run(600)
    assert job.workers == 3 and model_first.learned_by(job.memory) is None
    assert job.memory.held == 8
    assert re.fullmatch(r"the trainer takes 7\d\.\d/s, a worker makes (10\.\d|9\.9)/s", job.reason)


def test_what_cannot_be_had_is_not_asked_for_anew_by_every_window() -> None:
    job = known("needs-8", pool=3, noise=0.08).run(600)
    assert len(job.targets) <= 3, job.targets
    assert model_first.learned_by(job.memory) is None


def test_a_trainer_that_changes_its_speed_does_not_change_what_is_known_of_workers() -> None:
    job = known("storage-plateau", waits_inside=True, pool=12)
    job.trainer_per_s = 80.0
    job.run(10)
    job.trainer_per_s = 98.0
    job.run(60)
    assert job.workers == 5 and len(job.targets) <= 4, job.path
    job.trainer_per_s = 20.0
    assert job.run(30).workers == 2
    job.trainer_per_s = 100.0
    assert job.run(30).workers == 5
    assert job.targets[-2:] == [2, 5], "what a storage gives was found out before"


def test_model_first_asks_for_nothing_while_nobody_reads() -> None:
    job = known("needs-4").run(30)
    idle = replace(job.measure(), pace=None)
    memory, target = model_first.decide(job.memory, idle, job.limits, job.now)
    assert (target.workers, target.reason) == (0, "nobody reads")
    _, target = model_first.decide(memory, replace(job.measure(), workers=0), job.limits, job.now)
    assert target.workers == 4


def test_windows_in_which_nothing_was_made_ask_for_nothing() -> None:
    job = known("needs-4").run(30)
    for _ in range(30):
        job.memory, target = model_first.decide(job.memory, replace(job.measure(), worker_per_s=0.0), job.limits, 99.0)
        assert target.workers == 4
    memory = model_first.begin()
    for _ in range(5):
        stuck = replace(job.measure(), workers=1, worker_per_s=0.0)
        memory, target = model_first.decide(memory, stuck, job.limits, 0.0)
    assert target.workers == 1


def test_threads_fill_a_host_before_a_second_worker_is_asked_for() -> None:
    job = known("needs-4")
    memory = model_first.begin()
    for _ in range(5):
        memory, target = model_first.decide(memory, replace(job.measure(), filled=False), job.limits, 0.0)
    assert (target.workers, target.reason) == (1, "a worker's threads still grow")
    memory, target = model_first.decide(memory, job.measure(), job.limits, 0.0)
    assert target.workers == 4


def test_prices_decide_where_a_worker_costs_as_much_as_it_saves() -> None:
    cheap = Rent(trainer_per_h=1.0, worker_per_h=1.0)
    dear = Rent(trainer_per_h=30.0, worker_per_h=0.08)

    def settled(rent: Rent | None) -> Job:
        limits = ScalingLimits(most=64, rent=rent)
        return Job(trainer_per_s=300.0, worker_per_s=10.0, contention=0.05, limits=limits).run(120)

    assert settled(dear).workers > settled(cheap).workers
    assert "cost more than the waiting" in settled(cheap).reason
    job = settled(cheap)
    costs = {n: (1 + n) / min(job.made(n), 300.0) for n in range(1, 65)}
    assert costs[job.workers] <= 1.05 * min(costs.values())


def test_a_fixed_number_of_streams_is_a_staircase() -> None:
    job = Job(trainer_per_s=36.0, worker_per_s=10.0, limits=ScalingLimits(most=64, streams=8)).run(60)
    assert job.workers == 4  # 5, 6 and 7 would be no faster
    job = Job(trainer_per_s=45.0, worker_per_s=10.0, limits=ScalingLimits(most=64, streams=8)).run(60)
    assert job.workers == 8


def test_a_storage_that_is_waited_for_inside_a_function_is_found_as_fast() -> None:
    job = known("storage-plateau", waits_inside=True).run(120)
    assert [workers for _, workers, _ in job.path] == [10, 5]
    assert "however many share them" in job.reason


def test_a_storage_that_gives_most_of_what_is_wanted_is_found_by_one_try_more() -> None:
    job = Job(trainer_per_s=119.0, worker_per_s=10.0, storage_per_s=101.0, waits_inside=True).run(120)
    assert [workers for _, workers, _ in job.path][-1] == 10 and len(job.path) == 3


@pytest.mark.parametrize("seed", range(40))
def test_any_storage_that_is_waited_for_inside_a_function_is_found(seed: int) -> None:
    rng = random.Random(seed)
    job = Job(
        trainer_per_s=rng.uniform(30, 150),
        worker_per_s=10.0,
        storage_per_s=rng.uniform(20, 150),
        waits_inside=True,
        rng=rng,
    )
    job.run(60)
    assert len(job.path) <= 4
    path, best = list(job.path), min(job.storage_per_s, job.trainer_per_s)
    job.run(900)
    assert job.path == path
    assert min(job.made(job.workers), job.trainer_per_s) >= 0.92 * best
    assert job.workers <= 1.12 * job.oracle() + 1


@pytest.mark.parametrize("seed", range(40))
def test_workers_in_each_others_way_are_told_from_a_storage_by_trying(seed: int) -> None:
    rng = random.Random(seed)
    job = Job(
        trainer_per_s=rng.uniform(60, 200),
        worker_per_s=10.0,
        contention=rng.uniform(0.05, 0.3),
        waits_inside=True,
        rng=rng,
    )
    job.run(90)
    assert len(job.path) <= 4
    path, found = list(job.path), job.workers
    job.run(900)
    assert job.path == path
    tried = max(job.made(workers) for _, workers, _ in path)
    assert job.made(found) >= 0.9 * min(tried, job.trainer_per_s)


def test_a_ceiling_is_looked_at_again_after_an_hour() -> None:
    job = known("storage-plateau").run(300)
    assert job.workers == 5
    job.storage_per_s = math.inf
    job.run(3000)
    assert job.workers == 5
    job.run(700)
    assert job.workers == 10


def test_cachew_climbs_one_by_one_and_takes_the_last_one_back() -> None:
    job = Job(trainer_per_s=40.0, worker_per_s=10.0, policy=cachew, noise=0.0).run(600)
    assert [workers for _, workers, _ in job.path[:5]] == [2, 3, 4, 5, 4]
    assert job.workers == 4


def test_cachew_adds_when_batches_take_longer_and_removes_when_the_queue_grows() -> None:
    job = Job(trainer_per_s=40.0, worker_per_s=10.0, policy=cachew, noise=0.0).run(120)
    assert job.workers == 4
    job.worker_per_s = 7.0
    assert job.run(200).workers == 6
    job.worker_per_s = 20.0
    assert job.run(400).workers == 2


def test_utilization_goes_by_processor_use_alone() -> None:
    fast = Job(trainer_per_s=75.0, worker_per_s=10.0, policy=utilization, noise=0.0).run(900)
    assert fast.workers == 9  # 7.5 workers' worth, at 80 %, within its tolerance
    assert Job(trainer_per_s=75.0, worker_per_s=10.0, policy=utilization, processor=0.7).run(900).workers == 1


def test_utilization_waits_five_minutes_before_it_shrinks() -> None:
    job = Job(trainer_per_s=75.0, worker_per_s=10.0, policy=utilization, noise=0.0).run(900)
    changed_at, job.trainer_per_s = job.now, 20.0
    job.path.clear()
    job.run(600)
    assert job.path[0][0] - changed_at >= 280
    assert job.workers == 3


def test_buffers_grows_while_they_are_empty_and_drains_what_is_not_used() -> None:
    job = Job(trainer_per_s=75.0, worker_per_s=10.0, policy=buffers, noise=0.0).run(900)
    assert job.workers == 8
    job.trainer_per_s = 18.0
    assert job.run(120).workers == 2
