"""Elements: nested dicts, lists, tuples, dataclasses and other containers over leaves.

A leaf is a numpy array or scalar, a Python scalar, `bytes`, `str`, `None`, or a value of any class of the table in
`core.leaves`. Everything else a user's function returns is a leaf too, as long as it stays in one process.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np

from penstock.core import leaf_types as leaf_types  # fills the table
from penstock.core.leaves import JoinArrays, LeafType, add_type, is_namedtuple_type, leaf_type, name_of

Element: TypeAlias = Any
"""A user's value; the one place where `Any` is meant."""
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})
"""Leaves that are what they are: the table has nothing to say about them."""
Array: TypeAlias = np.ndarray[Any, Any]


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

    def take(self, rows: np.ndarray[Any, Any]) -> Ragged:
        """Return some rows, by number or by a flag for each."""
        lengths = self.lengths[rows]
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return Ragged(
            self.values[np.arange(offsets[-1]) + np.repeat(self.offsets[:-1][rows] - offsets[:-1], lengths)], offsets
        )

    @property
    def lengths(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """How many values each row has."""
        return np.diff(self.offsets)

    @property
    def nbytes(self) -> int:
        """The bytes of its two arrays."""
        return self.values.nbytes + self.offsets.nbytes

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ragged):
            return NotImplemented
        return np.array_equal(self.offsets, other.offsets) and np.array_equal(self.values, other.values)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Ragged({len(self)} rows, {len(self.values)} values of {self.values.dtype})"


def _ragged_rows(ragged: Ragged) -> list[Any]:
    return [ragged.values[start:stop] for start, stop in pairwise(ragged.offsets.tolist())]


def _join_ragged(parts: Sequence[Ragged], join_arrays: JoinArrays) -> Ragged:
    starts = accumulate((len(part.values) for part in parts), initial=0)
    offsets = [part.offsets[1:] - part.offsets[0] + start for part, start in zip(parts, starts)]
    zero = np.zeros(1, np.int64)
    return Ragged(join_arrays([part.values for part in parts]), np.concatenate([zero, *offsets]).astype(np.int64))


add_type(
    Ragged,
    LeafType(
        name=name_of(Ragged),
        flatten=lambda ragged: (ragged.values, ragged.offsets),
        unflatten=lambda parts: Ragged(*parts),
        has_rows=True,
        slice=Ragged.slice,
        take=Ragged.take,
        rows=_ragged_rows,
        join=_join_ragged,
        nbytes=lambda ragged: ragged.nbytes,
    ),
)


def is_namedtuple(value: object) -> bool:
    return is_namedtuple_type(type(value))


def opened(value: Element) -> tuple[Element, Callable[[Element], Element]] | None:
    """Return what a container that is no dict, list or tuple is made of, and what makes one of that; None: a leaf."""
    entry = leaf_type(type(value))
    return (entry.flatten(value), entry.unflatten) if entry.container and entry.flatten is not None else None


def rebuild_like(sample: Element, parts: Iterable[Element]) -> Element:
    """Return `parts` in the container type of `sample` (a dict, list, tuple or namedtuple)."""
    if isinstance(sample, dict):
        return OrderedDict(zip(sample, parts)) if type(sample) is OrderedDict else dict(zip(sample, parts))
    if is_namedtuple(sample):
        return type(sample)(*parts)
    return list(parts) if isinstance(sample, list) else tuple(parts)


def map_leaves(function: Callable[[Any], Any], element: Element) -> Element:
    if isinstance(element, dict):
        return rebuild_like(element, [map_leaves(function, value) for value in element.values()])
    if isinstance(element, (list, tuple)):
        return rebuild_like(element, [map_leaves(function, value) for value in element])
    if (inside := opened(element)) is not None:
        content, closed = inside
        return closed(map_leaves(function, content))
    return function(element)


def leaves(element: Element) -> list[Any]:
    """Return the leaves in a fixed order (the order of the containers)."""
    if isinstance(element, dict):
        return [leaf for value in element.values() for leaf in leaves(value)]
    if isinstance(element, (list, tuple)):
        return [leaf for value in element for leaf in leaves(value)]
    if (inside := opened(element)) is not None:
        return leaves(inside[0])
    return [element]


def element_bytes(element: Element) -> int:
    """Return about how much memory an element holds: its leaves and 64 bytes a container."""
    if isinstance(element, dict):
        return 64 + sum(map(element_bytes, element.values()))
    if isinstance(element, (list, tuple)):
        return 64 + sum(map(element_bytes, element))
    if isinstance(element, np.ndarray):
        return int(element.nbytes)
    if type(element) in _PLAIN:
        return sys.getsizeof(element)
    if (inside := opened(element)) is not None:
        return 64 + element_bytes(inside[0])
    return leaf_type(type(element)).nbytes(element)


def copied(element: Element) -> Element:
    """Return an element of memory of its own. What the table does not know how to take apart is the same object."""

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return leaf.copy()
        entry = leaf_type(type(leaf))
        return leaf if entry.flatten is None else entry.unflatten(copied(entry.flatten(leaf)))

    return map_leaves(copy, element)


def batch_length(batch: Element) -> int:
    """Return the length of the leading axis that every leaf of a batch shares."""
    lengths = {leaf_type(type(leaf)).length(leaf) for leaf in leaves(batch)}
    if len(lengths) != 1:
        raise ValueError(f"not a batch: its leaves have the lengths {sorted(lengths)}")
    return lengths.pop()


def slice_batch(batch: Element, start: int, stop: int) -> Element:
    """Return rows start to stop of a batch, as views."""
    return map_leaves(lambda leaf: leaf_type(type(leaf)).slice(leaf, start, stop), batch)


def batch_rows(batch: Element) -> list[Element]:
    """Return a batch's rows as elements; numeric arrays give numpy scalars or views, object arrays their objects."""
    if isinstance(batch, dict):
        columns = [batch_rows(value) for value in batch.values()]
        if type(batch) is dict:
            return [dict(zip(batch, row)) for row in zip(*columns)]
        return [rebuild_like(batch, row) for row in zip(*columns)]
    if isinstance(batch, (tuple, list)) and (is_namedtuple(batch) or _holds_batches(batch)):
        columns = [batch_rows(value) for value in batch]
        return [rebuild_like(batch, row) for row in zip(*columns)]
    if (inside := opened(batch)) is not None:
        content, closed = inside
        return list(map(closed, batch_rows(content)))
    return leaf_type(type(batch)).rows(batch)


def _holds_batches(batch: Sequence[Any]) -> bool:
    return bool(batch) and all(map(_may_be_a_batch, batch))


def _may_be_a_batch(part: Any) -> bool:
    if isinstance(part, (np.ndarray, dict, list, tuple)):
        return True
    entry = leaf_type(type(part))
    return entry.has_rows or entry.container
