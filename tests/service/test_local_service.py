"""A service of this process's own: what it refuses, and what it says once it is closed."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

import penstock as ps
from penstock.core.errors import InvalidArgumentError, ServiceClosedError
from tests.waiting import wait_until


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": "x"}, "workers='x' must be a whole number, (least, most) or 'auto'"),
        ({"workers": 1.5}, "workers=1.5 must be a whole number"),
        ({"workers": True}, "workers=True must be a whole number"),
        ({"workers": -1}, "workers=-1 must be a whole number of at least 0"),
        ({"workers": 10**9}, "workers=1000000000 must be at most 1024"),
        ({"workers": (1, 10**9)}, "workers=1000000000 must be at most 1024"),
        ({"inline": "x"}, "inline='x' must be a whole number"),
        ({"threads": "x"}, "threads='x' must be a whole number of at least 1"),
        ({"memory_bytes": "1G"}, "memory_bytes='1G' must be a whole number"),
        ({"memory_bytes": 300}, "memory_bytes=300 must be at least 1 MiB"),
        ({"tags": 5}, "tags=5 must be names"),
        ({"tags": ["gpu", ""]}, "must be names"),
        ({"tags": "a,b"}, "must be names"),
        ({"journal": 5}, "journal=5 must be a folder"),
    ],
    ids=str,
)
def test_arguments_that_mean_nothing_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        ps.LocalService(**arguments)
    assert message in str(caught.value)


def test_a_closed_service_says_so_wherever_it_is_used() -> None:
    service = ps.LocalService(workers=1)
    before = ps.range(10).distribute(service)
    service.close()
    began = time.monotonic()
    with pytest.raises(ServiceClosedError, match="closed; make a new one"):
        ps.range(10).distribute(service)
    with pytest.raises(ServiceClosedError):
        list(before)
    with pytest.raises(ServiceClosedError):
        before.job_figures()
    assert time.monotonic() - began < 5
    before.close()
    with pytest.raises(InvalidArgumentError, match="this loader is closed"):
        before.job_figures()


def test_as_many_processes_as_no_host_has_are_refused_before_one_is_started() -> None:
    with pytest.raises(
        InvalidArgumentError, match="to=1000000000 must be at most 1024: each is a process of this host"
    ):
        ps.range(10).distribute(10**9)


def test_a_service_that_is_closed_ends_the_readers_that_wait_for_it() -> None:
    def slow(x: int) -> int:
        time.sleep(0.05)
        return x

    before = set(threading.enumerate())
    service = ps.LocalService(workers=1)
    with ps.range(100_000).map(slow).distribute(service) as loader:
        iterator = iter(loader)
        next(iterator)
        closing = threading.Timer(0.2, service.close)
        closing.start()
        with pytest.raises(ServiceClosedError):
            for _ in iterator:
                pass
        closing.join()
        with pytest.raises(ServiceClosedError):
            next(iter(loader))
    new = [thread for thread in threading.enumerate() if thread not in before]
    wait_until(lambda: not any(thread.is_alive() for thread in new), "the end of its threads")


def test_a_service_lives_as_long_as_the_loaders_that_read_it() -> None:
    with ps.range(10).distribute(ps.LocalService(workers=1), limits=ps.Limits(timeout_s=30)) as loader:
        assert sorted(loader) == list(range(10))


def test_an_address_without_a_service_is_said_before_the_missing_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_KEYS", raising=False)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(InvalidArgumentError, match=f"no service runs at {address}.*penstock serve"):
            ps.range(4).distribute(address)
        nobody.listen()
        with pytest.raises(InvalidArgumentError, match=r"PENSTOCK_KEYS"):
            ps.range(4).distribute(address)
