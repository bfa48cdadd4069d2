"""A runner as a process: what its user code prints, how it ends, what it leaves behind."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from runner_harness import DEADLINE_S, RUNNER, Harness, Reader, harness

import penstock as ps
from penstock.core.ids import JobName, WorkerId
from penstock.processes.nursery_link import RECORD_BYTES
from penstock.processes.runner_config import RunnerConfig
from penstock.runtime.flight_record import read_flight
from penstock.wire.addresses import RunnerAddress, host_id

CHILD = """
import mmap, os, sys, msgspec
from penstock.worker.runner import RunnerConfig, run
with open(sys.argv[2], "r+b") as file:
    record = mmap.mmap(file.fileno(), 0)
run(msgspec.json.decode(sys.argv[1], type=RunnerConfig), lambda text: os.write(int(sys.argv[3]), text.encode()), record)
"""


class Child:
    def __init__(self, service: Harness, dataset: ps.Dataset, folder: Path, **config: Any) -> None:
        service.serve(dataset).close()  # tells the dispatcher what the job is
        self.record = folder / "record"
        self.record.write_bytes(bytes(RECORD_BYTES))
        chosen = RunnerConfig(
            runner=RUNNER,
            worker=WorkerId("w1"),
            job=JobName("job"),
            dispatcher=service.dispatcher.address,
            credentials=service.credentials,
            **{"memory_bytes": 64 << 20, "threads": 2, "host": host_id(), **config},
        )
        reading, writing = os.pipe()
        arguments = [msgspec.json.encode(chosen).decode(), str(self.record), str(writing)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, *arguments], pass_fds=[writing], stderr=subprocess.PIPE
        )
        os.close(writing)
        self.address = RunnerAddress.parse(os.read(reading, 4096).decode())
        os.close(reading)

        service.at_end.append(self.end)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate(timeout=DEADLINE_S)

    def stderr_after_end(self) -> str:
        return self.process.communicate(timeout=DEADLINE_S)[1].decode()


@pytest.fixture
def service() -> Iterator[Harness]:
    with harness() as made:
        yield made


def test_what_user_code_prints_reaches_its_readers(service: Harness, tmp_path: Path) -> None:
    def shout(x: int) -> int:
        if x % 10 == 0:
            print(f"at {x}")
        return x

    child = Child(service, ps.range(30).map(shout), tmp_path)
    reader = Reader(child.address, service.credentials)
    service.readers.append(reader)
    received = reader.open()
    reader.read_until(lambda: received.over)
    reader.read_until(lambda: "at 20" in "\n".join(reader.output), "the printed lines")
    assert [line for text in reader.output for line in text.splitlines()] == ["at 0", "at 10", "at 20"]
    child.process.terminate()
    child.stderr_after_end()
    assert child.process.returncode == 0


def test_too_many_lines_are_counted_instead_of_sent(service: Harness, tmp_path: Path) -> None:
    def babble(x: int) -> int:
        print("\n".join(f"{x}" for _ in range(500)))
        return x

    child = Child(service, ps.range(10).map(babble), tmp_path)
    reader = Reader(child.address, service.credentials)
    service.readers.append(reader)
    received = reader.open()
    reader.read_until(lambda: received.over)
    reader.read_until(lambda: "lines left out" in "\n".join(reader.output), "the count of lines left out")
    assert len("\n".join(reader.output).splitlines()) < 1_000
    child.process.terminate()
    child.stderr_after_end()


def test_sigterm_ends_a_runner_in_the_middle_of_a_users_function(service: Harness, tmp_path: Path) -> None:
    def hang(x: int) -> int:
        if x == 5:
            time.sleep(3600)
        return x

    child = Child(service, ps.range(30).map(hang), tmp_path)
    reader = Reader(child.address, service.credentials)
    service.readers.append(reader)
    received = reader.open()
    reader.read_until(lambda: len(received.elements) > 0, "what was made before it hung")
    began = time.monotonic()
    child.process.send_signal(signal.SIGTERM)
    child.process.wait(DEADLINE_S)
    child.stderr_after_end()
    assert time.monotonic() - began < 10


def test_an_element_that_kills_its_process_is_named_in_the_record(service: Harness, tmp_path: Path) -> None:
    def kill_at_17(x: int) -> int:
        if x == 17:
            os._exit(3)
        return x

    child = Child(service, ps.range(30).map(kill_at_17), tmp_path)
    reader = Reader(child.address, service.credentials)
    service.readers.append(reader)
    reader.open()
    assert child.process.wait(DEADLINE_S) == 3
    child.stderr_after_end()
    with child.record.open("r+b") as file, mmap.mmap(file.fileno(), 0) as record:
        found = read_flight(record)
    assert any(work.index <= 17 < work.index + work.count and work.split == 0 for work in found), found
    assert {work.stream for work in found} == {"att.0"}
