from __future__ import annotations

import tracemalloc
from collections import namedtuple
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.core.element import Ragged, is_namedtuple
from penstock.core.errors import CodecError
from penstock.wire.elements import flatten, unflatten
from penstock.wire.runs import ElementRun, decode_run, encode_run

Point = namedtuple("Point", ["x", "y"])


def contents(value: Any) -> list[bytes]:
    """Return all bytes but the padding of structured types, which nobody promises to keep."""
    if value.dtype.names is None:
        return [value.tobytes()]
    return [part for name in value.dtype.names for part in contents(np.asarray(value[name]))]


def assert_same(got: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert type(got) is dict and [(type(k), k) for k in got] == [(type(k), k) for k in expected]
        for key in expected:
            assert_same(got[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        if is_namedtuple(expected):
            assert type(got).__name__ == type(expected).__name__ and got._fields == expected._fields
        else:
            assert type(got) is type(expected)
        assert len(got) == len(expected)
        for one, other in zip(got, expected):
            assert_same(one, other)
    elif isinstance(expected, Ragged):
        assert type(got) is Ragged
        assert_same(got.values, expected.values)
        assert_same(got.offsets, expected.offsets)
    elif isinstance(expected, np.ndarray):
        assert type(got) is np.ndarray and got.shape == expected.shape and got.dtype == expected.dtype
        if expected.dtype == object:
            assert_same(list(got.ravel()), list(expected.ravel()))
        else:
            assert contents(got) == contents(expected) and got.flags.aligned
    elif isinstance(expected, np.generic):
        assert type(got) is type(expected) and got.dtype == expected.dtype and contents(got) == contents(expected)
    elif isinstance(expected, float):
        assert type(got) is float and np.float64(got).tobytes() == np.float64(expected).tobytes()
    else:
        assert type(got) is type(expected) and got == expected


def received(elements: list[Any], *, shift: int = 0) -> list[Any]:
    """Send a run through buffers that start `shift` bytes off any alignment."""
    layout, buffers = encode_run(elements)
    arrived = []
    for buffer in buffers:
        memory = np.empty(len(buffer) + 64 + shift, np.uint8)
        start = -memory.ctypes.data % 64 + shift
        memory[start : start + len(buffer)] = np.frombuffer(buffer, np.uint8)
        arrived.append(memory[start : start + len(buffer)].data)
    return decode_run(layout, arrived)


dtypes = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    hnp.complex_number_dtypes(),
    hnp.datetime64_dtypes(endianness="?"),
    hnp.timedelta64_dtypes(),
    hnp.byte_string_dtypes(),
    hnp.unicode_string_dtypes(),
    st.sampled_from(
        [
            np.dtype([("a", "<i4"), ("b", "u1")]),
            np.dtype([("a", "u1"), ("b", "<f8")], align=True),
            np.dtype([("a", [("x", "<f4"), ("y", "<f4", (2,))]), ("b", "S3")]),
            np.dtype("V5"),
        ]
    ),
)
shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)


@st.composite
def filled(draw: st.DrawFn, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Any bytes are a value of these types, except that text must be valid."""
    count = int(np.prod(shape))
    if dtype.kind == "U":
        array = np.zeros(shape, dtype)
        array[...] = draw(st.text(max_size=3, alphabet="abc é"))
    else:
        content = draw(st.binary(min_size=dtype.itemsize * count, max_size=dtype.itemsize * count))
        array = (
            np.frombuffer(content, np.uint8).copy().view(dtype).reshape(shape) if content else np.empty(shape, dtype)
        )
    order = draw(st.sampled_from("CFS"))
    if order == "F":
        return np.asfortranarray(array) if array.ndim else array
    return np.repeat(array, 2, axis=0)[::2] if order == "S" and array.ndim else array


plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.text("\ud800a"), st.binary())
arrays = st.tuples(dtypes, shapes).flatmap(lambda pair: filled(*pair))
leaves = st.one_of(
    plain,
    arrays,
    dtypes.filter(lambda dtype: dtype.itemsize > 0).flatmap(lambda d: filled(d, (1,))).map(lambda a: a[0]),
    st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=3).map(lambda rows: Ragged.of(rows, np.int32)),
    st.lists(plain, max_size=3).map(lambda parts: np.array([*parts, "x"], object)[:-1]),
)
any_element = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.tuples(inner, inner).map(lambda pair: Point(*pair)),
        st.dictionaries(st.one_of(st.text("ab", max_size=2), st.integers(0, 3), st.booleans()), inner, max_size=3),
    ),
    max_leaves=5,
)


@st.composite
def alike(draw: st.DrawFn) -> list[Any]:
    """Runs as pipelines make them: one structure, one dtype a leaf, mostly one shape."""
    dtype, shape = draw(dtypes), draw(shapes)
    scalar = draw(st.sampled_from([st.integers(-5, 5), st.booleans(), st.floats(), st.text(max_size=3), st.none()]))

    def some_shape(given: tuple[int, ...]) -> st.SearchStrategy[tuple[int, ...]]:
        return st.tuples(*[st.one_of(st.just(side), st.integers(0, 3)) for side in given])

    row = filled(dtype, shape) if draw(st.booleans()) else some_shape(shape).flatmap(lambda s: filled(dtype, s))
    one = draw(
        st.sampled_from(
            [
                row,
                st.fixed_dictionaries({"x": row, "y": scalar}),
                st.fixed_dictionaries({"x": row, "y": scalar, "z": st.binary(max_size=5), "w": row}),
                st.tuples(row, st.lists(scalar, min_size=2, max_size=2)),
                st.tuples(row, scalar).map(lambda pair: {"p": Point(*pair), "q": {}, "r": ()}),
                st.fixed_dictionaries({0: scalar, "a": row}),
            ]
        )
    )
    return draw(st.lists(one, min_size=2, max_size=6))


@settings(max_examples=150, deadline=None)
@given(st.lists(any_element, max_size=4), st.sampled_from([0, 1, 8]))
def test_any_elements_survive(elements: list[Any], shift: int) -> None:
    assert_same(received(elements, shift=shift), elements)


@settings(max_examples=250, deadline=None)
@given(alike(), st.sampled_from([0, 1, 8]))
def test_runs_of_one_structure_survive_and_agree_with_the_elements_one_by_one(elements: list[Any], shift: int) -> None:
    got = received(elements, shift=shift)
    assert_same(got, elements)
    assert_same(got, [unflatten(*flatten(element)) for element in elements])


@settings(max_examples=150, deadline=None)
@given(st.one_of(alike(), st.lists(any_element, max_size=4)), st.integers(0, 6), st.integers(0, 6))
def test_a_run_gives_any_part_of_its_elements(elements: list[Any], start: int, more: int) -> None:
    run = ElementRun(*encode_run(elements), count=len(elements))
    assert_same(run[start : start + more], elements[start : start + more])
    assert_same(run[start + more :], elements[start + more :])
    assert_same(run[:start], elements[:start])


@pytest.mark.parametrize("length", [3, None], ids=["of one shape", "of several"])
def test_rows_are_made_when_they_are_asked_for(length: int | None) -> None:
    rows = [{"x": np.full(length or 1 + i % 3, i), "y": (np.full(length or 1 + i % 3, i), i)} for i in range(1000)]
    run = ElementRun(*encode_run(rows))
    tracemalloc.start()
    try:
        few, few_bytes = run[100:110], tracemalloc.get_traced_memory()[0]
        many, many_bytes = run[110:710], tracemalloc.get_traced_memory()[0] - few_bytes
    finally:
        tracemalloc.stop()
    assert_same([*few, *many], rows[100:710])
    assert few_bytes < many_bytes / 20


def test_a_run_of_another_number_of_elements_than_announced_is_refused() -> None:
    for elements in ([1], [1, 2], []):
        with pytest.raises(CodecError, match=f"a run of {len(elements)} elements where 3"):
            ElementRun(*encode_run(elements), count=3)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60), st.lists(st.binary(max_size=40), max_size=2))
def test_bytes_that_are_no_run_are_refused(layout: bytes, buffers: list[bytes]) -> None:
    with pytest.raises(CodecError):
        decode_run(layout, buffers)


@pytest.mark.parametrize("position", range(40))
def test_a_layout_cut_or_changed_anywhere_is_refused_or_gives_other_values(position: int) -> None:
    layout, buffers = encode_run([{"x": np.arange(3), "y": b"ab", "z": i, "w": np.zeros(i)} for i in range(3)])
    for changed in (layout[:position], layout[:position] + b"\xff" + layout[position + 1 :]):
        try:
            decode_run(changed, buffers)
        except CodecError:
            pass


@pytest.mark.parametrize("size", [3, 5000])
def test_rows_are_writable_aligned_and_do_not_overlap(size: int) -> None:
    elements = [{"a": np.full(size, i, np.float32), "b": np.full(i + 1, i, np.int16), "c": i} for i in range(8)]
    got = received(elements, shift=1)
    for i, element in enumerate(got):
        for key in "ab":
            assert element[key].flags.aligned and element[key].flags.writeable
            element[key][...] = 99
        for other in got[i + 1 :]:
            assert_same(other, elements[other["c"]])


def test_an_array_of_one_element_is_sent_from_where_it_lies() -> None:
    batch = {"x": np.zeros((16, 1000), np.float32), "y": np.arange(16)}
    layout, buffers = encode_run([batch])
    assert np.frombuffer(buffers[0], np.uint8).ctypes.data == batch["x"].ctypes.data
    assert np.frombuffer(buffers[1], np.uint8).ctypes.data == batch["y"].ctypes.data
    memory = [np.frombuffer(bytearray(buffer), np.uint8) for buffer in buffers]
    (got,) = decode_run(layout, memory)
    assert got["x"].ctypes.data == memory[0].ctypes.data and got["x"].flags.writeable


def test_large_rows_of_a_run_are_not_copied_together() -> None:
    rows = [np.full((400, 400), i, np.float32) for i in range(3)]
    _, buffers = encode_run(rows)
    assert [np.frombuffer(buffer, np.uint8).ctypes.data for buffer in buffers] == [row.ctypes.data for row in rows]
    assert_same(received(rows), rows)


def test_a_run_of_small_elements_is_few_buffers_and_a_short_layout() -> None:
    layout, buffers = encode_run([{"x": np.full(256, i, np.float32), "y": np.int64(i)} for i in range(1000)])
    assert len(buffers) == 2 and len(layout) < 100
    _, buffers = encode_run([np.arange(i % 7) if i % 2 else "odd one" for i in range(1000)])
    assert len(buffers) <= 1


def test_bfloat16_survives() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rows = [np.arange(i, i + 4).astype(ml_dtypes.bfloat16) for i in range(3)]
    assert_same(received(rows), rows)
    assert_same(received([row[0] for row in rows]), [row[0] for row in rows])


def test_what_would_lose_something_is_refused_by_name() -> None:
    for element in ({"m": np.ma.masked_array([1, 2], [True, False])}, {"m": object()}, {"m": {1.5: 2}}):
        for run in ([element], [element, element]):
            with pytest.raises(CodecError, match="cannot be encoded"):
                encode_run(run)


def test_headers_of_older_caches_are_still_read() -> None:
    old = msgspec.msgpack.encode([4, [["a", "<i4"], ["b", "<f4", [2]]], [1]])
    got = unflatten(old, [bytes(12)])
    assert got.dtype == np.dtype([("a", "<i4"), ("b", "<f4", (2,))])


def test_columns_are_put_where_memory_is_given_for_them() -> None:
    taken: list[np.ndarray[Any, Any]] = []

    def allocate(shape: Any, dtype: Any) -> np.ndarray[Any, Any] | None:
        taken.append(np.full(shape, 7, dtype))
        return taken[-1]

    elements = [{"x": np.full(2_000, i, np.float64), "y": np.full(2, i)} for i in range(8)]
    layout, buffers = encode_run(elements, allocate)
    assert [array.nbytes for array in taken] == [8 * 16_000], "what is small stands in the layout"
    assert np.shares_memory(np.frombuffer(buffers[0], np.uint8), taken[0].view(np.uint8))
    assert_same(decode_run(layout, buffers), elements)
    assert encode_run(elements, lambda shape, dtype: None)[0] == layout, "where there is no memory it takes its own"


def test_what_lay_in_the_given_memory_is_not_sent_as_padding() -> None:
    padded = np.dtype([("a", "u1"), ("b", "f8")], align=True)
    elements = [np.zeros(4_000, padded) for _ in range(3)]
    _, buffers = encode_run(elements, lambda shape, dtype: np.full(shape, 255, np.uint8).view(dtype))
    assert not any(bytes(buffers[0]))
