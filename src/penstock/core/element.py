"""Elements: nested dicts, lists, tuples and namedtuples over leaves.

A leaf is a numpy array or scalar, a Python scalar, `bytes`, `str`, `None` or a `Ragged`. Everything else a user's
function returns travels as a leaf too, as long as it stays in one process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Element: TypeAlias = Any
"""A user's value; the one place where `Any` is meant."""


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Rows of unequal length: row i is `values[offsets[i]:offsets[i + 1]]`.

    >>> Ragged.of([[1, 2], [], [3]]).offsets.tolist()
    [0, 2, 2, 3]
    """

    values: np.ndarray[Any, Any]
    offsets: np.ndarray[Any, np.dtype[np.int64]]

    @staticmethod
    def of(rows: Iterable[Any], dtype: Any = None) -> Ragged:
        """Return rows of different lengths as one array and its offsets."""
        arrays = [np.asarray(row, dtype=dtype) for row in rows]
        offsets = np.zeros(len(arrays) + 1, np.int64)
        np.cumsum([len(a) for a in arrays], out=offsets[1:])
        filled = [a for a in arrays if len(a)] or arrays
        values = np.concatenate(filled) if filled else np.empty(0, dtype or np.float64)
        return Ragged(values, offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray[Any, Any]:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a Ragged of {len(self)} rows")
        row %= len(self)
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def slice(self, start: int, stop: int) -> Ragged:
        """Return rows start to stop, with offsets that begin at 0 again."""
        offsets = self.offsets[start : stop + 1]
        return Ragged(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])

    @property
    def lengths(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.diff(self.offsets)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.offsets.nbytes

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ragged):
            return NotImplemented
        return np.array_equal(self.offsets, other.offsets) and np.array_equal(self.values, other.values)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Ragged({len(self)} rows, {len(self.values)} values of {self.values.dtype})"


def is_namedtuple(value: object) -> bool:
    return isinstance(value, tuple) and hasattr(type(value), "_fields")


def rebuild_like(sample: Element, parts: Sequence[Element]) -> Element:
    """Return `parts` in the container type of `sample` (a dict, list, tuple or namedtuple)."""
    if isinstance(sample, dict):
        return dict(zip(sample, parts))
    if is_namedtuple(sample):
        return type(sample)(*parts)
    return list(parts) if isinstance(sample, list) else tuple(parts)


def map_leaves(function: Callable[[Any], Any], element: Element) -> Element:
    if isinstance(element, dict):
        return {key: map_leaves(function, value) for key, value in element.items()}
    if isinstance(element, (list, tuple)):
        return rebuild_like(element, [map_leaves(function, value) for value in element])
    return function(element)


def leaves(element: Element) -> list[Any]:
    """Return the leaves in a fixed order (the order of the containers)."""
    if isinstance(element, dict):
        return [leaf for value in element.values() for leaf in leaves(value)]
    if isinstance(element, (list, tuple)):
        return [leaf for value in element for leaf in leaves(value)]
    return [element]


def leaf_bytes(leaf: Any) -> int:
    if isinstance(leaf, (np.ndarray, Ragged)):
        return int(leaf.nbytes)
    return sys.getsizeof(leaf)


def element_bytes(element: Element) -> int:
    """Return about how much memory an element holds: its leaves and 64 bytes a container."""
    if isinstance(element, dict):
        return 64 + sum(map(element_bytes, element.values()))
    if isinstance(element, (list, tuple)):
        return 64 + sum(map(element_bytes, element))
    return leaf_bytes(element)


def batch_length(batch: Element) -> int:
    """Return the length of the leading axis that every leaf of a batch shares."""
    lengths = {len(leaf) for leaf in leaves(batch)}
    if len(lengths) != 1:
        raise ValueError(f"not a batch: its leaves have the lengths {sorted(lengths)}")
    return lengths.pop()


def slice_batch(batch: Element, start: int, stop: int) -> Element:
    """Return rows start to stop of a batch, as views."""
    return map_leaves(lambda leaf: leaf.slice(start, stop) if isinstance(leaf, Ragged) else leaf[start:stop], batch)


def batch_rows(batch: Element) -> list[Element]:
    """Return a batch's rows as elements; numeric arrays give numpy scalars or views, object arrays their objects."""
    if isinstance(batch, dict):
        columns = [batch_rows(value) for value in batch.values()]
        return [dict(zip(batch, row)) for row in zip(*columns)]
    if isinstance(batch, (tuple, list)) and (is_namedtuple(batch) or _holds_batches(batch)):
        columns = [batch_rows(value) for value in batch]
        return [rebuild_like(batch, row) for row in zip(*columns)]
    return [batch[i] for i in range(len(batch))] if isinstance(batch, Ragged) else list(batch)


def _holds_batches(batch: Sequence[Any]) -> bool:
    return bool(batch) and all(isinstance(part, (np.ndarray, Ragged, dict, list, tuple)) for part in batch)
