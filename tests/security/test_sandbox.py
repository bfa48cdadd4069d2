"""Runners in a sandbox: what they gave up, as their job's code finds out, and that they work."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.core.errors import InvalidArgumentError
from penstock.processes import landlock
from penstock.processes.sandbox import Sandbox
from penstock.processes.service_processes import ServiceOptions, ServiceProcesses
from penstock.wire.addresses import Listening
from penstock.wire.credentials import ServiceKeys
from tests.security.another_user import NOBODY, as_another_user, needs_root
from tests.security.readable_python import readable_python
from tests.waiting import wait_until

LIMITS = ps.Limits(timeout_s=60)
needs_landlock = pytest.mark.skipif(not landlock.version(), reason="this kernel has no Landlock")


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def runner_of(processes: ServiceProcesses) -> int:
    (pid,) = [child.pid for child in processes.children() if "/" in child.id]
    return pid


@contextmanager
def serving(folder: Path, sandbox: Sandbox, **options: Any) -> Iterator[tuple[ServiceProcesses, Path]]:
    """A service of one worker whose runners are in a sandbox, and its service file."""
    sandbox.check(options.get("listening") or Listening(folder="of its own"))
    processes = ServiceProcesses(ServiceOptions(workers=1, sandbox=sandbox, **options))
    try:
        processes.service_file().write(folder / "service.json")
        yield processes, folder / "service.json"
    finally:
        processes.close()


def found_by(service_file: Path, attempt: Callable[[int], str]) -> str:
    """Return what a job's function finds that runs in a worker."""
    with ps.range(1).map(attempt).distribute(service_file, limits=LIMITS) as loader:
        (found,) = loader
    return str(found)


def tried(act: Callable[..., object], *arguments: object) -> str:
    try:
        return f"done: {act(*arguments)}"
    except OSError as error:
        return type(error).__name__


def test_a_runner_in_the_sandbox_gains_no_privileges_and_leaves_no_core_dump(tmp_path: Path) -> None:
    with (
        serving(tmp_path, Sandbox()) as (processes, file),
        ps.range(1000).batch(10).distribute(file, limits=LIMITS) as loader,
    ):
        iterator = iter(loader)
        next(iterator)
        runner = runner_of(processes)
        assert status_of(runner)["NoNewPrivs"] == "1"
        assert int(status_of(runner)["CapEff"], 16) == int(status_of(runner)["CapPrm"], 16) == 0
        assert status_of(processes.nursery_pid)["NoNewPrivs"] == "0"
        (core,) = [line for line in Path(f"/proc/{runner}/limits").read_text().splitlines() if "core" in line]
        assert core.split()[4:6] == ["0", "0"]
        assert len(list(iterator)) == 99


@needs_landlock
def test_in_the_sandbox_a_jobs_code_reads_no_other_process_and_sends_it_no_signal(tmp_path: Path) -> None:
    trainer = os.getpid()

    def attempt(_: int) -> str:
        read = [tried(Path(f"/proc/{trainer}/{name}").read_bytes) for name in ("environ", "maps", "mem")]
        return ", ".join([*read, tried(os.kill, trainer, 0)])

    with serving(tmp_path, Sandbox()) as (_, file):
        signals = "PermissionError" if landlock.version() >= landlock.SCOPES_SINCE else "done: None"
        assert found_by(file, attempt) == f"PermissionError, PermissionError, PermissionError, {signals}"


@needs_landlock
def test_a_jobs_code_writes_where_the_operator_says_and_nowhere_else(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "old").write_text("old")

    def attempt(_: int) -> str:
        acts: dict[str, Callable[[Path], object]] = {
            "make": lambda folder: (folder / "new").write_text("new"),
            "change": lambda folder: (folder / "old").write_text("changed"),
            "remove": lambda folder: (folder / "old").unlink(),
            "folder": lambda folder: (folder / "more").mkdir(),
        }
        results = [
            f"{name} {tried(act, folder).partition(':')[0]}"
            for folder in (inside, outside)
            for name, act in acts.items()
        ]
        return ", ".join([*results, tried((outside / "old").read_text)])

    with serving(tmp_path, Sandbox(write=(str(inside),))) as (_, file):
        allowed = ", ".join(f"{name} done" for name in ("make", "change", "remove", "folder"))
        assert found_by(file, attempt) == f"{allowed}, {allowed.replace('done', 'PermissionError')}, done: old"
    assert sorted(os.listdir(inside)) == ["more", "new"] and os.listdir(outside) == ["old"]


@needs_landlock
def test_a_jobs_code_that_may_write_nothing_leaves_the_dispatchers_socket_alone(tmp_path: Path) -> None:
    with serving(tmp_path, Sandbox(write=())) as (processes, file):
        socket = processes.address.removeprefix("ipc://")
        assert found_by(file, lambda _: tried(os.unlink, socket)) == "PermissionError"
        assert os.path.exists(socket)


@needs_landlock
def test_a_jobs_code_reads_where_the_operator_says_and_not_the_services_keys(tmp_path: Path) -> None:
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for folder in (data, elsewhere):
        folder.mkdir()
        (folder / "file.txt").write_text("a\nb\n")

    def attempt(_: int) -> str:
        import decimal  # what Python has is read all the same

        read = [tried(path.read_text) for path in (data / "file.txt", elsewhere / "file.txt", file)]
        return ", ".join([*read, decimal.__name__])

    with serving(tmp_path, Sandbox(read=(str(data),), write=())) as (_, file):
        assert found_by(file, attempt) == "done: a\nb\n, PermissionError, PermissionError, decimal"
        with ps.read_text(str(data / "*.txt")).distribute(file, limits=LIMITS) as loader:
            assert list(loader) == ["a", "b"]


