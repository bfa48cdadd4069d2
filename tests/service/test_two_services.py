"""Two distributed datasets in one pipeline: it has one seed, which is in its state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import penstock as ps

LIMITS = ps.Limits(timeout_s=30)


@pytest.fixture(scope="module")
def service() -> Iterator[ps.LocalService]:
    with ps.LocalService(workers=1) as found:
        yield found


def drawn(x: int, rng: Any) -> tuple[int, int]:
    return x, int(rng.integers(1 << 30))


def part(service: ps.LocalService, job: str, **options: Any) -> ps.Loader:
    return ps.range(40).map(drawn).distribute(service, job=job, order="deterministic", limits=LIMITS, **options)


def test_loaders_of_other_seeds_are_not_put_together(service: ps.LocalService) -> None:
    one, two = part(service, "one", seed=5), part(service, "two", seed=6)
    with pytest.raises(ps.InvalidPipelineError, match=r"seed=5 and seed=6 .* a pipeline has one seed"):
        one.zip(two)


def test_the_seed_that_one_of_them_has_is_that_of_both(service: ps.LocalService) -> None:
    expected = ps.range(40).map(drawn)
    with part(service, "first") as first, part(service, "second", seed=7) as second, first.zip(second) as both:
        found = list(both)
        assert both.state_dict()["seed"] == 7
    assert sorted(pair for pair, _ in found) == list(expected.iterator(seed=7))
    assert [pair for pair, _ in found] == [pair for _, pair in found]


def test_a_rank_that_makes_the_second_job_makes_it_with_the_seed_of_the_first(service: ps.LocalService) -> None:
    ranks = [ps.Ranks(2, rank) for rank in range(2)]
    with (
        part(service, "left", ranks=ranks[0]) as maker,
        part(service, "left", ranks=ranks[1]) as left,
        part(service, "right", ranks=ranks[1]) as right,
        left.zip(right) as both,
        part(service, "right", ranks=ranks[0]) as other,
    ):
        iter(maker)
        iter(both)
        iter(other)
        seeds = [loader.state_dict()["seed"] for loader in (maker, both, other)]
        assert len(set(seeds)) == 1, seeds


def test_a_second_job_that_has_another_seed_is_refused(service: ps.LocalService) -> None:
    with part(service, "made before", seed=3) as maker, part(service, "new").zip(part(service, "made before")) as both:
        iter(maker)
        with pytest.raises(ps.JobMismatchError, match=r"'made before' has the seed 3 .* job= name"):
            iter(both)
