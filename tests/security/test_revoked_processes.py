"""What a revoked reader read from ends within two seconds, and its memory with it; what others read from goes on."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import pytest

import penstock as ps
from penstock.dispatcher.key_registry import KeyRecord, changed_keys
from penstock.processes.service_processes import ServiceOptions, ServiceProcesses
from penstock.wire.credentials import Credentials, ServiceFile
from tests.waiting import wait_until

REFUSED_WITHIN_S = 2.0
LIMITS = ps.Limits(timeout_s=60, memory_bytes=1 << 20)


def slowly(number: int) -> int:
    time.sleep(0.002)
    return number


def runners_of(processes: ServiceProcesses) -> set[int]:
    return {child.pid for child in processes.children() if "/" in child.id and child.pid}


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_key_that_is_revoked_while_its_trainer_reads_opens_neither_door_any_more(tmp_path: Path) -> None:
    registry = tmp_path / "registry.json"
    people = {name: Credentials.new("trainer", name) for name in ("alice", "bob")}
    with changed_keys(registry) as records:
        records += [
            KeyRecord(name=name, role="trainer", verifier=key.public, made=time.time()) for name, key in people.items()
        ]
    processes = ServiceProcesses(ServiceOptions(workers=2, registry=str(registry)))
    try:
        processes.wait_ready(60)
        for name, key in people.items():
            ServiceFile(address=processes.address, credentials=key).write(tmp_path / f"{name}.json")
        bobs = ps.range(4000).map(slowly).batch(10).distribute(tmp_path / "bob.json", job="bobs", limits=LIMITS)
        bob = iter(bobs)
        read = [*next(bob)]
        runners_of_bob = runners_of(processes)
        forever = ps.range(10**9).map(slowly).batch(10)
        with forever.distribute(tmp_path / "alice.json", job="alices", limits=LIMITS) as alices:
            alice = iter(alices)
            next(alice)
            runners_of_alice = runners_of(processes) - runners_of_bob
            assert runners_of_alice
            with changed_keys(registry) as records:
                records[0] = msgspec.structs.replace(records[0], revoked=time.time())
            revoked_at = time.monotonic()
            with pytest.raises(ps.PenstockError, match="revoked"):
                while time.monotonic() < revoked_at + 30:
                    next(alice)
            assert time.monotonic() - revoked_at < REFUSED_WITHIN_S
            wait_until(lambda: not any(map(is_alive, runners_of_alice)), "the end of what she read from")
            assert time.monotonic() - revoked_at < REFUSED_WITHIN_S
        with pytest.raises(PermissionError):
            list(ps.range(10).distribute(tmp_path / "alice.json", limits=ps.Limits(timeout_s=20)))
        for batch in bob:
            read += [*batch]
        assert sorted(read) == list(range(4000))
        assert all(map(is_alive, runners_of_bob)), "what others read from goes on"
        bobs.close()
    finally:
        processes.close()
