"""Features taken out of a batch, and what was made of them put into one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.core.element import Array, Ragged
from penstock.core.errors import InvalidPipelineError
from penstock.core.keyed import KeyedDense, KeyedRagged
from penstock.graph.ops import DENSE, SPARSE, TransformFeatures
from penstock.graph.transforms import CustomTransform, Sampling
from penstock.kernels.features import (
    Lists,
    Numbers,
    UnfitFeatureError,
    as_kernel_array,
    as_lists,
    checked,
    feature_of,
)
from penstock.kernels.hashing import sampled
from penstock.runtime.feature_schedule import TransformSchedule, alike, planned, stack_at
from penstock.runtime.feature_stacks import FeaturePlace, Span, Stack, joined_offsets
from penstock.runtime.feature_transforms import warm
from penstock.sources.recycled import RecycledMemory

SCHEDULES_KEPT = 8  # batches of one operator have one structure, or a few


class FeatureBatches:
    """What an operator does with each batch. Kernels are compiled when this is made."""

    def __init__(self, node: TransformFeatures) -> None:
        warm(node.transforms)
        self._node = node
        self._samplings = [each for each in node.transforms if isinstance(each, Sampling)]
        others = [each for each in node.transforms if not isinstance(each, Sampling)]
        self._groups = alike(others, node.read)
        # Which kind of feature a transform gives that is not ours may differ from batch to batch.
        self._schedules_kept = 0 if any(isinstance(each, CustomTransform) for each in others) else SCHEDULES_KEPT
        self._schedules: dict[tuple[Any, ...], TransformSchedule] = {}
        self._outputs = [node.dense, node.sparse] if node.dense or node.sparse else [(name,) for name in node.made]
        self._memory = RecycledMemory()

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
        node, sources = self._node, _Sources(self._node, batch)
        stacks: Sequence[Stack | None]
        schedule = self._schedules.get(sources.structure)
        if schedule is not None:
            stacks = schedule.run(sources.stacks)
        else:
            schedule, stacks = planned(self._groups, sources.stacks, sources.places(), self._outputs)
            if len(self._schedules) < self._schedules_kept:
                self._schedules[sources.structure] = schedule
        if not node.dense and not node.sparse:
            return {name: _as_column(stacks, span) for name, (span,) in zip(node.made, schedule.outputs)}
        given: dict[str, Any] = {}
        dense, sparse = schedule.outputs
        if node.dense:
            given[DENSE] = _as_dense(node.dense, dense, stacks)
        if node.sparse:
            given[SPARSE] = _as_sparse(node.sparse, sparse, stacks, self._memory)
        return given


class _Sources:
    """The features of one batch: a stack for each keyed column, and one for each column by itself."""

    def __init__(self, node: TransformFeatures, batch: Mapping[str, Any]) -> None:
        self._node = node
        self._columns = node.columns if node.within else node.read
        self._keyed = [_keyed(name, batch[name]) for name in node.within]
        self.stacks = [*map(_stack, node.within, self._keyed), *[_column_stack(name, batch) for name in self._columns]]
        self.structure = (*[column.keys for column in self._keyed], *[stack.kind for stack in self.stacks])
        """What a schedule depends on."""

    def places(self) -> dict[str, FeaturePlace]:
        """Return where each feature is that is read."""
        found: dict[str, FeaturePlace] = {}
        for number, column in reversed(list(enumerate(self._keyed))):
            found.update({name: FeaturePlace(number, at) for name, at in column.places.items()})
        found.update({name: FeaturePlace(len(self._keyed) + number, 0) for number, name in enumerate(self._columns)})
        missing = next((name for name in self._node.read if name not in found), None)
        if missing is not None:
            raise InvalidPipelineError(
                f"transform_features: there is no feature {missing!r} in {', '.join(self._node.within)}; read it, or "
                "name it in columns= if it is a column"
            )
        return found


def _keyed(name: str, column: Any) -> KeyedDense | KeyedRagged:
    if not isinstance(column, (KeyedDense, KeyedRagged)):
        raise InvalidPipelineError(
            f"transform_features: column {name!r} is a {type(column).__name__} and holds no features by name"
        )
    return column


def _stack(name: str, column: KeyedDense | KeyedRagged) -> Stack:
    """Return the features of a keyed column."""
    if isinstance(column, KeyedDense):
        presence = None if column.presence is None else np.ascontiguousarray(column.presence).reshape(-1)
        return Stack(Numbers(np.ascontiguousarray(column.values).reshape(-1), presence), len(column))
    values, offsets = np.ascontiguousarray(column.values), np.ascontiguousarray(column.offsets)
    weights = None if column.weights is None else np.ascontiguousarray(column.weights)
    try:
        return Stack(checked(Lists(values, offsets, weights)), len(column))
    except UnfitFeatureError as error:
        raise InvalidPipelineError(f"transform_features: column {name!r}: {error}") from None


def _column_stack(name: str, batch: Mapping[str, Any]) -> Stack:
    """Return a column by itself, which is one feature."""
    try:
        values = feature_of(batch[name])
    except UnfitFeatureError as error:
        raise InvalidPipelineError(
            f"transform_features: column {name!r}: {error}; transforms take batches of columns"
        ) from None
    return Stack(values, len(values))


def _whole(transform: Sampling, name: str, column: Any) -> Array:
    if isinstance(column, np.ndarray) and column.ndim == 1 and column.dtype.kind in "iu":
        return as_kernel_array(column)
    raise InvalidPipelineError(f"Sampling: {name!r} must be a column of whole numbers that say which row it is")


def _as_column(stacks: Sequence[Stack | None], span: Span) -> Any:
    """Return a feature as a column by itself: where a number is null there is NaN, or 0 among whole ones."""
    feature = stack_at(stacks, span.stack).cut(span.first, span.last)
    if isinstance(feature, Lists):
        return Ragged(feature.values, feature.offsets)
    if feature.presence is None or feature.values.dtype.kind != "f":
        return feature.values
    return np.where(feature.presence, feature.values, np.float32(np.nan))


def _as_dense(keys: tuple[str, ...], spans: Sequence[Span], stacks: Sequence[Stack | None]) -> KeyedDense:
    values = np.empty((len(keys), stack_at(stacks, spans[0].stack).rows), np.float32)
    presence: Array | None = None
    at = 0
    for number, first, last in spans:
        feature = stack_at(stacks, number).cut(first, last)
        if isinstance(feature, Lists):
            raise InvalidPipelineError(f"transform_features: the feature {keys[at]!r} has lists; name it in sparse=")
        stop = at + last - first
        values[at:stop] = feature.values.reshape(last - first, -1)
        if feature.presence is not None:
            presence = np.ones(values.shape, np.bool_) if presence is None else presence
            presence[at:stop] = feature.presence.reshape(last - first, -1)
        at = stop
    return KeyedDense(keys, values, presence)


def _as_sparse(
    keys: tuple[str, ...], spans: Sequence[Span], stacks: Sequence[Stack | None], memory: RecycledMemory
) -> KeyedRagged:
    lists: list[Lists] = []
    at = 0
    for number, first, last in spans:
        feature = stack_at(stacks, number).cut(first, last)
        if feature.values.dtype.kind != "i":
            raise InvalidPipelineError(
                f"transform_features: the feature {keys[at]!r} has numbers that are not whole; Bucketize it, or name "
                "it in dense="
            )
        lists.append(as_lists(feature))
        at += last - first
    weights = None
    if any(each.weights is not None for each in lists):
        weights = memory.joined(
            [np.ones(len(each.values), np.float32) if each.weights is None else each.weights for each in lists],
            np.float32,
        )
    values = memory.joined([each.values for each in lists], np.int64)
    return KeyedRagged(keys, values, joined_offsets(lists), weights)
