"""`batch(n, collate=f)`: the user's function makes the batch."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps


def test_collate_sees_elements_as_they_left_the_function_before_it():
    seen = []

    def collate(rows):
        seen.append([type(row) for row in rows])
        return {"sets": [sorted(row) for row in rows]}

    made = list(ps.range(5).map(lambda x: {x, x + 1}).batch(2, collate=collate).iterator(threads=1))
    assert made == [{"sets": [[0, 1], [1, 2]]}, {"sets": [[2, 3], [3, 4]]}, {"sets": [[4, 5]]}]
    assert seen == [[set, set], [set, set], [set]]


def test_columns_are_not_pushed_below_a_collate():
    rows = ps.from_items([{"a": i, "b": -i} for i in range(4)])
    made = list(rows.batch(2, collate=lambda xs: {"a": np.array([x["a"] + x["b"] for x in xs])}).select("a"))
    assert [batch["a"].tolist() for batch in made] == [[0, 0], [0, 0]]


def test_a_failing_collate_names_the_operator_and_the_element():
    def collate(rows):
        raise KeyError("no such thing")

    with pytest.raises(KeyError) as caught:
        list(ps.range(5).batch(2, collate=collate))
    assert "batch" in "".join(caught.value.__notes__)


def test_a_collate_that_takes_rng_is_refused():
    with pytest.raises(ps.InvalidArgumentError, match=r"draw in a map\(\) before the batch"):
        ps.range(5).batch(2, collate=lambda rows, rng: rows)


def test_another_collate_is_another_pipeline():
    first, second = (ps.range(5).batch(2, collate=f).fingerprint() for f in (lambda x: x, lambda x: x[:1]))
    assert first != second


class Filling:
    """Makes a batch in memory that it is given."""

    def __call__(self, rows):
        raise AssertionError("it takes memory")

    def collate_into(self, rows, empty):
        made = empty((len(rows), 1 << 16), np.uint8)
        made[:] = np.array(rows, np.uint8)[:, None]
        return made


def test_a_collate_may_take_memory_for_what_it_makes():
    made = list(ps.range(5).batch(2, collate=Filling()).iterator(threads=1))
    assert [batch[:, -1].tolist() for batch in made] == [[0, 1], [2, 3], [4]]
