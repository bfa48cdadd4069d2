"""Random numbers are those of the dataset wherever it is read, and `seed=` says which."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import penstock as ps

ROWS = 40


def noisy() -> ps.Dataset:
    """A new dataset each time: it has no seed of its own."""
    return ps.range(ROWS).map(lambda i, rng: (int(i), int(rng.integers(1 << 30))))


@pytest.fixture(scope="module")
def service() -> Iterator[ps.LocalService]:
    with ps.LocalService(workers=1) as found:
        yield found


def epoch(loader: ps.Loader) -> list[tuple[int, int]]:
    with loader:
        return sorted(map(tuple, map(np.ravel, loader)))


def test_a_dataset_draws_the_same_numbers_here_in_threads_and_through_a_service(service: ps.LocalService) -> None:
    dataset = noisy()
    here = sorted(dataset.iterator(epoch=0))
    assert epoch(dataset.distribute()) == here
    assert epoch(dataset.distribute(service)) == here
    assert epoch(dataset.distribute().map(lambda pair: pair)) == here


def test_without_a_seed_two_datasets_draw_different_numbers() -> None:
    assert epoch(noisy().distribute()) != epoch(noisy().distribute())


def test_a_seed_says_which_numbers_are_drawn(service: ps.LocalService) -> None:
    seeded = sorted(noisy().iterator(epoch=0, seed=7))
    assert epoch(noisy().distribute(seed=7)) == seeded
    assert epoch(noisy().distribute(service, seed=7)) == seeded
    assert epoch(noisy().distribute(seed=8)) != seeded


def test_a_seed_shuffles_where_the_pipeline_says_no_other() -> None:
    shuffled, own = ps.range(ROWS).shuffle(ROWS), ps.range(ROWS).shuffle(ROWS, seed=3)
    assert list(shuffled.distribute(seed=7)) == list(ps.range(ROWS).shuffle(ROWS).distribute(seed=7))
    assert list(own.distribute(seed=7)) == list(own.distribute(seed=8))


def test_a_state_goes_on_with_the_numbers_it_was_saved_with() -> None:
    first = noisy().distribute(seed=7)
    iterator = iter(first)
    head = [next(iterator) for _ in range(10)]
    second = noisy().distribute()
    second.load_state_dict(first.state_dict())
    assert head + list(second) == list(noisy().iterator(epoch=0, seed=7))
