"""From Arrow columns of a stripe to feature-major batches, without passing through rows.

A `FeatureBlock` holds a stripe's columns as they came; `batch(start, stop)` cuts rows out of all of them: one copy for
the dense features together, one for each sparse feature's values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.core.element import Array, Element
from penstock.core.keyed import KeyedDense, KeyedRagged
from penstock.core.leaves import leaf_type
from penstock.graph.readers import ReadFeatures
from penstock.sources.recycled import RecycledMemory


class FeatureBlock:
    """Rows of one file, with the features that were asked for; a feature that is not there is empty."""

    def __init__(
        self, node: ReadFeatures, columns: Mapping[str, pa.Array], rows: int, memory: RecycledMemory | None = None
    ) -> None:
        """`memory` is where the lists of batches are put, one batch after the other."""
        self.rows = rows
        memory = memory or RecycledMemory()
        self._node = node
        self._dense, self._presence = _dense(node.dense, columns, rows)
        self._sparse = _IdLists(node.sparse, columns, rows, memory, weighted=False)
        self._scored = _IdLists(node.scored, columns, rows, memory, weighted=True)
        self._plain = {name: _plain(columns.get(name), rows) for name in node.columns}

    def __len__(self) -> int:
        return self.rows

    def batch(self, start: int, stop: int) -> dict[str, Any]:
        """Return the rows start to stop as a batch."""
        made: dict[str, Any] = {}
        if self._node.dense:
            made["dense"] = KeyedDense(
                self._node.dense,
                np.ascontiguousarray(self._dense[:, start:stop]),
                np.ascontiguousarray(self._presence[:, start:stop]),
            )
        if self._node.sparse:
            made["sparse"] = self._sparse.keyed(start, stop)
        if self._node.scored:
            made["scored"] = self._scored.keyed(start, stop)
        for name, column in self._plain.items():
            made[name] = column[start:stop].copy()
        return made


def join_batches(parts: Sequence[dict[str, Any]]) -> Element:
    """Return one batch of the rows of several."""
    if len(parts) == 1:
        return parts[0]
    joined: dict[str, Any] = {}
    for name, first in parts[0].items():
        values = [part[name] for part in parts]
        if isinstance(first, np.ndarray):
            joined[name] = np.concatenate(values)
        else:
            joined[name] = leaf_type(type(first)).join(values, np.concatenate)
    return joined


def _dense(names: Sequence[str], columns: Mapping[str, pa.Array], rows: int) -> tuple[Array, Array]:
    values = np.zeros((len(names), rows), np.float32)
    presence = np.zeros((len(names), rows), np.bool_)
    for place, name in enumerate(names):
        column = columns.get(name)
        if column is None:
            continue
        content = column.buffers()[1]
        values[place] = np.frombuffer(content, np.float32, rows, column.offset * 4) if content is not None else 0
        presence[place] = _validity(column, rows) if column.null_count else True
    np.copyto(values, 0, where=~presence)
    return values, presence


def _validity(column: pa.Array, rows: int) -> Array:
    """Return which rows are there, of a column of which some are not.

    Arrow's own functions say it too; but to load all of them takes longer than a stripe does.
    """
    first, shift = divmod(column.offset, 8)
    packed = np.frombuffer(column.buffers()[0], np.uint8, offset=first)[: (rows + 15) // 8 + 1]
    return np.unpackbits(packed, count=shift + rows, bitorder="little")[shift:].view(np.bool_)


def _plain(column: pa.Array | None, rows: int) -> Array:
    if column is None:
        return np.zeros(rows, np.float32)
    if column.null_count:
        column = column.fill_null(0)
    return _numbers(column, column.type.to_pandas_dtype())


class _IdLists:
    """Lists of ids of several features; a null is an empty list."""

    def __init__(
        self,
        names: tuple[str, ...],
        columns: Mapping[str, pa.Array],
        rows: int,
        memory: RecycledMemory,
        *,
        weighted: bool,
    ) -> None:
        self._names, self._memory, self._weighted = names, memory, weighted
        self._ends = np.zeros((len(names), rows + 1), np.int64)
        self._values: list[Array] = []
        self._weights: list[Array] = []
        for place, name in enumerate(names):
            column = columns.get(name)
            if column is None:
                self._values.append(_NO_IDS)
                self._weights.append(_NO_WEIGHTS)
                continue
            content = column.buffers()[1]
            offsets = np.frombuffer(content, np.int32, rows + 1, column.offset * 4) if rows else np.zeros(1, np.int32)
            if column.null_count and np.diff(offsets)[~_validity(column, rows)].any():
                column = column.fill_null([])
                offsets = np.frombuffer(column.buffers()[1], np.int32, rows + 1, column.offset * 4)
            self._ends[place] = offsets
            inner = column.values
            if pa.types.is_struct(inner.type):
                self._values.append(_numbers(inner.field(0), np.int64))
                self._weights.append(_numbers(inner.field(1), np.float32))
            else:
                self._values.append(_numbers(inner, np.int64))
                self._weights.append(_NO_WEIGHTS)

    def keyed(self, start: int, stop: int) -> KeyedRagged:
        ends = self._ends[:, start : stop + 1]
        first, last = ends[:, 0], ends[:, -1]
        before = np.concatenate(([0], np.cumsum(last - first)))
        offsets = np.empty(len(self._names) * (stop - start) + 1, np.int64)
        offsets[:-1] = (ends[:, :-1] + (before[:-1] - first)[:, None]).ravel()
        offsets[-1] = before[-1]
        cuts = list(zip(first.tolist(), last.tolist()))
        values = self._memory.joined([own[a:b] for own, (a, b) in zip(self._values, cuts)], np.int64)
        weights = None
        if self._weighted:
            weights = self._memory.joined([own[a:b] for own, (a, b) in zip(self._weights, cuts)], np.float32)
        return KeyedRagged(self._names, values, offsets, weights)


_NO_IDS = np.zeros(0, np.int64)
_NO_WEIGHTS = np.zeros(0, np.float32)


def _numbers(column: pa.Array, dtype: Any) -> Array:
    if column.null_count:
        column = column.fill_null(0)
    content = column.buffers()[1]
    if column.type != pa.from_numpy_dtype(dtype) or content is None:
        return np.asarray(column, dtype)
    # Arrow's conversion of an array begins with an import of pandas, where that is installed.
    return np.frombuffer(content, dtype, len(column), column.offset * np.dtype(dtype).itemsize)
