"""Jobs that get the workers they need: real processes, which come and go while an epoch is read."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import penstock as ps
from tests.waiting import wait_until

from .checks import Background, assert_exactly_once, kill

LIMITS = ps.Limits(timeout_s=60)
WORK_S = 0.02


def work(number: int) -> int:
    time.sleep(WORK_S)
    return number


def slowly(number: int) -> int:
    time.sleep(0.002)
    return number


def workers_of(service: ps.LocalService) -> dict[str, int]:
    """Return how many workers each job has that serve it."""
    return {line.job: line.workers for line in service.jobs()}


def reading(service: ps.LocalService, job: str, placement: ps.Placement) -> tuple[Background, threading.Event]:
    """Read a job without end, until told to stop; its result is all that was read in whole epochs."""
    stop = threading.Event()

    def read() -> list[list[int]]:
        epochs: list[list[int]] = []
        with ps.range(400).map(slowly).distribute(service, job=job, placement=placement, limits=LIMITS) as loader:
            while not stop.is_set():
                epochs.append([int(each) for each in loader])
        return epochs

    return Background(read), stop


@pytest.fixture(scope="module")
def six_workers() -> Iterator[ps.LocalService]:
    with ps.LocalService(workers=6, threads=1) as service:
        yield service


def test_a_pool_of_three_where_eight_are_needed_finishes_and_the_reason_names_the_pool() -> None:
    with ps.LocalService(workers=3, threads=1) as service:
        pipeline = ps.range(1600).map(work, threads=1).batch(2)
        with pipeline.distribute(service, job="short", placement=ps.Placement(workers="auto"), limits=LIMITS) as loader:
            read = []
            for batch in loader:
                time.sleep(2 * WORK_S / 8)
                read.append(batch)
            assert_exactly_once(read, range(1600))
        (line,) = service.jobs()
        last = [each for each in service.why("short") if each.shortage][-1]
        assert 6 <= last.target <= 10 and last.allotted <= 3, service.why("short")
        assert f"{last.allotted} of {last.target} workers: the pool of 3 is exhausted by 1 job" in last.shortage
        assert last.figures["demand_per_s"] > 2 * last.figures["taken_per_s"]
        assert line.target is not None


@pytest.mark.alone
def test_two_jobs_of_weights_two_to_one_share_six_workers_and_a_higher_priority_takes_over(
    six_workers: ps.LocalService,
) -> None:
    big, stop_big = reading(six_workers, "big", ps.Placement(workers=6, weight=2.0))
    small, stop_small = reading(six_workers, "small", ps.Placement(workers=6))
    wait_until(lambda: {"big", "small"} <= workers_of(six_workers).keys(), "both jobs")
    shared = {"big": 4, "small": 2}
    wait_until(lambda: workers_of(six_workers) == shared, "four and two workers", deadline_s=5.0)
    urgent, stop_urgent = reading(six_workers, "urgent", ps.Placement(workers=5, priority=1))
    wait_until(lambda: workers_of(six_workers).get("urgent") == 5, "five workers for the urgent one", deadline_s=10.0)
    wait_until(lambda: workers_of(six_workers) == {"big": 1, "small": 1, "urgent": 5}, "one for the others together")
    assert "5 of them by jobs of higher priority" in six_workers.why("big")[-1].shortage
    stop_urgent.set()
    urgent.result(60)
    wait_until(lambda: workers_of(six_workers) == {**shared, "urgent": 0}, "what they had before")
    for each, stop in ((big, stop_big), (small, stop_small)):
        stop.set()
        for epoch in each.result(60):
            assert sorted(epoch) == list(range(400))


def test_a_quota_is_never_exceeded() -> None:
    with ps.LocalService(workers=4, threads=1, scaling={"others": {"quota": 2}}) as service:
        jobs = [reading(service, job, ps.Placement(workers=4)) for job in ("one", "two")]
        wait_until(lambda: sorted(workers_of(service).values()) == [1, 1], "one worker each")
        most = 0
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            most = max(most, len({line.worker for line in service.workers() if line.jobs}))
        assert most == 2
        assert "the quota of" in service.why("one")[-1].shortage
        for each, stop in jobs:
            stop.set()
            each.result(60)


@pytest.mark.parametrize("order", ["relaxed", "deterministic"])
def test_thirty_scalings_and_ten_kills_in_an_epoch_change_nothing(six_workers: ps.LocalService, order: Any) -> None:
    rows = 6_000
    pipeline = ps.range(rows).shuffle(500, seed=3).map(slowly, threads=1).batch(8)
    plain: list[np.ndarray] = []
    if order == "deterministic":
        with pipeline.distribute(six_workers, job="undisturbed", order=order, limits=LIMITS) as loader:
            plain = list(loader)
    rng = random.Random(7)
    events = ["scale"] * 30 + ["kill"] * 10
    rng.shuffle(events)
    job = f"disturbed-{order}"
    read: list[np.ndarray] = []
    with pipeline.distribute(
        six_workers, job=job, order=order, placement=ps.Placement(workers=3), limits=LIMITS
    ) as loader:
        for step, batch in enumerate(loader):
            read.append(batch)
            if step % 18 == 9 and events:
                if events.pop() == "scale":
                    six_workers.scale(job, rng.randint(1, 6))
                elif pids := sorted(six_workers.worker_pids().values()):
                    kill(rng.choice(pids))
    assert not events, "all of them happened before the epoch ended"
    assert_exactly_once(read, range(rows))
    if order == "deterministic":
        assert len(read) == len(plain)
        assert all(np.array_equal(one, other) for one, other in zip(read, plain))


def test_workers_come_and_go_as_jobs_want_them() -> None:
    with ps.LocalService(workers=(1, 4), threads=1) as service:
        job, stop = reading(service, "wants", ps.Placement(workers=3))
        wait_until(lambda: workers_of(service).get("wants") == 3 and len(service.workers()) == 3, "three workers")
        service.scale("wants", 1)
        wait_until(lambda: len(service.workers()) == 1, "the others to be let go")
        stop.set()
        for epoch in job.result(60):
            assert sorted(epoch) == list(range(400))
