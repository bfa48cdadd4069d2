"""Features behind each other, as one.

Transforms look at each row by itself. So features of one kind that lie behind each other are to a kernel one feature of
more rows, and a call for many of them costs what a call for one does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from penstock.core.element import Array
from penstock.kernels.features import FeatureValues, Lists, Numbers

Kind: TypeAlias = tuple[bool, str, bool]
"""Whether a feature has lists, the type of its numbers, whether these have weights."""


class Stack:
    """Features of one kind and as many rows each: all rows of the first, then all of the second."""

    __slots__ = ("_bounds", "kind", "rows", "values")

    def __init__(self, values: FeatureValues, rows: int) -> None:
        self.values, self.rows = values, rows
        self._bounds: list[int] = []
        if isinstance(values, Lists):
            self.kind: Kind = (True, values.values.dtype.char, values.weights is not None)
            self._bounds = values.offsets[::rows].tolist() if rows else []
        else:
            self.kind = (False, values.values.dtype.char, False)

    def size(self, place: int) -> int:
        """Return how many values a feature has."""
        return self._bounds[place + 1] - self._bounds[place] if self._bounds else self.rows

    def cut(self, first: int, last: int) -> FeatureValues:
        """Return the features from one place to before another."""
        whole, rows = self.values, self.rows
        if isinstance(whole, Numbers):
            start, stop = first * rows, last * rows
            return Numbers(whole.values[start:stop], _part(whole.presence, start, stop))
        start, stop = (self._bounds[first], self._bounds[last]) if self._bounds else (0, 0)
        offsets = whole.offsets[first * rows : last * rows + 1]
        return Lists(whole.values[start:stop], offsets - start if start else offsets, _part(whole.weights, start, stop))


def _part(array: Array | None, start: int, stop: int) -> Array | None:
    return None if array is None else array[start:stop]


class FeaturePlace(NamedTuple):
    """Where a feature is: in which stack, by number, and where in it."""

    stack: int
    at: int


class Span(NamedTuple):
    """Features that lie behind each other in a stack."""

    stack: int
    first: int
    last: int


def spans(places: Iterable[FeaturePlace]) -> tuple[Span, ...]:
    """Return where features are, as few spans in their order.

    >>> spans([FeaturePlace(0, 4), FeaturePlace(0, 5), FeaturePlace(1, 6), FeaturePlace(0, 6)])
    (Span(stack=0, first=4, last=6), Span(stack=1, first=6, last=7), Span(stack=0, first=6, last=7))
    """
    found: list[Span] = []
    for stack, at in places:
        if found and found[-1].stack == stack and found[-1].last == at:
            found[-1] = Span(stack, found[-1].first, at + 1)
        else:
            found.append(Span(stack, at, at + 1))
    return tuple(found)


def joined(parts: Sequence[FeatureValues]) -> FeatureValues:
    """Return features of one kind as one, copied if there are several."""
    if len(parts) == 1:
        return parts[0]
    values = np.concatenate([part.values for part in parts])
    numbers = [part for part in parts if isinstance(part, Numbers)]
    if numbers:
        return Numbers(values, _joined_presence(numbers))
    lists = [part for part in parts if isinstance(part, Lists)]
    weights = [part.weights for part in lists if part.weights is not None]
    return Lists(values, joined_offsets(lists), np.concatenate(weights) if weights else None)


def _joined_presence(parts: Sequence[Numbers]) -> Array | None:
    if all(part.presence is None for part in parts):
        return None
    return np.concatenate([np.ones(len(part), np.bool_) if part.presence is None else part.presence for part in parts])


def joined_offsets(lists: Sequence[Lists]) -> Array:
    """Return the offsets of lists once all lie behind each other."""
    offsets = np.empty(sum(map(len, lists)) + 1, np.int64)
    offsets[0] = at = end = 0
    for each in lists:
        np.add(each.offsets[1:], end, out=offsets[at + 1 : at + 1 + len(each)])
        at, end = at + len(each), end + len(each.values)
    return offsets
