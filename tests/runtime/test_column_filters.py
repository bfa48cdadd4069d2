"""Expressions that calculate, and filters over batches of columns: they judge rows as rows are judged one by one."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.graph.expressions import Expression

X, Y, T = ps.col("x"), ps.col("y"), ps.col("t")
ROWS = [{"x": i - 5, "y": (i % 4) / 2, "t": f"t{i % 3}", "n": None if i % 3 else i} for i in range(20)]
CONDITIONS = [
    X * 2 + Y > 3,
    (X - 1) / Y < X,
    X % 3 == 1,
    10 - X >= Y * Y,
    X > Y,
    X // 2 != Y,
    1 + 2 * X <= 3,
    6 / (X + 1) > 2,
    (X > 2) & ~(Y * 2 > 1),
    (X == 3) | (T == "t1"),
    ~(ps.col("n") + 1 > 5),
    ps.col("n").is_null(),
    ~ps.col("n").is_null() & (X > 0.5),
    X.isin([1, 2, 30]),
    X > 2**63,
    Y >= 1,
]


def columns(rows):
    kinds = {"t": object, "n": object}
    return {name: np.array([row[name] for row in rows], kinds.get(name)) for name in rows[0]}


@pytest.mark.parametrize("condition", CONDITIONS, ids=repr)
def test_rows_of_a_column_batch_are_kept_as_rows_are(condition):
    expected = [row["x"] for row in ps.from_items(ROWS).filter(condition)]
    batches = [columns(ROWS[start : start + 6]) for start in range(0, 20, 6)]
    kept = list(ps.from_items(batches).map(lambda batch: batch).filter(condition))
    assert [int(x) for batch in kept for x in batch["x"]] == expected
    assert all(len({len(column) for column in batch.values()}) == 1 and len(batch["x"]) for batch in kept)


@pytest.mark.parametrize("condition", CONDITIONS, ids=repr)
def test_an_expression_comes_back_from_plain_values(condition):
    again = Expression.from_plain(condition.to_plain())
    assert repr(again) == repr(condition) and again.columns() == condition.columns()
    assert [again.evaluate(row) for row in ROWS] == [condition.evaluate(row) for row in ROWS]


def test_a_calculation_is_exact_where_numpy_overflows():
    big = ps.from_items([{"x": np.int64(2**62)}])
    assert len(list(big.filter(X * 4 > 2**63))) == 1


def test_an_unknown_result_keeps_no_row():
    rows = ps.from_items([{"x": 0, "y": 1.0}, {"x": None, "y": 1.0}, {"x": 2, "y": 1.0}])
    assert [row["x"] for row in rows.filter(Y / X > 0)] == [2]
    assert [row["x"] for row in rows.filter(~(Y / X > 0))] == []


def test_calculations_filter_files_as_they_filter_rows(tmp_path):
    pq.write_table(pa.table({"x": list(range(40)), "y": [i / 3 for i in range(40)]}), tmp_path / "a.parquet")
    expected = [i for i in range(40) if i - 2 * (i / 3) > 4]
    condition = X - 2 * Y > 4
    assert [row["x"] for row in ps.read_parquet(tmp_path / "*.parquet").filter(condition)] == expected
    batches = ps.read_parquet(tmp_path / "*.parquet", batch=7).filter(condition)
    assert [int(x) for batch in batches for x in batch["x"]] == expected
    renamed = ps.read_parquet(tmp_path / "*.parquet").rename({"x": "a"}).filter(ps.col("a") - 2 * Y > 4)
    assert [row["a"] for row in renamed.select("a")] == expected


def test_ragged_columns_and_lists_keep_their_rows():
    ragged = ps.Ragged(np.arange(6), np.array([0, 1, 3, 6]))
    batch = {"x": np.arange(3), "r": ragged, "names": ["a", "b", "c"], "image": np.zeros((3, 2, 2))}
    (kept,) = ps.from_items([batch]).filter(X != 1)
    assert [row.tolist() for row in kept["r"]] == [[0], [3, 4, 5]]
    assert kept["names"] == ["a", "c"] and kept["image"].shape == (2, 2, 2)


def test_a_column_without_rows_is_refused_by_name():
    with pytest.raises(ps.InvalidPipelineError, match=r"column 'k' is a int without a row for each of 3"):
        list(ps.from_items([{"x": np.arange(3), "k": 5}]).filter(X > 1))


def test_what_cannot_be_calculated_with_is_refused():
    with pytest.raises(ps.InvalidArgumentError, match=r"\+ takes columns and numbers, not 'a'"):
        X + "a"
    with pytest.raises(ps.InvalidArgumentError, match="column 't' holds str, with which one cannot calculate"):
        list(ps.from_items(ROWS).filter(T * 2 > 3))
