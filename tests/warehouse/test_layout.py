"""Stripes that are written again: of the size that was asked for, with the columns of all, however many there are."""

from __future__ import annotations

from itertools import pairwise
from time import process_time

import numpy as np
import pyarrow as pa
import pytest

import penstock as ps
from penstock.warehouse.layout import _conformed, popular_order, regrouped, reorder
from penstock.warehouse.read_log import LoggedRead, ReadLog
from penstock.warehouse.writing import StripeSize

WIDE = 14_000
MOST_S = 5.0  # where each column looks through the names of all, it takes more than ten times as long


def rows(start: int, stop: int) -> pa.Table:
    keys = np.arange(start, stop)
    return pa.table({"key": keys, "f1": pa.array([[key] * (key % 3) for key in keys.tolist()], pa.list_(pa.int64()))})


@pytest.mark.parametrize("cuts", [[0, 100], [0, 3, 7, 20, 21, 64, 100], [0, 50, 100], list(range(101))])
@pytest.mark.parametrize("size", [1, 7, 50, 100, 1000])
def test_stripes_are_cut_anew_and_keep_their_rows(cuts, size):
    given = [rows(start, stop) for start, stop in pairwise(cuts)]
    made = list(regrouped(given, StripeSize(rows=size, bytes=1 << 40)))
    assert [len(part) for part in made] == [size] * (100 // size) + [100 % size] * (100 % size > 0)
    assert pa.concat_tables(made).equals(rows(0, 100))


@pytest.mark.alone
def test_a_wide_stripe_gets_the_columns_of_a_schema_in_time():
    column = pa.array([1.0, 2.0], pa.float32())
    schema = pa.schema([(f"f{number}", pa.float32()) for number in reversed(range(WIDE))])
    part = pa.table([column] * (WIDE // 2), names=[f"f{2 * number}" for number in range(WIDE // 2)])
    began = process_time()
    made = _conformed(part, schema)
    assert process_time() - began < MOST_S
    assert made.schema.equals(schema)
    assert (made["f0"].to_pylist(), made["f1"].to_pylist()) == ([1.0, 2.0], [None, None])


def test_numbers_are_written_before_lists_and_either_by_popularity(tmp_path):
    kinds = {1: "sparse", 2: "dense", 3: "scored", 4: "dense", 5: "sparse"}
    table = ps.Table.create(tmp_path / "t", [ps.Feature(id=number, kind=kind) for number, kind in kinds.items()])
    for session in ([5, 4, 3], [5, 4], [5, 2, 3], [5, 4, 1]):
        ReadLog(table.own_folder).add(session)
    columns = {"f2": [1.0], "f4": [2.0], "f1": [[1]], "f5": [[2]], "f3": [[{"id": 3, "score": 0.5}]]}
    table.append(pa.table({"key": [1], "time": [0], "label": [0.0], **columns}), date="2026-01-31")
    reorder(table)
    (file,) = table.snapshot().files
    assert table.open_file(table.folder / file.path).schema_arrow.names[3:] == ["f4", "f2", "f5", "f3", "f1"]
    assert popular_order(table, [LoggedRead(at_s=0, features=(5, 4, 77))]) == [4, 77, 5]
