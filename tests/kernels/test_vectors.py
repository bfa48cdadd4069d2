"""Every published example of a transform holds: of the kernels, and of the oracle that tests compare them with."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.graph import transforms as tr
from penstock.kernels.hashing import sampled
from tests.kernels import oracle
from tests.kernels.features_kit import applied
from tests.kernels.vectors import VECTORS, Vector, published


def same(wanted: Any, found: Any) -> bool:
    """Compare rows; whole numbers exactly, others up to the last digits of a float32."""
    if isinstance(wanted, (list, tuple)) and isinstance(found, (list, tuple)):
        return len(wanted) == len(found) and all(map(same, wanted, found))
    if wanted is None or found is None or isinstance(wanted, (list, tuple)) or isinstance(found, (list, tuple)):
        return wanted is found
    if wanted != wanted or found != found:
        return bool(wanted != wanted and found != found)
    if isinstance(wanted, int) and isinstance(found, int):
        return wanted == found
    return math.isclose(wanted, found, rel_tol=2e-6, abs_tol=2e-7)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector.transform.OP)
def test_a_published_example_holds(vector: Vector) -> None:
    made = applied(vector.transform, *vector.inputs)
    assert same(vector.made, made), made
    by_hand = [oracle.apply(vector.transform, *rows) for rows in zip(*vector.inputs)]
    assert same(vector.made, by_hand), by_hand


def test_each_transform_has_at_least_five_examples() -> None:
    counts = Counter(vector.transform.OP for vector in VECTORS)
    assert {op for op in tr.BY_OP if counts[op] < 5} == {"Sampling", "Custom"}  # the first has its own below


@pytest.mark.parametrize(
    ("rate", "seed", "kept"),
    [
        (0.5, 0, [0, 4, 6]),
        (0.5, 1, [0, 2, 3, 6, 7]),
        (0.25, 0, [0]),
        (0.0, 0, []),
        (1.0, 0, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_sampling_keeps_the_rows_that_were_published(rate: float, seed: int, kept: list[int]) -> None:
    files, rows = np.full(8, 3), np.arange(8)
    assert np.flatnonzero(sampled(files, rows, seed, rate)).tolist() == kept
    words = [oracle.combined(oracle.combined(seed, oracle.mixed(3)), oracle.mixed(row)) for row in range(8)]
    assert [row for row, word in enumerate(words) if word < rate * 2**64] == kept


def test_sampling_keeps_about_its_share_and_the_same_rows_however_they_are_cut() -> None:
    files, rows = np.repeat(np.arange(10), 10_000), np.tile(np.arange(10_000), 10)
    kept = sampled(files, rows, 7, 0.1)
    assert abs(kept.mean() - 0.1) < 0.005
    parts = [sampled(files[start : start + 777], rows[start : start + 777], 7, 0.1) for start in range(0, 100_000, 777)]
    assert np.array_equal(np.concatenate(parts), kept)
    assert not (sampled(files, rows, 8, 0.05) & ~sampled(files, rows, 8, 0.1)).any()


def test_the_page_on_features_has_every_example() -> None:
    page = (Path(__file__).parents[2] / "docs" / "features.md").read_text()
    assert [line for line in map(published, VECTORS) if line not in page] == []
