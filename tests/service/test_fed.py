"""Jobs that a consumer feeds with its own sampler: its order, whatever dies, and its place in the state."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from itertools import chain
from typing import Any, cast

import numpy as np
import pytest

import penstock as ps
from penstock.client.reader import EpochReader
from penstock.client.session import EpochSession
from penstock.core.errors import DeadlyElementError
from tests.waiting import wait_until

from .checks import kill

ROWS = 500
PIXELS = 2_000  # enough for rows to be written into the batch in place


class ShuffledBatches:
    """Batches of changing lengths over a permutation of its epoch."""

    def __init__(self, rows: int = ROWS) -> None:
        self.rows, self.epoch = rows, 0
        self.drawn = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = random.Random(self.epoch)
        left = order.sample(range(self.rows), self.rows)
        while left:
            size = order.randint(1, 6)
            self.drawn += 1
            yield left[:size]
            left = left[size:]

    def batches(self, epoch: int) -> list[list[int]]:
        self.epoch = epoch
        return list(self)


class Stateful:
    """Goes on where its state says, and would give something else if it were drawn from anew."""

    def __init__(self) -> None:
        self.given, self.loaded = 0, False

    def __iter__(self) -> Iterator[int]:
        assert self.loaded or self.given == 0, "drawn from anew"
        while self.given < ROWS:
            self.given += 1
            yield (self.given * 7) % ROWS

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given, self.loaded = state["given"], True


def picture(i: int, rng: np.random.Generator) -> dict[str, Any]:
    return {"id": i, "x": np.full(PIXELS, i, np.float32), "noise": rng.random()}


def pictures() -> ps.Dataset:
    return ps.range(ROWS).map(picture)


def ids(batches: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in batches]


def test_lists_become_batches_in_the_samplers_order(three_workers: ps.LocalService) -> None:
    sampler = ShuffledBatches()
    with pictures().distribute(three_workers, feed=sampler, limits=ps.Limits(timeout_s=60)) as loader:
        for epoch in range(2):
            read = [{key: leaf.copy() for key, leaf in batch.items()} for batch in loader]
            assert ids(read) == sampler.batches(epoch)
            assert all((batch["x"] == batch["id"][:, None]).all() for batch in read)


def test_a_short_list_is_a_batch_too(one_worker: ps.LocalService) -> None:
    dataset = ps.range(10).batch(4, drop_last=True)
    with dataset.distribute(one_worker, feed=[[3, 7, 1], [2, 0, 0, 1], [5]], limits=ps.Limits(timeout_s=60)) as loader:
        assert [batch.tolist() for batch in loader] == [[3, 7, 1], [2, 0, 0, 1], [5]]


def test_a_batch_operator_says_where_lists_are_joined_and_groups_single_indices(one_worker: ps.LocalService) -> None:
    order = list(range(0, 50, 2))
    dataset = ps.range(50).map(lambda i: i + 1).batch(4).map(lambda batch: batch * 10)
    expected = [[10 * (i + 1) for i in order[at : at + 4]] for at in range(0, len(order), 4)]
    with dataset.distribute(one_worker, feed=order, limits=ps.Limits(timeout_s=60)) as loader:
        assert [batch.tolist() for batch in loader] == expected
        assert len(loader) == len(expected)
    lists = [order[at : at + 4] for at in range(0, len(order), 4)]
    with dataset.distribute(one_worker, feed=lists, limits=ps.Limits(timeout_s=60)) as loader:
        assert [batch.tolist() for batch in loader] == expected
    with ps.range(50).distribute(one_worker, feed=order, limits=ps.Limits(timeout_s=60)) as loader:
        assert [int(i) for i in loader] == order


def test_torch_samplers(one_worker: ps.LocalService) -> None:
    torch = pytest.importorskip("torch")
    data = torch.utils.data

    def sampler(epoch: int) -> Any:
        order = data.RandomSampler(range(ROWS), generator=torch.Generator().manual_seed(epoch))
        return data.BatchSampler(order, batch_size=8, drop_last=False)

    with ps.range(ROWS).distribute(one_worker, feed=sampler, limits=ps.Limits(timeout_s=60)) as loader:
        for epoch in range(2):
            assert [batch.tolist() for batch in loader] == list(sampler(epoch))


def test_at_most_so_many_units_are_drawn_ahead(one_worker: ps.LocalService) -> None:
    sampler = ShuffledBatches()
    with pictures().distribute(one_worker, feed=ps.Feed(sampler, ahead=10), limits=ps.Limits(timeout_s=60)) as loader:
        for taken, _ in enumerate(loader, start=1):
            assert sampler.drawn <= taken + 10
    assert sampler.drawn == taken


def test_killed_workers_lose_and_repeat_nothing() -> None:
    sampler = ShuffledBatches()
    with (
        ps.LocalService(workers=2) as service,
        pictures().distribute(service, feed=sampler, limits=ps.Limits(timeout_s=60)) as loader,
    ):
        read = []
        for batch in loader:
            read.append(batch["id"].tolist())
            if len(read) in (5, 60):
                kill(wait_until(lambda: list(service.worker_pids().values()), "a running worker process")[0])
            if len(read) == 30:
                kill(service.dispatcher_pid)
        assert read == sampler.batches(0)


def test_a_state_resumes_on_another_service_with_the_same_random_numbers(
    one_worker: ps.LocalService, three_workers: ps.LocalService
) -> None:
    dataset = pictures()
    options: dict[str, Any] = {"job": "fed-resumed", "limits": ps.Limits(timeout_s=60)}
    with dataset.distribute(one_worker, feed=ShuffledBatches(), **options) as loader:
        whole = [(batch["id"].tolist(), batch["noise"].tolist()) for batch in loader]
    for at in (0, 1, 40, len(whole)):
        with dataset.distribute(three_workers, feed=ShuffledBatches(), **options) as loader:
            iterator = iter(loader)
            for _ in range(at):
                next(iterator)
            state = json.loads(json.dumps(loader.state_dict()))
        with dataset.distribute(one_worker, feed=ps.Feed(ShuffledBatches(), ahead=5), **options) as loader:
            loader.load_state_dict(state)
            assert [(batch["id"].tolist(), batch["noise"].tolist()) for batch in loader] == whole[at:]


def test_a_service_that_lost_the_attempt_is_told_where_the_trainer_stands(
    three_workers: ps.LocalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EpochSession, "rejoin", lambda self: False)
    with ps.range(ROWS).distribute(
        three_workers, feed=range(ROWS - 1, -1, -1), limits=ps.Limits(timeout_s=60)
    ) as loader:
        reader = cast(EpochReader, iter(loader))
        read = []
        for element in reader:
            read.append(int(element))
            if len(read) == 101:
                reader.session.board.put_forgotten("as a dispatcher with an empty journal would")
    assert read == list(range(ROWS - 1, -1, -1))


def test_a_state_taken_after_the_loop_is_the_next_epochs(one_worker: ps.LocalService) -> None:
    sampler = ShuffledBatches(40)
    with ps.range(40).distribute(one_worker, feed=sampler, limits=ps.Limits(timeout_s=60)) as loader:
        list(loader)
        state = loader.state_dict()
    with ps.range(40).distribute(one_worker, feed=sampler, limits=ps.Limits(timeout_s=60)) as loader:
        loader.load_state_dict(state)
        assert [batch.tolist() for batch in loader] == sampler.batches(1)


def test_a_samplers_own_state_is_saved_and_loaded(one_worker: ps.LocalService) -> None:
    expected = [(7 * i) % ROWS for i in range(1, ROWS + 1)]
    with ps.range(ROWS).distribute(one_worker, feed=Stateful(), limits=ps.Limits(timeout_s=60)) as loader:
        iterator = iter(loader)
        read = [int(next(iterator)) for _ in range(123)]
        state = loader.state_dict()
    assert state["place"]["sampler"]["sampler"] == {"given": 123}
    with ps.range(ROWS).distribute(one_worker, feed=Stateful(), limits=ps.Limits(timeout_s=60)) as loader:
        loader.load_state_dict(state)
        assert read + [int(i) for i in loader] == expected


def test_operators_after_it_run_here_and_resume(one_worker: ps.LocalService) -> None:
    def piped() -> Any:
        return ps.range(100).distribute(one_worker, feed=range(99, -1, -1), limits=ps.Limits(timeout_s=60)).batch(7)

    with piped() as loader:
        whole = [batch.tolist() for batch in loader]
    assert list(chain(*whole)) == list(range(99, -1, -1))
    with piped() as loader:
        iterator = iter(loader)
        next(iterator), next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
    with piped() as loader:
        loader.load_state_dict(state)
        assert [batch.tolist() for batch in loader] == whole[2:]


def test_consumers_feed_themselves(three_workers: ps.LocalService) -> None:
    def loader(rank: int) -> Any:
        orders = (range(0, 100, 2), range(1, 80, 2))
        return (
            ps.range(100)
            .batch(5)
            .distribute(
                three_workers,
                job="fed-ranks",
                ranks=ps.Ranks(2, rank),
                feed=orders[rank],
                limits=ps.Limits(timeout_s=60),
            )
        )

    with loader(0) as zero, loader(1) as one:
        read = [batch.tolist() for batch in zero], [batch.tolist() for batch in one]
        iterator = iter(one)
        next(iterator)
        state = one.state_dict()
    assert [list(chain(*own)) for own in read] == [list(range(0, 100, 2)), list(range(1, 80, 2))]
    with loader(0) as zero, pytest.raises(ps.StateMismatchError, match="state of consumer 1"):
        zero.load_state_dict(state)
    with loader(1) as one:
        one.load_state_dict(state)
        assert [batch.tolist() for batch in one] == read[1][1:]


def test_an_index_that_comes_twice_gets_other_random_numbers(one_worker: ps.LocalService) -> None:
    with pictures().distribute(one_worker, feed=[[3, 3], [3, 4]], limits=ps.Limits(timeout_s=60)) as loader:
        noise = np.concatenate([batch["noise"] for batch in loader])
    assert len(set(noise.tolist())) == 4


def test_a_sampler_that_gives_something_else_the_second_time_is_found_out(one_worker: ps.LocalService) -> None:
    def unseeded(epoch: int) -> list[int]:
        return random.sample(range(ROWS), ROWS)

    with ps.range(ROWS).distribute(one_worker, feed=unseeded, limits=ps.Limits(timeout_s=60)) as loader:
        iterator = iter(loader)
        for _ in range(10):
            next(iterator)
        state = loader.state_dict()
        loader.load_state_dict(state)
        with pytest.raises(ps.StateMismatchError, match="must give the same ones in the same epoch"):
            next(iter(loader))


def test_a_samplers_error_comes_out_and_does_not_look_like_an_end(one_worker: ps.LocalService) -> None:
    def broken(epoch: int) -> Iterator[int]:
        yield from range(5)
        raise KeyError("no more")

    with ps.range(ROWS).distribute(one_worker, feed=ps.Feed(broken, ahead=2), limits=ps.Limits(timeout_s=60)) as loader:
        iterator = iter(loader)
        for _ in range(3):
            with pytest.raises(KeyError, match="no more"):
                for _ in range(6):
                    next(iterator)


def test_an_element_that_kills_processes_is_an_error_and_not_left_out() -> None:
    def deadly(i: int) -> int:
        if i == 7:
            os._exit(3)
        return i

    with ps.LocalService(workers=1) as service:
        loader = ps.range(20).map(deadly).distribute(service, feed=range(20), limits=ps.Limits(timeout_s=60))
        with loader, pytest.raises(DeadlyElementError, match="element 7 killed the processes"):
            for expected, element in enumerate(loader):
                assert element == expected


@pytest.mark.parametrize(
    ("feed", "message"),
    [
        ([0, 10], "index 10, and the source has 10 elements"),
        ([0, [1]], "both indices and lists"),
        ([[]], "at least one index"),
        (["a"], "it must give indices"),
    ],
)
def test_bad_indices_are_refused(one_worker: ps.LocalService, feed: Any, message: str) -> None:
    loader = ps.range(10).distribute(one_worker, feed=feed, limits=ps.Limits(timeout_s=60))
    with loader, pytest.raises(ps.InvalidArgumentError, match=message):
        list(loader)


def test_what_cannot_be_fed_is_refused_with_the_remedy(one_worker: ps.LocalService, tmp_path: Any) -> None:
    (tmp_path / "lines.txt").write_text("a\nb\n")
    lines = ps.read_text(str(tmp_path / "lines.txt")).distribute(one_worker, feed=[0], limits=ps.Limits(timeout_s=60))
    with pytest.raises(ps.InvalidPipelineError, match="can only be read in order: use range"):
        list(lines)
    with pytest.raises(ps.InvalidPipelineError, match="the sampler says the order; leave it out"):
        ps.range(9).shuffle().distribute(one_worker, feed=[0])
    with pytest.raises(ps.InvalidPipelineError, match=r"put it after distribute\(\)"):
        ps.range(9).filter(lambda i: i > 2).distribute(one_worker, feed=[0])
    with pytest.raises(ps.InvalidPipelineError, match="leave one of them out"):
        ps.range(9).batch(2).batch(2).distribute(one_worker, feed=[0])
    with pytest.raises(ps.InvalidArgumentError, match="only once"):
        ps.range(9).distribute(one_worker, feed=iter([0]))
    with pytest.raises(ps.InvalidArgumentError, match="sharding='off' with feed="):
        ps.range(9).distribute(one_worker, feed=[0], sharding="off")


def test_a_state_without_a_sampler_is_refused(one_worker: ps.LocalService) -> None:
    with ps.range(100).distribute(one_worker, order="deterministic", limits=ps.Limits(timeout_s=60)) as loader:
        next(iter(loader))
        state = loader.state_dict()
    fed = ps.range(100).distribute(one_worker, feed=range(9), limits=ps.Limits(timeout_s=60))
    with fed, pytest.raises(ps.StateMismatchError, match="without feed="):
        fed.load_state_dict(state)
