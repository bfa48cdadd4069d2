"""Places on a real Slurm: they are cancelled, their node is drained, their time runs out; nothing is lost."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.provision.engines import EngineError, PlaceCommand
from penstock.provision.slurm import SlurmEngine, SlurmOptions
from tests.clusters.conftest import Head
from tests.clusters.reading import read_while
from tests.clusters.slurm_cluster import missing_commands, slurm_cluster
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    assert not missing_commands(), f"Slurm is not installed ({missing_commands()}); make test-clusters does that"
    with slurm_cluster(tmp_path_factory.mktemp("slurm")):
        yield


@pytest.fixture
def engine(head: Head, tmp_path: Path, slurm: None) -> Iterator[SlurmEngine]:
    command = PlaceCommand(dispatcher=head.address, keys=head.agent_key, drain_s=10)
    engine = SlurmEngine(command, SlurmOptions(service=f"test-{tmp_path.name}", output=str(tmp_path / "%A.%a.log")))
    yield engine
    engine.close()
    wait_until(lambda: not engine._tasks(), "Slurm's tasks to end")


def run(*words: str) -> None:
    subprocess.run(words, check=True, timeout=30)


def task(name: str) -> str:
    return "_".join(name.split("-")[1:])


def test_places_run_are_listed_and_leave_in_peace(engine: SlurmEngine, head: Head, tmp_path: Path) -> None:
    engine.start(3)
    names = engine.names()
    assert len(names) == 3

    def release_one() -> None:
        leaving = min(engine.names())
        engine.release([leaving])
        assert leaving not in engine.names()

    read_while(head.service_file, {20: release_one})
    assert len(engine.names()) == 2
    assert any("left" in log.read_text() for log in tmp_path.glob("*.log"))


def test_a_cancelled_task_and_a_drained_node_lose_nothing(engine: SlurmEngine, head: Head) -> None:
    engine.start(3)
    wait_until(lambda: set(engine._tasks().values()) == {"RUNNING"}, "all tasks to run")

    def cancel() -> None:
        run("scancel", task(min(engine.names())))

    def lose_node() -> None:
        run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")

    events = {10: cancel, 40: lambda: engine.start(1), 80: lose_node, 90: lambda: engine.start(1)}
    read_while(head.service_file, events)  # the node comes back by itself: its daemon lives


def test_a_time_limit_is_a_drain(head: Head, tmp_path: Path, slurm: None) -> None:
    command = PlaceCommand(dispatcher=head.address, keys=head.agent_key, drain_s=5)
    log = tmp_path / "limited.log"
    options = SlurmOptions(service="test-limited", output=str(log), time_limit_s=120)
    limited = SlurmEngine(command, options)
    staying = SlurmEngine(command, SlurmOptions(service="test-staying"))
    limited.start(1)
    staying.start(1)
    try:
        read_while(head.service_file, {})
        wait_until(lambda: "left" in log.read_text(), "the limited task to leave", 150.0)
        wait_until(lambda: limited.names() == frozenset(), "Slurm to see that it ended")
    finally:
        limited.close()
        staying.close()
        wait_until(lambda: not staying._tasks(), "Slurm's tasks to end")


def test_what_slurm_refuses_is_said_in_its_words(head: Head, slurm: None) -> None:
    command = PlaceCommand(dispatcher=head.address, keys=head.agent_key)
    engine = SlurmEngine(command, SlurmOptions(service="test", extra=("--partition=nowhere",)))
    with pytest.raises(EngineError, match=r"sbatch failed.*nowhere"):
        engine.start(1)


def test_serve_on_slurm_brings_what_a_job_wants_and_leaves_nothing(tmp_path: Path, slurm: None) -> None:
    file, output = tmp_path / "service.json", tmp_path / "serve.log"
    words = [sys.executable, "-m", "penstock", "serve", "--on", "slurm", "--workers", "0-3", "--bind", "127.0.0.1"]
    words += ["--port", "0", "--service-file", str(file), "--drain-seconds", "10", "--keys", keys_of(tmp_path)]
    with output.open("wb") as log:
        serving = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_until(file.exists, "the service file")
        read_while(str(file), {})
        assert "more on slurm" in output.read_text()
    finally:
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(60) == 0
    wait_until(lambda: not listed(), "Slurm's tasks to end")


def keys_of(folder: Path) -> str:
    subprocess.run([sys.executable, "-m", "penstock", "keys", "make", str(folder / "keys")], check=True, timeout=60)
    return str(folder / "keys" / "server.json")


def listed() -> str:
    return subprocess.run(["squeue", "-h"], check=True, timeout=30, capture_output=True, text=True).stdout
