"""Job code: what it can see of the service it runs in, and what it can do to the terminal of who reads."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock as ps
from penstock.wire.credentials import ServiceKeys
from tests.waiting import wait_until


def holds(pid: int, secret: str) -> bool:
    """Whether a secret is anywhere in the memory of a process."""
    needle = secret.encode()
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in maps:
            region = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw-p", line)
            if region is None or "/dev/" in line:
                continue
            begin, end = (int(each, 16) for each in region.groups())
            try:
                memory.seek(begin)
                if needle in memory.read(end - begin):
                    return True
            except OSError:
                continue
    return False


def test_a_runner_holds_no_key_but_its_own() -> None:
    with ps.LocalService(workers=1) as service:
        loader = ps.range(1_000_000).map(lambda x: x + 1).batch(10).distribute(service, limits=ps.Limits(timeout_s=60))
        iterator = iter(loader)
        next(iterator)
        keys: ServiceKeys = service._processes.keys
        (runner,) = service.worker_pids().values()
        nursery, dispatcher = service.pids()[0], service.dispatcher_pid
        agent = next(pid for pid in service.pids() if pid not in (runner, nursery, dispatcher))
        assert holds(agent, keys.agent.secret), "what is looked for is found where it is"
        for secret in (keys.server.secret, keys.agent.secret, keys.operator.secret, keys.trainer.secret):
            assert not holds(runner, secret)
            assert not holds(nursery, secret)
        loader.close()


LOOK_INTO = """
import os
import penstock as ps
with ps.LocalService(workers=1) as service:
    with ps.range(100_000).batch(10).distribute(service, limits=ps.Limits(timeout_s=60)) as loader:
        iterator = iter(loader)
        next(iterator)
        runners = set(service.worker_pids().values())
        for pid in service.pids():
            try:
                open(f"/proc/{pid}/mem", "rb").close()
                found = "open"
            except PermissionError:
                found = "closed"
            print("runner" if pid in runners else "service", found)
"""


def test_processes_of_the_same_user_do_not_look_into_agent_nursery_and_dispatcher(tmp_path: Path) -> None:
    # Root without the capability to trace others is as any user is to its own processes.
    command = [sys.executable, "-c", LOOK_INTO]
    without = ["setpriv", "--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace", "--"]
    if subprocess.run([*without, "true"], capture_output=True).returncode == 0:
        command = [*without, *command]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100)
    lines = ran.stdout.splitlines()
    assert sorted(lines) == ["runner open"] + ["service closed"] * 3, ran.stderr


def test_what_a_worker_prints_reaches_the_terminal_without_escape_sequences(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def hostile(number: int) -> int:
        if number == 0:
            print("\x1b]0;another title\x07\x1b[2J\x1b[31mred\x1b[0m \x9b5mblinking\x08\x07 the end", flush=True)
        return number

    said = ""

    def heard() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return "the end" in said

    with ps.LocalService(workers=1) as service:
        loader = ps.range(10_000).map(hostile).batch(1).distribute(service, limits=ps.Limits(timeout_s=60))
        iterator = iter(loader)
        wait_until(lambda: next(iterator) is not None and heard(), "what was printed")
        loader.close()
    (line,) = [line for line in said.splitlines() if "the end" in line]
    assert line.endswith("] red blinking the end") and line.isprintable(), repr(line)
