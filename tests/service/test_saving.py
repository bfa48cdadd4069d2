"""Saving a dataset through a service, and reading it back."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import CodecError, NoFilesError, SaveFailedError, SaveMismatchError, WaitTimeoutError
from penstock.sources.saved_files import FAILURE, MANIFEST, PROGRESS, Manifest, encode_manifest, load_manifest
from penstock.wire import neighbours
from tests.waiting import wait_until

from .checks import Background, assert_exactly_once, kill

Point = namedtuple("Point", "x y")

STRUCTURES: dict[str, Callable[[int], Any]] = {
    "ints": lambda i: i,
    "a large int": lambda i: 10**30 + i,
    "arrays": lambda i: np.arange(6, dtype=np.float32).reshape(2, 3) + i,
    "arrays of unequal shapes": lambda i: np.arange(i % 7),
    "empty arrays": lambda i: np.empty((0, 3), np.uint8),
    "dicts": lambda i: {"i": i, "text": f"é {i}", "raw": b"\0" * (i % 3), "none": None, "flag": i % 2 == 0, "f": i / 7},
    "other keys each": lambda i: {f"k{i}": i, "n": {"deep": [i, (i, "x")]}},
    "namedtuples": lambda i: Point(np.int16(i), np.float64(i)),
    "ragged": lambda i: {"r": ps.Ragged.of([[i], [], [1, 2]])},
    "objects": lambda i: np.array(["a", None, i], object),
    "dates": lambda i: np.datetime64("2024-01-01") + i,
    "structured": lambda i: np.array([(i, 2.0)], [("a", "<i4"), ("b", "<f8")]),
    "large": lambda i: np.full(300_000, i % 256, np.uint8),
    "surrogates": lambda i: "\udcff" * (i % 2),
}


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert type(found) is dict and list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, (list, tuple)):
        assert type(found).__name__ == type(expected).__name__ and len(found) == len(expected)
        for one, other in zip(found, expected):
            assert_same(one, other)
    elif isinstance(expected, ps.Ragged):
        assert_same(found.values, expected.values)
        assert_same(found.offsets, expected.offsets)
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert found.tolist() == expected.tolist()
        assert found.flags.writeable and found.flags.aligned
    else:
        assert type(found) is type(expected) and found == expected


@pytest.mark.parametrize("name", STRUCTURES)
def test_every_structure_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    make = STRUCTURES[name]
    summary = ps.range(50).map(make).save(None, tmp_path / "saved", rows_per_file=7)
    assert summary.elements == 50
    found = list(ps.read_saved(tmp_path / "saved"))
    assert len(found) == 50
    for number, element in enumerate(found):
        assert_same(element, make(number))


def test_a_dataset_is_saved_by_workers_and_read_by_others(three_workers: ps.LocalService, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    dataset = ps.range(2005).shuffle(seed=1).map(lambda i: {"i": i, "pid": os.getpid()})
    saved = dataset.save(three_workers, folder, rows_per_file=100)
    files = [path for path in folder.iterdir() if path.name != MANIFEST]
    assert (saved.elements, saved.files, saved.path) == (2005, 21, str(folder))
    assert len(files) == 21 and saved.bytes == sum(path.stat().st_size for path in files)
    elements = list(ps.read_saved(folder))
    assert_exactly_once([element["i"] for element in elements], range(2005))
    assert os.getpid() not in {element["pid"] for element in elements}
    numbers = ps.read_saved(folder).map(lambda element: element["i"])
    assert_exactly_once(numbers.distribute(three_workers), range(2005))
    assert_exactly_once(numbers.shuffle(500, seed=3).batch(10), range(2005))


def test_saved_batches_are_those_of_a_reader(three_workers: ps.LocalService, tmp_path: Path) -> None:
    ps.range(1003).batch(10).save(three_workers, tmp_path / "batches")
    batches = list(ps.read_saved(tmp_path / "batches"))
    assert sorted(map(len, batches)) == [3] + [10] * 100
    assert_exactly_once(batches, range(1003))
    ps.range(1003).batch(10, drop_last=True).save(three_workers, tmp_path / "whole batches")
    assert [len(batch) for batch in ps.read_saved(tmp_path / "whole batches")] == [10] * 100


def test_nothing_and_the_same_many_times_can_be_saved(one_worker: ps.LocalService, tmp_path: Path) -> None:
    empty = ps.range(100).filter(lambda i: False).save(one_worker, tmp_path / "empty")
    assert (empty.elements, empty.files) == (0, 0)
    assert list(ps.read_saved(tmp_path / "empty")) == []
    same = ps.range(100).map(lambda i: "same").save(one_worker, tmp_path / "same", rows_per_file=10)
    assert (same.elements, same.files) == (100, 1)
    assert list(ps.read_saved(tmp_path / "same")) == ["same"] * 100


def slow(i: int) -> int:
    time.sleep(0.002)
    return i


@pytest.mark.alone  # a worker that is slow has the same element in hand at several kills, and it is left out for that
def test_everything_is_saved_once_whatever_dies(tmp_path: Path) -> None:
    with ps.LocalService(workers=3) as service:
        saving = Background(lambda: ps.range(4000).map(slow).save(service, tmp_path / "saved", rows_per_file=20))
        for parts in (3, 30, 70, 110):  # far enough apart for whoever goes on to get past what was in hand
            wait_until(lambda parts=parts: parts_of(tmp_path / "saved") >= parts, f"{parts} parts")
            for pid in list(service.worker_pids().values())[:2]:
                with suppress(ProcessLookupError):  # it may have ended with the last fault
                    kill(pid)
            if parts in (30, 110):
                kill(service.dispatcher_pid)
        saved = saving.result(90)
    assert saved.elements == 4000
    assert_exactly_once(ps.read_saved(tmp_path / "saved"), range(4000))
    listed = {part.file for part in load_manifest(str(tmp_path / "saved")).parts}
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {*listed, MANIFEST}


def parts_of(folder: Path) -> int:
    manifest = load_manifest(str(folder))
    return 0 if manifest is None else len(manifest.parts)


def test_it_can_be_read_while_it_is_written(three_workers: ps.LocalService, tmp_path: Path) -> None:
    folder, hold = tmp_path / "saved", tmp_path / "go on"

    def last_one_later(i: int) -> int:
        time.sleep(0.002)
        while i == 1999 and not hold.exists():
            time.sleep(0.01)
        return i

    dataset = ps.range(2000).map(last_one_later)
    saving = Background(lambda: dataset.save(three_workers, folder, rows_per_file=10))
    wait_until(lambda: parts_of(folder) > 2, "the first parts")
    iterator = iter(ps.read_saved(folder))
    first = [next(iterator) for _ in range(30)]
    assert not (folder / MANIFEST).exists()
    elsewhere = Background(
        lambda: list(ps.read_saved(folder).distribute(three_workers, limits=ps.Limits(timeout_s=60)))
    )
    wait_until(lambda: elsewhere._thread.is_alive(), "the reading elsewhere")
    hold.touch()
    assert_exactly_once([*first, *iterator], range(2000))
    assert saving.result().elements == 2000
    assert_exactly_once(elsewhere.result(), range(2000))


def test_a_reader_of_what_nobody_goes_on_writing_says_so(tmp_path: Path) -> None:
    with pytest.raises(NoFilesError, match=r"no saved dataset, and none was begun there in 0\.2 s"):
        list(ps.read_saved(tmp_path, wait=0.2))
    (tmp_path / PROGRESS).write_bytes(encode_manifest(Manifest(fingerprint="x")))
    with pytest.raises(WaitTimeoutError, match=r"more of .* than 0 parts: nothing was added"):
        list(ps.read_saved(tmp_path, wait=0.2))


@pytest.mark.parametrize(
    "dataset",
    [
        ps.range(10).repeat().batch(2),
        ps.mix([ps.range(10), ps.range(10)], stop="never"),
        ps.mix([ps.range(10).repeat(), ps.range(10).repeat()]),
        ps.range(10).concatenate(ps.range(10).repeat()),
    ],
    ids=["repeat", "mix", "mix of repeats", "concatenate"],
)
def test_what_never_ends_is_refused_before_anything_is_written(tmp_path: Path, dataset: ps.Dataset) -> None:
    with pytest.raises(ps.InvalidPipelineError, match=r"(repeat|mix).*never ends.*read_saved"):
        dataset.save(None, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_reader_waits_for_a_save_that_has_not_begun(one_worker: ps.LocalService, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    reading = Background(lambda: list(ps.read_saved(folder, wait=30)))
    saved = ps.range(100).save(one_worker, folder, rows_per_file=10)
    assert saved.elements == 100
    assert_exactly_once(reading.result(), range(100))


def test_a_reader_that_waits_hears_why_saving_failed(one_worker: ps.LocalService, tmp_path: Path) -> None:
    folder, hold = tmp_path / "saved", tmp_path / "go on"

    def fails_at_the_end(i: int) -> int:
        time.sleep(0.002)
        while i == 1999 and not hold.exists():
            time.sleep(0.01)
        if i == 1999:
            raise ArithmeticError("no 1999 today")
        return i

    dataset = ps.range(2000).map(fails_at_the_end)
    saving = Background(lambda: dataset.save(one_worker, folder, rows_per_file=10))
    wait_until(lambda: parts_of(folder) > 2, "the first parts")
    reading = Background(lambda: list(ps.read_saved(folder, wait=30)))
    elsewhere = Background(
        lambda: list(ps.read_saved(folder, wait=30).distribute(one_worker, limits=ps.Limits(timeout_s=60)))
    )
    hold.touch()
    with pytest.raises(ArithmeticError):
        saving.result()
    for waiting in (reading, elsewhere):
        with pytest.raises(SaveFailedError, match=r"has failed: ArithmeticError: no 1999 today; call save\(\) again"):
            waiting.result()
    with pytest.raises(ArithmeticError):  # the same again: it goes on, and fails again
        dataset.save(one_worker, folder, rows_per_file=10)


def test_a_failure_is_forgotten_when_saving_goes_on(one_worker: ps.LocalService, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    with pytest.raises(ps.PenstockError):
        ps.range(100).save("tcp://127.0.0.1:1", folder, rows_per_file=10, timeout_s=0.5)
    with pytest.raises(SaveFailedError, match="InvalidArgumentError: no service runs at"):
        list(ps.read_saved(folder))
    ps.range(100).save(one_worker, folder, rows_per_file=10)
    assert_exactly_once(ps.read_saved(folder), range(100))
    assert not (folder / FAILURE).exists()


def test_a_reader_says_that_the_writer_has_died(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as writer:
        name = neighbours._named(writer.pid)
        writer.kill()
    (tmp_path / PROGRESS).write_bytes(encode_manifest(Manifest(fingerprint="x", writer=name)))
    with pytest.raises(WaitTimeoutError, match=r"nothing was added, and the process that saved it has died; go on"):
        list(ps.read_saved(tmp_path, wait=0.2))


SAVING = """
import sys, time
import penstock as ps