def test_a_jobs_code_has_no_more_memory_than_it_may(tmp_path: Path) -> None:
    def much(_: int) -> str:
        return tried_memory(1 << 31)

    with serving(tmp_path, Sandbox(memory_bytes=1 << 30)) as (_, file):
        assert found_by(file, much) == "MemoryError"


def tried_memory(nbytes: int) -> str:
    try:
        return f"{len(bytearray(nbytes))} bytes"
    except MemoryError:
        return "MemoryError"


@needs_root
def test_who_enters_it_as_another_user_cannot_read_the_services_files(tmp_path: Path) -> None:
    file = tmp_path / "service.json"
    ServiceKeys.new().file("tcp://127.0.0.1:1", all_roles=False).write(file)

    def attack() -> tuple[int, int, str]:
        Sandbox(user="nobody").enter(Listening())
        return os.getresuid()[0], os.geteuid(), tried(file.read_bytes)

    assert as_another_user(attack, user=0) == (NOBODY, NOBODY, "PermissionError")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can enter: those of pytest are its user's alone."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-open-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@needs_root
def test_runners_are_another_user_from_the_command_line_to_the_batch(open_folder: Path, tmp_path: Path) -> None:
    """The whole way: keys, `penstock serve --sandbox nobody`, a job, what its code can do, and how it all ends."""
    python, environment = readable_python(open_folder, "nobody")
    penstock = [python, "-P", "-m", "penstock"]
    subprocess.run(
        [*penstock, "keys", "make", str(tmp_path / "keys")], check=True, env=environment, capture_output=True
    )
    file, keys = tmp_path / "service.json", tmp_path / "keys" / "server.json"
    setuid = open_folder / "id"
    shutil.copy("/usr/bin/id", setuid)
    setuid.chmod(0o4755)
    given = ["--bind", "127.0.0.1", "--keys", str(keys), "--service-file", str(file), "--sandbox", "nobody"]
    with subprocess.Popen(
        [*penstock, "serve", "--workers", "1", *given], env=environment, stdout=subprocess.PIPE, text=True
    ) as serve:
        try:
            assert serve.stdout is not None
            said = serve.stdout.readline()
            assert said.startswith("sandbox:") and "they run as 'nobody'" in said, said
            wait_until(file.exists, "the service file")

            def attempt(_: int) -> str:
                user = subprocess.run([str(setuid), "-u"], capture_output=True, text=True).stdout.strip()
                return ", ".join(
                    [
                        f"{os.getresuid()} {os.getresgid()} {os.getgroups()} {os.environ['USER']}",
                        tried(os.setuid, 0),
                        tried(file.read_bytes),
                        tried(keys.read_bytes),
                        f"a set-user-id program runs as {user}",
                    ]
                )

            with ps.range(1000).batch(10).distribute(file, limits=LIMITS) as loader:
                iterator = iter(loader)
                next(iterator)
                runner = process_of("nobody", serve.pid)
                assert len(list(iterator)) == 99
            group = status_of(runner)["Gid"].split()[0]
            ids = f"{(NOBODY,) * 3} {(int(group),) * 3} [{group}] nobody"
            assert found_by(file, attempt) == (
                f"{ids}, PermissionError, PermissionError, PermissionError, a set-user-id program runs as {NOBODY}"
            )
            with ps.range(1 << 40).distribute(file, limits=LIMITS) as loader:
                next(iter(loader))
                runner = process_of("nobody", serve.pid)
                os.kill(int(status_of(runner)["PPid"]), signal.SIGKILL)
                wait_until(lambda: not Path(f"/proc/{runner}").exists(), "the end of a runner whose nursery was killed")
        finally:
            serve.terminate()


def process_of(user: str, above: int) -> int:
    """Return the process of that user among the descendants of another."""

    def beneath(pid: int) -> Iterator[int]:
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return
        for child in map(int, children):
            yield child
            yield from beneath(child)

    def found() -> list[int]:
        return [pid for pid in beneath(above) if Path(f"/proc/{pid}").owner() == user]

    return wait_until(found, f"a process of {user}")[-1]


@needs_root
def test_what_is_not_possible_is_said_at_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "can read what this user can" in Sandbox().check(Listening())
    with pytest.raises(InvalidArgumentError, match="by TCP"):
        Sandbox(user="nobody").check(Listening(folder="/tmp/x"))
    with pytest.raises(InvalidArgumentError, match="no user of this host"):
        Sandbox(user="no such user").check(Listening())
    with pytest.raises(InvalidArgumentError, match="is not there; make it"):
        Sandbox(write=(str(tmp_path / "nowhere"),)).check(Listening())
    monkeypatch.setattr(landlock, "version", lambda: 5)
    assert "this kernel lets them signal those" in Sandbox().check(Listening())
    monkeypatch.setattr(landlock, "version", lambda: 0)
    assert "they can trace and signal other processes of their user" in Sandbox().check(Listening())
    with pytest.raises(InvalidArgumentError, match="this kernel has no Landlock"):
        Sandbox(write=()).check(Listening())


@needs_root
def test_a_python_that_the_other_user_cannot_read_is_named_with_the_folder_that_is_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    (closed / "hidden_module.py").write_text("")
    monkeypatch.syspath_prepend(str(closed))
    monkeypatch.setattr("penstock.processes.sandbox.IMPORTED", ("hidden_module",))
    with pytest.raises(InvalidArgumentError, match=r"hidden_module.py \(.* is closed to it\)"):
        Sandbox(user="nobody").check(Listening())
