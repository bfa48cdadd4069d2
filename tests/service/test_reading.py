"""What a trainer reads through a service is what it would read without one."""

from __future__ import annotations

import functools
import gc
import socket
import subprocess
import sys
import threading
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.testing.conformance import compare_all
from penstock.wire.credentials import ServiceKeys
from tests.waiting import wait_until

from .checks import DEADLINE_S, Background, assert_exactly_once

Pair = namedtuple("Pair", "left right")


def structures(i: int) -> dict[str, object]:
    return {
        "nested": {"tuple": (i, [np.full((2, 3), i, np.int16), "text"]), "none": None},
        "pair": Pair(np.float32(i), b"bytes"),
        "ragged": ps.Ragged.of([[1, 2], [], [i]]),
        "empty": np.zeros((0, 4), np.float64),
        "scalar array": np.array(i, np.uint8),
        "bool": np.array([True, False]),
        "half": np.array([i, 2], np.float16),
        "when": np.array(["2024-01-01", "NaT"], "datetime64[D]"),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "strided": np.arange(20)[::3],
        "true": True,
        "float": i / 3,
        "big": 2**70 + i,
    }


def test_ten_elements_in_order(one_worker: ps.LocalService) -> None:
    assert list(ps.range(10).distribute(one_worker)) == list(range(10))


def test_a_journal_directory_changes_nothing(tmp_path: Path) -> None:
    with ps.LocalService(workers=1, journal=tmp_path / "journal") as service:
        assert list(ps.range(10).distribute(service)) == list(range(10))


def test_structure_survives(one_worker: ps.LocalService) -> None:
    dataset = ps.range(20).map(structures)
    assert compare_all(list(dataset.iterator()), list(dataset.distribute(one_worker))) is None


def test_batches_are_writable(one_worker: ps.LocalService) -> None:
    for batch in ps.range(1000).map(lambda i: np.full(100, i)).batch(100).distribute(one_worker):
        assert batch.flags.writeable
        batch += 1


class Scale:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def times(self, value: int) -> int:
        return value * self.factor


def test_functions_of_every_kind_are_shipped(one_worker: ps.LocalService) -> None:
    offset, table = np.arange(5), {0: 3, 1: 4}
    functions = [
        lambda i: i + int(offset[2]),
        lambda i: table[i % 2],
        Scale(3).times,
        functools.partial(pow, 2),
        abs,
    ]
    for function in functions:
        dataset = ps.range(8).map(function)
        assert list(dataset.distribute(one_worker)) == list(dataset)


def test_what_cannot_be_shipped_is_refused_by_name(one_worker: ps.LocalService) -> None:
    a_lock = threading.Lock()

    def guarded(i: int) -> int:
        with a_lock:
            return i

    with pytest.raises(ps.PenstockError, match="a_lock"):
        list(ps.range(3).map(guarded).distribute(one_worker))


def test_a_loader_gives_everything_each_time(one_worker: ps.LocalService) -> None:
    with ps.range(100).batch(10).distribute(one_worker) as loader:
        for _ in range(10):
            assert_exactly_once(loader, range(100))


def test_three_loaders_do_not_disturb_each_other(three_workers: ps.LocalService) -> None:
    loaders = [ps.range(n).batch(7).distribute(three_workers) for n in (50, 60, 70)]
    iterators = [iter(loader) for loader in loaders]
    read: list[list[np.ndarray]] = [[], [], []]
    for turn in range(11):
        for which, iterator in enumerate(iterators):
            batch = next(iterator, None)
            assert batch is not None or turn > 6
            if batch is not None:
                read[which].append(batch)
    for n, batches in zip((50, 60, 70), read):
        assert_exactly_once(batches, range(n))
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize("before", [True, False])
def test_repeat_before_or_after_gives_everything_five_times(three_workers: ps.LocalService, before: bool) -> None:
    numbers = ps.range(300)
    loader = numbers.repeat(5).distribute(three_workers) if before else numbers.distribute(three_workers).repeat(5)
    assert_exactly_once(loader, range(300), times=5)


