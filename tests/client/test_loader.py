"""Reading through a service: real processes, and what users see."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import (
    ForkedLoaderError,
    InvalidArgumentError,
    InvalidPipelineError,
    JobMismatchError,
    StateMismatchError,
    SupersededError,
    WaitTimeoutError,
)
from penstock.stream.checkpoint import ConsumerState
from tests.client.conftest import WAIT_S, in_threads, rows
from tests.waiting import wait_gone, wait_until

N = 600


def doubled(service: Any, **options: Any) -> ps.Loader:
    pipeline = ps.range(N).shuffle(seed=3).map(lambda x: 2 * x).batch(8)
    return pipeline.distribute(service, limits=ps.Limits(timeout_s=WAIT_S), **options)


EXPECTED = [2 * i for i in range(N)]


def test_every_element_comes_once_in_every_epoch(service: ps.LocalService) -> None:
    with doubled(service) as loader:
        for _ in range(3):
            assert sorted(rows(loader)) == EXPECTED
        assert len(loader) == N // 8


def test_one_worker_gives_ten_elements_in_order(service: ps.LocalService) -> None:
    assert list(
        ps.range(10).distribute(
            service, order="deterministic", sharding=ps.Sharding(streams=1), limits=ps.Limits(timeout_s=WAIT_S)
        )
    ) == list(range(10))


def test_loaders_do_not_disturb_each_other(service: ps.LocalService) -> None:
    loaders = [doubled(service) for _ in range(3)]
    iterators = [iter(loader) for loader in loaders]
    got: list[list[Any]] = [[], [], []]
    while iterators[0] is not None:
        step = [next(iterator, None) for iterator in iterators]
        if all(batch is None for batch in step):
            break
        for mine, batch in zip(got, step):
            if batch is not None:
                mine.append(batch)
    for mine in got:
        assert sorted(rows(mine)) == EXPECTED
    for loader in loaders:
        loader.close()


def test_structure_types_and_writability_survive(service: ps.LocalService) -> None:
    def make(i: int) -> dict[str, Any]:
        return {
            "a": np.full((3, 2), i, np.float16),
            "t": (np.bool_(i % 2 == 0), f"s{i}", bytes([i]), None, i),
            "z": np.empty((0, 4), np.int32),
            "d": np.datetime64(i, "D"),
            "f": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
            "s": np.arange(8)[::2],
            "zero": np.array(i),
        }

    got = sorted(
        ps.range(20).map(make).distribute(service, limits=ps.Limits(timeout_s=WAIT_S)), key=lambda e: e["t"][4]
    )
    for i, element in enumerate(got):
        wanted = make(i)
        assert element["t"] == wanted["t"]
        for key in ("a", "z", "f", "s", "zero"):
            assert element[key].dtype == wanted[key].dtype and np.array_equal(element[key], wanted[key])
            assert element[key].flags.writeable and element[key].flags.aligned
            element[key][...] = 0
        assert element["d"] == wanted["d"]


def test_large_batches_are_right_writable_and_independent(service: ps.LocalService) -> None:
    pipeline = ps.range(40).map(lambda i: np.full(1 << 18, i, np.float32)).batch(2)
    held = []
    for batch in pipeline.distribute(service, limits=ps.Limits(timeout_s=WAIT_S)):
        assert (batch == batch[:, :1]).all() and batch.flags.writeable
        held.append(batch)
    values = [int(row[0]) for batch in held for row in batch]
    assert sorted(values) == list(range(40))
    held[0][...] = -1.0
    assert all((batch >= 0).all() for batch in held[1:])


@pytest.mark.parametrize("transport", ["auto", "sockets", "lz4", "zstd"])
def test_data_crosses_sockets_where_memory_cannot_be_shared(
    service: ps.LocalService, monkeypatch: pytest.MonkeyPatch, transport: Any
) -> None:
    monkeypatch.setattr("penstock.client.connection.host_id", lambda: "another host")
    pipeline = ps.range(30).map(lambda i: {"x": np.full(1 << 17, i, np.float64), "n": i}).batch(2)
    with pipeline.distribute(service, transport=transport, limits=ps.Limits(timeout_s=WAIT_S)) as loader:
        seen = []
        for batch in loader:
            assert batch["x"].flags.writeable and batch["x"].flags.aligned
            assert (batch["x"] == batch["n"][:, None]).all()
            batch["x"] += 1
            seen += batch["n"].tolist()
        assert sorted(seen) == list(range(30))
        assert sorted(rows(ps.range(3000).batch(7).distribute(service, transport=transport))) == list(range(3000))


def test_deterministic_order_depends_on_nothing_but_the_seed(service: ps.LocalService) -> None:
    one = [batch.tolist() for batch in doubled(service, order="deterministic", sharding=ps.Sharding(streams=4))]
    other = [batch.tolist() for batch in doubled(service, order="deterministic", sharding=ps.Sharding(streams=4))]
    assert one == other and sorted(rows(one)) == EXPECTED
    with doubled(service, order="deterministic", sharding=ps.Sharding(streams=4)) as loader:
        loader.set_epoch(1)
        assert [batch.tolist() for batch in loader] != one


@pytest.mark.parametrize("order", ["relaxed", "deterministic"])
@pytest.mark.parametrize("where", ["same job", "another job"])
@pytest.mark.parametrize("taken", [0, 33, 75])
def test_a_state_goes_on_where_it_was_taken(service: ps.LocalService, order: str, where: str, taken: int) -> None:
    name = f"resume-{order}-{where}-{taken}"
    with doubled(service, job=name, order=order) as loader:
        iterator = iter(loader)
        before = [next(iterator).tolist() for _ in range(taken)]
        state = json.loads(json.dumps(loader.state_dict()))
    with doubled(service, job=name if where == "same job" else f"{name}-2", order=order) as again:
        again.load_state_dict(state)
        assert again.state_dict() == state
        after = [batch.tolist() for batch in again]
        assert sorted(rows(before) + rows(after)) == EXPECTED
        if order == "deterministic":
            with doubled(service, order=order) as whole:
                assert [batch.tolist() for batch in whole] == before + after


def test_saved_after_the_loop_the_next_epoch_follows(service: ps.LocalService) -> None:
    with doubled(service, order="deterministic", sharding=ps.Sharding(streams=3)) as loader:
        first = [batch.tolist() for batch in loader]
        state = loader.state_dict()
        second = [batch.tolist() for batch in loader]
    assert state["phase"] == "ended"
    with doubled(service, order="deterministic", sharding=ps.Sharding(streams=3)) as again:
        again.load_state_dict(state)
        assert [batch.tolist() for batch in again] == second != first


def test_a_state_from_before_the_first_epoch_begins_it(service: ps.LocalService) -> None:
    with doubled(service) as loader, doubled(service) as other:
        loader.set_epoch(2)
        state = loader.state_dict()
        other.load_state_dict(state)
        assert sorted(rows(other)) == EXPECTED and other.state_dict()["epoch"] == 2


def test_states_in_the_middle_of_small_elements_and_of_the_tail_are_exact(service: ps.LocalService) -> None:
    pipeline = ps.range(500).map(lambda x: x + 1).filter(lambda x: x % 7 > 0)
    expected = [x for x in range(1, 501) if x % 7 > 0]
    for stop in (1, 100, len(expected) - 1):
        with pipeline.distribute(service, limits=ps.Limits(timeout_s=WAIT_S)) as loader:
            iterator = iter(loader)
            before = [next(iterator) for _ in range(stop)]
            state = json.loads(json.dumps(loader.state_dict()))
        with pipeline.distribute(service, limits=ps.Limits(timeout_s=WAIT_S)) as again:
            again.load_state_dict(state)
            assert sorted(before + list(again)) == expected


def test_another_pipelines_state_is_refused_and_a_changed_map_warned_of(service: ps.LocalService) -> None:
    with ps.range(50).map(lambda x: x).distribute(service, limits=ps.Limits(timeout_s=WAIT_S)) as loader:
        iterator = iter(loader)
        before = [next(iterator) for _ in range(10)]
        state = loader.state_dict()
    with (
        ps.range(51).map(lambda x: x).distribute(service, limits=ps.Limits(timeout_s=WAIT_S)) as other,
        pytest.raises(StateMismatchError, match="another pipeline"),
    ):
        other.load_state_dict(state)
    with ps.range(50).map(lambda x: x + 1000).distribute(service, limits=ps.Limits(timeout_s=WAIT_S)) as changed:
        with pytest.warns(UserWarning, match="map"):
            changed.load_state_dict(state)
        assert sorted(before + [x - 1000 for x in changed]) == list(range(50))


def test_other_batches_are_warned_of_or_refused(service: ps.LocalService) -> None:
    with ps.range(4000).batch(8).distribute(service, limits=ps.Limits(timeout_s=WAIT_S)) as loader:
        iterator = iter(loader)
        for _ in range(100):  # how many batches a frame has is the worker's affair
            next(iterator)
            inside = loader.state_dict()
            streams = ConsumerState.read(inside["place"]).progress.streams
            if any(stream.cut.since for stream in streams):
                break
        else:
            pytest.fail("never inside a frame")
    with (
        ps.range(4000).batch(16).distribute(service, limits=ps.Limits(timeout_s=WAIT_S)) as other,
        pytest.warns(UserWarning, match="batch"),
        pytest.raises(StateMismatchError, match="batches changed"),
    ):
        other.load_state_dict(inside)


# Consumers


@pytest.mark.parametrize("order", ["relaxed", "deterministic"])
@pytest.mark.parametrize(("uneven", "counts"), [("drop", [25, 25, 25]), ("pad", [25, 25, 25])])
def test_consumers_share_the_data_evenly(service: ps.LocalService, order: str, uneven: str, counts: list[int]) -> None:
    name = f"three-{order}-{uneven}"

    def read(consumer: int) -> list[Any]:
        with doubled(service, job=name, ranks=ps.Ranks(3, consumer, uneven=uneven), order=order) as loader:
            assert len(loader) == 25
            return [batch.tolist() for batch in loader]

    parts = in_threads(3, read)
    assert [len(part) for part in parts] == counts
    assert sorted(value for part in parts for value in rows(part)) == EXPECTED


def test_what_does_not_divide_is_dropped_padded_or_allowed(service: ps.LocalService) -> None:
    def read(uneven: str) -> list[list[int]]:
        def one(consumer: int) -> list[int]:
            pipeline = ps.range(100).map(lambda x: x)
            with pipeline.distribute(
                service,
                job=f"odd-{uneven}",
                ranks=ps.Ranks(3, consumer, uneven=uneven),
                limits=ps.Limits(timeout_s=WAIT_S),
            ) as loader:
                return list(loader)

        return in_threads(3, one)

    dropped = read("drop")
    assert [len(part) for part in dropped] == [33, 33, 33] and len({x for part in dropped for x in part}) == 99
    padded = read("pad")
    assert [len(part) for part in padded] == [34, 34, 34] and len({x for part in padded for x in part}) == 100
    allowed = read("allow")
    assert sorted(x for part in allowed for x in part) == list(range(100))


@pytest.mark.filterwarnings("ignore:the state was saved by 2 consumers")
@pytest.mark.parametrize("order", ["relaxed", "deterministic"])
@pytest.mark.parametrize("now", [1, 2, 3])
def test_states_of_all_ranks_go_on_with_any_number_of_them(service: ps.LocalService, order: str, now: int) -> None:
    def first(consumer: int) -> tuple[list[Any], dict[str, Any]]:
        with doubled(service, job=f"ranks-{order}-{now}", ranks=ps.Ranks(2, consumer), order=order) as loader:
            iterator = iter(loader)
            got = [next(iterator).tolist() for _ in range(11)]
            return got, json.loads(json.dumps(loader.state_dict()))

    before = in_threads(2, first)
    states = [state for _, state in before]

    def second(consumer: int) -> list[Any]:
        with doubled(
            service, job=f"ranks-{order}-{now}-b", ranks=ps.Ranks(now, consumer, uneven="pad"), order=order
        ) as loader:
            loader.load_state_dict(states)
            return [batch.tolist() for batch in loader]

    after = in_threads(now, second)
    assert len({len(part) for part in after}) == 1
    seen = [value for got, _ in before for value in rows(got)] + [value for part in after for value in rows(part)]
    padded = len(after[0]) * now * 8 + 2 * 11 * 8 - N
    assert len(set(seen)) == N and len(seen) == N + padded and padded < 8 * now


def test_one_deterministic_state_serves_all_ranks_and_a_strangers_none(service: ps.LocalService) -> None:
    def first(consumer: int) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
        with doubled(service, job="all", ranks=ps.Ranks(2, consumer), order="deterministic") as loader:
            iterator = iter(loader)
            got = [next(iterator).tolist() for _ in range(7)]
            return got, loader.state_dict(all=True), loader.state_dict()

    (before_0, shared, own_0), (before_1, shared_1, _) = in_threads(2, first)
    # The same place; what came to one of them in one frame may have come to the other in two.
    one, other = (ConsumerState.read(state["place"]).progress for state in (shared, shared_1))
    assert [(each.number, each.round) for each in one.streams] == [(each.number, each.round) for each in other.streams]
    assert one.step == other.step and shared["consumer"] is shared_1["consumer"] is None

    def second(consumer: int) -> list[Any]:
        with doubled(service, job="all-b", ranks=ps.Ranks(2, consumer), order="deterministic") as loader:
            if consumer:
                with pytest.raises(StateMismatchError, match="state of consumer 0, and this is consumer 1"):
                    loader.load_state_dict(own_0)
            loader.load_state_dict(shared)
            return [batch.tolist() for batch in loader]

    after = in_threads(2, second)
    seen = rows(before_0) + rows(before_1) + rows(after[0]) + rows(after[1])
    assert len(set(seen)) == len(seen) == N - 8  # 75 batches: the odd one is dropped


def test_a_relaxed_state_for_all_is_refused_with_the_remedy(service: ps.LocalService) -> None:
    def read(consumer: int) -> None:
        with doubled(service, job="relaxed-all", ranks=ps.Ranks(2, consumer)) as loader:
            next(iter(loader))
            with pytest.raises(ValueError, match="load the list of them"):
                loader.state_dict(all=True)

    in_threads(2, read)


def test_replicas_read_identical_batches(service: ps.LocalService) -> None:
    def read(replica: int) -> list[Any]:
        with doubled(service, job="replicas", ranks=ps.Ranks(replica=replica), order="deterministic") as loader:
            return [batch.tolist() for batch in loader]

    one, other = in_threads(2, read)
    assert one == other and sorted(rows(one)) == EXPECTED


def test_a_second_reader_with_another_pipeline_is_refused(service: ps.LocalService) -> None:
    with ps.range(50).distribute(service, job="taken", limits=ps.Limits(timeout_s=WAIT_S)) as loader:
        next(iter(loader))
        with (
            ps.range(60).distribute(service, job="taken", limits=ps.Limits(timeout_s=WAIT_S)) as other,
            pytest.raises(JobMismatchError, match=r"stop 50 → 60"),
        ):
            next(iter(other))


# Sharding


def test_off_gives_everything_once_a_worker(service: ps.LocalService) -> None:
    got = sorted(ps.range(30).distribute(service, sharding="off", limits=ps.Limits(timeout_s=WAIT_S)))
    assert got == sorted([*range(30), *range(30)])


def test_static_shardings_cover_everything_once(service: ps.LocalService, tmp_path: Path) -> None:
    for i in range(10):
        (tmp_path / f"{i:02}.txt").write_text("".join(f"{i}-{k}\n" for k in range(3)))
    expected = sorted(f"{i}-{k}" for i in range(10) for k in range(3))
    text = ps.read_text(str(tmp_path))
    for sharding in ("file", "data", "file_or_data", "dynamic"):
        assert sorted(text.distribute(service, sharding=sharding, limits=ps.Limits(timeout_s=WAIT_S))) == expected, (
            sharding
        )
    assert (
        sorted(text.shard().map(str.upper).distribute(service, sharding="hint", limits=ps.Limits(timeout_s=WAIT_S)))
        == expected
    )
    seen: list[int] = []

    def own(splits: Any, workers: int) -> list[list[int]]:
        seen.append(workers)
        return [[], list(range(len(splits)))]

    assert sorted(text.distribute(service, sharding=own, limits=ps.Limits(timeout_s=WAIT_S))) == expected
    assert seen == [2]
    with pytest.raises(ValueError, match=r"\.shard\(\)"):
        next(iter(text.distribute(service, sharding="hint", limits=ps.Limits(timeout_s=WAIT_S))))


def test_file_sharding_reads_whole_files_by_worker(service: ps.LocalService, tmp_path: Path) -> None:
    for i in range(6):
        (tmp_path / f"{i}.txt").write_text("x\n" * 4)
    pipeline = ps.read_files(str(tmp_path)).map(lambda file: (os.getpid(), int(Path(file["path"]).stem)))
    by_process: dict[int, set[int]] = {}
    for pid, number in pipeline.distribute(service, sharding="file", limits=ps.Limits(timeout_s=WAIT_S)):
        by_process.setdefault(pid, set()).add(number)
    assert sorted(map(sorted, by_process.values())) == [[0, 2, 4], [1, 3, 5]]


def test_fewer_files_than_workers_is_an_error(service: ps.LocalService, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("x\n")
    with pytest.raises(ValueError, match="1 files for 2 workers"):
        iter(ps.read_text(str(tmp_path)).distribute(service, sharding="file", limits=ps.Limits(timeout_s=WAIT_S)))


# Operators after distribute


def test_operators_after_distribute_run_here(service: ps.LocalService) -> None:
    loader = ps.range(100).map(lambda x: (x, os.getpid())).distribute(service, limits=ps.Limits(timeout_s=WAIT_S))
    with loader.map(lambda pair: (*pair, os.getpid())).batch(10) as here:
        assert isinstance(here, ps.Loader) and len(here) == 10
        numbers, there, own = zip(*here)
        assert sorted(rows(numbers)) == list(range(100))
        assert set(rows(own)) == {os.getpid()} and os.getpid() not in set(rows(there))


def test_repeat_gives_everything_five_times_before_or_after(service: ps.LocalService) -> None:
    fivefold = sorted(list(range(40)) * 5)
    assert sorted(ps.range(40).repeat(5).distribute(service, limits=ps.Limits(timeout_s=WAIT_S))) == fivefold
    assert sorted(ps.range(40).distribute(service, limits=ps.Limits(timeout_s=WAIT_S)).repeat(5)) == fivefold


@pytest.mark.parametrize("order", ["relaxed", "deterministic"])
def test_operators_after_distribute_resume_exactly(service: ps.LocalService, order: str) -> None:
    def make() -> ps.Loader:
        batches = ps.range(240).batch(6).distribute(service, order=order, limits=ps.Limits(timeout_s=WAIT_S))
        return batches.unbatch().map(lambda x: x + 1).batch(5)

    for taken in (1, 7, 20):
        with make() as loader:
            iterator = iter(loader)
            before = [next(iterator) for _ in range(taken)]
            state = json.loads(json.dumps(loader.state_dict()))
        with make() as again:
            again.load_state_dict(state)
            assert json.loads(json.dumps(again.state_dict())) == state
            assert sorted(rows(before) + rows(again)) == list(range(1, 241))


@pytest.mark.parametrize("order", ["relaxed", "deterministic"])
def test_parts_that_ranks_held_after_distribute_are_not_dealt_anew(service: ps.LocalService, order: str) -> None:
    def rank(count: int, number: int) -> ps.Loader:
        batches = ps.range(240).batch(7)
        loader = batches.distribute(
            service,
            job=f"held-{order}-{count}",
            ranks=ps.Ranks(count, number),
            order=order,
            limits=ps.Limits(timeout_s=WAIT_S),
        )
        return loader.unbatch().batch(5)

    def saved(number: int) -> tuple[dict[str, Any], dict[str, Any]]:
        with rank(2, number) as loader:
            next(iter(loader))
            midway = json.loads(json.dumps(loader.state_dict()))
            list(loader)
            return midway, json.loads(json.dumps(loader.state_dict()))

    states = in_threads(2, saved)
    with rank(1, 0) as loader:
        with pytest.raises(StateMismatchError, match=r"2 consumers and there are 1 now, and unbatch\(\) after"):
            loader.load_state_dict([midway for midway, _ in states])
        with pytest.warns(UserWarning, match="dealt anew"):
            loader.load_state_dict([ended for _, ended in states])
        assert sorted(rows(loader)) == list(range(240))
    alone = iter(loader := rank(1, 0))
    next(alone)
    one = loader.state_dict()
    loader.close()
    with rank(2, 0) as loader, pytest.raises(StateMismatchError, match="1 consumers and there are 2 now"):
        loader.load_state_dict(one)


def test_one_state_is_not_for_all_where_ranks_come_apart_after_distribute(service: ps.LocalService) -> None:
    def rank(number: int) -> None:
        loader = ps.range(240).distribute(
            service,
            job="apart",
            ranks=ps.Ranks(2, number),
            order="deterministic",
            limits=ps.Limits(timeout_s=WAIT_S),
        )
        with loader:
            in_step = loader.map(lambda x: x + 1).batch(2)
            next(iter(in_step))
            assert in_step.state_dict(all=True)["consumer"] is None
            apart = loader.filter(lambda x: x % 3 == 0).batch(2)
            next(iter(apart))
            with pytest.raises(InvalidArgumentError, match=r"all=True\) with filter\(\) after distribute\(\)"):
                apart.state_dict(all=True)

    in_threads(2, rank)


def test_what_depends_on_the_order_of_arrival_is_refused(service: ps.LocalService) -> None:
    loader = ps.range(10).distribute(service, limits=ps.Limits(timeout_s=WAIT_S))
    for refused in (
        lambda: loader.shuffle(4),
        lambda: loader.group_by_window(int, size=2),
        lambda: loader.interleave(lambda x: [x]),
        lambda: loader.map(list, batch_size=4),
    ):
        with pytest.raises(InvalidPipelineError, match="order='deterministic'"):
            refused()
    with pytest.raises(InvalidPipelineError, match="without a path"):
        loader.cache("/tmp/somewhere")
    steady = (
        ps.range(100).distribute(service, order="deterministic", limits=ps.Limits(timeout_s=WAIT_S)).shuffle(20, seed=1)
    )
    assert sorted(steady) == list(range(100))
    steady.close()


def test_a_full_permutation_of_what_comes_from_workers_is_refused(service: ps.LocalService) -> None:
    loader = ps.range(100).distribute(service, order="deterministic")
    with pytest.raises(InvalidPipelineError, match=r"after distribute.*shuffle\(10_000\)"):
        loader.shuffle(seed=1)
    loader.close()


# Here


def test_without_a_service_a_loader_runs_on_threads_here() -> None:
    loader = ps.range(20).shuffle(seed=1).map(lambda x: x).distribute()
    assert sorted(loader) == list(range(20)) and len(loader) == 20
    with ps.range(20).distribute().map(lambda x: -x) as here:
        iterator = iter(here)
        before = [next(iterator) for _ in range(7)]
        state = json.loads(json.dumps(here.state_dict()))
        here.load_state_dict(state)
        assert here.state_dict() == state
        assert before + list(here) == [-x for x in range(20)]
        assert here.statistics().elements == 13
    with pytest.raises(ValueError, match="need a service"):
        ps.range(3).distribute(ranks=ps.Ranks(2, 0))


def test_the_environment_names_a_service(service: ps.LocalService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_SERVICE", str(service.service_file))
    with ps.range(20).map(lambda x: os.getpid()).distribute(limits=ps.Limits(timeout_s=WAIT_S)) as loader:
        assert os.getpid() not in set(loader)


def test_a_number_starts_processes_of_the_loaders_own() -> None:
    with ps.range(50).map(lambda x: (x, os.getpid())).distribute(1, limits=ps.Limits(timeout_s=WAIT_S)) as loader:
        numbers, pids = zip(*loader)
        assert sorted(numbers) == list(range(50)) and len(set(pids)) == 1
    wait_gone(pids[0])


# What goes wrong


def test_a_functions_error_comes_out_as_it_was_raised(service: ps.LocalService) -> None:
    def fail(x: int) -> int:
        if x == 77:
            raise KeyError("seventy-seven")
        return x

    loader = ps.range(100).map(fail).distribute(service, limits=ps.Limits(timeout_s=WAIT_S))
    with pytest.raises(KeyError, match="seventy-seven") as raised:
        list(loader)
    assert any("map(fail)" in note for note in raised.value.__notes__)
    with pytest.raises(KeyError):
        next(loader._epoch.elements)  # type: ignore[union-attr]
    loader.close()


def test_what_workers_print_is_printed_here(service: ps.LocalService, capfd: pytest.CaptureFixture[str]) -> None:
    def speak(x: int) -> int:
        if x == 3:
            print("three it is")
        return x

    with ps.range(10).map(speak).distribute(service, limits=ps.Limits(timeout_s=WAIT_S)) as loader:
        seen = ""
        deadline = time.monotonic() + 30
        while "three it is" not in seen and time.monotonic() < deadline:
            list(loader)
            seen += capfd.readouterr().err
    assert "[worker " in seen and "] three it is" in seen


@pytest.mark.alone
def test_waiting_too_long_names_what_was_waited_for(service: ps.LocalService) -> None:
    pipeline = ps.range(4).map(lambda x: time.sleep(600))
    loader = pipeline.distribute(service, job="slow", limits=ps.Limits(timeout_s=4.0))
    began = time.monotonic()
    with pytest.raises(WaitTimeoutError, match=r"job 'slow'.*stream \d+ on worker w") as raised:
        next(iter(loader))
    assert 3.9 < time.monotonic() - began < 20 and raised.value.waited_s >= 4.0
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 2.5


@pytest.mark.alone
def test_a_loader_blocked_on_a_slow_element_closes_at_once(service: ps.LocalService) -> None:
    loader = ps.range(4).map(lambda x: time.sleep(600)).distribute(service, limits=ps.Limits(timeout_s=WAIT_S))
    ended = threading.Event()

    def read() -> None:
        assert list(loader) == []
        ended.set()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    wait_until(lambda: loader._epoch is not None, "the epoch to begin")
    began = time.monotonic()
    loader.close()
    assert ended.wait(10) and time.monotonic() - began < 3


def test_a_dropped_loader_lets_go_of_everything(service: ps.LocalService) -> None:
    loader = doubled(service, job="dropped")
    iterator = iter(loader)
    next(iterator)
    del loader, iterator
    gc.collect()
    wait_until(
        lambda: not any(line.job == "dropped" and line.clients for line in service.jobs()), "the job to have no client"
    )
    names = {thread.name for thread in threading.enumerate()}
    assert "penstock-beat-dropped" not in names


def test_a_forked_child_is_told_and_the_parent_reads_on(service: ps.LocalService) -> None:
    with doubled(service) as loader:
        iterator = iter(loader)
        first = next(iterator)
        pid = os.fork()
        if pid == 0:
            try:
                while True:
                    next(iterator)
            except ForkedLoaderError:
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert sorted(rows([first, *iterator])) == EXPECTED


def test_what_cannot_be_shipped_is_refused_before_anything_is_sent(service: ps.LocalService) -> None:
    lock = threading.Lock()
    loader = (
        ps.range(10)
        .map(lambda x: lock.locked())
        .distribute(service, job="unshippable", limits=ps.Limits(timeout_s=WAIT_S))
    )
    with pytest.raises(TypeError, match="lock"):
        iter(loader)
    with pytest.raises(InvalidPipelineError, match="after distribute"):
        iter(ps.range(10).take(3).distribute(service, limits=ps.Limits(timeout_s=WAIT_S)))
    assert all(line.job != "unshippable" for line in service.jobs())


def test_a_pipeline_of_many_megabytes_is_sent_in_pieces(service: ps.LocalService) -> None:
    table = np.random.default_rng(0).integers(0, 1000, 11 << 17)
    with ps.range(20).map(lambda i: int(table[i])).distribute(service, limits=ps.Limits(timeout_s=WAIT_S)) as loader:
        assert sorted(loader) == sorted(table[:20].tolist())


def test_a_client_waits_for_a_service_that_comes_later(tmp_path: Path) -> None:
    file = tmp_path / "service.json"
    early = ps.range(20).distribute(str(file), limits=ps.Limits(timeout_s=0.5))
    with pytest.raises(WaitTimeoutError, match=r"service\.json"):
        iter(early)
    loader = ps.range(20).distribute(str(file), limits=ps.Limits(timeout_s=WAIT_S))
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.extend(loader), daemon=True)
    thread.start()
    with ps.LocalService(workers=1) as service:
        os.link(service.service_file, file)
        thread.join(WAIT_S)
    assert sorted(got) == list(range(20))
    loader.close()


def test_statistics_tell_where_time_and_data_went(service: ps.LocalService) -> None:
    with doubled(service) as loader:
        assert loader.statistics().elements == 0
        iterator = iter(loader)
        for _ in range(5):
            next(iterator)
        statistics = loader.statistics()
        assert statistics.elements == 5 and statistics.bytes > 0 and statistics.wait_s > 0
        assert sum(stream.elements for stream in statistics.streams) == 5
        assert sum(statistics.workers.values()) == 5 and 0 < statistics.wait_fraction <= 1


@pytest.mark.parametrize("pipeline", [ps.range(0), ps.range(5).batch(10, drop_last=True), ps.range(1)])
def test_small_and_empty_epochs_end(service: ps.LocalService, pipeline: ps.Dataset) -> None:
    with pipeline.distribute(service, limits=ps.Limits(timeout_s=WAIT_S)) as loader:
        for _ in range(2):
            assert list(loader) == list(pipeline)


@pytest.mark.parametrize("order", ["relaxed", "deterministic"])
def test_a_cache_after_distribute_goes_on_in_its_process_and_elsewhere_only_in_order(
    service: ps.LocalService, order: str
) -> None:
    def make() -> ps.Loader:
        return (
            ps.range(40).distribute(service, order=order, limits=ps.Limits(timeout_s=WAIT_S)).cache().map(lambda i: i)
        )

    with make() as loader:
        first = list(loader)
        iterator = iter(loader)
        again = [next(iterator) for _ in range(5)]
        state = json.loads(json.dumps(loader.state_dict()))
        loader.load_state_dict(state)
        assert [*again, *loader] == first
    with make() as loader:
        loader.load_state_dict(state)
        if order == "deterministic":
            assert [*again, *loader] == first
        else:
            with pytest.raises(StateMismatchError, match="has not cached them"):
                list(loader)


def test_several_consumers_do_not_cache_what_they_received(service: ps.LocalService) -> None:
    loader = ps.range(40).distribute(service, ranks=ps.Ranks(2, 0))
    with pytest.raises(InvalidPipelineError, match="with 2 consumers"):
        loader.cache()


def test_ranks_with_unequal_numbers_do_not_leave_an_epoch_early(service: ps.LocalService) -> None:
    def make(count: int = 2) -> ps.Loader:
        return ps.range(40).distribute(service, ranks=ps.Ranks(count, 0, uneven="allow"))

    for early in (lambda loader: loader.take(5), lambda loader: loader.map(abs).zip(ps.range(5))):
        with pytest.raises(
            InvalidPipelineError, match=r"\(\) after distribute\(\) with uneven='allow'.*'drop' or 'pad'"
        ):
            early(make())
        early(make(1))
    make().take(-1)


@pytest.mark.parametrize("with_state", [True, False])
def test_an_older_reader_of_a_slot_stops_with_elements_at_hand(service: ps.LocalService, with_state: bool) -> None:
    def make() -> ps.Loader:
        return ps.range(5000).distribute(service, job=f"taken {with_state}", limits=ps.Limits(timeout_s=WAIT_S))

    with make() as older, make() as newer:
        reading = iter(older)
        next(reading)
        if with_state:
            newer.load_state_dict(older.state_dict())
        next(iter(newer))
        with pytest.raises(SupersededError):
            for _ in range(4000):  # far fewer than have arrived, and far longer than it takes to be told
                next(reading)
                time.sleep(0.005)
