"""Saving and loading where a trainer stands: nothing lost, nothing twice, on any number of workers and ranks."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import numpy as np
import pytest

import penstock as ps

from .checks import Background, assert_exactly_once

ROWS = 6000


def dataset() -> ps.Dataset:
    return ps.range(ROWS).shuffle(seed=9).map(lambda i: i).batch(8)


def read_some(loader: ps.Loader, steps: int) -> tuple[list[np.ndarray], str]:
    iterator = iter(loader)
    read = [next(iterator).copy() for _ in range(steps)]
    state = json.dumps(loader.state_dict())
    return read, state


@pytest.mark.parametrize("order", ["relaxed", "deterministic"])
@pytest.mark.parametrize("steps", [0, 1, 333, 749, 750])
def test_a_state_continues_on_another_service(
    one_worker: ps.LocalService, three_workers: ps.LocalService, order: str, steps: int
) -> None:
    with dataset().distribute(three_workers, order=order, limits=ps.Limits(timeout_s=60)) as loader:
        before, state = read_some(loader, steps)
    with dataset().distribute(one_worker, order=order, limits=ps.Limits(timeout_s=60)) as loader:
        loader.load_state_dict(json.loads(state))
        assert json.loads(json.dumps(loader.state_dict()))["epoch"] == 0
        assert_exactly_once([*before, *loader], range(ROWS))


def test_a_state_continues_on_the_same_service(three_workers: ps.LocalService) -> None:
    with dataset().distribute(three_workers, job="again", limits=ps.Limits(timeout_s=60)) as loader:
        before, state = read_some(loader, 100)
    with dataset().distribute(three_workers, job="again", limits=ps.Limits(timeout_s=60)) as loader:
        loader.load_state_dict(json.loads(state))
        assert_exactly_once([*before, *loader], range(ROWS))


def test_a_state_taken_after_the_end_begins_the_next_epoch(one_worker: ps.LocalService) -> None:
    with dataset().distribute(one_worker, limits=ps.Limits(timeout_s=60)) as loader:
        first = [batch.tolist() for batch in loader]
        state = loader.state_dict()
        second = [batch.tolist() for batch in loader]
    with dataset().distribute(one_worker, limits=ps.Limits(timeout_s=60)) as loader:
        loader.load_state_dict(state)
        assert [batch.tolist() for batch in loader] == second != first


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_state_of_a_later_epoch_comes_to_its_end(one_worker: ps.LocalService, repeats: int) -> None:
    numbers = ps.range(100).repeat(repeats).batch(10)
    with numbers.distribute(one_worker, limits=ps.Limits(timeout_s=30)) as loader:
        assert len(list(loader)) == 10 * repeats
        before, state = read_some(loader, 3)
    with numbers.distribute(one_worker, limits=ps.Limits(timeout_s=30)) as loader:
        loader.load_state_dict(json.loads(state))
        read = np.concatenate([*before, *loader])
    assert np.sort(read).tolist() == sorted([*range(100)] * repeats)


@pytest.mark.parametrize("steps", [2, 12])
def test_a_mix_that_stops_with_its_first_input_comes_to_its_end_after_loading(
    one_worker: ps.LocalService, steps: int
) -> None:
    mixed = ps.mix([ps.range(100), ps.range(1000, 9000)], weights=[0.5, 0.5], stop="first").batch(10)
    with mixed.distribute(one_worker, limits=ps.Limits(timeout_s=30)) as loader:
        whole = [batch.tolist() for batch in loader]
    with mixed.distribute(one_worker, limits=ps.Limits(timeout_s=30)) as loader:
        before, state = read_some(loader, steps)
    with mixed.distribute(one_worker, limits=ps.Limits(timeout_s=30)) as loader:
        loader.load_state_dict(json.loads(state))
        assert [*(batch.tolist() for batch in before), *(batch.tolist() for batch in loader)] == whole


def read_ranks(
    service: ps.LocalService,
    job: str,
    ranks: int,
    steps: int | None,
    states: list[object] | None = None,
    **options: object,
) -> tuple[list[list[np.ndarray]], list[object]]:
    def rank(consumer: int) -> tuple[list[np.ndarray], object]:
        loader = dataset().distribute(
            service, job=job, ranks=ps.Ranks(ranks, consumer), limits=ps.Limits(timeout_s=60), **options
        )
        with loader:
            if states is not None:
                loader.load_state_dict(states if len(states) > 1 else states[0])
            read: list[np.ndarray] = []
            for batch in loader:
                read.append(batch.copy())
                if steps is not None and len(read) == steps:
                    break
            return read, json.loads(json.dumps(loader.state_dict()))

    outcomes = [background.result(100) for background in [Background(lambda c=c: rank(c)) for c in range(ranks)]]
    return [read for read, _ in outcomes], [state for _, state in outcomes]


@pytest.mark.parametrize("order", ["relaxed", "deterministic"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_four_ranks_continue_as_another_number(
    one_worker: ps.LocalService, three_workers: ps.LocalService, order: str, ranks: int
) -> None:
    before, states = read_ranks(three_workers, f"four-{order}-{ranks}", 4, 50, order=order)
    after, _ = read_ranks(one_worker, f"then-{order}-{ranks}", ranks, None, states, order=order)
    batches = [batch for each in (*before, *after) for batch in each]
    ids = np.concatenate(batches).tolist()
    assert len(set(ids)) == len(ids)
    # What the last round could not give to every rank is dropped: less than a batch a rank.
    assert ROWS - len(ids) < 8 * ranks
    assert len({len(each) for each in after}) == 1


def test_a_rank_rejoins_alone(three_workers: ps.LocalService) -> None:
    options: dict[str, Any] = {"job": "rejoin", "limits": ps.Limits(timeout_s=60)}
    with dataset().distribute(three_workers, ranks=ps.Ranks(2, 0), **options) as steady:
        going = iter(steady)
        first = dataset().distribute(three_workers, ranks=ps.Ranks(2, 1), **options)
        reading = Background(lambda: read_some(first, 20))
        zero = [next(going).copy() for _ in range(20)]
        one, state = reading.result()
        first.close()
        with dataset().distribute(three_workers, ranks=ps.Ranks(2, 1), **options) as second:
            second.load_state_dict(json.loads(state))
            rest = Background(lambda: [batch.copy() for batch in second])
            zero += [batch.copy() for batch in going]
            assert_exactly_once([*zero, *one, *rest.result(90)], range(ROWS))


def test_another_ranks_state_is_refused(three_workers: ps.LocalService) -> None:
    _, states = read_ranks(three_workers, "wrong-rank", 2, 5)
    loader = dataset().distribute(three_workers, job="wrong-rank-2", ranks=ps.Ranks(2, 1))
    with pytest.raises(ps.StateMismatchError, match="consumer"):
        loader.load_state_dict(states[0])


def test_a_changed_source_is_refused_and_a_changed_map_warns(one_worker: ps.LocalService) -> None:
    with dataset().distribute(one_worker, limits=ps.Limits(timeout_s=60)) as loader:
        _, state = read_some(loader, 10)
    with pytest.raises(ps.StateMismatchError, match="range"):
        ps.range(ROWS + 1).shuffle(seed=9).batch(8).distribute(one_worker).load_state_dict(json.loads(state))
    changed = ps.range(ROWS).shuffle(seed=9).map(lambda i: -i).batch(8).distribute(one_worker)
    with pytest.warns(UserWarning, match="map"):
        changed.load_state_dict(json.loads(state))


def test_states_are_small(three_workers: ps.LocalService) -> None:
    with dataset().distribute(
        three_workers, order="deterministic", sharding=ps.Sharding(streams=64), limits=ps.Limits(timeout_s=60)
    ) as loader:
        iterator = iter(loader)
        for _ in range(200):
            next(iterator)
        assert len(json.dumps(loader.state_dict())) / 64 <= 300


def test_epochs_after_one_loaded_on_another_number_of_ranks_are_those_of_a_run_that_never_stopped(
    one_worker: ps.LocalService,
) -> None:
    numbers = ps.range(300).shuffle(seed=9).batch(5)
    with numbers.distribute(one_worker, order="deterministic", limits=ps.Limits(timeout_s=30)) as loader:
        read_some(loader, 7)
        state = loader.state_dict()

    def second_epoch(rank: int, job: str) -> list[list[int]]:
        with numbers.distribute(
            one_worker, job=job, ranks=ps.Ranks(2, rank), order="deterministic", limits=ps.Limits(timeout_s=30)
        ) as loader:
            if job == "resumed":
                with pytest.warns(UserWarning, match="dealt anew"):
                    loader.load_state_dict(state)
            list(loader)
            return [batch.tolist() for batch in loader]

    def second_epochs(job: str) -> list[list[list[int]]]:
        ranks = [Background(partial(second_epoch, rank, job)) for rank in range(2)]
        return [rank.result() for rank in ranks]

    assert second_epochs("resumed") == second_epochs("straight")


@pytest.mark.parametrize("taken", [0, 5])
def test_a_rank_with_operators_after_distribute_returns_before_its_first_output(
    three_workers: ps.LocalService, taken: int
) -> None:
    def rank(consumer: int) -> ps.Loader:
        numbers = ps.range(400).batch(4)
        loader = numbers.distribute(
            three_workers,
            job=f"piped-{taken}",
            ranks=ps.Ranks(2, consumer, uneven="pad"),
            limits=ps.Limits(timeout_s=30),
        )
        return loader.enumerate()

    first = rank(0)
    other = Background(lambda: [batch.copy() for _, batch in first])
    with rank(1) as loader:
        mine = [batch.copy() for _, (_, batch) in zip(range(taken), iter(loader))]
        state = json.dumps(loader.state_dict())
    for _ in range(2):  # the second one loads what was saved where the first stood, which had received nothing
        with rank(1) as loader:
            loader.load_state_dict(json.loads(state))
            iter(loader)
            state = json.dumps(loader.state_dict())
    with rank(1) as loader:
        loader.load_state_dict(json.loads(state))
        mine += [batch.copy() for _, batch in loader]
    assert_exactly_once([*mine, *other.result()], range(400))
