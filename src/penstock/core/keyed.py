"""Columns of many features: the values of some hundred or thousand of them as three or four arrays.

Both classes are *feature-major*: all rows of the first feature, then all rows of the second. So the values of a feature
lie together, which is how tables store them, how kernels read them and how embedding tables look them up, and a batch
of thousands of features has as many buffers as one of three.

Rows are few bytes each and lie far apart. Cutting rows out copies them, once; a row by itself is a batch of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.core.element import Array, Ragged
from penstock.core.errors import BatchShapeError, InvalidArgumentError
from penstock.core.leaves import JoinArrays, LeafType, add_type, name_of

KEY_END = "\0"  # on the wire names are one text: thousands of texts would be thousands of values to encode
FEW_PIECES = 1 << 14  # so many pieces are joined as they lie; more are gathered by number


@dataclass(frozen=True, eq=False)
class KeyedDense:
    """One float32 a feature and row: `values[f, b]` is of feature `keys[f]` in row `b`.

    `presence[f, b]` says whether there is a value, and is None where all are there. What is not there is 0 in `values`.

    >>> clicks = KeyedDense(("age", "price"), np.array([[31, 0, 27], [9.5, 3, 1]], np.float32))
    >>> len(clicks), clicks["price"].tolist()
    (3, [9.5, 3.0, 1.0])
    """

    keys: tuple[str, ...]
    values: Array
    presence: Array | None = None

    def __post_init__(self) -> None:
        _check_keys(self.keys)
        shape = self.values.shape
        if self.values.dtype != np.float32 or len(shape) != 2 or shape[0] != len(self.keys):
            raise InvalidArgumentError(
                f"KeyedDense of {len(self.keys)} features takes values of float32[{len(self.keys)}, rows], "
                f"not {_described(self.values)}"
            )
        if self.presence is not None and (self.presence.dtype != np.bool_ or self.presence.shape != shape):
            raise InvalidArgumentError(
                f"KeyedDense takes presence of bool{list(shape)}, as values has it, not {_described(self.presence)}"
            )

    def __len__(self) -> int:
        return int(self.values.shape[1])

    def __getitem__(self, key: str) -> Array:
        """Return a feature's values, without a copy."""
        found: Array = self.values[self.places[_name(key)]]
        return found

    def present(self, key: str) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return in which rows a feature has a value."""
        place = self.places[_name(key)]
        return np.ones(len(self), np.bool_) if self.presence is None else self.presence[place]

    @cached_property
    def places(self) -> dict[str, int]:
        """The number of each feature."""
        return _places(self.keys)

    def slice(self, start: int, stop: int) -> KeyedDense:
        """Return rows start to stop, as views."""
        return self._of_rows(slice(start, stop))

    def take(self, rows: Array) -> KeyedDense:
        """Return some rows, by number or by a flag for each."""
        return self._of_rows(rows)

    def _of_rows(self, rows: Any) -> KeyedDense:
        presence = None if self.presence is None else self.presence[:, rows]
        return KeyedDense(self.keys, self.values[:, rows], presence)

    @property
    def nbytes(self) -> int:
        """The bytes of its arrays."""
        return self.values.nbytes + (0 if self.presence is None else self.presence.nbytes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KeyedDense):
            return NotImplemented
        return (
            self.keys == other.keys
            and np.array_equal(self.values, other.values, equal_nan=True)
            and _same(self.presence, other.presence)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"KeyedDense({len(self.keys)} features, {len(self)} rows)"


@dataclass(frozen=True, eq=False)
class KeyedRagged:
    """A list of int64 a feature and row: feature f of row b is `values[offsets[f * B + b] : offsets[f * B + b + 1]]`.

    B is how many rows there are; `weights` has a float32 for each value, or is None.

    >>> pages = KeyedRagged(("seen", "liked"), np.array([7, 8, 9, 7]), np.array([0, 2, 2, 3, 4]))
    >>> len(pages), [row.tolist() for row in pages["liked"]]
    (2, [[9], [7]])
    """

    keys: tuple[str, ...]
    values: Array
    offsets: Array
    weights: Array | None = None

    def __post_init__(self) -> None:
        _check_keys(self.keys)
        if self.values.dtype != np.int64 or self.values.ndim != 1:
            raise InvalidArgumentError(f"KeyedRagged takes values of int64[n], not {_described(self.values)}")
        count, left = divmod(len(self.offsets) - 1, len(self.keys)) if self.offsets.ndim == 1 else (0, 1)
        if self.offsets.dtype != np.int64 or left or count < 0:
            raise InvalidArgumentError(
                f"KeyedRagged of {len(self.keys)} features takes offsets of int64[{len(self.keys)} * rows + 1], "
                f"not {_described(self.offsets)}"
            )
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.values):
            raise InvalidArgumentError(
                f"offsets begin at 0 and end at {len(self.values)}, which is how many values there are; "
                f"these begin at {self.offsets[0]} and end at {self.offsets[-1]}"
            )
        if self.weights is not None and (self.weights.dtype != np.float32 or self.weights.shape != self.values.shape):
            raise InvalidArgumentError(
                f"KeyedRagged takes weights of float32[{len(self.values)}], one a value, not {_described(self.weights)}"
            )

    def __len__(self) -> int:
        return (len(self.offsets) - 1) // len(self.keys)

    def __getitem__(self, key: str) -> Ragged:
        """Return a feature's rows; the values are not copied."""
        start, stop, offsets = self._piece(key)
        return Ragged(self.values[start:stop], offsets)

    def weights_of(self, key: str) -> Ragged | None:
        """Return the weights of a feature's values, row by row; None: there are no weights."""
        start, stop, offsets = self._piece(key)
        return None if self.weights is None else Ragged(self.weights[start:stop], offsets)

    def _piece(self, key: str) -> tuple[int, int, Array]:
        place = self.places[_name(key)]
        offsets = self.offsets[place * len(self) : (place + 1) * len(self) + 1]
        return int(offsets[0]), int(offsets[-1]), offsets - offsets[0]

    @cached_property
    def places(self) -> dict[str, int]:
        """The number of each feature."""
        return _places(self.keys)

    @property
    def lengths(self) -> Array:
        """How many values each row of each feature has, of shape (features, rows)."""
        return np.diff(self.offsets).reshape(len(self.keys), len(self))

    def slice(self, start: int, stop: int) -> KeyedRagged:
        """Return rows start to stop: the values are copied, unless these are all rows."""
        start, stop, _ = slice(start, stop).indices(len(self))
        if (start, stop) == (0, len(self)):
            return self
        stop = max(start, stop)
        bounds = self.offsets[:-1].reshape(len(self.keys), len(self))
        if start == stop:
            return self._of_pieces([], np.zeros((len(self.keys), 0), np.int64))
        lengths = self.lengths[:, start:stop]
        starts = bounds[:, start]
        stops = bounds[:, stop - 1] + lengths[:, -1]
        return self._of_pieces(list(zip(starts.tolist(), stops.tolist())), lengths)

    def _of_pieces(self, pieces: list[tuple[int, int]], lengths: Array) -> KeyedRagged:
        def cut(array: Array) -> Array:
            return np.concatenate([array[start:stop] for start, stop in pieces]) if pieces else array[:0]

        weights = None if self.weights is None else cut(self.weights)
        return KeyedRagged(self.keys, cut(self.values), offsets_of(lengths), weights)

    def take(self, rows: Array) -> KeyedRagged:
        """Return some rows, by number or by a flag for each."""
        starts = self.offsets[:-1].reshape(len(self.keys), len(self))[:, rows]
        lengths = self.lengths[:, rows]
        numbers = _numbers(starts.reshape(-1), lengths.reshape(-1))
        weights = None if self.weights is None else self.weights[numbers]
        return KeyedRagged(self.keys, self.values[numbers], offsets_of(lengths), weights)

    @property
    def nbytes(self) -> int:
        """The bytes of its arrays."""
        return self.values.nbytes + self.offsets.nbytes + (0 if self.weights is None else self.weights.nbytes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KeyedRagged):
            return NotImplemented
        return (
            self.keys == other.keys
            and np.array_equal(self.offsets, other.offsets)
            and np.array_equal(self.values, other.values)
            and _same(self.weights, other.weights)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        weighed = "" if self.weights is None else " with weights"
        return f"KeyedRagged({len(self.keys)} features, {len(self)} rows, {len(self.values)} values{weighed})"


def offsets_of(lengths: Array) -> Array:
    """Return where rows of such lengths begin, and where the last one ends.

    >>> offsets_of(np.array([[2, 0], [1, 3]])).tolist()
    [0, 2, 2, 3, 6]
    """
    offsets = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths.reshape(-1), out=offsets[1:])
    return offsets


