"""What transforms take and give: the values of one feature in the rows of a batch.

A feature has *numbers*, one a row, which may be absent (null), or *lists*, of any length. A list is never null: a row
without one has the empty list. Numbers are float32 or int64, and so are the items of lists; lists of ids may have a
weight for each item.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from penstock.core.element import Array, Ragged


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """One number a row; where `presence` is False it is 0, and null. None: no row is null."""

    values: Array
    presence: Array | None = None

    def __len__(self) -> int:
        return len(self.values)

    def where_present(self, values: Array) -> Numbers:
        """Return other numbers that are null where these are."""
        if self.presence is not None:
            values[~self.presence] = 0
        return Numbers(values, self.presence)


@dataclass(frozen=True, slots=True, eq=False)
class Lists:
    """A list a row: row b is `values[offsets[b] : offsets[b + 1]]`; `weights` has one for each value, or is None."""

    values: Array
    offsets: Array
    weights: Array | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Array:
        return np.diff(self.offsets)

    def with_values(self, values: Array) -> Lists:
        """Return lists of the same lengths and weights."""
        return replace(self, values=values)


FeatureValues: TypeAlias = Numbers | Lists


class UnfitFeatureError(TypeError):
    """A column that is no feature, or not of the kind that a transform takes; the message is the remedy."""


def feature_of(column: Any) -> FeatureValues:
    """Return a column of a batch as a feature: an array of numbers, or a `Ragged` of them."""
    if isinstance(column, Ragged):
        return checked(Lists(as_kernel_array(column.values), np.ascontiguousarray(column.offsets, np.int64)))
    if isinstance(column, np.ndarray) and column.ndim == 1:
        return Numbers(as_kernel_array(column))
    shape = f"{column.dtype}{list(column.shape)}" if isinstance(column, np.ndarray) else type(column).__name__
    raise UnfitFeatureError(f"a feature is one number a row, or a Ragged of numbers, and not {shape}")


def as_kernel_array(values: Array) -> Array:
    """Return numbers as kernels take them: float32, or int64 for whole ones, without a gap."""
    kind = values.dtype.kind
    if kind == "f":
        return np.ascontiguousarray(values, np.float32)
    if kind in "ib" or (kind == "u" and values.dtype.itemsize < 8):
        return np.ascontiguousarray(values, np.int64)
    raise UnfitFeatureError(f"a feature has numbers, and not {values.dtype}; uint64 goes with .view(numpy.int64)")


def checked(lists: Lists) -> Lists:
    """Return the lists, if offsets rise from 0 to the number of values: kernels do not look again."""
    offsets = lists.offsets
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(lists.values) or (offsets[1:] < offsets[:-1]).any():
        raise UnfitFeatureError(f"offsets of a ragged column rise from 0 to {len(lists.values)}, and these do not")
    return lists


def as_lists(feature: FeatureValues) -> Lists:
    """Return numbers as lists of one, or of none where they are null; lists as they are."""
    if isinstance(feature, Lists):
        return feature
    if feature.presence is None:
        return Lists(feature.values, np.arange(len(feature) + 1))
    return Lists(feature.values[feature.presence], np.concatenate(([0], np.cumsum(feature.presence, dtype=np.int64))))


def both_present(one: Array | None, other: Array | None) -> Array | None:
    """Return in which rows neither of two numbers is null."""
    if one is None or other is None:
        return one if other is None else other
    return one & other