def test_a_large_definition_works_for_late_workers_too() -> None:
    table = np.random.default_rng(1).integers(0, 255, 12_000_000, dtype=np.uint8)
    with ps.LocalService(workers=1) as service, ps.range(40).map(lambda i: int(table[i])).distribute(service) as loader:
        assert sorted(loader) == sorted(table[:40].tolist())
        service.add_worker()
        assert sorted(loader) == sorted(table[:40].tolist())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_client_waits_for_its_dispatcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ServiceKeys.new()
    keys.write(tmp_path / "server.json")
    keys.trainer.write(tmp_path / "trainer.json")
    monkeypatch.setenv("PENSTOCK_KEYS", str(tmp_path / "trainer.json"))
    port = free_port()
    loader = ps.range(10).distribute(f"tcp://127.0.0.1:{port}", limits=ps.Limits(timeout_s=60))
    reading = Background(lambda: list(loader))
    command = [sys.executable, "-m", "penstock", "serve", "--workers", "1", "--port", str(port)]
    command += ["--keys", str(tmp_path / "server.json")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            assert reading.result(60) == list(range(10))
        finally:
            loader.close()
            server.terminate()
            server.wait(20)


def test_timeout_names_what_was_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ServiceKeys.new().trainer.write(tmp_path / "trainer.json")
    monkeypatch.setenv("PENSTOCK_KEYS", str(tmp_path / "trainer.json"))
    address = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(ps.PenstockError, match=address):
        list(ps.range(10).distribute(address, limits=ps.Limits(timeout_s=0.5)))


def test_drop_last_that_swallows_everything_gives_an_empty_epoch(three_workers: ps.LocalService) -> None:
    loader = ps.range(30).batch(100, drop_last=True).distribute(three_workers)
    assert list(loader) == [] and list(loader) == []


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_elements_on_more_workers(three_workers: ps.LocalService, count: int) -> None:
    assert sorted(ps.range(count).distribute(three_workers)) == list(range(count))


def test_splits_filtered_empty(three_workers: ps.LocalService) -> None:
    loader = ps.range(2000).filter(lambda i: i == 1234).batch(10).distribute(three_workers)
    assert [batch.tolist() for batch in loader] == [[1234]]


def test_no_workers_for_a_while() -> None:
    with ps.LocalService(workers=0) as service:
        loader = ps.range(50).distribute(service, limits=ps.Limits(timeout_s=60))
        reading = Background(lambda: list(loader))
        service.add_worker()
        assert sorted(reading.result(60)) == list(range(50))
        loader.close()


def sleep_for_ever(i: int) -> int:
    time.sleep(3600)
    return i


def test_deleting_a_blocked_loader_returns_at_once(one_worker: ps.LocalService) -> None:
    loader = ps.range(3).map(sleep_for_ever).distribute(one_worker, limits=ps.Limits(timeout_s=1.0))
    with pytest.raises(ps.PenstockError):
        next(iter(loader))
    began = time.monotonic()
    del loader
    gc.collect()
    assert time.monotonic() - began < 5


def test_a_process_with_open_loaders_exits_promptly(one_worker: ps.LocalService) -> None:
    program = (
        "import penstock as ps, time, sys\n"
        f"loader = ps.range(100).map(lambda i: time.sleep(i) or i).distribute({str(one_worker.service_file)!r})\n"
        "it = iter(loader)\n"
        "next(it)\n"
        "print('read', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "read\n"
        assert process.wait(20) == 0


def test_reading_goes_on_beside_a_stuck_worker(tmp_path: Path) -> None:
    token = tmp_path / "one is stuck"

    def sticky(i: int) -> int:
        try:
            token.touch(exist_ok=False)
        except FileExistsError:
            return i
        time.sleep(3600)
        return i

    with ps.LocalService(workers=3, threads=1) as service:
        service.wait_ready(DEADLINE_S)
        # Every element is a split of its own, so that the stuck worker holds as little as possible.
        dataset = ps.from_generator(lambda split: iter([split]), splits=list(range(60))).map(sticky, threads=1)
        with dataset.distribute(service, limits=ps.Limits(timeout_s=8)) as loader:
            read: list[int] = []
            with pytest.raises(ps.PenstockError) as stalled:
                for each in loader:
                    read.append(each)  # noqa: PERF402 - what was read before the failure counts
            assert len(read) >= 40 and len(set(read)) == len(read)
            assert "worker" in str(stalled.value)


def test_operators_after_distribute_run_here(one_worker: ps.LocalService) -> None:
    seen: list[int] = []  # cannot be shipped back: only a function that runs here can fill it
    loader = ps.range(20).distribute(one_worker).map(lambda i: seen.append(i) or i).batch(5)
    assert_exactly_once(loader, range(20))
    assert sorted(seen) == list(range(20))


def test_a_users_exception_keeps_its_type(one_worker: ps.LocalService) -> None:
    def fails(i: int) -> int:
        if i == 7:
            raise KeyError("number seven")
        return i

    with pytest.raises(KeyError, match="number seven") as caught:
        list(ps.range(10).map(fails).distribute(one_worker))
    assert any("fails" in note for note in caught.value.__notes__)


def test_what_workers_print_reaches_the_trainer(one_worker: ps.LocalService, capfd: pytest.CaptureFixture[str]) -> None:
    def chatty(i: int) -> int:
        print(f"working on {i}", flush=True)
        return i

    seen: list[str] = []

    def heard() -> bool:
        seen.append(capfd.readouterr().err)
        return "working on 2" in "".join(seen)

    with ps.range(3).map(chatty).distribute(one_worker) as loader:
        iterator = iter(loader)
        next(iterator)
        wait_until(lambda: list(iterator) is not None and heard(), "the worker's line")


def test_threads_in_this_process_have_the_same_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_SERVICE", raising=False)
    with ps.range(100).batch(10).distribute() as loader:
        first = next(iter(loader))
        state = loader.state_dict()
        rest = ps.range(100).batch(10).distribute()
        rest.load_state_dict(state)
        assert_exactly_once([first, *rest], range(100))


def test_processes_of_its_own() -> None:
    with ps.range(1000).batch(10).distribute(2) as loader:
        assert_exactly_once(loader, range(1000))


def test_the_environment_names_the_service(one_worker: ps.LocalService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_SERVICE", str(one_worker.service_file))
    loader = ps.range(10).map(lambda i: __import__("os").getpid()).distribute()
    assert set(loader) == set(one_worker.worker_pids().values()) or len(set(loader)) == 1
