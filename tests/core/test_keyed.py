"""Keyed columns: rows of all features come apart and together again as nested lists do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.core.element import batch_length, batch_rows, element_bytes, slice_batch
from penstock.core.keyed import FEW_PIECES
from penstock.runtime.collate import join_batches
from penstock.testing.conformance import check_resumes_everywhere, compare, compare_all
from penstock.wire.elements import flatten, unflatten

KEYS = ("a", "b", "c")


def ragged(rows: list[list[list[int]]], *, keys: tuple[str, ...] = KEYS, weighed: bool = False) -> ps.KeyedRagged:
    """Return a keyed ragged of rows, each a list of values for each feature."""
    pieces = [row[feature] for feature in range(len(keys)) for row in rows]
    values = np.array([value for piece in pieces for value in piece], np.int64)
    offsets = np.cumsum([0, *map(len, pieces)]).astype(np.int64)
    return ps.KeyedRagged(keys, values, offsets, values.astype(np.float32) / 2 if weighed else None)


def as_lists(column: ps.KeyedRagged) -> list[list[list[int]]]:
    features = [column[key] for key in column.keys]
    return [[feature[row].tolist() for feature in features] for row in range(len(column))]


def dense(rows: list[list[float]], presence: list[list[bool]] | None = None) -> ps.KeyedDense:
    values = np.array(rows, np.float32).reshape(len(rows), len(KEYS)).T.copy()
    return ps.KeyedDense(KEYS, values, None if presence is None else np.array(presence, bool).reshape(-1, 3).T.copy())


row_lists = st.lists(
    st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), min_size=3, max_size=3), max_size=7
)


@given(row_lists, st.booleans(), st.integers(0, 7), st.integers(0, 7))
@settings(max_examples=150, deadline=None)
def test_rows_are_cut_out_and_joined_as_lists_are(
    rows: list[list[list[int]]], weighed: bool, one: int, other: int
) -> None:
    start, stop = sorted((min(one, len(rows)), min(other, len(rows))))
    whole = ragged(rows, weighed=weighed)
    assert as_lists(whole) == rows and batch_length({"k": whole}) == len(rows)
    parts = [whole.slice(0, start), whole.slice(start, stop), whole.slice(stop, len(rows))]
    assert [as_lists(part) for part in parts] == [rows[:start], rows[start:stop], rows[stop:]]
    assert compare(join_batches([{"k": part} for part in parts]), {"k": whole}) is None
    singles = batch_rows(whole)
    assert [as_lists(single) for single in singles] == [[row] for row in rows]
    if singles:
        assert compare(join_batches(singles), whole) is None
    numbers = np.array([stop, start, stop], np.int64)[: 3 if stop < len(rows) else 0]
    assert as_lists(whole.take(numbers)) == [rows[number] for number in numbers]


@given(st.lists(st.tuples(*[st.floats(width=32)] * 3, st.tuples(*[st.booleans()] * 3)), max_size=6), st.integers(0, 6))
@settings(max_examples=50, deadline=None)
def test_dense_rows_keep_their_presence(rows: list[Any], cut: int) -> None:
    whole = dense([list(row[:3]) for row in rows], [list(row[3]) for row in rows])
    cut = min(cut, len(rows))
    parts = [slice_batch(whole, 0, cut), slice_batch(whole, cut, len(rows))]
    assert compare(join_batches(parts), whole) is None
    if rows:
        assert compare(join_batches(batch_rows(whole)), whole) is None
    header, buffers = flatten({"d": whole})
    assert compare(unflatten(header, buffers), {"d": whole}) is None


def test_joining_fills_in_presence_where_some_parts_have_none() -> None:
    joined = join_batches([dense([[1, 2, 3]]), dense([[4, 5, 6]], [[True, False, True]])])
    assert joined.presence.T.tolist() == [[True] * 3, [True, False, True]]
    assert joined["b"].tolist() == [2, 5] and joined.present("b").tolist() == [True, False]


def test_many_parts_are_joined_by_number_and_give_the_same() -> None:
    rows = [[[i, i + 1], [], [i] * (i % 3)] for i in range(FEW_PIECES // 3 + 2)]
    whole = ragged(rows, weighed=True)
    assert compare(join_batches(batch_rows(whole)), whole) is None


def batches() -> ps.Dataset:
    def make(i: int) -> dict[str, Any]:
        rows = [[[i, row], [row] * (row % 3), []] for row in range(5)]
        return {"s": ragged(rows, weighed=True), "d": dense([[i, row, 0] for row in range(5)]), "y": np.arange(5)}

    return ps.range(6).map(make)


def test_keyed_batches_are_unbatched_rebatched_padded_filtered_and_resumed_anywhere(
    one_worker: ps.LocalService,
) -> None:
    for make in (
        lambda: batches().rebatch(7),
        lambda: batches().rebatch(4, drop_last=True),
        lambda: batches().unbatch().batch(7),
        lambda: batches().unbatch().shuffle(9, seed=1).padded_batch(7),
        lambda: batches().filter(ps.col("y") > 2).rebatch(3),
    ):
        assert check_resumes_everywhere(make) > 2
        assert compare_all(list(make()), list(make().distribute(one_worker))) is None
    assert compare_all(list(batches().rebatch(7)), list(batches().unbatch().batch(7))) is None


def test_a_batch_of_thousands_of_features_is_a_few_buffers() -> None:
    keys = tuple(f"f{number}" for number in range(3000))
    column = ps.KeyedRagged(keys, np.arange(3000 * 8), np.arange(0, 3000 * 8 + 1, 2))
    header, buffers = flatten({"sparse": column})
    assert len(column) == 4 and len(buffers) == 2
    again = unflatten(header, buffers)["sparse"]
    assert again == column and again.keys is not None and again["f2999"][3].tolist() == [23998, 23999]
    assert element_bytes(column) == column.values.nbytes + column.offsets.nbytes


def test_columns_that_do_not_fit_say_what_does() -> None:
    with pytest.raises(ps.InvalidArgumentError, match=r"offsets of int64\[3 \* rows \+ 1\], not int64\[3\]"):
        ps.KeyedRagged(KEYS, np.arange(2), np.array([0, 1, 2]))
    with pytest.raises(ps.InvalidArgumentError, match="begin at 0 and end at 2"):
        ps.KeyedRagged(("a",), np.arange(2), np.array([0, 3]))
    with pytest.raises(ps.InvalidArgumentError, match=r"weights of float32\[2\]"):
        ps.KeyedRagged(("a",), np.arange(2), np.array([0, 2]), np.ones(2))
    with pytest.raises(ps.InvalidArgumentError, match=r"float32\[1, rows\], not float64\[1, 2\]"):
        ps.KeyedDense(("a",), np.ones((1, 2)))
    with pytest.raises(ps.InvalidArgumentError, match="'a' stands twice"):
        ps.KeyedDense(("a", "a"), np.ones((2, 2), np.float32))
    with pytest.raises(TypeError, match="by name, not by 0"):
        dense([[1, 2, 3]])[0]  # type: ignore[index]
    other = ps.KeyedDense(("a", "b", "x"), np.ones((3, 1), np.float32))
    with pytest.raises(ps.BatchShapeError, match="batch 1 differ in c, x, against batch 0"):
        join_batches([dense([[1, 2, 3]]), other])