def slow(i):
    time.sleep(0.003)
    return i

print(ps.range(2000).shuffle().map(slow).save(sys.argv[1], sys.argv[2], rows_per_file=10).elements)
"""


def test_a_killed_caller_goes_on_where_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    program = tmp_path / "saving.py"
    program.write_text(SAVING)
    with ps.LocalService(workers=2) as service:
        command = [sys.executable, str(program), str(service.service_file), str(folder)]
        kept: list[Any] = []
        for parts in (20, 60):
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as caller:
                wait_until(lambda parts=parts: parts_of(folder) > parts, f"{parts} parts")
                caller.kill()
            now = load_manifest(str(folder))
            assert not now.complete and now.parts[: len(kept)] == kept
            kept = now.parts
        with pytest.raises(SaveMismatchError, match="another pipeline"):
            ps.range(10).save(service, folder)
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    assert done.stdout.strip() == "2000"
    assert load_manifest(str(folder)).parts[: len(kept)] == kept
    assert_exactly_once(ps.read_saved(folder), range(2000))


def test_a_finished_save_is_not_done_again(one_worker: ps.LocalService, tmp_path: Path) -> None:
    first = ps.range(100).save(one_worker, tmp_path / "saved", rows_per_file=10)
    (tmp_path / "saved" / PROGRESS).write_bytes(b"left by a caller that was killed at the end")
    assert ps.range(100).save("tcp://127.0.0.1:1", tmp_path / "saved", rows_per_file=10) == first
    with pytest.raises(SaveMismatchError, match="another pipeline"):
        ps.range(101).save(one_worker, tmp_path / "saved", rows_per_file=10)
    assert_exactly_once(ps.read_saved(tmp_path / "saved"), range(100))


def test_a_caller_killed_before_publishing_publishes(one_worker: ps.LocalService, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    first = ps.range(100).save(one_worker, folder, rows_per_file=10)
    complete = load_manifest(str(folder))
    (folder / MANIFEST).unlink()
    unpublished = Manifest(fingerprint=complete.fingerprint, parts=complete.parts)
    (folder / PROGRESS).write_bytes(encode_manifest(unpublished))
    assert ps.range(100).save(one_worker, folder, rows_per_file=10) == first
    assert load_manifest(str(folder)) == complete


def test_what_cannot_be_saved_is_refused(one_worker: ps.LocalService, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("not to be touched")
    with pytest.raises(SaveMismatchError, match=r"mine\.txt"):
        ps.range(10).save(one_worker, tmp_path)
    with pytest.raises(ValueError, match="rows_per_file"):
        ps.range(10).save(one_worker, tmp_path / "a", rows_per_file=0)
    with pytest.raises(ValueError, match="s3://"):
        ps.range(10).save(one_worker, "s3://bucket/x")
    with pytest.raises(CodecError, match="a set, which cannot be encoded"):
        ps.range(10).map(lambda i: {i}).save(one_worker, tmp_path / "b", timeout_s=30)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    ps.range(100).save(None, tmp_path / "saved")
    (part,) = (tmp_path / "saved").glob("part-*")
    content = bytearray(part.read_bytes())
    content[200] ^= 1
    part.write_bytes(content)
    with pytest.raises(ps.PenstockError, match=part.name):
        list(ps.read_saved(tmp_path / "saved"))
