"""A job that takes a while, read while hosts come and go: each element once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import penstock as ps

ELEMENTS, BATCH = 3000, 10


def slowly(number: int) -> int:
    time.sleep(0.004)
    return number


def read_while(service: str | ps.RayService, events: Mapping[int, Callable[[], None]]) -> None:
    """Read an epoch; `events` are done after so many batches. Nothing is lost, and nothing comes twice."""
    dataset = ps.range(ELEMENTS).map(slowly).batch(BATCH)
    seen: list[int] = []
    with dataset.distribute(service, job="read", limits=ps.Limits(timeout_s=120)) as loader:
        for count, batch in enumerate(loader):
            seen += batch.tolist()
            if count in events:
                events[count]()
    assert sorted(seen) == list(range(ELEMENTS))
