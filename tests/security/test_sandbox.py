"""Runners in a sandbox: what they gave up, and that they work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import penstock as ps
from penstock.core.errors import InvalidArgumentError
from penstock.processes.sandbox import Sandbox
from penstock.processes.service_processes import ServiceOptions, ServiceProcesses
from penstock.wire.addresses import Listening
from penstock.wire.credentials import ServiceKeys
from tests.security.another_user import NOBODY, as_another_user, needs_root

LIMITS = ps.Limits(timeout_s=60)


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def runner_of(processes: ServiceProcesses) -> int:
    (pid,) = [child.pid for child in processes.children() if "/" in child.id]
    return pid


def test_a_runner_in_the_sandbox_gains_no_privileges_and_leaves_no_core_dump(tmp_path: Path) -> None:
    processes = ServiceProcesses(ServiceOptions(workers=1, sandbox=Sandbox()))
    try:
        processes.service_file().write(tmp_path / "service.json")
        with ps.range(1000).batch(10).distribute(tmp_path / "service.json", limits=LIMITS) as loader:
            iterator = iter(loader)
            next(iterator)
            runner = runner_of(processes)
            assert status_of(runner)["NoNewPrivs"] == "1"
            assert status_of(processes.nursery_pid)["NoNewPrivs"] == "0"
            (core,) = [line for line in Path(f"/proc/{runner}/limits").read_text().splitlines() if "core" in line]
            assert core.split()[4:6] == ["0", "0"]
            assert len(list(iterator)) == 99
    finally:
        processes.close()


@needs_root
def test_who_enters_it_as_another_user_cannot_read_the_services_files(tmp_path: Path) -> None:
    file = tmp_path / "service.json"
    ServiceKeys.new().file("tcp://127.0.0.1:1", all_roles=False).write(file)

    def attack() -> tuple[int, int, str]:
        Sandbox(user="nobody").enter()
        try:
            file.read_bytes()
        except PermissionError as error:
            return os.getresuid()[0], os.geteuid(), type(error).__name__
        return os.getresuid()[0], os.geteuid(), "read"

    assert as_another_user(attack, user=0) == (NOBODY, NOBODY, "PermissionError")


@needs_root
def test_a_service_whose_runners_are_another_user_works_where_that_user_can_read_python(tmp_path: Path) -> None:
    sandbox = Sandbox(user="nobody")
    try:
        sandbox.check(Listening())
    except InvalidArgumentError as error:
        pytest.skip(str(error))
    processes = ServiceProcesses(ServiceOptions(workers=1, listening=Listening(), sandbox=sandbox))
    try:
        processes.service_file().write(tmp_path / "service.json")
        with ps.range(20).map(lambda _: os.geteuid()).distribute(tmp_path / "service.json", limits=LIMITS) as loader:
            assert set(loader) == {NOBODY}
    finally:
        processes.close()


@needs_root
def test_what_is_not_possible_is_said_at_start() -> None:
    assert "can read what this user can" in Sandbox().check(Listening())
    with pytest.raises(InvalidArgumentError, match="by TCP"):
        Sandbox(user="nobody").check(Listening(folder="/tmp/x"))
    with pytest.raises(InvalidArgumentError, match="no user of this host"):
        Sandbox(user="no such user").check(Listening())