def _numbers(starts: Array, lengths: Array) -> Array:
    """Return the numbers of the values of pieces that begin there and have such lengths."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    numbers: Array = np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - lengths), lengths)
    return numbers


def _check_keys(keys: tuple[str, ...]) -> None:
    if not isinstance(keys, tuple) or not keys:
        raise InvalidArgumentError(f"keys are the names of features, a tuple of at least one; not {keys!r:.200}")
    _places(keys)


@lru_cache(maxsize=256)
def _places(keys: tuple[str, ...]) -> dict[str, int]:
    for key in keys:
        if not isinstance(key, str) or KEY_END in key or not key:
            raise InvalidArgumentError(f"a feature's name is a text of at least one character, none of them 0: {key!r}")
    places = {key: place for place, key in enumerate(keys)}
    if len(places) < len(keys):
        twice = next(key for place, key in enumerate(keys) if places[key] != place)
        raise InvalidArgumentError(f"the feature {twice!r} stands twice in keys; name each feature once")
    return places


def _name(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"features are taken by name, not by {key!r}; rows with slice() or take()")
    return key


def _described(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__


def _same(one: Array | None, other: Array | None) -> bool:
    if one is None or other is None:
        return one is other
    return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


# In the table of leaves


@lru_cache(maxsize=256)
def _as_text(keys: tuple[str, ...]) -> str:
    return KEY_END.join(keys)


@lru_cache(maxsize=256)
def _as_keys(text: str) -> tuple[str, ...]:
    return tuple(text.split(KEY_END))


def _same_keys(parts: Sequence[KeyedDense | KeyedRagged]) -> tuple[str, ...]:
    keys = parts[0].keys
    for number, part in enumerate(parts):
        if part.keys != keys:
            differing = sorted(set(keys) ^ set(part.keys))[:3]
            what = f"differ in {', '.join(differing)}" if differing else "have another order"
            raise BatchShapeError(
                f"the features of batch {number} {what}, against batch 0; read them with the same features", number
            )
    return keys


def _join_dense(parts: Sequence[KeyedDense], join_arrays: JoinArrays) -> KeyedDense:
    keys = _same_keys(parts)

    def joined(arrays: list[Array]) -> Array:
        return join_arrays([np.concatenate(arrays, axis=1)])

    some = any(part.presence is not None for part in parts)
    presence = [
        np.ones(part.values.shape, np.bool_) if part.presence is None else part.presence for part in parts if some
    ]
    return KeyedDense(keys, joined([part.values for part in parts]), joined(presence) if some else None)


def _join_ragged(parts: Sequence[KeyedRagged], join_arrays: JoinArrays) -> KeyedRagged:
    keys = _same_keys(parts)
    weighed = [part.weights is not None for part in parts]
    if any(weighed) and not all(weighed):
        number = weighed.index(not weighed[0])
        raise BatchShapeError(f"batch 0 and batch {number} differ in whether they have weights", number)
    lengths = np.concatenate([part.lengths for part in parts], axis=1)

    def joined(arrays: list[Array]) -> Array:
        if len(arrays) * len(keys) <= FEW_PIECES:
            return join_arrays(_by_feature(parts, arrays))
        # Where each piece lies once all arrays lie behind each other.
        firsts = np.cumsum([0, *[len(array) for array in arrays[:-1]]])
        starts = np.stack(
            [part.offsets[: -1 : len(part) or 1][: len(keys)] + at for part, at in zip(parts, firsts)], axis=1
        )
        sizes = np.stack([part.lengths.sum(axis=1) for part in parts], axis=1)
        return join_arrays([np.concatenate(arrays)[_numbers(starts.reshape(-1), sizes.reshape(-1))]])

    values = joined([part.values for part in parts])
    weights = joined([part.weights for part in parts if part.weights is not None]) if all(weighed) else None
    return KeyedRagged(keys, values, offsets_of(lengths), weights)


def _by_feature(parts: Sequence[KeyedRagged], arrays: Sequence[Array]) -> list[Array]:
    """Return the pieces of the parts' arrays, feature by feature."""
    bounds = [part.offsets[:: len(part) or 1].tolist() if len(part) else [0] * (len(part.keys) + 1) for part in parts]
    return [
        array[bound[feature] : bound[feature + 1]]
        for feature in range(len(parts[0].keys))
        for array, bound in zip(arrays, bounds)
    ]


