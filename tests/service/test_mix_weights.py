"""A mix through the service: shares hold across resumes, and weights change between epochs and between two steps."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import InvalidArgumentError

from .checks import Background, kill

FIRST, SECOND, MANY = 0, 1_000_000, 60_000
BATCH = 10


MEMORY = 4 << 20
PADDING = np.zeros(500)  # these never end: what is made ahead is limited by its size


def padded(i: int) -> dict[str, Any]:
    return {"id": i, "padding": PADDING}


def mixed(stop: str = "never", rows: int = MANY) -> ps.Dataset:
    sources = [ps.range(FIRST, FIRST + rows).shuffle(seed=1), ps.range(SECOND, SECOND + rows).shuffle(seed=2)]
    return ps.mix(sources, [0.7, 0.3], stop=stop).map(padded).batch(BATCH)


def share(batches: list[np.ndarray]) -> float:
    """Return the first source's."""
    return float((np.concatenate(batches) < SECOND).mean())


def take(iterator: Any, count: int) -> list[np.ndarray]:
    return [next(iterator)["id"].copy() for _ in range(count)]


def check_once(batches: list[np.ndarray]) -> None:
    twice = [i for i, count in Counter(np.concatenate(batches).tolist()).items() if count > 1]
    assert not twice, f"{len(twice)} elements came twice, {twice[:5]} among them"


LIMITS = ps.Limits(timeout_s=60, memory_bytes=MEMORY)
ORDERS = [{"order": "relaxed"}, {"order": "deterministic", "sharding": ps.Sharding(streams=4)}]


@pytest.mark.parametrize("order", ORDERS)
def test_shares_hold_across_resumes(
    one_worker: ps.LocalService, three_workers: ps.LocalService, order: dict[str, Any]
) -> None:
    read: list[np.ndarray] = []
    state = None
    for part in range(6):
        service = (three_workers, one_worker)[part % 2]
        with mixed().distribute(service, job=f"shares-{order['order']}-{part}", limits=LIMITS, **order) as loader:
            if state is not None:
                loader.load_state_dict(json.loads(state))
            read += take(iter(loader), 173)
            state = json.dumps(loader.state_dict())
        assert abs(share(read) - 0.7) <= 0.005
    check_once(read)


@pytest.mark.parametrize("order", ORDERS)
def test_weights_change_between_two_steps(
    one_worker: ps.LocalService, three_workers: ps.LocalService, order: dict[str, Any]
) -> None:
    with mixed().distribute(three_workers, job=f"change-{order['order']}", limits=LIMITS, **order) as loader:
        iterator = iter(loader)
        before = take(iterator, 211)
        loader.set_weights([0.2, 0.8])
        assert loader.state_dict()["weights"] == [0.2, 0.8]
        at_once = json.dumps(loader.state_dict())
        after = take(iterator, 307)
        later = json.dumps(loader.state_dict())
        more = take(iterator, 100)
        loader.set_weights([1, 0])
        only = take(iterator, 50)
    assert abs(share(before) - 0.7) <= 0.02 and share(only) == 1
    assert abs(share([*after, *more]) - 0.2) <= 0.006
    check_once([*before, *after, *more, *only])
    for name, state, head in (("at-once", at_once, before), ("later", later, before + after)):
        with mixed().distribute(
            one_worker,
            job=f"change-{order['order']}-{name}",
            limits=LIMITS,
            **order,
        ) as loader:
            loader.load_state_dict(json.loads(state))
            rest = take(iter(loader), 400)
        assert abs(share(rest) - 0.2) <= 0.006
        check_once([*head, *rest])
        if order["order"] == "deterministic":
            expected = [*after, *more] if name == "at-once" else more
            both = min(len(rest), len(expected))
            assert [batch.tolist() for batch in rest[:both]] == [batch.tolist() for batch in expected[:both]]


def test_weights_set_between_epochs_hold_in_the_next_ones(one_worker: ps.LocalService) -> None:
    with mixed("first", rows=3000).distribute(one_worker, job="epochs", limits=LIMITS) as loader:
        assert abs(share([batch["id"].copy() for batch in loader]) - 0.7) < 0.01
        loader.set_weights([1, 1])
        assert abs(share([batch["id"].copy() for batch in loader]) - 0.5) < 0.01
        state = json.loads(json.dumps(loader.state_dict()))
        assert abs(share([batch["id"].copy() for batch in loader]) - 0.5) < 0.01
    with mixed("first", rows=3000).distribute(one_worker, job="epochs-again", limits=LIMITS) as loader:
        loader.load_state_dict(state)
        assert abs(share([batch["id"].copy() for batch in loader]) - 0.5) < 0.01


def test_finite_data_is_read_once_over_changes_and_deaths() -> None:
    with (
        ps.LocalService(workers=2) as service,
        mixed("all", rows=4000).distribute(service, limits=LIMITS) as loader,
    ):
        read: list[np.ndarray] = []
        for batch in loader:
            read.append(batch["id"].copy())
            if len(read) % 90 == 0:
                loader.set_weights([1, 1 + len(read) % 4])
            if len(read) in (100, 300):
                kill(next(iter(service.worker_pids().values())))
    ids = np.concatenate(read).tolist()
    assert Counter(ids) == Counter([*range(4000), *range(SECOND, SECOND + 4000)])


