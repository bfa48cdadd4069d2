"""Another number of ranks goes on where streams end inside the rounds of the old number: nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.stream import consuming
from penstock.stream.checkpoint import ConsumerState
from penstock.stream.position import Lane, Serving
from penstock.stream.reading import ByArrival, Choice, StreamReader

from .checks import Background

ROWS, BATCH, STEPS = 40, 2, 4  # ten batches a stream: fewer than a round of seven are left of each


@pytest.fixture(scope="module")
def two_workers() -> Iterator[ps.LocalService]:
    with ps.LocalService(workers=2) as service:
        yield service


def read_rank(
    service: ps.LocalService, job: str, rank: int, ranks: int, steps: int | None, states: Any
) -> tuple[list[np.ndarray], Any]:
    loader = (
        ps.from_items(range(ROWS))
        .map(int)
        .batch(BATCH)
        .distribute(
            service, job=job, ranks=ps.Ranks(ranks, rank, uneven="pad"), sharding="data", limits=ps.Limits(timeout_s=60)
        )
    )
    with loader:
        if states is not None:
            loader.load_state_dict(states)
        read: list[np.ndarray] = []
        for batch in loader:
            read.append(batch.copy())
            if len(read) == steps:
                break
        return read, json.loads(json.dumps(loader.state_dict()))


def read_ranks(
    service: ps.LocalService, job: str, ranks: int, steps: int | None = None, states: Any = None
) -> tuple[list[np.ndarray], list[Any]]:
    reading = [
        Background(lambda rank=rank: read_rank(service, job, rank, ranks, steps, states)) for rank in range(ranks)
    ]
    outcomes = [background.result(60) for background in reading]
    return [batch for read, _ in outcomes for batch in read], [state for _, state in outcomes]


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_far_apart_continue_as_more_ranks(
    two_workers: ps.LocalService, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """Each rank takes from a stream of its own, so that marks are as unequal as the data allows."""

    made: list[ByArrival] = []

    class OwnStreamFirst(ByArrival):
        """Takes from every second stream only, another half of them on each rank."""

        def __init__(self, next_stream: int | None = None) -> None:
            super().__init__(next_stream)
            self.mine = (len(made) + first) % 2
            made.append(self)

        def choose(self, readers: Collection[StreamReader]) -> Choice | None:
            own = next((reader for reader in self._arrived if reader.number % 2 == self.mine), None)
            if own is None:
                return None
            self._arrived.remove(own)
            if not own.frames:
                return own
            return Serving((Lane(own.number, own.frames[0], own.frames[0].at),), own.frames[0].left)

    with monkeypatch.context() as patched:
        patched.setattr(consuming, "ByArrival", OwnStreamFirst)
        before, states = read_ranks(two_workers, f"two-{first}", 2, STEPS)
    streams = [ConsumerState.read(state["place"]).progress.streams for state in states]
    marks = [{each.number: each.round for each in held} for held in streams]
    assert marks[0] != marks[1]
    after, _ = read_ranks(two_workers, f"seven-{first}", 7, states=states)
    given = {int(row) for batch in (*before, *after) for row in batch}
    assert sorted(set(range(ROWS)) - given) == []
    repeated = sum(map(len, (*before, *after))) - len(given)
    assert repeated <= 6 * BATCH  # the last round is filled up with outputs of its own
