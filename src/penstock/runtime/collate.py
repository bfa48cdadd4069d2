"""Rows into batches.

Numbers become arrays; arrays are copied once, into one buffer; `str`, `bytes`, `None` and other objects become object
arrays (numpy's own string types drop trailing zeros). Rows of a batch must have the same structure, shapes and types.
A row that is None is refused: a function forgot to return something. A field that is None is a value like others.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from operator import attrgetter, itemgetter
from typing import Any, Protocol, runtime_checkable

import numpy as np

from penstock.core.element import Array, Element, Ragged, rebuild_like
from penstock.core.errors import BatchShapeError
from penstock.core.leaves import leaf_type

LeafCollator = Callable[[Sequence[Any], str], Any]
Empty = Callable[[tuple[int, ...], "np.dtype[Any]"], Array]
"""Gives memory for an array."""


@runtime_checkable
class CollatesInto(Protocol):
    """A collate function that makes large arrays in memory it is given: what it returns must be nobody else's."""

    def collate_into(self, rows: Sequence[Any], empty: Empty, /) -> Element: ...


_VALUES = frozenset({int, float, str, bytes, bool, type(None)})
_LEAVES = _VALUES | {np.ndarray}
_dtype_of = attrgetter("dtype")
_shape_of = attrgetter("shape")


def collate(rows: Sequence[Element], path: str = "", leaf: LeafCollator | None = None) -> Element:
    """Return the batch of `rows`; `leaf` says how leaves are joined (default: equal shapes only)."""
    first = rows[0]
    kind = type(first)
    if kind in _LEAVES:
        return (leaf or stack_leaves)(rows, path)
    if isinstance(first, dict):
        try:
            if sum(map(len, rows)) != len(first) * len(rows):  # a row that lacks a key is found below
                raise different_structure(rows, path)
            columns = [collate(list(map(itemgetter(key), rows)), f"{path}[{key!r}]", leaf) for key in first]
            return rebuild_like(first, columns)
        except (KeyError, TypeError, IndexError):
            if all(isinstance(row, dict) and row.keys() == first.keys() for row in rows):
                raise  # a leaf's own error: the rows are alike
            raise different_structure(rows, path) from None
    if isinstance(first, (tuple, list)):
        width = len(first)
        if any(type(row) is not kind or len(row) != width for row in rows):  # tuples and lists mix silently
            raise different_structure(rows, path)
        columns = [collate(column, f"{path}[{i}]", leaf) for i, column in enumerate(zip(*rows))]
        return rebuild_like(first, columns)
    if (entry := leaf_type(kind)).container and entry.flatten is not None:
        if any(type(row) is not kind for row in rows):
            raise different_structure(rows, path)
        return entry.unflatten(collate(list(map(entry.flatten, rows)), path, leaf))
    return (leaf or stack_leaves)(rows, path)


def stack_leaves(rows: Sequence[Any], path: str, empty: Empty = np.empty) -> Any:
    """Return one array with a leading axis, for leaves of equal shape and type; keyed rows become a keyed batch."""
    first = rows[0]
    kind = type(first)
    if kind is int:
        try:
            return _packed(rows, "q", np.int64)
        except struct.error:
            return _numbers_or_objects(rows, path)
    if kind is float:
        try:
            return _packed(rows, "d", np.float64)
        except struct.error:
            return _numbers_or_objects(rows, path)
    if kind is np.ndarray:
        return _stack_arrays(rows, path, empty)
    if isinstance(first, (str, bytes)) or first is None:
        return _objects(rows, path)
    if isinstance(first, (bool, np.generic)):
        return _numbers_or_objects(rows, path)
    if hasattr(first, "__array__"):  # torch tensors and other array types
        return _stack_arrays([np.asarray(row) for row in rows], path, empty)
    if (entry := leaf_type(kind)).has_rows:
        if entry.rows_are_batches and all(type(row) is kind and entry.length(row) == 1 for row in rows):
            return entry.join(rows, np.concatenate)
        where = f"leaf {path or 'of the element'} is a {kind.__name__}"
        raise BatchShapeError(f"{where}, which is a column; batch column batches with rebatch()")
    return _objects(rows, path)


