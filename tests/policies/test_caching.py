"""What is kept, and where, by figures alone."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from penstock.policies.caching import (
    CacheDemand,
    PipelineProfile,
    PointProfile,
    StorageModel,
    StorageSpeed,
    cachew_choice,
    choose_caching,
)


def storage(read: float, write: float | None = None) -> StorageModel:
    """A location that gives so many bytes a second."""

    def speed(bytes_per_s):
        return (StorageSpeed(nbytes=1 << 20, parallel=4, latency_s=0.001, bytes_per_s=bytes_per_s),)

    return StorageModel(reads=speed(read), writes=speed(read if write is None else write))


def profile(function_s: float, *, source_s=0.0005, trainer_s=0.0, gil_s=0.0) -> PipelineProfile:
    """A source of 250 KB an element, a function, results of 100 KB."""
    return PipelineProfile(
        cpu_s=0.0002 + function_s,
        gil_s=gil_s,
        source_s=source_s,
        trainer_s=trainer_s,
        points=(
            PointProfile(number=1, cpu_s=0.0002, gil_s=0.0, nbytes=250e3),
            PointProfile(number=2, cpu_s=0.0002 + function_s, gil_s=gil_s, nbytes=100e3),
        ),
    )


FAST, SLOW = storage(1e9), storage(20e6)

CASES = {
    "a cheap function over a fast source": (profile(0.00005, source_s=0.00005), storage(300e6), CacheDemand(), 0),
    "an expensive function": (profile(0.02), FAST, CacheDemand(), 2),
    "an expensive function and a slow disk": (profile(0.02), SLOW, CacheDemand(), 2),
    "a function cheaper than a slow disk": (profile(0.003), SLOW, CacheDemand(), 0),
    "a slow source and a cheap function": (profile(0.0001, source_s=0.01), FAST, CacheDemand(), 2),
    "a trainer that is slower": (profile(0.02, trainer_s=0.03), FAST, CacheDemand(), 0),
    "a trainer that is slower than getting only": (profile(0.02, trainer_s=0.01), FAST, CacheDemand(), 2),
    "the last epoch": (profile(0.02), FAST, CacheDemand(epochs_left=1), 0),
    "two epochs": (profile(0.02), FAST, CacheDemand(epochs_left=2), 2),
    "cores enough": (profile(0.02), SLOW, CacheDemand(max_workers=64), 0),
    "a function that holds the GIL": (profile(0.02, gil_s=0.02), FAST, CacheDemand(cores=64), 2),
    "equals": (profile(0.0001, source_s=0.0051), storage(20e6), CacheDemand(), 0),
}


@pytest.mark.parametrize("name", CASES)
def test_the_largest_of_overlapping_bounds_decides(name):
    measured, where, demand, point = CASES[name]
    choice = choose_caching(measured, where, demand)
    assert choice.point == point, choice.reason
    assert (choice.mode == "compute") == (point == 0)
    assert set(choice.seconds_by_mode) == {"compute", "keep 1", "keep 2"}


def test_what_is_never_written_in_the_epochs_left_is_not_kept():
    slow_to_write = storage(1e9, write=2e6)
    assert choose_caching(profile(0.02), slow_to_write, CacheDemand(epochs_left=90)).point == 2
    choice = choose_caching(profile(0.001), slow_to_write, CacheDemand(epochs_left=2))
    assert choice.seconds_by_mode["keep 2"] < choice.seconds_by_mode["compute"], "what is there is got, all the same"


def test_a_mode_needs_its_own_number_of_workers():
    demand = CacheDemand(max_workers=16)
    measured = profile(0.02, trainer_s=0.002)
    computing = choose_caching(replace(measured, points=()), FAST, demand)
    keeping = choose_caching(replace(measured, trainer_s=0.001), FAST, demand)
    assert computing.workers == pytest.approx(11, abs=1) and keeping.workers == 1


def test_of_points_that_are_equally_fast_the_one_that_needs_fewer_workers_is_kept():
    measured = PipelineProfile(
        cpu_s=0.22,
        gil_s=0.0,
        source_s=0.0,
        trainer_s=0.05,
        points=(
            PointProfile(number=1, cpu_s=0.02, gil_s=0.0, nbytes=1e5),
            PointProfile(number=2, cpu_s=0.12, gil_s=0.0, nbytes=2e5),
        ),
    )
    choice = choose_caching(measured, storage(1e9), CacheDemand(max_workers=4))
    assert (choice.point, choice.workers) == (2, 2), choice.reason


def test_the_table_of_another_storage_decides_otherwise_on_a_slow_one():
    measured = profile(0.003)
    assert cachew_choice(measured).point == 2, "the table knows one storage"
    assert choose_caching(measured, SLOW, CacheDemand()).point == 0
