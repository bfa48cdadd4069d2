"""Allotting: what always holds, for any jobs and any pool."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.policies.allotting import Allotment, JobClaim, PoolWorker, allot

KINDS = ("cpu", "big")


@st.composite
def pools(draw: st.DrawFn, most: int = 8, sizes: tuple[float, ...] = (1.0,)) -> list[PoolWorker]:
    count = draw(st.integers(0, most))
    return [
        PoolWorker(
            worker=f"w{i}",
            host=draw(st.sampled_from("abc")),
            kind=draw(st.sampled_from(KINDS)),
            size=draw(st.sampled_from(sizes)),
        )
        for i in range(count)
    ]


@st.composite
def claims(draw: st.DrawFn, most: int = 5, weights: tuple[float, ...] = (1.0, 2.0, 3.0)) -> list[JobClaim]:
    return [
        JobClaim(
            job=f"j{i}",
            target=draw(st.integers(0, 6)),
            weight=draw(st.sampled_from(weights)),
            priority=draw(st.integers(0, 1)),
            owner=draw(st.sampled_from(("ann", "bob"))),
            kinds=draw(st.sampled_from((frozenset(), frozenset({"cpu"}), frozenset({"big"})))),
        )
        for i in range(draw(st.integers(0, most)))
    ]


QUOTAS = st.dictionaries(st.just("ann"), st.integers(0, 4).map(float))


def shared(given: Allotment) -> set[str]:
    served = Counter(worker for workers in given.workers.values() for worker in workers)
    return {worker for worker, jobs in served.items() if jobs > 1}


def counts(wanted: list[JobClaim], given: Allotment) -> dict[str, int]:
    """Return how many workers each has, those left out that it only shares."""
    several = shared(given)
    found = {}
    for claim in wanted:
        names = given.workers.get(claim.job, ())
        first = [w for w in names if w not in several or claim.job == first_of(given, w)]
        found[claim.job] = len(first)
    return found


def first_of(given: Allotment, worker: str) -> str:
    """Return whose a shared worker was before others joined: the one that is not short of all."""
    holders = [job for job, workers in given.workers.items() if worker in workers]
    return next((job for job in holders if "a part of" not in given.shortages.get(job, "")), holders[0])


@given(claims(), pools(sizes=(1.0, 2.0)), QUOTAS)
@settings(max_examples=100, deadline=None)
def test_pool_quota_target_and_kind_are_never_exceeded(
    wanted: list[JobClaim], pool: list[PoolWorker], quotas: dict[str, float]
) -> None:
    allotted = allot(wanted, pool, None, quotas)
    by_name = {worker.worker: worker for worker in pool}
    owned: dict[str, set[str]] = {"ann": set(), "bob": set()}
    for claim in wanted:
        names = allotted.workers.get(claim.job, ())
        assert len(set(names)) == len(names)
        assert all(claim.fits(by_name[name].kind) for name in names)
        largest = max((by_name[name].size for name in names), default=0.0)
        assert sum(by_name[name].size for name in names) - largest < max(claim.target, 1)
        assert (not names) if not claim.target else True
        owned[claim.owner].update(names)
    for owner, quota in quotas.items():
        assert sum(by_name[name].size for name in owned[owner]) <= quota
    for claim in wanted:
        size = sum(by_name[name].size for name in allotted.workers.get(claim.job, ()))
        assert claim.job in allotted.shortages or size >= claim.target


def reachable(wanted: list[JobClaim], pool: list[PoolWorker], quotas: dict[str, float]) -> set[tuple[int, ...]]:
    """Return every way to give workers of size 1 to jobs, as numbers."""
    kinds = Counter(worker.kind for worker in pool)
    found = set()
    for numbers in itertools.product(*(range(claim.target + 1) for claim in wanted)):
        only = {kind: sum(n for n, c in zip(numbers, wanted) if c.kinds == frozenset({kind})) for kind in KINDS}
        owned = sum(n for n, c in zip(numbers, wanted) if c.owner == "ann")
        if sum(numbers) <= len(pool) and owned <= quotas.get("ann", 99) and all(only[k] <= kinds[k] for k in KINDS):
            found.add(numbers)
    return found


@given(claims(most=4, weights=(1.0,)), pools(most=6), QUOTAS)
@settings(max_examples=100, deadline=None)
def test_shares_of_equal_weight_are_max_min_optimal(
    wanted: list[JobClaim], pool: list[PoolWorker], quotas: dict[str, float]
) -> None:
    wanted = [claim for claim in wanted if claim.target]
    numbers = counts(wanted, allot(wanted, pool, None, quotas))

    def levels(each: tuple[int, ...]) -> list[list[int]]:
        return [sorted(n for n, claim in zip(each, wanted) if claim.priority == p) for p in (1, 0)]

    best = max((levels(each) for each in reachable(wanted, pool, quotas)), default=[[], []])
    assert levels(tuple(numbers[claim.job] for claim in wanted)) == best


@given(claims(most=4), pools(most=8), QUOTAS)
@settings(max_examples=100, deadline=None)
def test_no_worker_could_go_to_a_job_that_has_less_for_its_weight(
    wanted: list[JobClaim], pool: list[PoolWorker], quotas: dict[str, float]
) -> None:
    wanted = [claim for claim in wanted if claim.target]
    numbers = counts(wanted, allot(wanted, pool, None, quotas))
    ways = reachable(wanted, pool, quotas)
    now = tuple(numbers[claim.job] for claim in wanted)
    assert now in ways
    for poor, rich in itertools.permutations(range(len(wanted)), 2):
        if wanted[poor].priority == wanted[rich].priority and now[rich]:
            moved = list(now)
            moved[poor] += 1
            moved[rich] -= 1
            if tuple(moved) in ways:
                assert (now[rich] - 1) / wanted[rich].weight <= now[poor] / wanted[poor].weight
    assert not [way for way in ways if way != now and all(a >= b for a, b in zip(way, now))]


@given(claims(), claims(), pools(sizes=(1.0, 2.0)), QUOTAS)
@settings(max_examples=100, deadline=None)
def test_an_allotment_is_kept_while_nothing_changes(
    before: list[JobClaim], wanted: list[JobClaim], pool: list[PoolWorker], quotas: dict[str, float]
) -> None:
    earlier = allot(before, pool, None, quotas)
    once = allot(wanted, pool, earlier.workers, quotas)
    for _ in range(2):  # sharing may be evened out, and a small worker let go that a larger one has made superfluous
        once = allot(wanted, pool, once.workers, quotas)
    again = allot(wanted, pool, once.workers, quotas)
    assert {job: sorted(names) for job, names in again.workers.items()} == {
        job: sorted(names) for job, names in once.workers.items()
    }


@given(claims(), claims(), st.integers(0, 8))
@settings(max_examples=100, deadline=None)
def test_a_job_keeps_as_many_of_its_workers_as_it_is_due(
    before: list[JobClaim], wanted: list[JobClaim], size: int
) -> None:
    pool = [PoolWorker(worker=f"w{i}", kind="cpu") for i in range(size)]
    earlier = allot(before, pool)
    several = shared(earlier)
    later = allot(wanted, pool, earlier.workers)
    if shared(later) or several:
        return
    for job, names in later.workers.items():
        had = set(earlier.workers.get(job, ()))
        assert len(had & set(names)) == min(len(had), len(names))


def test_a_job_that_fits_one_kind_gets_it_from_one_that_can_use_another() -> None:
    pool = [PoolWorker(worker="w0", kind="cpu"), PoolWorker(worker="w1", kind="big")]
    anywhere = JobClaim(job="anywhere", target=1)
    picky = JobClaim(job="picky", target=1, kinds=frozenset({"cpu"}))
    allotted = allot([anywhere, picky], pool, {"anywhere": ["w0"]})
    assert allotted.workers == {"anywhere": ("w1",), "picky": ("w0",)}
    assert not allotted.shortages


def test_jobs_share_workers_where_there_are_fewer_of_them() -> None:
    pool = [PoolWorker(worker=f"w{i}") for i in range(2)]
    allotted = allot([JobClaim(job=f"j{i}", target=3) for i in range(4)], pool)
    served = Counter(worker for workers in allotted.workers.values() for worker in workers)
    assert served == {"w0": 2, "w1": 2}
    assert allotted.shortages["j3"] == "a part of 1 of 3 workers: the pool of 2 is exhausted by 4 jobs"


def test_jobs_of_an_owner_at_its_quota_share_its_workers() -> None:
    pool = [PoolWorker(worker=f"w{i}") for i in range(4)]
    training, validation = JobClaim(job="t", target=2, owner="ann"), JobClaim(job="v", target=1, owner="ann")
    allotted = allot([training, validation], pool, None, {"ann": 1.0})
    assert allotted.workers["t"] == allotted.workers["v"] and len(allotted.workers["t"]) == 1
    assert allotted.shortages["t"] == "1 of 2 workers: the quota of 'ann' is 1"


def test_a_host_is_filled_before_a_second_one_is_used() -> None:
    pool = [PoolWorker(worker=f"{host}{i}", host=host) for i in range(3) for host in "abc"]
    allotted = allot([JobClaim(job="j", target=3)], pool, {"j": ["b1"]})
    assert set(allotted.workers["j"]) == {"b0", "b1", "b2"}


def test_nobody_can_run_it_is_a_reason() -> None:
    claim = JobClaim(job="j", target=2, kinds=frozenset({"gpu"}))
    allotted = allot([claim], [PoolWorker(worker="w", kind="cpu")])
    assert allotted.shortages == {"j": "0 of 2 workers: none of the pool can run it"}