def _as_arrays(rows: Sequence[Any]) -> Sequence[Any]:
    """Return arrays of leaves of other array types, and other leaves as they are."""
    kind = type(rows[0])
    if kind in _LEAVES or not leaf_type(kind).has_rows or not hasattr(kind, "__array__"):
        return rows
    return [np.asarray(row) if type(row) is kind else row for row in rows]


def _packed(rows: Sequence[Any], code: str, dtype: Any) -> Array:
    """Return numbers as an array; `struct` refuses what is no number of the kind, unlike np.fromiter, and is faster."""
    out = np.empty(len(rows), dtype)
    struct.pack_into(f"{len(rows)}{code}", out.data, 0, *rows)
    return out


def _stack_arrays(rows: Sequence[Array], path: str, empty: Empty) -> Array:
    shape, dtype, count = rows[0].shape, rows[0].dtype, len(rows)
    if (
        list(map(type, rows)).count(np.ndarray) < count  # half of what a set of them costs
        or list(map(_shape_of, rows)).count(shape) < count
        or list(map(_dtype_of, rows)).count(dtype) < count
    ):
        for i, row in enumerate(rows):
            if type(row) is not np.ndarray or row.shape != shape or row.dtype != dtype:
                raise different_arrays(rows[0], row, i, path)
    if not shape or 0 in shape or dtype.hasobject:
        return np.stack(rows)
    out = empty((len(rows), *shape), dtype)
    np.concatenate(rows, out=out.reshape(len(rows) * shape[0], *shape[1:]))
    return out


def different_arrays(first: Array, other: Any, row: int, path: str) -> BatchShapeError:
    def described(value: Any) -> str:
        return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__

    if other is None and not path:
        return _no_element(row)
    return BatchShapeError(
        f"leaf {path or 'of the element'}: row 0 is {described(first)}, row {row} is {described(other)}; "
        "make them equal in map(), or use padded_batch() or ragged_batch()",
        row,
    )


def _no_element(row: int) -> BatchShapeError:
    return BatchShapeError(
        f"row {row} is None: a function that ends without `return` gives None; "
        "return the element, or leave it out with filter()",
        row,
    )


def _numbers_or_objects(rows: Sequence[Any], path: str) -> Array:
    if any(not isinstance(row, (int, float, complex, np.generic)) for row in rows):
        return _objects(rows, path)
    return np.array(rows)


def _objects(rows: Sequence[Any], path: str) -> Array:
    if not path and any(row is None for row in rows):
        raise _no_element(next(i for i, row in enumerate(rows) if row is None))
    out = np.empty(len(rows), object)
    if _VALUES.issuperset(map(type, rows)):
        out[:] = rows
    else:  # one by one: numpy takes whatever has a length for rows of its own
        for i, row in enumerate(rows):
            out[i] = row
    return out


def different_structure(rows: Sequence[Element], path: str, numbers: Sequence[int] | None = None) -> BatchShapeError:
    first = rows[0]
    numbers = numbers or range(len(rows))
    for i, row in zip(numbers, rows):
        if row is None and not path:
            return _no_element(i)
        if (
            type(row) is not type(first)
            or (isinstance(first, (dict, list, tuple)) and len(row) != len(first))
            or (isinstance(first, dict) and row.keys() != first.keys())
        ):
            return BatchShapeError(
                f"{path or 'the element'} has another structure in row {i} than in row {numbers[0]}: "
                f"{_outline(row)} against {_outline(first)}",
                i,
            )
    return BatchShapeError(f"{path or 'the element'} differs in structure between rows")


