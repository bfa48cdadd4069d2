"""Another number of ranks goes on where streams end inside the rounds of the old number: nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.client.fetch import EpochReader
from penstock.client.reading import StreamReading

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
        .distribute(service, job=job, consumers=ranks, consumer=rank, sharding="data", uneven="pad", timeout=60)
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

    def choose_own(reader: EpochReader) -> StreamReading | None:
        own = (reader._consumer + first) % 2
        arrived = [reading for reading in reader._arrived if reading.number % 2 == own]
        if not arrived:
            return None
        reader._arrived.remove(arrived[0])
        return arrived[0]

    with monkeypatch.context() as patched:
        patched.setattr(EpochReader, "_choose", choose_own)
        before, states = read_ranks(two_workers, f"two-{first}", 2, STEPS)
    marks = [{number: round_ for number, round_, *_ in state["streams"]} for state in states]
    assert marks[0] != marks[1]
    after, _ = read_ranks(two_workers, f"seven-{first}", 7, states=states)
    given = {int(row) for batch in (*before, *after) for row in batch}
    assert sorted(set(range(ROWS)) - given) == []
    repeated = sum(map(len, (*before, *after))) - len(given)
    assert repeated <= 6 * BATCH  # the last round is filled up with outputs of its own
