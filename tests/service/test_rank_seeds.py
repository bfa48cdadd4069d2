"""Ranks are processes: each describes the dataset anew, and draws a seed of its own where none is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import penstock as ps

ROWS = 40
RANKS = 2
TIMEOUT_S = 20.0
Rows = list[tuple[int, int]]
Made = Callable[[ps.LocalService, int], Any]


def numbered(x: int, rng: Any) -> tuple[int, int]:
    return x, int(rng.integers(1 << 30))


def rows_of(batch: Any) -> Rows:
    first, second = batch
    return [(int(x), int(number)) for x, number in zip(first, second)]


def before_the_cut(service: ps.LocalService, rank: int) -> Any:
    return _distributed(ps.range(ROWS).map(numbered).batch(2), service, rank)


def after_the_cut(service: ps.LocalService, rank: int) -> Any:
    return _distributed(ps.range(ROWS), service, rank).map(numbered).batch(2)


def shuffled(service: ps.LocalService, rank: int) -> Any:
    return _distributed(ps.range(ROWS).shuffle(8).map(numbered).batch(2), service, rank).map(tuple)


def _distributed(dataset: ps.Dataset, service: ps.LocalService, rank: int) -> Any:
    return dataset.distribute(
        service,
        job="training",
        ranks=ps.Ranks(RANKS, rank),
        order="deterministic",
        limits=ps.Limits(timeout_s=TIMEOUT_S),
    )


MADE = pytest.mark.parametrize("made", [before_the_cut, after_the_cut, shuffled])


def on_all(work: Callable[[int], Any]) -> list[Any]:
    """Have all ranks work at once; return what each gave."""
    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(work, range(RANKS)))


def read(loaders: Sequence[Any], epochs: int) -> list[list[Rows]]:
    """Return the epochs that each rank reads."""
    return on_all(lambda rank: [[row for batch in loaders[rank] for row in rows_of(batch)] for _ in range(epochs)])


def saved_after(loaders: Sequence[Any], batches: int, *, epoch: int) -> list[tuple[Rows, dict[str, Any]]]:
    """Read some batches of an epoch; return them, and the state, of each rank."""

    def some(rank: int) -> tuple[Rows, dict[str, Any]]:
        for _ in range(epoch):
            for _ in loaders[rank]:
                pass
        batch_of = iter(loaders[rank])
        rows = [row for _ in range(batches) for row in rows_of(next(batch_of))]
        return rows, loaders[rank].state_dict()

    return on_all(some)


@MADE
@pytest.mark.parametrize("epoch", [0, 1])
def test_ranks_that_load_their_own_states_on_a_new_service_go_on(made: Made, epoch: int) -> None:
    with ps.LocalService(workers=2) as service:
        loaders = [made(service, rank) for rank in range(RANKS)]
        begun = saved_after(loaders, 3, epoch=epoch)
        whole = on_all(lambda rank: begun[rank][0] + [row for batch in _rest(loaders[rank]) for row in rows_of(batch)])
        after = read(loaders, 1)
    with ps.LocalService(workers=1) as service:
        loaders = [made(service, rank) for rank in range(RANKS)]
        for rank, (_, state) in enumerate(begun):
            loaders[rank].load_state_dict(state)
        resumed = read(loaders, 2)
    for rank in range(RANKS):
        assert begun[rank][0] + resumed[rank][0] == whole[rank]
        assert resumed[rank][1] == after[rank][0]


def _rest(loader: Any) -> Any:
    """Go on with what is being read."""
    return loader._epoch.elements


@MADE
def test_all_ranks_draw_the_numbers_of_whoever_made_the_job(made: Made) -> None:
    with ps.LocalService(workers=1) as service:
        loaders = [made(service, rank) for rank in range(RANKS)]
        given = dict(row for rank in read(loaders, 1) for row in rank[0])
        seeds = {loader.state_dict()["seed"] for loader in loaders}
    assert len(seeds) == 1
    expected = ps.range(ROWS).map(numbered).iterator(seed=seeds.pop())
    assert given == dict(expected)


def test_evaluation_goes_on_from_the_states_of_its_ranks() -> None:
    def evaluation(service: ps.LocalService, rank: int) -> Any:
        rows = ps.range(ROWS).map(lambda x: {"x": x})
        return rows.evaluation(2, service, ranks=ps.Ranks(RANKS, rank), job="evaluation")

    with ps.LocalService(workers=1) as service:
        loaders = [evaluation(service, rank) for rank in range(RANKS)]

        def some(rank: int) -> tuple[list[int], dict[str, Any]]:
            batches = iter(loaders[rank])
            return [int(x) for _ in range(3) for x in next(batches)["x"]], loaders[rank].state_dict()

        begun = on_all(some)
    with ps.LocalService(workers=1) as service:
        loaders = [evaluation(service, rank) for rank in range(RANKS)]
        for rank, (_, state) in enumerate(begun):
            loaders[rank].load_state_dict(state)
        rest = on_all(lambda rank: [int(x) for batch in loaders[rank] for x in batch["x"]])
    assert sorted(x for (rows, _), more in zip(begun, rest) for x in rows + more) == list(range(ROWS))
