"""Stripes that are written again: of the size that was asked for, with the columns of all, however many there are."""

from __future__ import annotations

from itertools import pairwise
from time import process_time

import numpy as np
import pyarrow as pa
import pytest

from penstock.warehouse.layout import _conformed, regrouped
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
