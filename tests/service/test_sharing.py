"""Several trainers read one job out of its window, with real processes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import JobMismatchError
from penstock.wire.control import ControlClient
from penstock.wire.messages import JobLine, Jobs, ListJobs
from tests.waiting import wait_until

from .checks import Background, assert_exactly_once, count_of, kill

MIB = 1 << 20


def row(i: int) -> np.ndarray:
    """A kilobyte that says which element it is."""
    return np.full(256, i, np.int32)


def slow_row(i: int) -> np.ndarray:
    time.sleep(0.001)
    return row(i)


def ids(batch: np.ndarray) -> list[int]:
    return batch[..., 0].ravel().tolist()


def rows(count: int) -> ps.Dataset:
    return ps.range(count).map(row).batch(4)


def trainer(
    service: ps.LocalService,
    dataset: ps.Dataset,
    name: str,
    job: str,
    *,
    sharing: Any = "skip",
    ranks: ps.Ranks | None = None,
    transport: Any = "auto",
    **share: Any,
) -> ps.Loader:
    return dataset.distribute(
        service,
        job=job,
        ranks=ranks,
        sharing=ps.Share(sharing, name, **share),
        transport=transport,
        limits=ps.Limits(timeout_s=60),
    )


def first(iterator: Iterator[np.ndarray], count: int) -> list[list[int]]:
    return [ids(next(iterator)) for _ in range(count)]


# What trainers read


def test_trainer_2_reads_exactly_what_trainer_1_read_first(one_worker: ps.LocalService) -> None:
    dataset = rows(4000)
    with trainer(one_worker, dataset, "1", "same") as one, trainer(one_worker, dataset, "2", "same") as two:
        read = first(iter(one), 50)
        assert first(iter(two), 50) == read
        assert one.statistics().shared == 0
        assert two.statistics().shared >= 40 and two.statistics().skipped == 0


def test_twenty_trainers_in_step_read_identical_shuffled_elements_for_two_epochs(one_worker: ps.LocalService) -> None:
    dataset = ps.range(330).shuffle().map(row).batch(4)
    loaders = [trainer(one_worker, dataset, f"t{n}", "twenty") for n in range(20)]
    epochs = []
    for _ in range(2):
        iterators = [iter(loader) for loader in loaders]
        steps: list[list[int]] = []
        while True:
            batches = [next(iterator, None) for iterator in iterators]
            if batches[0] is None:
                assert all(batch is None for batch in batches)
                break
            step = [ids(batch) for batch in batches if batch is not None]
            assert step == [step[0]] * 20
            steps.append(step[0])
        assert_exactly_once(steps, range(330))
        made = sum(loader.statistics().elements - loader.statistics().shared for loader in loaders)
        assert made == len(steps) == 83
        epochs.append(steps)
    assert epochs[0] != epochs[1]
    for loader in loaders:
        loader.close()


def test_a_trainer_slower_than_the_window_skips_ahead_and_keeps_reading(
    one_worker: ps.LocalService, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = rows(4000)
    options = {"window_bytes": 128 << 10}
    with (
        trainer(one_worker, dataset, "fast", "slower", **options) as fast,
        trainer(one_worker, dataset, "slow", "slower", **options) as slow,
    ):
        slowly, quickly = iter(slow), iter(fast)
        read = [ids(next(slowly))]
        for _ in range(10):
            first(quickly, 60)
            read.append(ids(next(slowly)))
        assert len(list(quickly)) == 400
        with caplog.at_level(logging.WARNING, "penstock"):
            read += [ids(batch) for batch in slowly]
        statistics = slow.statistics()
        assert statistics.elements == len(read)
        assert statistics.elements + statistics.skipped == 1000
        assert statistics.skipped > 500
        assert max(count_of(read).values()) == 1
        assert "skipped" in caplog.text and "'slow'" in caplog.text
        assert fast.statistics().skipped == 0 and fast.statistics().elements == 1000


def test_a_late_trainer_starts_inside_the_window(one_worker: ps.LocalService) -> None:
    dataset = rows(4000)
    options = {"window_bytes": 128 << 10}
    with trainer(one_worker, dataset, "early", "late", **options) as early:
        read = first(iter(early), 500)
        with trainer(one_worker, dataset, "late", "late", **options) as late:
            seen = ids(next(iter(late)))
            assert seen in read[430:]
            assert late.statistics().skipped == 0


def test_the_same_trainer_never_reads_anything_twice(one_worker: ps.LocalService) -> None:
    dataset = rows(4000)
    with trainer(one_worker, dataset, "other", "again") as other:
        iterator = iter(other)
        first(iterator, 10)
        read = []
        for _ in range(4):  # a new loader each time, without a state
            with trainer(one_worker, dataset, "same", "again") as loader:
                # Much more was sent by then, and is on its way: what was taken of it must be heard all the same.
                read += [ids(batch) for batch in islice(loader, 20)]
        rest = trainer(one_worker, dataset, "same", "again")
        read += [ids(batch) for batch in rest]
        assert_exactly_once(read, range(4000))
        again = first(iter(rest), 1)  # the next epoch
        assert again[0] == [0, 1, 2, 3]
        rest.close()


def test_a_state_is_gone_on_from(one_worker: ps.LocalService) -> None:
    dataset = rows(4000)
    with trainer(one_worker, dataset, "keeps", "states") as keeps:
        read = first(iter(keeps), 30)
        state = keeps.state_dict()
        first(iter(keeps), 5)
    with trainer(one_worker, dataset, "keeps", "states") as keeps:
        keeps.load_state_dict(state)
        read += [ids(batch) for batch in keeps]
    assert_exactly_once(read, range(4000))


def test_different_job_names_have_different_windows(one_worker: ps.LocalService) -> None:
    dataset = rows(400)
    with trainer(one_worker, dataset, "a", "left") as left, trainer(one_worker, dataset, "a", "right") as right:
        assert first(iter(left), 30) == first(iter(right), 30)
        assert left.statistics().shared == right.statistics().shared == 0


def test_without_a_job_name_the_same_pipeline_is_joined(one_worker: ps.LocalService) -> None:
    loaders = [
        rows(402).distribute(one_worker, sharing=ps.Share("skip", name), limits=ps.Limits(timeout_s=60))
        for name in ("first", "second")
    ]
    assert first(iter(loaders[0]), 20) == first(iter(loaders[1]), 20)
    assert loaders[1].statistics().hit_ratio > 0.7
    for loader in loaders:
        loader.close()


def test_dynamic_sharding_over_three_workers(three_workers: ps.LocalService) -> None:
    dataset = ps.range(3000).shuffle(seed=1).map(slow_row).batch(4)
    loaders = [trainer(three_workers, dataset, f"t{n}", "sharded") for n in range(4)]
    readings = [Background(lambda loader=loader: [ids(batch) for batch in loader]) for loader in loaders]
    for reading in readings:
        assert_exactly_once(reading.result(), range(3000))
    made = sum(loader.statistics().elements - loader.statistics().shared for loader in loaders)
    assert made == 750
    for loader in loaders:
        loader.close()


def test_arrays_are_read_only_unless_copies_are_asked_for(one_worker: ps.LocalService) -> None:
    dataset = ps.range(64).map(lambda i: np.full((MIB // 4,), i, np.float32)).batch(2)
    with (
        trainer(one_worker, dataset, "reads", "own") as reads,
        trainer(one_worker, dataset, "writes", "own", writable=True) as writes,
    ):
        theirs, own = next(iter(reads)), next(iter(writes))
        with pytest.raises(ValueError, match="read-only"):
            theirs[:] = -1
        own[:] = -1
        assert theirs[0, 0] == 0 and theirs[1, -1] == 1


def test_readers_by_socket_get_the_same(one_worker: ps.LocalService, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = ps.range(64).map(lambda i: np.full((MIB // 4,), i, np.float32)).batch(2)
    monkeypatch.setenv("PENSTOCK_NO_SLABS", "1")
    loaders = [trainer(one_worker, dataset, f"t{n}", "socket", transport="lz4") for n in range(2)]
    assert [ids(batch) for batch in loaders[0]] == [[i, i + 1] for i in range(0, 64, 2)]
    for loader in loaders:
        loader.close()


def test_a_shuffle_that_holds_more_batches_than_the_window_does_not_wait_for_its_memory(
    one_worker: ps.LocalService,
) -> None:
    block = MIB // 8
    dataset = ps.range(128).map(lambda i: np.full(block // 4, i, np.int32)).batch(2).shuffle(48, seed=1)
    with trainer(one_worker, dataset, "one", "holds", window_bytes=2 * MIB) as loader:
        began = time.monotonic()
        read = [ids(batch[:, :1]) for batch in loader]
        assert_exactly_once(read, range(128))
        assert time.monotonic() - began < 10  # half a second for each batch would be far more


# Waiting


def test_wait_gives_three_trainers_of_different_speed_everything_once(one_worker: ps.LocalService) -> None:
    dataset = ps.range(1201).shuffle(seed=2).map(row).batch(4)
    options = {"sharing": "wait", "window_bytes": 64 << 10, "trainers": 3}

    def read(pause_s: float, name: str) -> list[list[int]]:
        with trainer(one_worker, dataset, name, "waits", **options) as loader:
            read: list[list[int]] = []
            for _ in range(2):
                for batch in loader:
                    read.append(ids(batch))
                    time.sleep(pause_s)
            assert loader.statistics().skipped == 0
            return read

    readings = [Background(lambda p=p: read(p, f"{p}")) for p in (0.0, 0.001, 0.003)]
    for reading in readings:
        assert_exactly_once(reading.result(60), range(1201), times=2)


def test_a_silent_trainer_is_passed_over_and_told_what_it_missed(
    one_worker: ps.LocalService, capfd: pytest.CaptureFixture[str]
) -> None:
    dataset = rows(4000)
    options = {"sharing": "wait", "window_bytes": 64 << 10, "trainer_timeout_s": 1.0}
    with (
        trainer(one_worker, dataset, "sleepy", "silent", **options) as sleepy,
        trainer(one_worker, dataset, "awake", "silent", **options) as awake,
    ):
        sleeping = iter(sleepy)
        read = first(sleeping, 3)
        assert len([ids(batch) for batch in awake]) == 1000
        assert "trainer 'sleepy' is silent" in capfd.readouterr().err
        read += [ids(batch) for batch in sleeping]
        assert max(count_of(read).values()) == 1
        statistics = sleepy.statistics()
        assert statistics.skipped > 0 and statistics.skipped + statistics.elements == 1000


def test_a_trainer_that_leaves_is_not_waited_for(one_worker: ps.LocalService) -> None:
    dataset = rows(4000)
    options = {"sharing": "wait", "window_bytes": 64 << 10, "trainer_timeout_s": 300.0}
    with trainer(one_worker, dataset, "stays", "leaves", **options) as stays:
        with trainer(one_worker, dataset, "leaves", "leaves", **options) as leaves:
            left, staying = iter(leaves), iter(stays)
            first(left, 3)
            read = first(staying, 3)
        read += [ids(batch) for batch in staying]
        assert_exactly_once(read, range(4000))


# Faults


def read_with_faults(
    service: ps.LocalService, dataset: ps.Dataset, job: str, fault: Callable[[], object], **options: Any
) -> list[tuple[list[list[int]], ps.Loader]]:
    """Four trainers read an epoch; at a quarter and at half of it something happens."""
    loaders = [trainer(service, dataset, f"t{n}", job, **options) for n in range(4)]
    steps = [0] * 4

    def read(n: int) -> list[list[int]]:
        seen: list[list[int]] = []
        for batch in loaders[n]:
            seen.append(ids(batch))
            steps[n] = len(seen)
        steps[n] = 1 << 30
        return seen

    readings = [Background(lambda n=n: read(n)) for n in range(4)]
    for at in (60, 150):
        wait_until(lambda at=at: min(steps) >= at, f"step {at} of all trainers")
        fault()
    found = [(reading.result(60), loader) for reading, loader in zip(readings, loaders)]
    for _, loader in found:
        loader.close()
    return found


@pytest.mark.parametrize("sharing", ["skip", "wait"])
def test_everybody_goes_on_when_workers_are_killed(sharing: str) -> None:
    dataset = ps.range(1600).shuffle(seed=3).map(slow_row).batch(4)
    with ps.LocalService(workers=2) as service:

        def fault() -> None:
            kill(wait_until(lambda: list(service.worker_pids().values()), "a running process")[0])

        found = read_with_faults(service, dataset, "killed", fault, sharing=sharing)
    for read, loader in found:
        statistics = loader.statistics()
        if sharing == "wait":
            assert_exactly_once(read, range(1600))
        assert max(count_of(read).values()) == 1
        assert statistics.elements + statistics.skipped == 400
        assert statistics.elements > 250


@pytest.mark.parametrize("sharing", ["skip", "wait"])
def test_everybody_goes_on_when_the_dispatcher_restarts(sharing: str) -> None:
    dataset = ps.range(1600).shuffle(seed=3).map(slow_row).batch(4)
    with ps.LocalService(workers=2) as service:
        found = read_with_faults(service, dataset, "restart", lambda: kill(service.dispatcher_pid), sharing=sharing)
    for read, loader in found:
        assert_exactly_once(read, range(1600))
        assert loader.statistics().skipped == 0


# Trainers of several ranks


@pytest.mark.parametrize("kind", ["wait", "skip"])
def test_trainers_of_several_ranks_read_all_of_it_in_equal_steps(one_worker: ps.LocalService, kind: str) -> None:
    read: dict[tuple[str, int], list[list[int]]] = {}
    more = {"trainers": 2} if kind == "wait" else {}

    def rank(name: str, consumer: int) -> None:
        seat = {"sharing": kind, "ranks": ps.Ranks(2, consumer), **more}
        with trainer(one_worker, rows(400), name, f"ranks-{kind}", **seat) as loader:
            read[name, consumer] = [ids(batch) for batch in loader]

    threads = [threading.Thread(target=rank, args=(name, c)) for name in ("one", "other") for c in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    for name in ("one", "other"):
        assert len(read[name, 0]) == len(read[name, 1]) > 0
        given = [i for c in range(2) for batch in read[name, c] for i in batch]
        assert len(set(given)) == len(given)
        assert kind == "skip" or sorted(given) == list(range(400))


# Refused


def test_refused_with_a_reason(one_worker: ps.LocalService) -> None:
    dataset = rows(40)
    for options, reason in (
        ({"sharing": ps.Share("skip")}, "without trainer="),
        ({"ranks": ps.Ranks(2, 0, uneven="allow")}, "uneven='allow'"),
        ({"ranks": ps.Ranks(replica=1), "order": "deterministic"}, "replica=1"),
        ({"order": "deterministic"}, "order='deterministic'"),
        ({"sharding": ps.Sharding(streams=1)}, "streams=1"),
    ):
        with pytest.raises(ps.InvalidArgumentError, match=reason):
            dataset.distribute(one_worker, job="refused", **{"sharing": ps.Share("skip", "t"), **options})
    with pytest.raises(ps.InvalidArgumentError, match="needs a service"):
        dataset.distribute(sharing=ps.Share("skip", "t"))


def test_an_epoch_that_others_read_is_not_cut_short(one_worker: ps.LocalService) -> None:
    """After `take` the next iteration would begin in its middle, and one after the last would be empty."""
    with trainer(one_worker, rows(40), "a", "short") as loader:
        assert len(list(loader.take(-1))) == 10
        with pytest.raises(ps.InvalidPipelineError, match=r"take\(3\) after distribute.*Leave the loop"):
            loader.take(3)


def test_parameters_that_differ_from_the_jobs_are_refused(one_worker: ps.LocalService) -> None:
    with trainer(one_worker, rows(40), "one", "differs") as one:
        next(iter(one))
        for options, field in (
            ({"window_bytes": 9 * MIB}, "window_bytes"),
            ({"sharing": "wait"}, "sharing"),
            ({"trainer_timeout_s": 5.0}, "trainer_timeout_s"),
        ):
            two = trainer(one_worker, rows(40), "two", "differs", **options)
            with two, pytest.raises(JobMismatchError, match=field):
                next(iter(two))
        with trainer(one_worker, rows(44), "two", "differs") as two, pytest.raises(JobMismatchError):
            next(iter(two))
        alone = rows(40).distribute(one_worker, job="differs", limits=ps.Limits(timeout_s=60))
        with pytest.raises(JobMismatchError, match="sharing"):
            next(iter(alone))


def test_one_trainer_too_many_is_refused(one_worker: ps.LocalService) -> None:
    options = {"sharing": "wait", "trainers": 2}
    loaders = [trainer(one_worker, rows(40), f"t{n}", "too many", **options) for n in range(3)]
    for loader in loaders[:2]:
        next(iter(loader))
    with pytest.raises(JobMismatchError, match="trainers=2"):
        next(iter(loaders[2]))
    for loader in loaders:
        loader.close()


# Figures


def test_the_service_says_how_trainers_fare(one_worker: ps.LocalService) -> None:
    loaders = [trainer(one_worker, rows(4000), name, "figures") for name in ("lead", "follow")]
    reading = []
    for loader in loaders:  # one after the other: an epoch that is open reads ahead, and could come to lead
        reading.append(iter(loader))
        first(reading[-1], 100)
    for loader in loaders:
        loader.statistics()
    with ControlClient(one_worker.address, one_worker.credentials, name="test") as control:

        def line() -> JobLine | None:
            answer = control.ask(ListJobs(), timeout_s=10, what="jobs")
            assert isinstance(answer, Jobs)
            found = next(job for job in answer.jobs if job.job == "figures")
            told = len(found.trainers) == 2 and all(each.read == 100 for each in found.trainers)
            return found if told else None

        follow, lead = wait_until(line, "both trainers' beats").trainers
    assert (follow.trainer, follow.skipped, lead.trainer, lead.shared) == ("follow", 0, "lead", 0)
    assert follow.shared == loaders[1].statistics().shared > 50
    for loader in loaders:
        loader.close()
