"""`model_first` in services: what a job's trainer, workers and host do to the windows it decides on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest

from tests.policies.services import BUSY, IDLE, POOL, WORKLOADS, Host, Service

SETTLES_S = 20.0


@dataclass(frozen=True)
class Phase:
    """A part of a run in which the trainer has one speed."""

    begins_s: float
    ends_s: float
    oracle: int
    trainer_limits: bool
    """Rather than what workers can make."""
    changes: tuple[tuple[float, int], ...]
    """When, from its beginning on, and to how many workers. A job's first number is no change."""
    reached: int
    """Workers at its end."""


def made(workload: dict[str, Any], workers: int) -> float:
    alone = workers * workload["worker_per_s"] / (1 + workload.get("contention", 0.0) * (workers - 1))
    return float(min(alone, workload.get("storage_per_s", math.inf)))


def phases(workload: dict[str, Any], service: Service) -> list[Phase]:
    begins = [0.0, *(change["at_s"] for change in workload.get("changes", ()))]
    speeds = [workload["trainer_per_s"], *(change["trainer_per_s"] for change in workload.get("changes", ()))]
    found = []
    for at, until, per_s in zip(begins, [*begins[1:], service.now], speeds):
        best = min(per_s, made(workload, POOL))
        oracle = next(n for n in range(1, POOL + 1) if made(workload, n) * 1.03 >= best)
        changes = tuple((when - at, to) for when, to, _ in service.path[1:] if at <= when < until)
        reached = [to for when, to, _ in service.path if when < until][-1]
        found.append(Phase(at, until, oracle, best == per_s, changes, reached))
    return found


def check(workload: dict[str, Any], service: Service) -> None:
    """Every phase has its number within 20 s, by two changes at most, and keeps it."""
    for phase in phases(workload, service):
        assert abs(phase.reached - phase.oracle) <= 1, service.path
        assert len(phase.changes) <= 2, service.path
        assert all(after_s <= SETTLES_S for after_s, _ in phase.changes), service.path
        if phase.trainer_limits:
            assert max((to for _, to in phase.changes), default=phase.reached) <= phase.oracle + 1, service.path


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_settled_within_twenty_seconds_and_then_left_alone(name: str, seed: int) -> None:
    check(WORKLOADS[name], Service(WORKLOADS[name], seed=seed, noise=0.2).run(400))


@pytest.mark.parametrize("name", WORKLOADS)
def test_trainers_with_room_for_few_batches_are_no_different(name: str) -> None:
    check(WORKLOADS[name], Service(WORKLOADS[name], seed=4, noise=0.2, ahead=8).run(300))


@pytest.mark.parametrize("seed", range(10, 40))
def test_a_storage_is_found_although_those_who_leave_have_taken_turns_at_it(seed: int) -> None:
    workload = WORKLOADS["storage-plateau"]
    check(workload, Service(workload, seed=seed).run(60))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["trainer-bound", "needs-4", "needs-8", "two-consumers"])
def test_a_host_that_is_busy_for_seconds_changes_nothing(name: str, seed: int) -> None:
    service = Service(WORKLOADS[name], seed=seed, noise=0.2, host=IDLE).run(60)
    settled = list(service.path)
    service.disturb(BUSY)
    service.run(360)
    assert service.path == settled


@pytest.mark.parametrize("seed", range(4))
def test_a_host_that_stands_still_for_seconds_changes_nothing(seed: int) -> None:
    service = Service(WORKLOADS["needs-8"], seed=seed, noise=0.2).run(60)
    settled = list(service.path)
    service.disturb(Host(every_s=20.0, calm_s=20.0, lasts_s=(5.0, 7.0), slower=8.0))
    assert service.run(300).path == settled


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("before", "after"), [(20.0, 40.0), (60.0, 30.0), (35.0, 70.0), (100.0, 50.0)])
def test_a_trainer_that_doubles_or_halves_its_speed_is_followed_also_on_a_busy_host(
    before: float, after: float, seed: int
) -> None:
    workload = {"trainer_per_s": before, "worker_per_s": 10.0, "changes": [{"at_s": 90.0, "trainer_per_s": after}]}
    service = Service(workload, seed=seed, noise=0.2).run(200)
    check(workload, service)
    service = Service(workload, seed=seed, noise=0.2, host=Host(every_s=20.0, lasts_s=(1.0, 3.0))).run(130)
    _, phase = phases(workload, service)
    assert abs(phase.reached - phase.oracle) <= 1, service.path


def test_streams_that_outlive_their_workers_are_no_reason_to_give_more_back() -> None:
    workload = {"trainer_per_s": 110.0, "worker_per_s": 10.0, "changes": [{"at_s": 60.0, "trainer_per_s": 55.0}]}
    for seed in range(4):
        check(workload, Service(workload, seed=seed).run(300))


def test_workers_that_become_slower_are_joined_by_more() -> None:
    service = Service(WORKLOADS["needs-4"], seed=1, noise=0.1).run(60)
    assert service.path[-1][1] == 4
    service.slow_workers(2.0)
    service.run(120)
    assert service.path[-1][1] in (7, 8), service.path
