"""Who reads what, under every sharding policy."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps

from .checks import assert_exactly_once, count_of

DEADLINE_S = 45.0


@pytest.fixture(scope="module")
def five_workers() -> ps.LocalService:
    with ps.LocalService(workers=5) as service:
        yield service


@pytest.fixture(scope="module")
def ten_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ten")
    for file in range(10):
        (folder / f"{file}.txt").write_text("".join(f"{file * 10 + line}\n" for line in range(10)))
    return folder


def with_pid(text: object) -> tuple[int, int]:
    return int(text), os.getpid()  # type: ignore[call-overload]


def test_off_gives_every_element_once_a_worker(three_workers: ps.LocalService) -> None:
    assert_exactly_once(ps.range(100).distribute(three_workers, sharding="off"), range(100), times=3)


@pytest.mark.parametrize("seed", [None, 3])
def test_off_with_a_shuffle(three_workers: ps.LocalService, seed: int | None) -> None:
    loader = ps.range(50).shuffle(seed=seed).map(with_pid).distribute(three_workers, sharding="off")
    orders: dict[int, list[int]] = {}
    for value, pid in loader:
        orders.setdefault(pid, []).append(value)
    assert len(orders) == 3
    assert len({tuple(order) for order in orders.values()}) == (1 if seed is not None else 3)


PIPELINES = {
    "range": lambda files: ps.range(500),
    "files": lambda files: ps.read_text(files).map(int),
    "shuffled files": lambda files: ps.read_text(files).map(int).shuffle(16, seed=1),
    "interleave": lambda files: ps.range(50).interleave(lambda i: range(i * 10, i * 10 + 10), cycle=4),
    "flat_map": lambda files: ps.range(50).flat_map(lambda i: range(i * 10, i * 10 + 10)),
    "shuffle": lambda files: ps.range(500).shuffle(),
    "batches": lambda files: ps.range(500).shuffle(seed=2).batch(7),
    "concatenate": lambda files: ps.range(200).concatenate(ps.range(200, 500)),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_dynamic_gives_every_element_once(three_workers: ps.LocalService, ten_files: Path, name: str) -> None:
    dataset = PIPELINES[name](str(ten_files / "*.txt"))
    expected = Counter(count_of(dataset))
    assert count_of(dataset.distribute(three_workers)) == expected
    assert count_of(dataset.distribute(three_workers, order="deterministic")) == expected


def test_dynamic_with_repeat(three_workers: ps.LocalService) -> None:
    assert_exactly_once(ps.range(200).shuffle(seed=1).repeat(3).batch(8).distribute(three_workers), range(200), times=3)


def streams_of(loader: ps.Loader) -> list[set[int]]:
    """Read to the end; return what each stream gave. A stream may move between processes, its data may not."""
    found: dict[int, set[int]] = {}
    before: dict[int, int] = {}
    for value in loader:
        now = {stream.number: stream.elements for stream in loader.statistics().streams}
        (number,) = [number for number, count in now.items() if count != before.get(number, 0)]
        before = now
        found.setdefault(number, set()).add(int(value))
    return [found[number] for number in sorted(found)]


def test_file_deals_files_to_workers(five_workers: ps.LocalService, ten_files: Path) -> None:
    loader = ps.read_text(str(ten_files / "*.txt")).map(int).distribute(five_workers, sharding="file")
    files_by_worker = [sorted({value // 10 for value in values}) for values in streams_of(loader)]
    assert files_by_worker == [[0, 5], [1, 6], [2, 7], [3, 8], [4, 9]]


def test_fewer_files_than_workers_is_an_error(five_workers: ps.LocalService, ten_files: Path) -> None:
    three = [str(ten_files / f"{i}.txt") for i in range(3)]
    with pytest.raises(ValueError, match=r"3 files.*5 workers"):
        list(ps.read_text(three).distribute(five_workers, sharding="file"))


def test_data_deals_elements_to_workers(five_workers: ps.LocalService) -> None:
    shards = streams_of(ps.range(100).distribute(five_workers, sharding="data"))
    assert [sorted({value % 5 for value in values}) for values in shards] == [[0], [1], [2], [3], [4]]
    assert_exactly_once([np.array(list(values)) for values in shards], range(100))


def test_file_or_data_chooses(five_workers: ps.LocalService, ten_files: Path) -> None:
    three = [str(ten_files / f"{i}.txt") for i in range(3)]
    assert_exactly_once(ps.read_text(three).map(int).distribute(five_workers, sharding="file_or_data"), range(30))


def test_hint_puts_the_shard_at_the_marker(five_workers: ps.LocalService) -> None:
    # Pairs of neighbours are made before the marker: a worker has whole pairs.
    dataset = ps.range(100).batch(2).shard().map(lambda pair: (int(pair[0]), int(pair[1]), os.getpid()))
    read = list(dataset.distribute(five_workers, sharding="hint"))
    assert all(b == a + 1 and a % 2 == 0 for a, b, _ in read)
    assert_exactly_once([pair[:2] for pair in read], range(100))


def test_a_function_of_the_users_decides(three_workers: ps.LocalService, ten_files: Path) -> None:
    called: list[tuple[int, int]] = []

    def in_turn(splits: list[object], workers: int) -> list[list[int]]:
        called.append((len(splits), workers))
        return [[i for i in range(len(splits)) if i % workers == w] for w in range(workers)]

    loader = ps.range(4000).distribute(three_workers, sharding=in_turn)
    assert_exactly_once(loader, range(4000))
    assert called and called[0][1] == 3


def test_mixing_follows_the_weights(three_workers: ps.LocalService) -> None:
    dataset = ps.mix([ps.range(0, 100_000), ps.range(1_000_000, 1_100_000)], [0.8, 0.2], stop="first")
    read = np.concatenate(list(dataset.batch(100).distribute(three_workers)))[:50_000]
    assert abs(float((read < 1_000_000).mean()) - 0.8) < 0.01


@pytest.mark.parametrize(
    "dataset",
    [ps.range(10).take(5), ps.range(10).skip(5), ps.range(10).enumerate(), ps.range(10).zip(ps.range(10))],
    ids=["take", "skip", "enumerate", "zip"],
)
def test_what_means_something_only_over_all_workers_is_refused(
    three_workers: ps.LocalService, dataset: ps.Dataset
) -> None:
    with pytest.raises(ps.InvalidPipelineError, match="after distribute"):
        list(dataset.distribute(three_workers))


def test_deterministic_order_does_not_depend_on_the_workers(
    one_worker: ps.LocalService, three_workers: ps.LocalService
) -> None:
    dataset = ps.range(3000).shuffle(seed=5).batch(16)
    one = [batch.tolist() for batch in dataset.distribute(one_worker, order="deterministic")]
    three = [batch.tolist() for batch in dataset.distribute(three_workers, order="deterministic")]
    assert one == three


def test_splits_are_dealt_to_all_workers_that_were_asked_for() -> None:
    """Not to those that have come when the loader is read first."""
    seen: list[int] = []

    def shard(splits: list[Any], workers: int) -> list[list[int]]:
        seen.append(workers)
        return [list(range(w, len(splits), workers)) for w in range(workers)]

    with ps.LocalService(workers=1, inline=1, threads=1) as service:
        dataset = ps.range(40)
        assert sorted(dataset.distribute(service, sharding=shard, limits=ps.Limits(timeout_s=DEADLINE_S))) == list(
            range(40)
        )
        service.add_worker()
        assert sorted(dataset.distribute(service, sharding=shard, limits=ps.Limits(timeout_s=DEADLINE_S))) == list(
            range(40)
        )
    with dataset.distribute(3, sharding=shard, limits=ps.Limits(timeout_s=DEADLINE_S)) as loader:
        assert sorted(loader) == list(range(40))
    assert seen == [2, 3, 3]
