"""A sampler feeds a pipeline in this process: its order, what filters leave of it, and its place in the state."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from tests.waiting import wait_until

ROWS = 60


class Lists:
    """Lists of changing lengths over a permutation of its epoch."""

    def __init__(self) -> None:
        self.epoch, self.drawn = 0, 0
        self.threads: set[int] = set()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = random.Random(self.epoch)
        left = order.sample(range(ROWS), ROWS)
        while left:
            size = order.randint(1, 6)
            self.drawn += 1
            self.threads.add(threading.get_ident())
            yield left[:size]
            left = left[size:]


def numbered(x: int, rng: np.random.Generator) -> dict[str, Any]:
    return {"x": x, "noise": rng.random()}


def even(element: dict[str, Any]) -> bool:
    return bool(element["x"] % 2 == 0)


def fails_at_seven(x: int) -> int:
    if x == 7:
        raise ValueError("seven")
    return x


def rows(batches: Any) -> list[list[int]]:
    return [batch["x"].tolist() for batch in batches]


def test_every_list_is_a_batch_in_the_samplers_order_and_epochs_differ() -> None:
    loader = ps.range(ROWS).map(numbered).distribute(feed=Lists())
    assert rows(loader) == list(Lists())
    later = Lists()
    later.set_epoch(1)
    assert rows(loader) == list(later)


def test_it_gives_what_workers_give_random_numbers_included() -> None:
    ds = ps.range(ROWS).map(numbered)
    here = [(batch["x"].tolist(), batch["noise"].tolist()) for batch in ds.distribute(feed=Lists(), seed=3)]
    with ds.distribute(1, feed=Lists(), seed=3) as loader:
        assert [(batch["x"].tolist(), batch["noise"].tolist()) for batch in loader] == here


def test_a_filter_leaves_each_list_what_passes_and_an_empty_one_gives_nothing() -> None:
    left = [[x for x in unit if x % 2 == 0] for unit in Lists()]
    assert rows(ps.range(ROWS).map(numbered).filter(even).distribute(feed=Lists())) == [u for u in left if u]


def test_single_indices_are_filtered_and_batched_as_ever() -> None:
    order = list(range(ROWS))[::-1]
    loader = ps.range(ROWS).map(numbered).filter(even).batch(4, drop_last=True).distribute(feed=order)
    kept = [x for x in order if x % 2 == 0]
    assert rows(loader) == [kept[i : i + 4] for i in range(0, len(kept) - 3, 4)]


def test_what_a_function_cannot_make_is_left_out_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # what is skipped is written down where one works
    loader = ps.range(10).map(fails_at_seven, on_error="skip").distribute(feed=[[1, 7, 2], [7], [3]])
    assert [batch.tolist() for batch in loader] == [[1, 2], [3]]
    assert loader.state_dict()["skipped"] == 2


def test_files_that_cannot_be_read_are_left_out_of_their_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # what is left out is written down there
    for name in "abc":
        (tmp_path / f"{name}.txt").write_bytes(name.encode())

    def lists(epoch: int) -> Iterator[list[int]]:
        (tmp_path / "b.txt").unlink()  # by now the files are listed
        yield from ([0, 1], [1], [2, 1])

    loader = (
        ps.read_files(str(tmp_path / "*.txt"), on_error="skip").map(lambda file: file["data"]).distribute(feed=lists)
    )
    assert [batch.tolist() for batch in loader] == [[b"a"], [b"c"]]


@pytest.mark.parametrize("filtered", [False, True])
def test_a_state_resumes_after_every_batch(filtered: bool) -> None:
    def loader() -> Any:
        ds = ps.range(ROWS).map(numbered)
        return (ds.filter(even) if filtered else ds).distribute(feed=Lists(), seed=5)

    whole = [(batch["x"].tolist(), batch["noise"].tolist()) for batch in loader()]
    for taken in range(len(whole) + 1):
        first = loader()
        batches = iter(first)
        for _ in range(taken):
            next(batches)
        state = first.state_dict()
        first.close()
        second = loader()
        second.load_state_dict(state)
        assert [(batch["x"].tolist(), batch["noise"].tolist()) for batch in second] == whole[taken:]


def test_the_sampler_is_drawn_from_while_the_trainer_asks_and_no_further_than_ahead() -> None:
    sampler = Lists()
    loader = ps.range(ROWS).map(numbered).distribute(feed=ps.Feed(sampler, ahead=3))
    batches = iter(loader)
    next(batches)
    drawn = sampler.drawn
    assert 2 <= drawn < len(list(Lists()))
    wait_until(lambda: sampler.drawn == drawn, "the sampler rests between steps")
    loader.close()


def test_a_dropped_reader_leaves_no_thread_waiting_for_its_sampler() -> None:
    before = threading.active_count()
    batches = iter(ps.range(ROWS).map(numbered, threads=2).distribute(feed=ps.Feed(Lists(), ahead=1)))
    next(batches)
    del batches
    wait_until(lambda: threading.active_count() <= before, "its threads end", 10)


def test_a_samplers_own_error_reaches_the_trainer() -> None:
    def broken(epoch: int) -> Iterator[int]:
        yield 1
        raise KeyError("of the sampler")

    loader = ps.range(9).distribute(feed=broken)
    batches = iter(loader)
    assert next(batches) == 1
    with pytest.raises(KeyError, match="of the sampler"):
        next(batches)


def test_its_length_is_the_samplers_unless_something_is_left_out() -> None:
    ds = ps.range(ROWS)
    assert len(ds.batch(4).distribute(feed=range(10))) == 3
    with pytest.raises(TypeError, match="with_length"):
        len(ds.filter(lambda x: x > 3).batch(4).distribute(feed=range(10)))


def test_what_cannot_follow_a_sampler_is_refused_with_the_remedy() -> None:
    with pytest.raises(ps.InvalidPipelineError, match=r"flat_map.*worker processes.*leave feed= out"):
        ps.range(9).flat_map(lambda x: [x, x]).distribute(feed=[1, 2])
    state = ps.range(9).distribute().state_dict()
    fed = ps.range(9).distribute(feed=[1, 2])
    iter(fed)
    next(iter(fed))
    with pytest.raises(ps.StateMismatchError, match="feed="):
        plain = ps.range(9).distribute()
        next(iter(plain))
        fed.load_state_dict(plain.state_dict())
    fed.load_state_dict(state)  # of the beginning of an epoch: there is nothing in it that a sampler would not know
