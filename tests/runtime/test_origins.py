"""Every output can say where it came from, also where it begins in another chunk than the one before it ended in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.passes import canonicalize, optimize
from penstock.runtime.budget import default_budget
from penstock.runtime.contract import Chunk, Stage
from penstock.runtime.iterator import Run
from penstock.sources.registry import open_source


def same(x: Any) -> Any:
    return x


def numbers() -> ps.Dataset:
    """A shuffle's marks know their block, and nothing behind it."""
    return ps.from_items(list(range(23))).flat_map(lambda x: [x]).shuffle(3, seed=1)


def batches() -> ps.Dataset:
    rows = [{"id": np.arange(4 * i, 4 * i + 4)} for i in range(7)]
    return ps.from_items(rows).flat_map(lambda x: [x]).shuffle(3, seed=1)


def sequences() -> ps.Dataset:
    return numbers().map(lambda x: np.arange(x % 5 + 1))


PIPELINES: dict[str, Callable[[], ps.Dataset]] = {
    "map": lambda: numbers().map(same),
    "batch": lambda: numbers().batch(4),
    "drop_last": lambda: numbers().batch(4, drop_last=True),
    "filter": lambda: numbers().filter(lambda x: x % 2 == 0).batch(2),
    "padded_batch": lambda: sequences().padded_batch(3),
    "ragged_batch": lambda: sequences().ragged_batch(3),
    "bucket_by_length": lambda: sequences().bucket_by_length(len, boundaries=[3], batch_size=3),
    "group_by_window": lambda: numbers().group_by_window(lambda x: x % 2, size=3),
    "pack": lambda: sequences().pack(5),
    "rebatch, smaller": lambda: batches().rebatch(3),
    "rebatch, as large": lambda: batches().rebatch(4),
    "rebatch, larger": lambda: batches().rebatch(6),
    "unbatch": lambda: batches().unbatch(),
    "lists": lambda: numbers().map(same, batch_size=3),
    "flat_map": lambda: numbers().flat_map(lambda x: [x] * (x % 3)).batch(2),
    "shuffle": lambda: numbers().batch(2).shuffle(2, seed=3),
    "repeat": lambda: numbers().repeat(2).batch(4),
    "mix": lambda: ps.mix([numbers(), numbers()], [1, 2], stop="all").batch(3),
    "cache": lambda: numbers().cache().batch(2),
    "take": lambda: numbers().skip(2).take(9).enumerate(),
}


@pytest.mark.parametrize("want", [1, 2, 7])
@pytest.mark.parametrize("passes", [canonicalize, optimize], ids=["as written", "optimized"])
@pytest.mark.parametrize("name", PIPELINES)
def test_every_output_of_every_stage_says_where_it_came_from(
    name: str, passes: Any, want: int, monkeypatch: Any
) -> None:
    asked = 0
    pull = Stage.pull

    def pull_and_ask(stage: Stage, want: int) -> Chunk:
        nonlocal asked
        chunk = pull(stage, want)
        for k in range(len(chunk.elements)):
            chunk.marks.origin(k)
            asked += 1
        return chunk

    monkeypatch.setattr(Stage, "pull", pull_and_ask)
    node = passes(PIPELINES[name]().map(same).node)
    run = Run(node, seed=1, epoch=0, budget=default_budget(1), source_of=open_source)
    try:
        run.open(0, None)
        while run.pull(want).elements:
            pass
    finally:
        run.close()
    assert asked
