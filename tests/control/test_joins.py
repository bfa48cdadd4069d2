"""Workers join a job one by one: what that costs, and is sent, depends on who joins and not on who is there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest

from penstock.wire.jobs import HeldView
from penstock.wire.messages import RunnerPlace, ViewMoved
from tests.control.cluster import JOB, Cluster, spec

CLIENTS = 8


def opened(**changes: Any) -> Cluster:
    cluster = Cluster()
    described = spec(consumers=CLIENTS, **changes)
    for consumer in range(CLIENTS):
        cluster.open(consumer, spec=described)
    cluster.pushed.clear()
    return cluster


def join(cluster: Cluster, number: int) -> list[bytes]:
    """Have a worker join and serve; return what the first client is sent meanwhile."""
    worker = f"worker-{number:05}"
    cluster.register(worker, agent=f"agent-{number:05}")
    sent = [push for peer, push in cluster.pushed if peer == "peer of c0" and isinstance(push, ViewMoved)]
    cluster.ready()
    sent += [push for peer, push in cluster.pushed if peer == "peer of c0" and isinstance(push, ViewMoved)]
    cluster.pushed.clear()
    return [msgspec.msgpack.encode(push) for push in sent]


def test_what_a_client_is_sent_grows_with_the_workers_that_join() -> None:
    cluster = opened()
    sizes = [sum(map(len, join(cluster, number))) for number in range(400)]
    assert len(cluster.view().streams) == 400
    assert sum(sizes) < 2.1 * sum(sizes[:200])
    assert sum(sizes) < 400 * 600


def test_what_is_sent_makes_the_whole_view() -> None:
    cluster = opened()
    held = HeldView(cluster.view())
    for number in range(20):
        for frame in join(cluster, number):
            held.take_change(msgspec.msgpack.decode(frame, type=ViewMoved).change)
        assert len(held.take_news()) == 1
    assert held.view == cluster.view()


def calls(act: Callable[[], Any]) -> int:
    """Return how many functions are called."""
    made = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(None)
    return made


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"uneven": "allow"},
        {"order": "deterministic", "streams": 16},
        {"order": "deterministic", "streams": 600},
        {"policy": "off"},
        {"max_workers": 10},
    ],
    ids=str,
)
def test_a_join_costs_the_same_however_many_are_there(changes: dict[str, Any]) -> None:
    cluster = opened(**changes)
    for number in range(40):
        join(cluster, number)
    few = max(calls(partial(join, cluster, number)) for number in range(40, 44))
    for number in range(44, 300):
        join(cluster, number)
    many = min(calls(partial(join, cluster, number)) for number in range(300, 304))
    assert many < 1.3 * few


def test_an_agents_return_costs_the_same_however_many_are_there() -> None:
    """After a dispatcher's restart all agents register again, with the processes they have."""
    costs = []
    for workers in (40, 300):
        cluster = opened()
        for number in range(workers):
            join(cluster, number)
        runners = cluster.state.runners[JOB]
        cluster.restart()
        cluster.tick()
        asks = []
        for number in range(4):
            worker = f"worker-{number:05}"
            (runner,) = runners.on(worker)
            place = RunnerPlace(runner.runner, worker, JOB, runner.address)
            asks.append(partial(cluster.register, worker, agent=f"agent-{number:05}", runners=(place,)))
        costs.append([calls(ask) for ask in asks])
    assert min(costs[1]) < 1.3 * max(costs[0])
