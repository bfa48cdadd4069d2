"""Rows of a feature as columns, and columns as rows: numbers may be None, lists may hold (id, weight)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from penstock.graph import transforms as tr
from penstock.kernels.features import FeatureValues, Lists, Numbers
from penstock.runtime.feature_transforms import application


def column(rows: list[Any]) -> FeatureValues:
    items = [item for row in rows for item in (row if isinstance(row, list) else [row]) if item is not None]
    weighed = any(isinstance(item, tuple) for item in items)
    ids = [item[0] if isinstance(item, tuple) else item for item in items]
    dtype = np.float32 if any(isinstance(id, float) for id in ids) else np.int64
    if not any(isinstance(row, list) for row in rows):
        presence = np.array([row is not None for row in rows], bool)
        values = np.array([row or 0 for row in rows], dtype)
        return Numbers(values, None if presence.all() else presence)
    lengths = [len(row) if isinstance(row, list) else row is not None for row in rows]
    weights = np.array([item[1] for item in items], np.float32) if weighed else None
    return Lists(np.array(ids, dtype), np.cumsum([0, *lengths]).astype(np.int64), weights)


def rows_of(feature: FeatureValues) -> list[Any]:
    if isinstance(feature, Numbers):
        present = [True] * len(feature) if feature.presence is None else feature.presence.tolist()
        return [value if here else None for value, here in zip(feature.values.tolist(), present)]
    items: list[Any] = feature.values.tolist()
    if feature.weights is not None:
        items = list(zip(items, feature.weights.tolist()))
    bounds = feature.offsets.tolist()
    return [items[start:stop] for start, stop in pairwise(bounds)]


def applied(transform: tr.FeatureTransform, *inputs: list[Any]) -> list[Any]:
    made = application(transform)([column(rows) for rows in inputs])
    if isinstance(made, Numbers) and made.presence is not None:
        assert not made.values[~made.presence].any(), "what is null is 0"
    return rows_of(made)