def _dense_rows(batch: KeyedDense) -> list[KeyedDense]:
    return [batch.slice(row, row + 1) for row in range(len(batch))]


def _ragged_rows(batch: KeyedRagged) -> list[KeyedRagged]:
    # Once all rows lie behind each other, each of them is a view.
    count, features = len(batch), len(batch.keys)
    lengths = batch.lengths.T
    starts = batch.offsets[:-1].reshape(features, count).T
    numbers = _numbers(starts.reshape(-1), lengths.reshape(-1))
    values = batch.values[numbers]
    weights = None if batch.weights is None else batch.weights[numbers]
    offsets = offsets_of(lengths)
    rows = []
    for row, (start, stop) in enumerate(pairwise(offsets[::features].tolist())):
        own = offsets[row * features : (row + 1) * features + 1] - start
        rows.append(KeyedRagged(batch.keys, values[start:stop], own, None if weights is None else weights[start:stop]))
    return rows


add_type(
    KeyedDense,
    LeafType(
        name=name_of(KeyedDense),
        flatten=lambda dense: (_as_text(dense.keys), dense.values, dense.presence),
        unflatten=lambda parts: KeyedDense(_as_keys(parts[0]), *parts[1:]),
        has_rows=True,
        rows_are_batches=True,
        slice=KeyedDense.slice,
        take=KeyedDense.take,
        rows=_dense_rows,
        join=_join_dense,
        nbytes=lambda dense: dense.nbytes,
    ),
)
add_type(
    KeyedRagged,
    LeafType(
        name=name_of(KeyedRagged),
        flatten=lambda ragged: (_as_text(ragged.keys), ragged.values, ragged.offsets, ragged.weights),
        unflatten=lambda parts: KeyedRagged(_as_keys(parts[0]), *parts[1:]),
        has_rows=True,
        rows_are_batches=True,
        slice=KeyedRagged.slice,
        take=KeyedRagged.take,
        rows=_ragged_rows,
        join=_join_ragged,
        nbytes=lambda ragged: ragged.nbytes,
    ),
)
