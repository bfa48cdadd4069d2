"""Small elements come a thousand a frame, and are made piece by piece: which piece one stands in changes nothing."""

from __future__ import annotations

import json
from itertools import cycle
from typing import Any, cast

import numpy as np
import pytest

import penstock as ps
from penstock.client.reader import PIECE, EpochReader
from tests.client.conftest import WAIT_S

N = 6 * 1024


def small(numbers: list[int]) -> list[Any]:
    return list(np.repeat(np.array(numbers)[:, None], 16, axis=1))


def reading(service: ps.LocalService, streams: int, **options: Any) -> ps.Loader:
    """Return a loader to which streams give in turn."""
    return (
        ps.range(N)
        .map(small, batch_size=1024)
        .distribute(
            service,
            order="deterministic",
            sharding=ps.Sharding(streams=streams),
            limits=ps.Limits(timeout_s=WAIT_S),
            **options,
        )
    )


def ids(elements: Any) -> list[int]:
    return [int(element[0]) for element in elements]


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("taken", [1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 7])
def test_a_state_taken_in_any_piece_of_a_frame_goes_on_there(
    service: ps.LocalService, streams: int, taken: int
) -> None:
    with reading(service, streams) as loader:
        whole = ids(loader)
        iterator = iter(loader)
        before = ids(next(iterator) for _ in range(taken))
        state = json.loads(json.dumps(loader.state_dict()))
        statistics = loader.statistics()
        more = ids(next(iterator) for _ in range(2 * PIECE))
    assert sorted(whole) == list(range(N))
    assert statistics.elements == taken
    with reading(service, streams) as loader:
        loader.load_state_dict(state)
        after = ids(loader)
    assert len(before) + len(after) == N and sorted(before + after) == list(range(N))
    assert after[: len(more)] == more


@pytest.mark.parametrize("streams", [1, 3])
def test_operators_after_distribute_take_as_many_as_they_want(service: ps.LocalService, streams: int) -> None:
    def doubled(element: Any) -> Any:
        return 2 * element

    with reading(service, streams).map(doubled).batch(100) as loader:
        first = [batch[:, 0].tolist() for batch in loader]
        iterator = iter(loader)
        before = [next(iterator)[:, 0].tolist() for _ in range(7)]
        state = json.loads(json.dumps(loader.state_dict()))
    assert sorted(row for batch in first for row in batch) == list(range(0, 2 * N, 2))
    with reading(service, streams).map(doubled).batch(100) as loader:
        loader.load_state_dict(state)
        rows = sorted(row for batch in (*before, *(batch[:, 0].tolist() for batch in loader)) for row in batch)
    assert rows == list(range(0, 2 * N, 2))


def test_the_rest_of_a_frame_is_not_given_to_one_that_was_closed(service: ps.LocalService) -> None:
    loader = reading(service, 1)
    iterator = iter(loader)
    for _ in range(PIECE):
        next(iterator)
    loader.close()
    with pytest.raises((StopIteration, ps.PenstockError)):
        next(iterator)


@pytest.mark.parametrize("streams", [1, 3])
def test_states_between_elements_that_were_taken_together_say_where_each_stream_stands(
    service: ps.LocalService, streams: int
) -> None:
    with reading(service, streams) as loader:
        reader, taken = cast(EpochReader, iter(loader)), 0
        for want in cycle((10, 300, 7, 1, 500)):
            elements, after = reader.take(want)
            if not elements:
                break
            for k in (0, len(elements) // 2, len(elements)):
                progress = after(k).progress
                assert progress.step == sum(position.round for position in progress.streams) == taken + k
            settled = reader.state().progress
            assert (progress.streams, progress.done) == (settled.streams, settled.done)
            taken += len(elements)
    assert taken == N
