"""Features taken out of a batch, and what was made of them put into one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.core.element import Array, Ragged
from penstock.core.errors import InvalidPipelineError
from penstock.core.keyed import KeyedDense, KeyedRagged
from penstock.graph.ops import DENSE, SPARSE, TransformFeatures
from penstock.graph.transforms import Sampling
from penstock.kernels.features import (
    FeatureValues,
    Lists,
    Numbers,
    UnfitFeatureError,
    as_kernel_array,
    as_lists,
    checked,
    feature_of,
)
from penstock.kernels.hashing import sampled
from penstock.runtime.feature_transforms import application, warm


class FeatureBatches:
    """What an operator does with each batch. Kernels are compiled when this is made."""

    def __init__(self, node: TransformFeatures) -> None:
        warm(node.transforms)
        self._node = node
        self._samplings = [each for each in node.transforms if isinstance(each, Sampling)]
        self._applications = [application(each) for each in node.transforms if not isinstance(each, Sampling)]

    def kept(self, batch: Mapping[str, Any]) -> Array | None:
        """Return which rows are kept; None: all."""
        flags: Array | None = None
        for each in self._samplings:
            files, rows = (_whole(each, name, batch.get(name)) for name in each.inputs)
            own = sampled(files, rows, each.seed, each.rate)
            flags = own if flags is None else flags & own
        return flags

    def made(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns that are made of a batch's."""
        node = self._node
        features: dict[str, FeatureValues] = {}
        sources = _Sources(node, batch)

        def found(name: str) -> FeatureValues:
            if name not in features:
                features[name] = sources.feature(name)
            return features[name]

        for each in self._applications:
            inputs = [found(name) for name in each.transform.inputs]
            try:
                features[each.transform.out] = each(inputs)
            except UnfitFeatureError as error:
                raise InvalidPipelineError(f"{each.described}: {error}") from None
        if not node.dense and not node.sparse:
            return {name: _as_column(features[name]) for name in node.made}
        given: dict[str, Any] = {}
        if node.dense:
            given[DENSE] = _as_dense(node.dense, [found(name) for name in node.dense])
        if node.sparse:
            given[SPARSE] = _as_sparse(node.sparse, [found(name) for name in node.sparse])
        return given


class _Sources:
    """The features of one batch."""

    def __init__(self, node: TransformFeatures, batch: Mapping[str, Any]) -> None:
        self._columns = node.columns if node.within else node.read
        self._batch = batch
        self._keyed = [batch[name] for name in node.within]
        self._within = node.within
        for name, column in zip(node.within, self._keyed):
            if not isinstance(column, (KeyedDense, KeyedRagged)):
                raise InvalidPipelineError(
                    f"transform_features: column {name!r} is a {type(column).__name__} and holds no features by name"
                )
            if isinstance(column, KeyedRagged):
                try:
                    checked(Lists(column.values, column.offsets))
                except UnfitFeatureError as error:
                    raise InvalidPipelineError(f"transform_features: column {name!r}: {error}") from None

    def feature(self, name: str) -> FeatureValues:
        if name in self._columns:
            try:
                return feature_of(self._batch[name])
            except UnfitFeatureError as error:
                raise InvalidPipelineError(
                    f"transform_features: column {name!r}: {error}; transforms take batches of columns"
                ) from None
        for column in self._keyed:
            place = column.places.get(name)
            if place is not None:
                return _taken_out(column, place)
        raise InvalidPipelineError(
            f"transform_features: there is no feature {name!r} in {', '.join(self._within)}; read it, or name it in "
            "columns= if it is a column"
        )


def _taken_out(column: KeyedDense | KeyedRagged, place: int) -> FeatureValues:
    if isinstance(column, KeyedDense):
        presence = None if column.presence is None else np.ascontiguousarray(column.presence[place])
        return Numbers(np.ascontiguousarray(column.values[place]), presence)
    count = len(column)
    offsets = column.offsets[place * count : (place + 1) * count + 1]
    start, stop = int(offsets[0]), int(offsets[-1])
    weights = None if column.weights is None else np.ascontiguousarray(column.weights[start:stop])
    return Lists(np.ascontiguousarray(column.values[start:stop]), offsets - start, weights)


def _whole(transform: Sampling, name: str, column: Any) -> Array:
    if isinstance(column, np.ndarray) and column.ndim == 1 and column.dtype.kind in "iu":
        return as_kernel_array(column)
    raise InvalidPipelineError(f"Sampling: {name!r} must be a column of whole numbers that say which row it is")


def _as_column(feature: FeatureValues) -> Any:
    """Return a feature as a column by itself: where a number is null there is NaN, or 0 among whole ones."""
    if isinstance(feature, Lists):
        return Ragged(feature.values, feature.offsets)
    if feature.presence is None or feature.values.dtype.kind != "f":
        return feature.values
    return np.where(feature.presence, feature.values, np.float32(np.nan))


def _as_dense(keys: tuple[str, ...], features: list[FeatureValues]) -> KeyedDense:
    values = np.empty((len(keys), len(features[0])), np.float32)
    presence: Array | None = None
    for place, (key, feature) in enumerate(zip(keys, features)):
        if isinstance(feature, Lists):
            raise InvalidPipelineError(f"transform_features: the feature {key!r} has lists; name it in sparse=")
        values[place] = feature.values
        if feature.presence is not None:
            presence = np.ones(values.shape, np.bool_) if presence is None else presence
            presence[place] = feature.presence
    return KeyedDense(keys, values, presence)


def _as_sparse(keys: tuple[str, ...], features: list[FeatureValues]) -> KeyedRagged:
    lists = []
    for key, feature in zip(keys, features):
        if feature.values.dtype.kind != "i":
            raise InvalidPipelineError(
                f"transform_features: the feature {key!r} has numbers that are not whole; Bucketize it, or name it in "
                "dense="
            )
        lists.append(as_lists(feature))
    ends = np.cumsum([0, *[len(each.values) for each in lists]])
    offsets = np.concatenate([[0], *[each.offsets[1:] + end for each, end in zip(lists, ends)]])
    weights = None
    if any(each.weights is not None for each in lists):
        weights = np.concatenate(
            [np.ones(len(each.values), np.float32) if each.weights is None else each.weights for each in lists]
        )
    return KeyedRagged(keys, np.concatenate([each.values for each in lists]), offsets, weights)
