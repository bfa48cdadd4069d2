"""Arrow columns as elements: types, nulls, ownership of memory."""

import datetime
import decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.core.element import Ragged, map_leaves
from penstock.core.errors import InvalidArgumentError
from penstock.sources.columns import Converter, NullFoundError

D64 = np.datetime64


def convert(array: pa.Array, nulls: Any = "error", *, rows: bool = False) -> Any:
    """Return column "x" of a batch, or the cells of all rows."""
    batch = pa.record_batch([array], names=["x"])
    converter = Converter(batch.schema, nulls, rows=rows)
    return [row["x"] for row in converter.rows(batch)(0, len(array))] if rows else converter.batch(batch)["x"]


def same(found: Any, expected: Any) -> bool:
    """Compare by type, dtype and value."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, Ragged):
        return found == expected and found.values.dtype == expected.values.dtype
    if isinstance(expected, np.ndarray):
        return found.dtype == expected.dtype and np.array_equal(found, expected)
    return type(found) is type(expected) and found == expected


def objects(*values: Any) -> Any:
    return np.array([*values, None], object)[:-1]


FIXED = pa.list_(pa.float32(), 2)
STRUCT = pa.struct([("a", pa.int16()), ("b", pa.struct([("c", pa.string())]))])
NUMBERS = [
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
    *(pa.float16(), pa.float32(), pa.float64()),
]
TYPES: list[tuple[Any, list[Any], Any, list[Any]]] = [  # Arrow type, values, in a batch, in rows
    *((t, [1, 2], np.array([1, 2], t.to_pandas_dtype()), [1, 2]) for t in NUMBERS if pa.types.is_integer(t)),
    *((t, [0.5, 2], np.array([0.5, 2], t.to_pandas_dtype()), [0.5, 2.0]) for t in NUMBERS if pa.types.is_floating(t)),
    (pa.bool_(), [True, False], np.array([True, False]), [True, False]),
    (pa.decimal128(5, 2), [decimal.Decimal("1.25")], np.array([1.25]), [1.25]),
    (pa.string(), ["a", "é"], objects("a", "é"), ["a", "é"]),
    (pa.large_string(), ["a"], objects("a"), ["a"]),
    (pa.string_view(), ["a"], objects("a"), ["a"]),
    (pa.binary(), [b"a", b""], objects(b"a", b""), [b"a", b""]),
    (pa.binary(2), [b"ab"], objects(b"ab"), [b"ab"]),
    (pa.timestamp("ms"), [1], np.array([1], "M8[ms]"), [D64(1, "ms")]),
    (pa.timestamp("ns", "Europe/Berlin"), [1], np.array([1], "M8[ns]"), [D64(1, "ns")]),
    (pa.date32(), [datetime.date(2024, 1, 2)], np.array(["2024-01-02"], "M8[D]"), [D64("2024-01-02", "D")]),
    (pa.date64(), [datetime.date(2024, 1, 2)], np.array(["2024-01-02"], "M8[ms]"), [D64("2024-01-02", "ms")]),
    (pa.time32("s"), [datetime.time(0, 1)], np.array([60], "m8[s]"), [np.timedelta64(60, "s")]),
    (pa.time64("ns"), [5], np.array([5], "m8[ns]"), [np.timedelta64(5, "ns")]),
    (pa.duration("us"), [7], np.array([7], "m8[us]"), [np.timedelta64(7, "us")]),
    (pa.list_(pa.int32()), [[1, 2], [], [3]], Ragged.of([[1, 2], [], [3]], np.int32), [[1, 2], [], [3]]),
    (pa.large_list(pa.float64()), [[0.5], [1, 2]], Ragged.of([[0.5], [1.0, 2.0]]), [[0.5], [1.0, 2.0]]),
    (pa.list_view(pa.int64()), [[1], [2, 3]], Ragged.of([[1], [2, 3]]), [[1], [2, 3]]),
    (
        pa.list_(pa.string()),
        [["a"], ["b", "c"]],
        Ragged(objects("a", "b", "c"), np.array([0, 1, 3])),
        [["a"], ["b", "c"]],
    ),
    (pa.list_(pa.bool_()), [[True], [False]], Ragged.of([[True], [False]]), [[True], [False]]),
    (FIXED, [[1, 2], [3, 4]], np.array([[1, 2], [3, 4]], np.float32), [[1.0, 2.0], [3.0, 4.0]]),
    (
        pa.list_(FIXED, 1),
        [[[1, 2]], [[3, 4]]],
        np.array([[[1, 2]], [[3, 4]]], np.float32),
        [[[1.0, 2.0]], [[3.0, 4.0]]],
    ),
    (
        pa.list_(FIXED),
        [[[1, 2], [3, 4]], [[5, 6]]],
        Ragged(np.array([[1, 2], [3, 4], [5, 6]], np.float32), np.array([0, 2, 3])),
        [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0]]],
    ),
    (
        STRUCT,
        [{"a": 1, "b": {"c": "x"}}, {"a": 2, "b": {"c": "y"}}],
        {"a": np.array([1, 2], np.int16), "b": {"c": objects("x", "y")}},
        [{"a": 1, "b": {"c": "x"}}, {"a": 2, "b": {"c": "y"}}],
    ),
]


def plain(cell: Any) -> Any:
    return map_leaves(lambda leaf: leaf.tolist() if isinstance(leaf, np.ndarray) else leaf, cell)


@pytest.mark.parametrize(("arrow", "values", "batch", "rows"), TYPES, ids=[str(t) for t, *_ in TYPES])
def test_every_type_has_its_form_in_batches_and_rows(arrow: Any, values: Any, batch: Any, rows: list[Any]) -> None:
    for array in (pa.array(values, arrow), pa.array([*values, *values], arrow).slice(len(values))):
        assert same(convert(array), batch)
        cells = convert(array, rows=True)
        assert [plain(cell) for cell in cells] == rows
        assert [type(plain(cell)) for cell in cells] == [type(row) for row in rows]
        assert all(isinstance(cell, np.ndarray) for cell in cells) == ("list" in str(arrow))


@pytest.mark.parametrize("arrow", [pa.string(), pa.int64(), pa.timestamp("us"), pa.float32()], ids=str)
@pytest.mark.parametrize("encode", ["dictionary", "run ends"])
def test_encoded_columns_are_as_their_values(arrow: Any, encode: str) -> None:
    values = pa.array([5, 5, 7, 5], pa.int64()).cast(arrow)
    encoded = values.dictionary_encode() if encode == "dictionary" else pa.compute.run_end_encode(values)
    assert same(convert(encoded.slice(1)), convert(values.slice(1)))
    with_null = pa.concat_arrays([values, pa.array([None], arrow)])
    encoded = with_null.dictionary_encode() if encode == "dictionary" else pa.compute.run_end_encode(with_null)
    with pytest.raises(NullFoundError):
        convert(encoded)
    assert convert(encoded, None, rows=True)[-1] is None


def test_tensors_keep_their_shape() -> None:
    arrow = pa.fixed_shape_tensor(pa.int32(), (2, 3))
    storage = pa.array([list(range(6)), list(range(6, 12)), list(range(12, 18))], pa.list_(pa.int32(), 6))
    tensors = pa.ExtensionArray.from_storage(arrow, storage)
    expected = np.arange(18, dtype=np.int32).reshape(3, 2, 3)
    assert same(convert(tensors), expected)
    assert same(convert(tensors.slice(1)), expected[1:])
    assert all(same(row, tensor) for row, tensor in zip(convert(tensors, rows=True), expected))


@pytest.mark.parametrize(
    "arrow",
    [
        pa.list_(pa.list_(pa.int8())),
        pa.list_(pa.struct([("a", pa.int8())])),
        pa.list_(pa.list_(pa.int8()), 2),
        pa.map_(pa.string(), pa.int8()),
        pa.struct([("a", pa.list_(pa.list_(pa.int8())))]),
        pa.dense_union([pa.field("a", pa.int8())]),
        pa.month_day_nano_interval(),
    ],
    ids=str,
)
def test_what_has_no_form_is_refused_by_name(arrow: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"column 'x.*leave it out"):
        Converter(pa.schema([("x", arrow)]), "error", rows=True)


NULLS: list[tuple[Any, list[Any], Any, Any, Any]] = [  # type, values, a fill, batch filled, batch masked
    (pa.int8(), [1, None], -1, np.array([1, -1], np.int8), np.array([1, 0], np.int8)),
    (pa.float32(), [1, None], float("inf"), np.array([1, np.inf], np.float32), np.array([1, 0], np.float32)),
    (pa.float16(), [1, None], 2, np.array([1, 2], np.float16), np.array([1, 0], np.float16)),
    (pa.bool_(), [True, None], True, np.array([True, True]), np.array([True, False])),
    (pa.decimal128(5, 2), [1, None], 2.5, np.array([1, 2.5]), np.array([1.0, 0.0])),
    (pa.string(), ["a", None], "?", objects("a", "?"), objects("a", "")),
    (pa.string_view(), ["a", None], "?", objects("a", "?"), objects("a", "")),
    (pa.binary(), [b"a", None], b"?", objects(b"a", b"?"), objects(b"a", b"")),
    (pa.timestamp("s"), [5, None], D64(7, "s"), np.array([5, 7], "M8[s]"), np.array([5, 0], "M8[s]")),
    (pa.date32(), [5, None], D64(7, "D"), np.array([5, 7], "M8[D]"), np.array([5, 0], "M8[D]")),
    (pa.list_(pa.int16()), [[1], None], 9, Ragged.of([[1], []], np.int16), Ragged.of([[1], []], np.int16)),
    (FIXED, [[1, 2], None], 9, np.array([[1, 2], [9, 9]], np.float32), np.array([[1, 2], [0, 0]], np.float32)),
    (pa.null(), [None, None], 3, np.array([3.0, 3.0]), np.array([0.0, 0.0])),
]


@pytest.mark.parametrize(("arrow", "values", "fill", "filled", "masked"), NULLS, ids=[str(t) for t, *_ in NULLS])
def test_nulls_are_errors_masks_none_or_a_value(arrow: Any, values: Any, fill: Any, filled: Any, masked: Any) -> None:
    array = pa.array(values, arrow)
    with pytest.raises(NullFoundError) as error:
        convert(array)
    assert error.value.row == values.index(None)
    assert same(convert(array, fill), filled)
    batch = Converter(pa.schema([("x", arrow)]), "mask", rows=False).batch(pa.record_batch([array], names=["x"]))
    assert same(batch["x"], masked)
    assert same(batch["x__mask"], np.array([value is not None for value in values]))
    assert [cell is None for cell in convert(array, None, rows=True)] == [value is None for value in values]


def test_none_stands_in_batches_of_objects_only() -> None:
    assert convert(pa.array(["a", None]), None).tolist() == ["a", None]
    with pytest.raises(InvalidArgumentError, match="nulls=None cannot stand in column 'x' of type int64"):
        convert(pa.array([1, None]), None)


@pytest.mark.parametrize(
    ("arrow", "fill"),
    [
        *((pa.int8(), fill) for fill in (300, 0.5, float("nan"), "0", True, None)),
        *((pa.uint8(), -1), (pa.bool_(), 0), (pa.string(), 0), (pa.string(), b""), (pa.binary(), "")),
        *((pa.timestamp("s"), 0), (pa.float64(), "0"), (pa.float64(), False)),
    ],
    ids=repr,
)
def test_a_value_that_cannot_stand_in_a_column_is_refused(arrow: Any, fill: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot stand in column 'x'"):
        convert(pa.array([None], arrow), fill)


def test_nulls_inside_lists_name_their_row_and_can_be_filled() -> None:
    array = pa.array([[1], [], [2, None]], pa.list_(pa.int64()))
    for nulls in ("error", "mask", None):
        with pytest.raises(NullFoundError, match="inside a list") as error:
            convert(array, nulls)
        assert error.value.row == 2
    assert convert(array, 0) == Ragged.of([[1], [], [2, 0]])
    fixed = pa.array([[1, 2], None, [None, 3]], pa.list_(pa.int64(), 2))
    with pytest.raises(NullFoundError, match="inside a list") as error:
        convert(fixed, "mask")
    assert error.value.row == 2
    assert convert(fixed, 0).tolist() == [[1, 2], [0, 0], [0, 3]]


def test_values_below_a_null_list_do_not_show() -> None:
    offsets, values = pa.array([0, 2, 4, 5], pa.int32()), pa.array([1, 2, 66, 66, 3])
    array = pa.ListArray.from_arrays(offsets, values, mask=pa.array([False, True, False]))
    assert convert(array, 0) == Ragged.of([[1, 2], [], [3]])
    assert convert(array.slice(1), 0) == Ragged.of([[], [3]])


def test_a_null_struct_is_null_in_its_fields() -> None:
    array = pa.array([{"a": 1, "b": {"c": "x"}}, None], STRUCT)
    with pytest.raises(NullFoundError, match=r"'x\.a'"):
        convert(array)
    masked = convert(array, "mask")
    assert masked["a"].tolist() == [1, 0] and masked["a__mask"].tolist() == [True, False]
    assert masked["b"]["c"].tolist() == ["x", ""] and masked["b"]["c__mask"].tolist() == [True, False]


def test_a_mask_does_not_overwrite_a_column() -> None:
    with pytest.raises(InvalidArgumentError, match="x__mask"):
        Converter(pa.schema([("x", pa.int8()), ("x__mask", pa.bool_())]), "mask", rows=False)


@pytest.mark.parametrize(("arrow", "values", "batch", "rows"), TYPES, ids=[str(t) for t, *_ in TYPES])
def test_arrays_can_be_written_to_and_arrow_s_constants_are_not(arrow: Any, values: Any, batch: Any, rows: Any) -> None:
    read_only = pa.ipc.read_record_batch(  # as from a memory map
        pa.record_batch([pa.array(values, arrow)], names=["x"]).serialize(), pa.schema([("x", arrow)])
    )
    found = Converter(read_only.schema, "error", rows=False).batch(read_only)

    def is_writable(leaf: Any) -> None:
        arrays = (leaf.values, leaf.offsets) if isinstance(leaf, Ragged) else (leaf,)
        assert all(array.flags.writeable for array in arrays)

    map_leaves(is_writable, found)
    map_leaves(lambda leaf: (leaf.values if isinstance(leaf, Ragged) else leaf).fill(0), found)
    assert read_only.column(0).to_pylist() == pa.array(values, arrow).to_pylist()


def test_wide_rows_and_strange_names_are_kept() -> None:
    names = ["it's", 'a "b"', "{x}", "\\", "π", *(f"c{i}" for i in range(100))]
    for count in (1, 5, 105):
        batch = pa.record_batch([pa.array([i, -i]) for i in range(count)], names=names[:count])
        rows = Converter(batch.schema, "error", rows=True).rows(batch)(0, 2)
        assert rows == [dict(zip(names, range(count))), {name: -i for i, name in enumerate(names[:count])}]