@pytest.mark.parametrize("coordinated", [True, False])
def test_ranks_change_weights_at_the_same_step(three_workers: ps.LocalService, coordinated: bool) -> None:
    ranks = partial(ps.Ranks, 2, coordinated=coordinated)
    options: dict[str, Any] = {
        "job": f"ranks-{coordinated}",
        "order": "relaxed" if coordinated else "deterministic",
        "sharding": ps.Sharding(streams=3),
        "limits": LIMITS,
    }

    def rank(consumer: int) -> tuple[list[np.ndarray], Any]:
        with mixed().distribute(three_workers, ranks=ranks(rank=consumer), **options) as loader:
            iterator = iter(loader)
            read = take(iterator, 100)
            state = loader.state_dict()
            read += take(iterator, 50)
            loader.set_weights([0.5, 0.5])
            return read + take(iterator, 200), state

    (one, state), (other, _) = (thread.result() for thread in [Background(lambda c=c: rank(c)) for c in range(2)])
    check_once([*one, *other])
    assert abs(share([*one[:150], *other[:150]]) - 0.7) < 0.01
    assert abs(share([*one[150:], *other[150:]]) - 0.5) < 0.01
    # A rank that comes back from before the change makes the same change, and reads the same again.
    with mixed().distribute(three_workers, ranks=ranks(rank=0), **options) as loader:
        loader.load_state_dict(state)
        iterator = iter(loader)
        again = take(iterator, 50)
        loader.set_weights([0.5, 0.5])
        again += take(iterator, 150)
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in one[100:300]]


def test_a_rank_that_misses_a_change_is_told(one_worker: ps.LocalService) -> None:
    options: dict[str, Any] = {
        "job": "missed",
        "order": "deterministic",
        "sharding": ps.Sharding(streams=2),
        "limits": LIMITS,
    }
    with (
        mixed().distribute(one_worker, ranks=ps.Ranks(2, 0), **options) as first,
        mixed().distribute(one_worker, ranks=ps.Ranks(2, 1), **options) as second,
    ):
        one, other = iter(first), iter(second)
        beginning = Background(lambda: next(one))
        next(other)
        beginning.result()
        first.set_weights([0, 1])
        going_on = Background(lambda: [next(one, None) for _ in range(20_000)])
        with pytest.raises(ps.InvalidArgumentError, match="all ranks"):
            take(other, 100_000)
        first.close()
        going_on.result()


def test_weights_that_cannot_be_are_refused(one_worker: ps.LocalService) -> None:
    with mixed().distribute(one_worker, job="refused") as loader:
        with pytest.raises(ps.InvalidArgumentError, match="2 sources"):
            loader.set_weights([1, 2, 3])
        with pytest.raises(ps.InvalidArgumentError, match="negative"):
            loader.set_weights([-1, 2])
    with ps.range(9).distribute(one_worker) as loader, pytest.raises(ps.InvalidPipelineError, match="exactly one"):
        loader.set_weights([1])
    with pytest.raises(ps.InvalidArgumentError, match="service"):
        mixed().distribute().set_weights([1, 1])
    held = ps.mix([ps.range(900), ps.range(900)], [1, 1], stop="all").shuffle(4)
    with held.distribute(one_worker, job="held back", limits=ps.Limits(timeout_s=60)) as loader:
        next(iter(loader))
        with pytest.raises(ps.InvalidArgumentError, match="shuffle"):
            loader.set_weights([1, 2])
        list(loader)
        loader.set_weights([1, 2])
    options = {"job": "relaxed", "limits": LIMITS}
    with mixed().distribute(one_worker, ranks=ps.Ranks(2, 0), **options) as loader:
        next(iter(loader))
        with pytest.raises(ps.InvalidArgumentError, match="deterministic"):
            loader.set_weights([1, 1])


def test_weights_of_a_mix_that_every_stream_reads_whole_hold_for_the_epoch(one_worker: ps.LocalService) -> None:
    """Elements came twice and others never: streams told apart by a mark after the mix are at different places."""
    mix = ps.mix([ps.range(FIRST, 10), ps.range(SECOND, SECOND + 10)], [0.7, 0.3], stop="all")
    with mix.shard().distribute(one_worker, sharding="hint", limits=LIMITS) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(InvalidArgumentError, match=r"shard\(\) after the mix"):
            loader.set_weights([0.5, 0.5])
    inputs = [ps.range(FIRST, 10).shard(), ps.range(SECOND, SECOND + 10).shard()]
    with ps.mix(inputs, [0.7, 0.3], stop="all").distribute(one_worker, sharding="hint", limits=LIMITS) as loader:
        elements = iter(loader)
        given = [int(next(elements))]
        loader.set_weights([0.5, 0.5])
        assert sorted([*given, *map(int, elements)]) == [*range(10), *range(SECOND, SECOND + 10)]
