"""A pipeline may be cut in two anywhere: what draws random numbers after `distribute` draws the same ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import penstock as ps
from penstock.core.errors import JobMismatchError

from .checks import Background

ROWS = 60
NUMBERS = count()

Operator = Callable[[Any], Any]


def noisy(row: int, rng: np.random.Generator) -> dict[str, Any]:
    return {"id": int(row), "noise": float(rng.random())}


def kept(row: dict[str, Any], rng: np.random.Generator) -> bool:
    return bool(rng.random() < 0.8)


def crop(batch: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**batch, "crop": int(rng.integers(1 << 40))}


def several(row: dict[str, Any], rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    for child in range(1 + row["id"] % 3):
        yield {**row, "child": child, "drawn": int(rng.integers(1000))}


def jitter(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**row, "jitter": float(rng.random())}


# In batches the shuffle does not reach the source, so that its order is the same wherever it stands.
BATCHES: tuple[Operator, ...] = (
    lambda ds: ds.map(noisy),
    lambda ds: ds.filter(kept),
    lambda ds: ds.batch(4),
    lambda ds: ds.shuffle(3, seed=5),
    lambda ds: ds.map(crop),
)
ROWS_AND_CHILDREN: tuple[Operator, ...] = (
    lambda ds: ds.shuffle(8, seed=3),
    lambda ds: ds.map(noisy),
    lambda ds: ds.flat_map(several),
    lambda ds: ds.filter(kept),
    lambda ds: ds.map(jitter),
)


def plain(output: Any) -> Any:
    if isinstance(output, dict):
        return tuple((name, plain(value)) for name, value in sorted(output.items()))
    if isinstance(output, (list, tuple)):
        return tuple(map(plain, output))
    return output.tolist() if isinstance(output, (np.ndarray, np.generic)) else output


def through(pipeline: Any, operators: tuple[Operator, ...]) -> Any:
    for operator in operators:
        pipeline = operator(pipeline)
    return pipeline


def epochs(reader: Any, count: int = 2) -> list[list[Any]]:
    return [[plain(output) for output in reader] for _ in range(count)]


@pytest.fixture(scope="module")
def service() -> Iterator[ps.LocalService]:
    with ps.LocalService(workers=2) as found:
        yield found


@pytest.mark.parametrize("cut", range(len(BATCHES) + 1))
def test_the_same_elements_and_numbers_with_distribute_after_each_of_six_operators(service, cut):
    here = epochs(through(ps.range(ROWS), BATCHES))
    before = through(ps.range(ROWS), BATCHES[:cut])
    distributed = before.distribute(service, order="deterministic", sharding=ps.Sharding(streams=1))
    with through(distributed, BATCHES[cut:]) as loader:
        assert epochs(loader) == here
    with through(before.distribute(), BATCHES[cut:]) as loader:
        assert epochs(loader) == here


@pytest.mark.parametrize("cut", range(len(ROWS_AND_CHILDREN) + 1))
def test_each_element_draws_its_own_numbers_in_any_order_of_arrival(service, cut):
    here = list(map(sorted, epochs(through(ps.range(ROWS), ROWS_AND_CHILDREN))))
    operators = ROWS_AND_CHILDREN
    order = "relaxed" if cut else "deterministic"
    before = through(ps.range(ROWS), operators[:cut])
    with through(before.distribute(service, order=order, seed=3), operators[cut:]) as loader:
        assert list(map(sorted, epochs(loader))) == here


# The same options on both sides of one operator that draws


def ranks_of(dataset: ps.Dataset, service: ps.LocalService, after: Operator, **options: Any) -> list[list[Any]]:
    """Return what each rank of a job reads in an epoch."""
    ranks: ps.Ranks = options.pop("ranks", ps.Ranks(1, 0))
    job = f"cut-{next(NUMBERS)}"
    loaders = [
        after(dataset.distribute(service, job=job, seed=7, ranks=replace(ranks, rank=rank), **options))
        for rank in range(ranks.count)
    ]
    readings = [Background(lambda loader=loader: [plain(output) for output in loader]) for loader in loaders]
    try:
        return [reading.result() for reading in readings]
    finally:
        for loader in loaders:
            loader.close()


def batches() -> ps.Dataset:
    return ps.range(ROWS).map(noisy).batch(4)


WAYS: dict[str, dict[str, Any]] = {
    "streams": {"order": "deterministic", "sharding": ps.Sharding(streams=3)},
    "ranks": {"order": "deterministic", "ranks": ps.Ranks(2, 0)},
    "padded": {"order": "deterministic", "ranks": ps.Ranks(2, 0, "pad")},
    "coordinated": {"order": "deterministic", "ranks": ps.Ranks(2, 0, coordinated=True)},
    "fed": {"feed": [[5, 3], [8, 8, 1], [2]]},
    "off": {"sharding": "off", "placement": ps.Placement(max_workers=1)},
    "shared": {"sharing": ps.Share("wait", "one"), "placement": ps.Placement(max_workers=1)},
    "compressed": {"order": "deterministic", "transport": "lz4"},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_function_draws_the_same_on_both_sides_of_distribute(service, way):
    dataset = batches()
    before = ranks_of(dataset.map(crop), service, lambda loader: loader, **WAYS[way])
    after = ranks_of(dataset, service, lambda loader: loader.map(crop), **WAYS[way])
    assert after == before
    assert len({dict(output)["crop"] for outputs in after for output in outputs}) > 2


def test_what_counts_keeps_identities(service):
    def numbered(pipeline: Any) -> Any:
        return pipeline.skip(5).take(20).enumerate(100).map(lambda pair, rng: (pair, int(rng.integers(1 << 40))))

    with numbered(ps.range(ROWS)).iterator(epoch=0, seed=7) as here:
        expected = list(map(plain, here))
    (found,) = ranks_of(ps.range(ROWS), service, numbered, order="deterministic", sharding=ps.Sharding(streams=1))
    assert found == expected


def test_functions_that_take_lists_and_generators_draw_the_same(service):
    def listed(pipeline: Any) -> Any:
        pipeline = pipeline.map(lambda rows, rng: [(int(row), float(rng.random())) for row in rows], batch_size=4)
        return pipeline.interleave(lambda pair, rng: [(pair, int(rng.integers(1 << 40)))] * 2, cycle=3)

    with listed(ps.range(ROWS)).iterator(epoch=0, seed=7) as here:
        expected = list(map(plain, here))
    (found,) = ranks_of(ps.range(ROWS), service, listed, order="deterministic", sharding=ps.Sharding(streams=1))
    assert found == expected


def test_a_state_goes_on_with_the_same_numbers(service):
    def made() -> Any:
        dataset = ps.range(ROWS).shuffle(seed=7).map(noisy)
        loader = dataset.distribute(service, order="deterministic", sharding=ps.Sharding(streams=2))
        return loader.flat_map(several).map(jitter)

    with made() as loader:
        whole = epochs(loader)
    for steps in (1, 10, 25):
        with made() as loader:
            reading = iter(loader)
            head = [plain(next(reading)) for _ in range(steps)]
            state = json.loads(json.dumps(loader.state_dict()))
        with made() as loader:
            loader.load_state_dict(state)
            assert [head + epochs(loader, 1)[0], *epochs(loader, 1)] == whole


def test_an_element_of_which_some_children_were_given_comes_next_on_another_service():
    """In relaxed order another stream might be first, and another split be granted to the stream."""

    def made(to: ps.LocalService) -> Any:
        rows = ps.from_generator(lambda split: iter([split]), splits=range(12))
        return rows.map(noisy).distribute(to, seed=7).flat_map(several)

    with ps.LocalService(workers=3) as one:
        with made(one) as loader:
            whole = sorted(epochs(loader, 1)[0])
        loader = made(one)
        reading = iter(loader)
        head = [plain(next(reading)) for _ in range(2)]
        state = loader.state_dict()
        loader.close()
    with ps.LocalService(workers=3) as other, made(other) as loader:
        loader.load_state_dict(state)
        assert sorted(head + epochs(loader, 1)[0]) == whole


def test_elements_of_two_jobs_and_of_a_source_here_draw_numbers_of_their_own(service):
    first = ps.range(10).concatenate(ps.range(10)).map(plainly)
    parts = (first, ps.range(10), ps.range(10))
    with first.concatenate(*parts[1:]).map(crop_any).iterator(epoch=0, seed=7) as here:
        expected = sorted(map(plain, here))
    loaders = [part.distribute(service, seed=7) for part in parts[:2]]
    with loaders[0].concatenate(loaders[1], parts[2]).map(crop_any) as loader:
        assert sorted(map(plain, loader)) == expected
    assert len({row[-1] for row in expected}) == len(expected) == 40


def plainly(row: int, rng: np.random.Generator) -> int:
    return int(row) if rng.random() >= 0 else -1


def crop_any(element: Any, rng: np.random.Generator) -> tuple[Any, int]:
    return element, int(rng.integers(1 << 40))


def test_a_registered_pipeline_hands_identities_on(service):
    ps.register(service, batches(), id="cut")
    with batches().map(crop).iterator(epoch=0, seed=7) as here:
        expected = list(map(plain, here))
    options = {"order": "deterministic", "sharding": ps.Sharding(streams=1), "seed": 7}
    with ps.read_registered(service, "cut", **options).map(crop) as loader:
        assert list(map(plain, loader)) == expected


def test_who_reads_one_job_with_and_without_identities_is_told(service):
    plain_one = batches().distribute(service, job="told")
    reading = iter(plain_one)
    next(reading)
    drawing = batches().distribute(service, job="told").map(crop)
    with pytest.raises(JobMismatchError, match=r"Only this loader has a function that takes rng after distribute\(\)"):
        next(iter(drawing))
    drawing.close()
    plain_one.close()
