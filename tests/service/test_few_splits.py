"""Mixes and endless repeats over sources that have fewer splits than there could be streams."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest

import penstock as ps

from .checks import DEADLINE_S, Background

Options = dict[str, object]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two small JSON-lines files: each is one split."""
    folder = tmp_path_factory.mktemp("corpora")
    for name in ("web", "books"):
        lines = [json.dumps({"from": name, "tokens": [i % 97] * (5 + i % 7)}) for i in range(120)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder / "web.jsonl"), str(folder / "books.jsonl")


def mixed(corpora: tuple[str, str], stop: str) -> ps.Dataset:
    web, books = map(ps.read_jsonl, corpora)
    return ps.mix([web, books], [3, 1], stop=stop)


def kind(row: dict[str, object]) -> str:
    return str(row["from"])


def tokens(row: dict[str, object]) -> np.ndarray:
    return np.asarray(row["tokens"], np.int32)


ORDERS: dict[str, Options] = {
    "relaxed": {},
    "deterministic": {"order": "deterministic"},
    "four streams": {"order": "deterministic", "sharding": ps.Sharding(streams=4)},
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_mix_that_never_stops_keeps_its_shares(three_workers: ps.LocalService, corpora, order: str) -> None:
    dataset = mixed(corpora, "never").map(kind)
    with dataset.distribute(three_workers, limits=ps.Limits(timeout_s=DEADLINE_S), **ORDERS[order]) as loader:
        counted = Counter(islice(loader, 1200))
    assert abs(counted["web"] - 900) < 40


@pytest.mark.parametrize("order", ORDERS)
def test_a_mix_that_never_stops_goes_on_without_an_empty_file(
    three_workers: ps.LocalService, corpora, tmp_path, order: str
) -> None:
    (tmp_path / "empty.jsonl").touch()
    dataset = mixed((corpora[0], str(tmp_path / "empty.jsonl")), "never").map(kind)
    with dataset.distribute(three_workers, limits=ps.Limits(timeout_s=DEADLINE_S), **ORDERS[order]) as loader:
        assert set(islice(loader, 300)) == set(dataset.take(300)) == {"web"}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stop", ["first", "all"])
def test_a_mix_that_ends_gives_what_it_gives_in_process(
    three_workers: ps.LocalService, corpora, stop: str, order: str
) -> None:
    dataset = mixed(corpora, stop).map(kind)
    with dataset.distribute(three_workers, limits=ps.Limits(timeout_s=DEADLINE_S), **ORDERS[order]) as loader:
        assert Counter(loader) == Counter(dataset)


@pytest.mark.parametrize("order", ORDERS)
def test_an_endless_repeat_of_one_file_goes_on(three_workers: ps.LocalService, corpora, order: str) -> None:
    dataset = ps.read_jsonl(corpora[0]).map(kind).repeat().batch(10)
    with dataset.distribute(three_workers, limits=ps.Limits(timeout_s=DEADLINE_S), **ORDERS[order]) as loader:
        assert len(list(islice(loader, 100))) == 100


def test_a_repeat_of_a_mix_that_never_stops_has_a_second_epoch(three_workers: ps.LocalService, corpora) -> None:
    dataset = mixed(corpora, "never").map(kind).repeat()
    with dataset.distribute(three_workers, limits=ps.Limits(timeout_s=DEADLINE_S)) as loader:
        for _ in range(2):
            assert len(list(islice(loader, 100))) == 100


@pytest.mark.parametrize("streams", [None, 2])
def test_a_mixture_of_two_small_corpora_is_packed_for_two_consumers(
    three_workers: ps.LocalService, corpora, streams: int | None
) -> None:
    dataset = mixed(corpora, "never").map(tokens).pack(64).batch(2)
    loaders = [
        dataset.distribute(
            three_workers,
            job=f"mixture of {streams}",
            ranks=ps.Ranks(2, consumer),
            order="deterministic",
            sharding=ps.Sharding(streams=streams),
            limits=ps.Limits(timeout_s=DEADLINE_S),
        )
        for consumer in range(2)
    ]
    try:
        reading = [Background(lambda loader=loader: list(islice(loader, 30))) for loader in loaders]
        assert [len(one.result()) for one in reading] == [30, 30]
    finally:
        for loader in loaders:
            loader.close()


def test_the_sequence_does_not_depend_on_the_workers(
    one_worker: ps.LocalService, three_workers: ps.LocalService, corpora
) -> None:
    def read(service: ps.LocalService) -> list[str]:
        dataset = mixed(corpora, "never").shuffle(16, seed=4).map(kind)
        with dataset.distribute(service, order="deterministic", limits=ps.Limits(timeout_s=DEADLINE_S)) as loader:
            return list(islice(loader, 400))

    assert read(one_worker) == read(three_workers)


def test_a_mix_in_relaxed_order_goes_on_where_a_state_says(three_workers: ps.LocalService) -> None:
    dataset = ps.mix([ps.range(3000), ps.range(10_000, 13_000)], [1, 1], stop="all").batch(10)
    with dataset.distribute(three_workers, limits=ps.Limits(timeout_s=DEADLINE_S)) as loader:
        reading = iter(loader)
        first = [batch.tolist() for batch in islice(reading, 100)]
        state = loader.state_dict()
    with dataset.distribute(three_workers, limits=ps.Limits(timeout_s=DEADLINE_S)) as loader:
        loader.load_state_dict(json.loads(json.dumps(state)))
        rest = [batch.tolist() for batch in loader]
    seen = sorted(x for batch in first + rest for x in batch)
    assert seen == [*range(3000), *range(10_000, 13_000)]


def test_a_sharding_function_that_leaves_a_worker_without_an_input_is_refused(three_workers: ps.LocalService) -> None:
    def to_the_first(splits: list[object], workers: int) -> list[list[int]]:
        return [list(range(len(splits))), *([] for _ in range(workers - 1))]

    dataset = ps.mix([ps.range(1000), ps.range(1000)], stop="never")
    with pytest.raises(ValueError, match=r"worker 1 of 3 would get nothing of range.*mix.*sharding='dynamic'"):
        list(dataset.distribute(three_workers, sharding=to_the_first, limits=ps.Limits(timeout_s=DEADLINE_S)))
    with ps.range(1000).distribute(
        three_workers, sharding=to_the_first, limits=ps.Limits(timeout_s=DEADLINE_S)
    ) as alone:
        assert sorted(alone) == list(range(1000)), "without a mix it is the user's choice"


def test_fewer_elements_than_workers_are_not_mixed_by_data(three_workers: ps.LocalService) -> None:
    dataset = ps.mix([ps.range(2), ps.range(1000)], stop="never")
    with pytest.raises(ValueError, match=r"worker 2 of 3 would get nothing of range, which mix needs"):
        list(dataset.distribute(three_workers, sharding="data", limits=ps.Limits(timeout_s=DEADLINE_S)))


def test_too_few_splits_for_consumers_with_streams_of_their_own_are_refused(
    three_workers: ps.LocalService, corpora
) -> None:
    loader = mixed(corpora, "first").distribute(
        three_workers, job="own", ranks=ps.Ranks(2, 0, uneven="allow"), limits=ps.Limits(timeout_s=DEADLINE_S)
    )
    with pytest.raises(ValueError, match=r"uneven='allow'.*cut into 1.*use uneven='drop'"):
        list(loader)
    loader.close()


def test_one_shard_after_another_is_refused(three_workers: ps.LocalService) -> None:
    dataset = ps.range(100).shard().map(abs).shard()
    with pytest.raises(ValueError, match=r"one shard\(\) follows another.*leave one of them out"):
        list(dataset.distribute(three_workers, sharding="hint", limits=ps.Limits(timeout_s=DEADLINE_S)))


def test_a_shard_on_each_branch_is_taken_once_on_each(three_workers: ps.LocalService) -> None:
    dataset = ps.range(100).shard().concatenate(ps.range(100, 200).shard())
    with dataset.distribute(three_workers, sharding="hint", limits=ps.Limits(timeout_s=DEADLINE_S)) as loader:
        assert sorted(loader) == list(range(200))
