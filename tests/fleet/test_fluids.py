"""The fleet simulator: fluids that add up, and published numbers that it gives back."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.fleet.fluids import Fleet, FleetJob, FleetLimits, settle
from penstock.policies.allotting import PoolWorker
from penstock.policies.scaling import cachew, model_first, utilization

PUBLISHED = tomllib.loads((Path(__file__).parents[2] / "experiments" / "workloads.toml").read_text())["published"]


def published(name: str) -> FleetJob:
    fields = ("trainer_per_s", "worker_per_s", "contention", "storage_per_s", "processor", "ranks")
    return FleetJob(name=name, **{key: PUBLISHED[name][key] for key in fields if key in PUBLISHED[name]})


def workers(count: int, kind: str = "") -> list[PoolWorker]:
    return [PoolWorker(worker=f"{kind}{n}", kind=kind) for n in range(count)]


def job(name: str = "j", **changes: Any) -> FleetJob:
    return replace(FleetJob(name=name, trainer_per_s=8.0, worker_per_s=1.0), **changes)


def test_figure_9_of_tf_data_service_is_predicted_within_a_tenth() -> None:
    m1 = published("tf-data-m1")
    for count, per_s in PUBLISHED["tf-data-m1"]["seen"].items():
        assert m1.taken(int(count)) == pytest.approx(per_s, rel=0.1), count


@pytest.mark.parametrize(
    ("name", "climb"),
    [
        ("retinanet", [1, 2, 3, 4, 5, 4]),
        ("multi-tenant-first", [1, 2, 3, 2]),
        ("multi-tenant-second", [1, 2, 3, 4, 5, 4]),
    ],
)
def test_cachew_climbs_as_in_its_paper(name: str, climb: list[int]) -> None:
    model = published(name)
    record = settle(model, policy=cachew, beat_s=50 / model.trainer_per_s, until_s=6000 / model.trainer_per_s)
    assert [count for _, count, _ in record.path] == climb


def test_simclr_ends_at_16_with_cachew_and_at_24_with_kubernetes() -> None:
    simclr = published("simclr-compute")
    record = settle(simclr, policy=cachew, beat_s=50 / simclr.trainer_per_s, until_s=2000)
    assert max(count for _, count, _ in record.path) == 17 and record.workers == 16
    assert settle(simclr, policy=utilization, beat_s=15.0, until_s=900).workers == 24


@pytest.mark.parametrize("name", ["simclr-compute", "simclr-source"])
def test_workers_that_disturb_each_other_as_foreseen_are_asked_for_while_they_pay(name: str) -> None:
    simclr = published(name)
    record = settle(simclr, policy=model_first, beat_s=50 / simclr.trainer_per_s, until_s=2000)
    assert simclr.taken(record.workers) * 1.03 >= simclr.trainer_per_s, record.path


def test_a_job_that_ends_gives_its_workers_to_those_that_wait() -> None:
    short, long = job("short", ends_s=3000.0), job("long")
    record = Fleet([short, long], workers(8), beat_s=20.0, move_s=0.0).run(6000)
    assert record.held[100] == 8 and record.jobs["short"].ended_s == 3000.0
    assert record.used[100] == pytest.approx(8) and record.used[-1] == pytest.approx(8)
    assert record.utilization > 0.95


def test_two_jobs_of_weights_2_and_1_get_4_and_2_of_six() -> None:
    fleet = Fleet([job("big", weight=2.0), job("small")], workers(6), beat_s=20.0)
    fleet.run(600)
    assert {name: len(held) for name, held in fleet.allotment.workers.items()} == {"big": 4, "small": 2}
    assert fleet.allotment.shortages["big"] == "4 of 8 workers: the pool of 6 is exhausted by 2 jobs"


def test_jobs_share_a_storage_fairly() -> None:
    jobs = [job("a", storage="s"), job("b", storage="s", trainer_per_s=2.0)]
    fleet = Fleet(jobs, workers(30), beat_s=20.0, limits=FleetLimits(storages={"s": 6.0}))
    record = fleet.run(4000)
    assert record.jobs["b"].waiting_s / record.jobs["b"].reading_s < 0.05
    assert record.jobs["a"].batches / record.jobs["a"].reading_s == pytest.approx(4.0, rel=0.05)
    assert len(fleet.allotment.workers["a"]) <= 6


def test_workers_far_from_the_data_get_what_the_network_gives() -> None:
    far = Fleet([job(region="here")], workers(20, "there"), beat_s=20.0, limits=FleetLimits(crossing_per_s=2.0))
    assert far.run(2000).jobs["j"].batches / 2000 == pytest.approx(2.0, rel=0.05)
    near = Fleet([job(region="here")], workers(20, "here"), beat_s=20.0, limits=FleetLimits(crossing_per_s=2.0))
    assert near.run(2000).jobs["j"].batches / 2000 == pytest.approx(8.0, rel=0.05)


def test_fixed_numbers_are_given_for_good() -> None:
    fleet = Fleet([job()], workers(20), fixed={"j": 3}, beat_s=20.0, move_s=0.0)
    record = fleet.run(1000)
    assert record.jobs["j"].batches == pytest.approx(3.0 * 980)
    assert record.jobs["j"].path == []


def test_the_same_seed_gives_the_same_run() -> None:
    def run(seed: int) -> float:
        jobs = [job(f"j{n}", noise=0.1, trainer_per_s=3.0 + n) for n in range(5)]
        return Fleet(jobs, workers(60), policy=model_first, seed=seed).run(3600).jobs["j3"].batches

    assert run(1) == run(1) != run(2)
