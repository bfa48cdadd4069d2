"""A stranger at the doors of a service that works: `make strangers` is the same with more of everything."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock as ps
from penstock.dispatcher.main import DispatcherConfig
from penstock.wire.addresses import Listening
from penstock.wire.framing import LISTENER_FRAME_BYTES
from tests.dispatcher.serving import KNOWN, ended, started
from tests.keys import SERVER
from tests.security.listeners import listening_addresses
from tests.security.strangers import connections, frame, resident_mb
from tests.waiting import wait_until

MOST_GROWTH_MB = 64
CONNECTIONS = 2_000
ATTACK_S = 3.0


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < CONNECTIONS + 500:
        pytest.skip(f"this user may open {hard} files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, CONNECTIONS + 500), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_two_thousand_strangers_that_send_as_much_as_they_may_cost_64_mb(
    many_descriptors: None, tmp_path: Path, way: str
) -> None:
    tmp_path.chmod(0o700)
    listening = Listening(folder=str(tmp_path)) if way == "unix" else Listening()
    process, address = started(DispatcherConfig(server=SERVER, known=KNOWN, listening=listening))
    try:
        before_mb = resident_mb(process.pid)
        with connections(address, CONNECTIONS) as peers:
            for peer in peers:
                peer.sendall(frame(LISTENER_FRAME_BYTES) + bytes(LISTENER_FRAME_BYTES - 200))
            time.sleep(0.2)  # what is measured is what it holds, and that only grows meanwhile
            assert resident_mb(process.pid) - before_mb <= MOST_GROWTH_MB
    finally:
        os.kill(process.pid, signal.SIGTERM)
        ended(process)


def attack(address: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.security.attack", address, "300", str(ATTACK_S)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def test_a_job_beside_strangers_at_both_its_doors_loses_nothing() -> None:
    with (
        ps.LocalService(workers=1) as service,
        ps.range(60_000).map(abs).batch(100).distribute(service, job="undisturbed") as loader,
    ):
        epoch = iter(loader)
        first = next(epoch)
        runner = wait_until(lambda: list(service.worker_pids().values()), "a process that serves")[0]
        attacked = {service.dispatcher_pid: service.address, runner: listening_addresses(runner)[0]}
        before_mb = {pid: resident_mb(pid) for pid in attacked}
        attackers = [attack(address) for address in attacked.values()]
        read = [int(value) for value in first]
        grown_mb: dict[int, float] = {}
        for batch in epoch:
            read += [int(value) for value in batch]
            if any(attacker.poll() is None for attacker in attackers) and len(read) > 50_000:
                time.sleep(0.05)  # there shall be something left to read until they are through
            for pid in attacked:
                grown_mb[pid] = max(grown_mb.get(pid, 0.0), resident_mb(pid) - before_mb[pid])
        assert sorted(read) == list(range(60_000))
        for attacker in attackers:
            told = json.loads(attacker.communicate(timeout=60)[0])
            assert told["made"] > 300, told
        assert max(grown_mb.values()) <= MOST_GROWTH_MB, grown_mb
        assert list(service.worker_pids().values()) == [runner]
