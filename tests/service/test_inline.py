"""A worker that lives in the trainer's process."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest

import penstock as ps
from tests.waiting import wait_until

from .checks import assert_exactly_once, kill

DEADLINE_S = 45.0


def where(number: int) -> dict[str, int]:
    return {"id": number, "pid": os.getpid()}


def read(loader: ps.Loader) -> tuple[list[np.ndarray], set[int]]:
    batches = list(loader)
    return [batch["id"] for batch in batches], {pid for batch in batches for pid in batch["pid"].tolist()}


def test_a_job_runs_in_this_process() -> None:
    before = set(threading.enumerate())
    with ps.LocalService(workers=0, inline=1) as service:
        with ps.range(2000).map(where).batch(50).distribute(service, limits=ps.Limits(timeout_s=DEADLINE_S)) as loader:
            for _ in range(2):
                ids, pids = read(loader)
                assert_exactly_once(ids, range(2000))
                assert pids == {os.getpid()}
        assert len(service.workers()) == 1
        assert len(service.pids()) == 3  # nursery, dispatcher, and an agent with no worker: nobody else runs functions
    wait_until(lambda: not set(threading.enumerate()) - before, "the end of its threads", 10.0)


def test_large_batches_come_out_of_this_process_as_they_went_in() -> None:
    with ps.LocalService(workers=0, inline=1) as service:
        dataset = ps.range(40).map(lambda i: np.full(100_000, i, np.float32)).batch(4)
        held = list(
            dataset.distribute(
                service, order="deterministic", sharding=ps.Sharding(streams=2), limits=ps.Limits(timeout_s=DEADLINE_S)
            )
        )
    assert sorted(set(np.concatenate([batch.ravel() for batch in held]).tolist())) == list(range(40))
    assert all((batch == batch[:, :1]).all() for batch in held)


def test_it_works_beside_processes_and_goes_on_when_they_die() -> None:
    def slow(number: int) -> dict[str, int]:
        time.sleep(0.002)
        return where(number)

    with ps.LocalService(workers=1, inline=1) as service:
        loader = ps.range(1000).map(slow).batch(10).distribute(service, limits=ps.Limits(timeout_s=DEADLINE_S))
        pids: set[int] = set()
        killed: list[int] = []
        deadline_s = time.monotonic() + DEADLINE_S
        while not killed:  # on a busy machine the first epoch may be over before the process has begun
            assert time.monotonic() < deadline_s, "the worker's process gave nothing"
            ids = []
            for batch in loader:
                ids.append(batch["id"])
                pids.update(batch["pid"].tolist())
                if len(pids) > 1 and not killed:
                    killed = list(service.worker_pids().values())
                    for pid in killed:
                        kill(pid)
            assert_exactly_once(ids, range(1000))
        assert {os.getpid(), *killed} <= pids


def test_a_state_is_resumed_on_processes() -> None:
    dataset = ps.range(1000).map(where).batch(10)
    with ps.LocalService(workers=0, inline=1) as service:
        loader = dataset.distribute(service, limits=ps.Limits(timeout_s=DEADLINE_S))
        reader = iter(loader)
        ids = [next(reader)["id"] for _ in range(30)]
        state = loader.state_dict()
    with ps.LocalService(workers=1) as service:
        loader = dataset.distribute(service, limits=ps.Limits(timeout_s=DEADLINE_S))
        loader.load_state_dict(state)
        rest, pids = read(loader)
        assert_exactly_once([*ids, *rest], range(1000))
        assert os.getpid() not in pids


def test_an_error_of_a_function_is_raised_and_harms_nothing() -> None:
    def fails(number: int) -> int:
        if number == 70:
            raise ValueError("no seventy")
        return number

    with ps.LocalService(workers=0, inline=1) as service:
        with pytest.raises(ValueError, match="no seventy"):
            list(ps.range(100).map(fails).distribute(service, limits=ps.Limits(timeout_s=DEADLINE_S)))
        assert sorted(ps.range(100).distribute(service, limits=ps.Limits(timeout_s=DEADLINE_S))) == list(range(100))


def test_a_dispatcher_that_was_killed_finds_it_again() -> None:
    with ps.LocalService(workers=0, inline=1) as service:
        assert len(list(ps.range(10).distribute(service, limits=ps.Limits(timeout_s=DEADLINE_S)))) == 10
        kill(service.dispatcher_pid)
        assert len(list(ps.range(20).distribute(service, limits=ps.Limits(timeout_s=DEADLINE_S)))) == 20


def test_it_can_be_closed_before_it_has_begun() -> None:
    service = ps.LocalService(workers=0, inline=2)
    before = time.monotonic()
    service.close()
    assert time.monotonic() - before < 5
    with pytest.raises(ps.InvalidArgumentError, match="inline=-1"):
        ps.LocalService(inline=-1)
