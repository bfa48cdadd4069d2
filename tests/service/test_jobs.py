"""Jobs, their consumers, their names."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.client.session import BEAT_S
from penstock.core.errors import SupersededError
from tests.waiting import wait_until

from .checks import Background, assert_exactly_once, kill


def slowly(number: int) -> int:
    time.sleep(0.001)
    return number


LIMITS = ps.Limits(timeout_s=60)


def consumers_of(
    dataset: ps.Dataset, service: ps.LocalService, job: str, count: int, uneven: Any = "drop", **options: Any
) -> list[list[np.ndarray]]:
    """Read a job with several consumers at once; return what each got."""
    loaders = [
        dataset.distribute(service, job=job, ranks=ps.Ranks(count, c, uneven), limits=LIMITS, **options)
        for c in range(count)
    ]
    readings = [Background(lambda loader=loader: list(loader)) for loader in loaders]
    read = [reading.result(90) for reading in readings]
    for loader in loaders:
        loader.close()
    return read


@pytest.mark.parametrize("order", ["relaxed", "deterministic"])
@pytest.mark.parametrize("uneven", ["drop", "allow"])
def test_two_consumers_share_the_data(three_workers: ps.LocalService, order: str, uneven: str) -> None:
    job = f"two-{order}-{uneven}"
    if uneven == "allow" and order == "deterministic":
        pytest.skip("streams of deterministic order belong to all consumers")
    read = consumers_of(ps.range(1000).batch(10), three_workers, job, 2, order=order, uneven=uneven)
    assert_exactly_once([batch for each in read for batch in each], range(1000))
    if uneven == "drop":
        assert len(read[0]) == len(read[1]) == 50


@pytest.mark.parametrize(("rows", "batch", "consumers"), [(1003, 10, 2), (95, 10, 3), (7, 1, 5), (1000, 33, 4)])
def test_all_consumers_get_the_same_number_of_steps(
    three_workers: ps.LocalService, rows: int, batch: int, consumers: int
) -> None:
    read = consumers_of(ps.range(rows).batch(batch), three_workers, f"steps-{rows}-{batch}", consumers)
    batches = -(-rows // batch)
    assert [len(each) for each in read] == [batches // consumers] * consumers
    given = np.concatenate([np.concatenate(each) for each in read if each] or [np.empty(0, int)])
    assert len(set(given.tolist())) == len(given)


@pytest.mark.alone
@pytest.mark.parametrize("how", ["anew", "rejoin"])
def test_a_reader_whose_place_is_taken_is_told_at_once_by_whom(one_worker: ps.LocalService, how: str) -> None:
    slow = ps.range(100_000).map(slowly).batch(4)
    with (
        slow.distribute(one_worker, job=f"taken-{how}", limits=LIMITS) as older,
        slow.distribute(one_worker, job=f"taken-{how}", limits=LIMITS) as newer,
    ):
        reading = iter(older)
        next(reading)
        if how == "rejoin":
            newer.load_state_dict(older.state_dict())
        next(iter(newer))
        begin = time.monotonic()
        with pytest.raises(SupersededError, match=f"process {os.getpid()} on .* taken consumer 0's place"):
            for _ in reading:
                pass
        assert time.monotonic() - begin < BEAT_S / 2, "before its next beat"


def test_one_file_and_two_consumers(one_worker: ps.LocalService, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("".join(f"{i}\n" for i in range(101)))
    read = consumers_of(ps.read_text(str(tmp_path / "one.txt")).map(int), one_worker, "one-file", 2)
    assert [len(each) for each in read] == [50, 50]


def test_pad_gives_everybody_the_larger_number(three_workers: ps.LocalService) -> None:
    read = consumers_of(ps.range(1001).batch(10), three_workers, "padded", 3, uneven="pad")
    assert [len(each) for each in read] == [34, 34, 34]
    assert {int(i) for each in read for batch in each for i in batch} == set(range(1001))


def test_drop_last_at_many_streams_drops_less_than_a_batch_a_consumer(three_workers: ps.LocalService) -> None:
    dataset = ps.range(10_000).batch(64, drop_last=True)
    loader = dataset.distribute(three_workers, order="deterministic", sharding=ps.Sharding(streams=64))
    assert sum(map(len, loader)) == 10_000 // 64 * 64


def test_a_split_filtered_empty_does_not_make_consumers_uneven(three_workers: ps.LocalService) -> None:
    read = consumers_of(ps.range(3000).filter(lambda i: i > 1500).batch(10), three_workers, "filtered", 2)
    assert [len(each) for each in read] == [75, 75]


def test_jobs_of_other_names_get_everything(one_worker: ps.LocalService) -> None:
    for job in ("first name", "second name"):
        assert_exactly_once(ps.range(100).distribute(one_worker, job=job), range(100))


def test_replicas_read_identical_batches(three_workers: ps.LocalService) -> None:
    loaders = [
        ps.range(500)
        .shuffle(seed=1)
        .batch(10)
        .distribute(
            three_workers,
            job="replicas",
            ranks=ps.Ranks(replica=r),
            order="deterministic",
            limits=LIMITS,
        )
        for r in range(2)
    ]
    readings = [Background(lambda loader=loader: [batch.tolist() for batch in loader]) for loader in loaders]
    first, second = (reading.result(90) for reading in readings)
    assert first == second and len(first) == 50


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"dataset": ps.range(101)}, "fingerprint|range"),
        ({"sharding": "off"}, "sharding"),
        ({"sharding": ps.Sharding(guarantee="at_most_once")}, "at_most_once"),
        ({"order": "deterministic"}, "order"),
    ],
    ids=["pipeline", "sharding", "guarantee", "order"],
)
def test_another_job_under_the_same_name_is_refused(
    one_worker: ps.LocalService, change: dict[str, object], shown: str
) -> None:
    with ps.range(100).distribute(one_worker, job="taken") as holder:
        next(iter(holder))
        dataset = change.pop("dataset", ps.range(100))
        with pytest.raises(ps.PenstockError, match=shown):
            list(dataset.distribute(one_worker, job="taken", limits=ps.Limits(timeout_s=20), **change))


def test_a_corrected_pipeline_takes_the_name_of_one_that_failed(one_worker: ps.LocalService) -> None:
    def wrong(x: int) -> int:
        return [10, 20, 30][x]

    with (
        pytest.raises(IndexError),
        ps.range(5).map(wrong).distribute(one_worker, job="mended", limits=LIMITS) as loader,
    ):
        list(loader)
    wait_until(lambda: all(line.clients == 0 for line in one_worker.jobs() if line.job == "mended"), "it to be left")
    corrected = ps.range(5).map(lambda x: [10, 20, 30, 40, 50][x])
    assert sorted(corrected.distribute(one_worker, job="mended", limits=LIMITS)) == [
        10,
        20,
        30,
        40,
        50,
    ]


def test_a_job_that_was_read_to_its_end_keeps_its_name(one_worker: ps.LocalService) -> None:
    with ps.range(5).distribute(one_worker, job="between-epochs", limits=LIMITS) as holder:
        assert sorted(holder) == [0, 1, 2, 3, 4]
        with pytest.raises(ps.PenstockError, match="another one"):
            list(ps.range(6).distribute(one_worker, job="between-epochs", limits=LIMITS))
        assert sorted(holder) == [0, 1, 2, 3, 4]


def test_repeat_over_nothing_ends(one_worker: ps.LocalService) -> None:
    assert list(ps.range(0).repeat().distribute(one_worker, limits=LIMITS)) == []
    assert list(ps.range(9).filter(lambda x: x > 10).batch(2).repeat().distribute(one_worker, limits=LIMITS)) == []


def test_a_job_nobody_reads_is_collected_and_its_name_free_again(one_worker: ps.LocalService) -> None:
    with ps.range(100).distribute(one_worker, job="short-lived", limits=ps.Limits(collect_after_s=0.5)) as loader:
        next(iter(loader))
        assert "short-lived" in {line.job for line in one_worker.jobs()}
    wait_until(lambda: "short-lived" not in {line.job for line in one_worker.jobs()}, "the job to be collected")
    assert_exactly_once(ps.range(7).distribute(one_worker, job="short-lived"), range(7))


def test_a_job_that_is_held_is_not_collected_across_a_restart() -> None:
    held = ps.range(1000)
    with (
        ps.LocalService(workers=1) as service,
        held.distribute(service, job="held", limits=ps.Limits(collect_after_s=0.5)) as loader,
    ):
        iterator = iter(loader)
        first = next(iterator)
        kill(service.dispatcher_pid)
        wait_until(lambda: "held" in {line.job for line in service.jobs()}, "the restarted dispatcher")
        assert_exactly_once([first, *iterator], range(1000))


BAD_ARGUMENTS = [
    ({"ranks": ps.Ranks(2)}, "2 ranks without a rank"),
    ({"ranks": 2}, "must be a ps.Ranks"),
    ({"job": ""}, "job"),
    ({"sharding": "sideways"}, "dynamic"),
    ({"order": "random"}, "deterministic"),
    ({"transport": "rar"}, "zstd"),
    ({"sharing": "skip"}, "must be a ps.Share"),
    ({"to": "http://nowhere"}, "tcp://"),
    ({"to": "gpu7:5050"}, "tcp://gpu7:5050"),
    ({"to": "[::1]:5050"}, r"tcp://\[::1\]:5050"),
]


@pytest.mark.parametrize(("arguments", "named"), BAD_ARGUMENTS, ids=lambda value: str(value))
def test_bad_arguments_are_refused_at_once(
    one_worker: ps.LocalService, arguments: dict[str, object], named: str
) -> None:
    arguments = {"to": one_worker, **arguments}
    with pytest.raises(ValueError, match=named):
        ps.range(10).distribute(arguments.pop("to"), **arguments)


def test_a_registered_pipeline_is_read_without_its_code(one_worker: ps.LocalService) -> None:
    ps.register(one_worker, ps.range(20).map(lambda i: i * 3), id="triples")
    ps.register(one_worker, ps.range(20).map(lambda i: i * 3), id="triples")
    with pytest.raises(ps.PenstockError, match="triples"):
        ps.register(one_worker, ps.range(21), id="triples")
    program = f"import penstock as ps\nprint(sorted(ps.read_registered({str(one_worker.service_file)!r}, 'triples')))\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == str([i * 3 for i in range(20)])
