"""Local services as real processes: they start, what dies comes back, and nothing is left."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from tests.waiting import wait_gone, wait_until

import penstock as ps
from penstock.core.errors import CannotListenError, InvalidArgumentError, ServiceClosedError
from penstock.processes.service_folder import ServiceFolder
from penstock.processes.service_processes import ServiceOptions, ServiceProcesses, free_port
from penstock.wire.addresses import Listening
from penstock.wire.credentials import find_service

DEADLINE_S = 90.0


@pytest.fixture(scope="module")
def service():
    with ps.LocalService(workers=2) as made:
        made.wait_ready(DEADLINE_S)
        yield made


def test_a_service_has_its_workers(service):
    lines = wait_until(lambda: len(service.workers()) == 2 and service.workers(), "two workers")
    assert len({line.worker for line in lines}) == 2
    assert len(service.pids()) == 3  # nursery, dispatcher, agent: no job, no runner
    assert service.worker_pids() == {}
    assert service.jobs() == []


def test_the_service_file_names_it_to_others_of_this_user(service):
    assert stat.S_IMODE(service.service_file.stat().st_mode) == 0o600
    found = find_service(str(service.service_file))
    assert found.address == service.address
    assert found.credentials == service.credentials and found.credentials.role == "trainer"
    assert find_service(str(service.service_file), "operator").credentials.role == "operator"
    assert service.credentials.secret not in repr(service.credentials)


def test_workers_are_added_and_removed(service):
    added = service.add_worker(tags=("fast",))
    line = wait_until(
        lambda: next((line for line in service.workers() if line.worker == added), None), "the added worker"
    )
    assert line.tags == ("fast",)
    assert service.remove_worker() == added
    wait_until(lambda: added not in {line.worker for line in service.workers()}, "the removed worker's end")
    with pytest.raises(InvalidArgumentError, match="is not one of"):
        service.remove_worker("nobody")


def test_a_killed_dispatcher_comes_back_at_its_address(service):
    first = service.dispatcher_pid
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: service.dispatcher_pid != first, "another dispatcher")
    wait_until(lambda: len(service.workers()) == 2, "its workers")


def test_a_killed_agent_comes_back_with_its_workers(service):
    before = {line.worker for line in service.workers()}
    added = service.add_worker()
    wait_until(lambda: added in {line.worker for line in service.workers()}, "the added worker")
    agent = next(child.pid for child in service._processes.children() if child.id == "agent")
    os.kill(agent, signal.SIGKILL)
    wait_gone(agent)
    wait_until(
        lambda: {line.worker for line in service.workers() if line.status != "lost"} == before | {added},
        "the same workers",
    )
    service.remove_worker(added)


def test_a_trainer_reads_on_when_everything_was_killed(caplog):
    with ps.LocalService(workers=2) as service:
        before = service.address
        loader = ps.range(60_000).batch(100).distribute(service, limits=ps.Limits(timeout_s=DEADLINE_S))
        seen = []
        for step, batch in enumerate(loader):
            seen.extend(batch.tolist())
            if step in (50, 200):
                # Nursery, dispatcher, agent and two runners; what was read ahead may have lasted until they are back.
                wait_until(lambda: len(service.pids()) == 5, "all processes")
                pids = service.pids()
                os.kill(service._processes.nursery_pid, signal.SIGKILL)
                wait_gone(*pids)
        assert sorted(seen) == list(range(60_000))
        assert service.address == before
        assert len(wait_until(service.workers, "its workers")) == 2
    assert "(killed by SIGKILL); they are started again" in caplog.text


def test_a_loaders_own_processes_are_started_again():
    with ps.range(20_000).batch(10).distribute(1, limits=ps.Limits(timeout_s=DEADLINE_S)) as loader:
        close = loader._sources[0].backend._finalizer.peek()[2][3]
        kept = (cell.cell_contents for cell in close.__closure__)
        own = next(each for each in kept if isinstance(each, ServiceProcesses))
        seen = []
        for step, batch in enumerate(loader):
            seen.extend(batch.tolist())
            if step == 100:
                os.kill(own.nursery_pid, signal.SIGKILL)
        assert sorted(seen) == list(range(20_000))
        pids = [own.nursery_pid, *(child.pid for child in own.children() if child.pid)]
    wait_gone(*pids)


def test_a_service_that_is_closed_while_it_is_started_again_leaves_nothing():
    service = ps.LocalService(workers=1)
    service.wait_ready(DEADLINE_S)
    pids, folder = service.pids(), service._processes.scratch
    os.kill(pids[0], signal.SIGKILL)
    service.close()
    wait_gone(*pids, service._processes.nursery_pid)
    assert not folder.exists()


def test_workers_that_were_added_come_back_too():
    with ps.LocalService(workers=1) as service:
        service.wait_ready(DEADLINE_S)
        os.kill(service._processes.nursery_pid, signal.SIGKILL)
        added = service.add_worker(tags=("fast",))  # told to a dead nursery, or to the next one
        wait_until(
            lambda: added in {line.worker for line in service.workers() if line.status != "lost"}, "the added worker"
        )


@pytest.mark.alone
def test_nothing_is_left_after_close():
    service = ps.LocalService(workers=1)
    service.wait_ready(DEADLINE_S)
    pids, folder = service.pids(), service.service_file.parent
    before = time.monotonic()
    service.close()
    assert time.monotonic() - before < 4  # two seconds are promised, on a machine that is not busy
    wait_gone(*pids)
    assert not folder.exists()
    service.close()
    with pytest.raises(ServiceClosedError):
        service.pids()
    assert "closed" in repr(service)


def test_closing_before_anything_has_started_leaves_nothing():
    service = ps.LocalService(workers=1)
    nursery, folder = service._processes.nursery_pid, service._processes.scratch
    service.close()
    wait_gone(nursery)
    assert not folder.exists()


def test_a_forgotten_service_is_closed():
    before = set(threading.enumerate())
    service = ps.LocalService(workers=0)
    assert service.jobs() == []
    its_own = set(threading.enumerate()) - before
    assert its_own
    pids, folder = service.pids(), service._processes.scratch
    del service
    gc.collect()
    wait_gone(*pids)
    assert not folder.exists()
    assert not its_own & set(threading.enumerate())


@pytest.mark.parametrize("end", ["pass", "os.kill(os.getpid(), 9)", "raise SystemExit(3)", "os._exit(0)"])
def test_nothing_is_left_when_the_process_ends(end):
    code = (
        "import os, penstock as ps\n"
        "service = ps.LocalService(workers=1)\n"
        "service.wait_ready(60)\n"
        "print(service._processes.scratch, *service.pids(), flush=True)\n"
        f"{end}\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    folder, *pids = ran.stdout.split()
    assert len(pids) == 3, ran.stderr
    wait_gone(*map(int, pids))
    wait_until(lambda: not Path(folder).exists(), "the folder's removal")


def test_a_fork_of_the_trainer_does_not_end_its_service():
    code = (
        "import os, sys, penstock as ps\n"
        "service = ps.LocalService(workers=1)\n"
        "service.wait_ready(60)\n"
        "if os.fork() == 0:\n"
        "    sys.exit(0)\n"  # runs what is to be done at exit
        "if os.fork() == 0:\n"
        "    service.close()\n"
        "    os._exit(0)\n"
        "os.wait(), os.wait()\n"
        "print(len(service.workers()), service._processes.scratch.exists())\n"
        "os.kill(service._processes.nursery_pid, 9)\n"  # it is still watched
        "print(len(list(ps.range(10).distribute(service, limits=ps.Limits(timeout_s=30)))))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.stdout.split() == ["1", "True", "10"], ran.stderr


def test_a_port_that_is_taken_is_not_chosen():
    with free_port("127.0.0.1") as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CannotListenError, match="in ports"):
            free_port("127.0.0.1", (port, port))


def test_a_service_that_is_reached_by_tcp_is_encrypted_and_read_as_any_other(tmp_path):
    processes = ServiceProcesses(ServiceOptions(workers=1, listening=Listening(bind="0.0.0.0", advertise="127.0.0.1")))
    try:
        processes.wait_ready(DEADLINE_S)
        assert processes.control() is processes.control()
        assert not processes.service_file().others, "whoever reads elsewhere need not do more"
        processes.service_file().write(tmp_path / "service.json")
        with ps.range(10).distribute(tmp_path / "service.json", limits=ps.Limits(timeout_s=30)) as loader:
            assert sorted(loader) == list(range(10))
    finally:
        processes.close()


def test_what_killed_services_left_is_swept(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", f"/tmp/ps{os.getpid()}")
    os.mkdir(os.environ["TMPDIR"])
    try:
        code = (
            "import os\nfrom penstock.processes.service_folder import ServiceFolder\n"
            "print(ServiceFolder().path, flush=True)\nos.kill(os.getpid(), 9)"
        )
        left = Path(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip())
        assert left.exists() and left.stat().st_mode & 0o777 == 0o700
        alive = ServiceFolder()
        another = ServiceFolder()
        assert alive.path.exists() and another.path.exists() and not left.exists()
        with pytest.raises(CannotListenError, match="runs already"):
            (ServiceFolder("journal"), ServiceFolder("journal"))
        alive.path.parent.chmod(0o755)
        assert str(ServiceFolder().path.parent) == f"/tmp/penstock-{os.geteuid()}", "others could enter the first"
    finally:
        shutil.rmtree(os.environ["TMPDIR"])


def test_a_service_that_cannot_start_says_why(tmp_path):
    (tmp_path / "journal").write_text("not a folder")
    said = "the service did not start: the dispatcher exited with code 1"
    with (
        ps.LocalService(workers=1, journal=tmp_path / "journal") as service,
        pytest.raises(ps.PenstockError, match=said),
    ):
        service.wait_ready(DEADLINE_S)


@pytest.mark.alone
def test_starting_returns_at_once():
    before = time.monotonic()
    with ps.LocalService(workers=2) as service:
        assert time.monotonic() - before < 1
        service.wait_ready(DEADLINE_S)
