"""Predicates over Arrow columns: for every value and literal that is trouble, they say what `Expression.truth` says."""

import math
from collections.abc import Iterator
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.core.errors import InvalidArgumentError
from penstock.graph.expressions import Expression, col
from penstock.graph.literals import nanoseconds_of
from penstock.sources.columns import Converter
from penstock.sources.predicates import Bounds, TimeBound, check_predicate, may_be_true, row_mask

FLOATS = [0.0, -0.0, 0.1, 1.0, 1.5, -2.0, math.nan, math.inf, -math.inf, 2.0**53, 2.0**63]
NUMBERS = [0, -1, 2, 127, 128, 255, 256, -129, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), True]
NUMBERS += [-0.0, 0.1, 0.5, float(np.float32(0.1)), 1e300, math.inf, -math.inf, float(2**53), float(2**63)]
TIMES = ["1970-01-01", "1970-01-02T00:00:00.0000015", "1970-01-02T00:00:00.001", "1969", "9999-12-31", "1970-01-03T00Z"]
DAY_NS = 86_400 * 10**9

CASES: list[tuple[pa.Array, list[Any]]] = [
    *(
        (pa.array([0, 1, 2, 3, info.min, info.max, *([2**53 + 1] if info.max > 2**53 else [])], arrow), NUMBERS)
        for arrow in (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint32(), pa.uint64())
        for info in [np.iinfo(arrow.to_pandas_dtype())]
    ),
    *((pa.array(FLOATS, arrow), NUMBERS) for arrow in (pa.float32(), pa.float64())),
    (pa.array(np.array(FLOATS[:-2], np.float16)), NUMBERS),
    (pa.array([True, False]), NUMBERS),
    (pa.array([0, 1, 2]).cast(pa.decimal128(22, 3)), NUMBERS),
    *((pa.array(["", "a", "b", "é", "z"], arrow), ["", "a", "c", "é"]) for arrow in (pa.string(), pa.large_string())),
    (pa.array(["", "a", "b"], pa.string_view()), ["", "a", "c"]),
    (pa.array(["a", "b", "a"]).dictionary_encode(), ["", "a", "c"]),
    (pa.array([b"", b"a", b"\xff"]), [b"", b"a", b"b\x00"]),
    (pa.array([b"aa", b"zz"], pa.binary(2)), [b"", b"aa", b"b"]),
    *(
        (pa.array([0, DAY_NS // n, 2 * DAY_NS // n, 1]).cast(pa.timestamp(u)), TIMES)
        for u, n in {"ns": 1, "ms": 10**6}.items()
    ),
    (pa.array([0, 86_400, 1]).cast(pa.timestamp("s", "Europe/Berlin")), TIMES),
    (pa.array([0, 1, -1], pa.int32()).cast(pa.date32()), TIMES),
    (pa.array([0, 86_400_000]).cast(pa.date64()), TIMES),
]
IDS = [str(array.type) for array, _ in CASES]


def comparisons(literals: list[Any]) -> Iterator[Expression]:
    column = col("x")
    for value in literals:
        yield from (column == value, column != value, column < value, column <= value, column > value, column >= value)
        yield column.isin([value])
    yield column.isin([])
    yield column.isin(literals[:4])
    yield column.is_null()


def cells(array: pa.Array) -> list[Any]:
    batch = pa.record_batch([array], names=["x"])
    return [row["x"] for row in Converter(batch.schema, None, rows=True).rows(batch)(0, len(array))]


@pytest.mark.parametrize(("array", "literals"), CASES, ids=IDS)
def test_masks_are_true_false_or_unknown_as_expressions_are(array: pa.Array, literals: list[Any]) -> None:
    array = pa.concat_arrays([array, pa.nulls(1, array.type)])
    values = cells(array)
    for expression in comparisons(literals):
        check_predicate(expression, {"x": array.type})
        for each in (expression, ~expression):
            assert row_mask(each, {"x": array}.__getitem__).to_pylist() == [each.truth({"x": v}) for v in values], each


def test_conjunctions_follow_three_valued_logic() -> None:
    truths = [True, False, None]
    pairs = [(left, right) for left in truths for right in truths]
    columns = {"a": pa.array([a for a, _ in pairs]), "b": pa.array([b for _, b in pairs])}
    for expression in (col("a") & col("b"), col("a") | col("b"), ~(col("a") & ~col("b"))):
        expected = [expression.truth({"a": a, "b": b}) for a, b in pairs]
        assert row_mask(expression, columns.__getitem__).to_pylist() == expected


@pytest.mark.parametrize(("array", "literals"), CASES, ids=IDS)
def test_a_group_is_passed_over_only_if_nothing_in_it_is_true(array: pa.Array, literals: list[Any]) -> None:
    values = cells(array)
    nans = [value for value in values if value != value]
    passed_over = 0
    ordered = sorted(value for value in values if value == value)
    for low, high in combinations_with_replacement(ordered[:3] + ordered[3::3], 2):
        for more in ([], [None], nans):
            group = [low, high, *more]
            if isinstance(low, np.datetime64):
                least, greatest = TimeBound(nanoseconds_of(low)), TimeBound(nanoseconds_of(high))
            else:
                least, greatest = low, high
            bounds = Bounds(rows=len(group), nulls=group.count(None), low=least, high=greatest, nans=bool(nans))
            for expression in comparisons(literals[::2]):
                for each in (expression, ~expression, expression & ~expression, expression | col("x").is_null()):
                    may_be = may_be_true(each, lambda _, bounds=bounds: bounds)
                    assert may_be or not any(each.evaluate({"x": value}) for value in group), (each, group)
                    passed_over += not may_be
    assert passed_over > 50  # "it may be" would always be right


def test_nothing_is_known_without_statistics() -> None:
    assert may_be_true(col("x") == 1, lambda _: Bounds(rows=3))
    assert not may_be_true(col("x") == 1, lambda _: Bounds(rows=3, nulls=3))
    assert may_be_true(~col("x").is_null(), lambda _: Bounds(rows=3))
    assert may_be_true(col("x") == 1, lambda _: Bounds(rows=3, low=b"\x00", high=b"\x01"))  # of another kind


@pytest.mark.parametrize(
    ("expression", "arrow", "told"),
    [
        (col("y") == 1, pa.int8(), "no column 'y'; there are x"),
        (col("x") == "a", pa.int8(), "bool or int or float"),
        (col("x").isin([1]), pa.string(), "compares with str"),
        (col("x") == "a", pa.binary(), "compares with bytes"),
        (col("x") > 3, pa.list_(pa.int8()), "only is_null works"),
        (col("x") > 3, pa.duration("s"), "only is_null works"),
        (col("x") > 3, pa.timestamp("s"), "compares with str"),
        (col("x") > "soon", pa.timestamp("s"), "not one in UTC"),
        (~(col("x") & (col("x") > 1)), pa.int8(), "no column of bools"),
    ],
)
def test_what_does_not_compare_is_refused(expression: Expression, arrow: Any, told: str) -> None:
    with pytest.raises(InvalidArgumentError, match=told):
        check_predicate(expression, {"x": arrow})


def test_a_struct_is_never_null_itself_pushed_down_or_not(tmp_path):
    import pyarrow.parquet as pq

    import penstock as ps

    pq.write_table(
        pa.table({"s": pa.array([{"x": 1}, None, {"x": None}], pa.struct([("x", pa.int64())]))}), tmp_path / "a.parquet"
    )
    ds = ps.read_parquet(tmp_path / "a.parquet", nulls=None).filter(ps.col("s").is_null())
    assert list(ds.iterator(optimize=True)) == list(ds.iterator(optimize=False)) == []
