"""A loader has one iterator at a time: an older one that is read on with says so, wherever the work runs."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

import penstock as ps
from penstock.core.errors import SupersededError
from tests.client.conftest import WAIT_S

N = 2_000
Make = Callable[[ps.LocalService], ps.Loader]
LIMITS = ps.Limits(timeout_s=WAIT_S)
MAKERS: dict[str, Make] = {
    "here": lambda service: ps.range(N).distribute(),
    "by a sampler here": lambda service: ps.range(N).distribute(feed=range(N)),
    "a service": lambda service: ps.range(N).distribute(service, limits=LIMITS),
    "a service and operators": lambda service: ps.range(N).distribute(service, limits=LIMITS).map(lambda x: x),
    "by a sampler elsewhere": lambda service: ps.range(N).distribute(service, feed=range(N), limits=LIMITS),
    "offloaded": lambda service: ps.offload(
        ps.range(N).map(lambda x: x).batch(1).map(lambda x: x), service, offloading=ps.Offloading(window_s=0.01)
    ),
}
everywhere = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@everywhere
def test_an_older_iterator_says_that_there_is_a_newer_one(service: ps.LocalService, make: Make) -> None:
    with make(service) as loader:
        older = iter(loader)
        next(older)
        newer = iter(loader)
        for _ in range(2):
            with pytest.raises(SupersededError, match=r"a newer iterator of this loader.*Make a loader for each"):
                next(older)
        assert len(list(newer)) == N
        assert next(newer, None) is None
        assert loader.state_dict()["phase"] == "ended"


@everywhere
def test_a_loader_read_side_by_side_with_itself_is_refused(service: ps.LocalService, make: Make) -> None:
    with make(service) as loader, pytest.raises(SupersededError):
        list(zip(loader, loader))


@everywhere
def test_an_older_iterator_that_had_ended_is_at_its_end(service: ps.LocalService, make: Make) -> None:
    with make(service) as loader:
        older = iter(loader)
        assert len(list(older)) == N
        newer = iter(loader)
        assert next(older, None) is None
        assert len(list(newer)) == N


@everywhere
def test_loops_that_are_left_and_begun_again_and_closed_loaders_are_as_ever(
    service: ps.LocalService, make: Make
) -> None:
    with make(service) as loader:
        for _ in range(2):
            for _ in loader:
                break
        reading = iter(loader)
        next(reading)
    for _ in reading:
        pass  # what was pulled already may still come, and then the end


@pytest.mark.parametrize("threads", [1, 2])
def test_a_thread_that_waits_in_an_older_iterator_is_told(service: ps.LocalService, threads: int) -> None:
    begun, told, go_on = threading.Event(), [], threading.Event()

    def slow(x: int) -> int:
        if x == 1 and not go_on.is_set():
            begun.set()
            go_on.wait(WAIT_S)
        return x

    def read(older: object) -> None:
        try:
            list(older)  # type: ignore[call-overload]
        except SupersededError as error:
            told.append(error)

    loader = ps.range(10).map(slow, threads=threads).distribute()
    thread = threading.Thread(target=read, args=(iter(loader),))
    thread.start()
    assert begun.wait(WAIT_S)
    newer = iter(loader)
    go_on.set()
    thread.join(WAIT_S)
    assert len(told) == 1, "it took the newer one for its end"
    assert list(newer) == list(range(10))