def _outline(value: Element) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(map(repr, value)) + "}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


class Members:
    """What becomes of one leaf where rows are made into several batches: its part in each of them."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts


class Padder:
    """A leaf collator that pads arrays along every axis; `values` and `padding` count what it has filled in.

    With `cuts`, the rows make several batches that end there, all padded alike: leaves become `Members`.
    """

    def __init__(
        self,
        value: Any,
        length: int | None = None,
        multiple_of: int | None = None,
        empty: Empty = np.empty,
        cuts: Sequence[int] | None = None,
    ) -> None:
        self._value = value
        self._length = length
        self._multiple_of = multiple_of
        self._empty = empty
        self._cuts = cuts
        self.values = 0
        self.padding = 0

    def __call__(self, rows: Sequence[Any], path: str) -> Array | Members:
        rows = _as_arrays(rows)
        if not isinstance(rows[0], np.ndarray) or not rows[0].ndim:
            return self._cut(rows, lambda part: stack_leaves(part, path, self._empty))
        first = rows[0]
        for i, row in enumerate(rows):
            if not isinstance(row, np.ndarray) or row.ndim != first.ndim or row.dtype != first.dtype:
                raise different_arrays(first, row, i, path)
        shapes = np.array([row.shape for row in rows])
        shape = self._padded(shapes, path)
        values = int(shapes.prod(axis=1).sum())
        self.values += values
        self.padding += len(rows) * math.prod(shape) - values
        return self._cut(rows, lambda part: self._filled(part, shape))

    def _cut(self, rows: Sequence[Any], join: Callable[[Sequence[Any]], Array]) -> Array | Members:
        if self._cuts is None:
            return join(rows)
        return Members([join(rows[start:stop]) for start, stop in pairwise((0, *self._cuts))])

    def _padded(self, shapes: Array, path: str) -> tuple[int, ...]:
        first, *others = map(int, shapes.max(axis=0))
        if self._length is not None:
            if first > self._length:
                row = int(shapes[:, 0].argmax())
                raise BatchShapeError(
                    f"leaf {path or 'of the element'} has a row of {first}, over length={self._length}", row
                )
            first = self._length
        elif self._multiple_of is not None:
            first = -(-first // self._multiple_of) * self._multiple_of
        return first, *others

    def _filled(self, rows: Sequence[Array], shape: tuple[int, ...]) -> Array:
        out = self._empty((len(rows), *shape), rows[0].dtype)
        out[...] = self._value
        for i, row in enumerate(rows):
            out[i][tuple(slice(length) for length in row.shape)] = row
        return out


def ragged_leaves(rows: Sequence[Any], path: str) -> Any:
    """Return a `Ragged` of one-dimensional leaves; others are stacked."""
    rows = _as_arrays(rows)
    first = rows[0]
    if not isinstance(first, np.ndarray) or first.ndim != 1:
        return stack_leaves(rows, path)
    for i, row in enumerate(rows):
        if not isinstance(row, np.ndarray) or row.ndim != 1 or row.dtype != first.dtype:
            raise different_arrays(first, row, i, path)
    return Ragged.of(rows, first.dtype)


def join_batches(parts: Sequence[Element], empty: Empty = np.empty) -> Element:
    """Return one batch of the rows of several, column by column. Never a view of a part's memory."""

    def join_arrays(arrays: Sequence[Array], path: str) -> Array:
        first = arrays[0]
        for i, part in enumerate(arrays):
            if part.shape[1:] != first.shape[1:] or part.dtype != first.dtype:
                raise different_arrays(first, part, i, path)
        rows = sum(len(part) for part in arrays)
        return np.concatenate(arrays, out=empty((rows, *first.shape[1:]), first.dtype))

    def join(leaves: Sequence[Any], path: str) -> Any:
        return leaf_type(type(leaves[0])).join(leaves, partial(join_arrays, path=path))

    return collate(parts, "", join)
