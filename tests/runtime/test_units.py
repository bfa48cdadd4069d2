"""Streams whose feed names elements by index: a unit is an output, and between two outputs any state can be opened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.passes import optimize
from penstock.runtime.budget import default_budget
from penstock.runtime.iterator import Run
from penstock.runtime.streams import StreamPart
from penstock.sources.registry import open_source
from penstock.testing.conformance import compare_all

pytestmark = pytest.mark.usefixtures("many_splits")

UNITS = [[3, 1], [4], [1, 5, 9, 2, 6], [5, 3], [5], [8, 9, 7], [9], [3, 2, 3]]


class Listed:
    """Units of a stream that are all there, or that are known only when they are asked for."""

    def __init__(self, units: Sequence[Sequence[int]], *, ahead: bool) -> None:
        self._units, self._ahead = units, ahead
        self._named = -1

    def next_split(self, source: int, pass_: int, after: int | None) -> int | None:
        ordinal = 0 if after is None else after + 1
        self._named = max(self._named, ordinal)
        return ordinal if ordinal < len(self._units) else None

    def known_split(self, source: int, pass_: int, after: int) -> int | None:
        return self.next_split(source, pass_, after) if self._ahead or after < self._named else None

    def prefer(self, source: int, pass_: int, ordinals: Sequence[int]) -> None:
        pass

    def unit(self, ordinal: int) -> Sequence[int]:
        assert ordinal <= self._named, "asked for before it was named"
        return self._units[ordinal]

    def number(self, ordinal: int) -> int:
        return 100 + 2 * ordinal

    def select(self, leftover: int) -> None:
        raise AssertionError("not a tail")


def noisy(i: int, rng: np.random.Generator) -> dict[str, Any]:
    return {"id": i, "noise": rng.random(), "large": np.full(2_000, i)}


PIPELINES = {
    "batch": ps.range(10).batch(4),
    "map and batch": ps.range(10).map(noisy).batch(4),
    "map, batch and map": ps.range(10).map(noisy).batch(4).map(lambda batch: {**batch, "n": len(batch["id"])}),
    "padded": ps.range(10).map(lambda i: np.arange(i)).padded_batch(4),
    "ragged": ps.range(10).map(lambda i: np.arange(i)).ragged_batch(4),
}


def read(
    dataset: ps.Dataset,
    units: Sequence[Sequence[int]],
    state: Any = None,
    *,
    ahead: bool = True,
    threads: int = 2,
    want: int = 3,
) -> tuple[list[Any], list[Any]]:
    """Return the outputs, and the states before and after each of them."""
    run = Run(
        optimize(dataset.node),
        seed=7,
        epoch=0,
        budget=default_budget(threads, None),
        source_of=open_source,
        part=StreamPart(feed=Listed(units, ahead=ahead)),
    )
    outputs: list[Any] = []
    states = [state]
    try:
        run.open(0, state)
        while (chunk := run.pull(want)).elements:
            outputs += chunk.elements
            states += [chunk.marks.at(k + 1) for k in range(len(chunk.elements))]
    finally:
        run.close()
    return outputs, states


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("threads", [1, 2])
def test_each_unit_is_a_batch_and_any_state_goes_on_from_there(name: str, threads: int) -> None:
    dataset = PIPELINES[name]
    whole, states = read(dataset, UNITS, threads=threads)
    assert len(whole) == len(UNITS)
    if name == "batch":
        assert [batch.tolist() for batch in whole] == UNITS
    for k, state in enumerate(states):
        for ahead in (True, False):
            rest, _ = read(dataset, UNITS, state, ahead=ahead, threads=threads, want=1 + k % 3)
            assert compare_all(whole[k:], rest) is None


def test_units_of_one_index_are_elements() -> None:
    outputs, states = read(ps.range(10).map(noisy), [[i] for (i, *_) in UNITS], want=100)
    assert [element["id"] for element in outputs] == [unit[0] for unit in UNITS]
    assert [state[3] for state in states[1:]] == list(range(1, len(UNITS) + 1))


def test_an_index_that_comes_again_gets_other_random_numbers() -> None:
    outputs, _ = read(PIPELINES["map and batch"], UNITS)
    noise = np.concatenate([batch["noise"] for batch in outputs])
    assert len(set(noise.tolist())) == len(noise)
