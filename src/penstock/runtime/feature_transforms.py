"""Which kernel carries out which transform, and what it takes.

Numbers that are null stay null, whatever is made of them; of two numbers, where either is null.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, assert_never

import numpy as np

from penstock.core.element import Array
from penstock.core.keyed import offsets_of
from penstock.graph import transforms as tr
from penstock.graph.parameters import text
from penstock.kernels import hashing, lists, single_values
from penstock.kernels.catalog import kernels_of
from penstock.kernels.features import FeatureValues, Lists, Numbers, UnfitFeatureError, as_lists, both_present
from penstock.kernels.registered import find_transform

Apply: TypeAlias = Callable[[Sequence[FeatureValues]], FeatureValues]


class Application:
    """One transform, ready to be applied to the features that it reads."""

    __slots__ = ("_apply", "transform")

    def __init__(self, transform: tr.FeatureTransform, apply: Apply) -> None:
        self.transform, self._apply = transform, apply

    @property
    def described(self) -> str:
        return text(self.transform)

    def __call__(self, inputs: Sequence[FeatureValues]) -> FeatureValues:
        return self._apply(inputs)


def warm(transforms: Iterable[tr.FeatureTransform]) -> None:
    """Compile the kernels that some transforms call, or load what was compiled before."""
    for kernel in kernels_of(transform.OP for transform in transforms):
        kernel.ready()


def application(transform: tr.FeatureTransform) -> Application:
    """Return a transform as something to call."""
    return Application(transform, _apply(transform))


def _apply(t: Any) -> Apply:
    match t:
        case tr.Bucketize():
            return _bucketize(t)
        case tr.SigridHash():
            return lambda given: _each_id(given[0], lambda ids: hashing.sigrid_hash(ids, t.salt, t.max_value))
        case tr.PositiveModulus():
            return lambda given: _each_id(given[0], lambda ids: single_values.positive_modulus(ids, t.divisor))
        case tr.Clamp():
            clamped = single_values.clamper(t.low, t.high)
            return lambda given: _each(given[0], clamped)
        case tr.BoxCox():
            return lambda given: _each_float(given[0], lambda x: single_values.boxcox(x, t.lambda1, t.lambda2))
        case tr.Logit():
            return lambda given: _each_float(given[0], lambda x: single_values.logit(x, t.epsilon))
        case tr.MapId():
            return _map_id(t)
        case tr.GetLocalHour():
            return _local_hour(t)
        case tr.FirstX():
            return _first_x(t)
        case tr.EnumerateIds():
            return lambda given: lists.enumerated(_ids(given[0]))
        case tr.ComputeScore():
            return lambda given: Numbers(lists.compute_score(_ids(given[0]), _ids(given[1]), t.mode))
        case tr.IdListTransform():
            return lambda given: lists.intersect(_ids(given[0]), _ids(given[1]), t.distinct)
        case tr.Cartesian():
            return lambda given: hashing.cartesian(_ids(given[0]), _ids(given[1]), t.limit)
        case tr.NGram():
            return _ngram(t)
        case tr.Onehot():
            return _onehot(t)
        case tr.CustomTransform():
            return _custom(t)
    assert_never(t)


# What a transform takes


def _ids(feature: FeatureValues) -> Lists:
    if feature.values.dtype.kind != "i":
        raise UnfitFeatureError("it takes ids, which are whole numbers")
    return as_lists(feature)


def _floats(feature: FeatureValues) -> Numbers:
    if isinstance(feature, Lists):
        raise UnfitFeatureError("it takes one number a row, and not lists")
    return feature if feature.values.dtype.kind == "f" else Numbers(feature.values.astype(np.float32), feature.presence)


def _each(feature: FeatureValues, compute: Callable[[Array], Array]) -> FeatureValues:
    values = compute(feature.values)
    return feature.with_values(values) if isinstance(feature, Lists) else feature.where_present(values)


def _each_id(feature: FeatureValues, compute: Callable[[Array], Array]) -> FeatureValues:
    if feature.values.dtype.kind != "i":
        raise UnfitFeatureError("it takes ids, which are whole numbers")
    return _each(feature, compute)


def _each_float(feature: FeatureValues, compute: Callable[[Array], Array]) -> FeatureValues:
    return _each(
        feature if isinstance(feature, Lists) and feature.values.dtype.kind == "f" else _floats(feature), compute
    )


# Those that take more than a line


def _bucketize(t: tr.Bucketize) -> Apply:
    if len(t.border_sets) == 1:
        (borders,) = t.border_sets
        return lambda given: _each(given[0], lambda values: single_values.bucketize(values, borders))
    first_ids = np.cumsum([0, *[len(borders) + 1 for borders in t.border_sets]])

    def of_several(given: Sequence[FeatureValues]) -> FeatureValues:
        if isinstance(given[0], Lists):
            raise UnfitFeatureError("with several borders it takes one number a row, and not lists")
        buckets = [single_values.bucketize(given[0].values, b) + at for b, at in zip(t.border_sets, first_ids)]
        rows = np.stack(buckets, axis=1)
        if given[0].presence is not None:
            rows = rows[given[0].presence]
        present = np.ones(len(given[0]), np.int64) if given[0].presence is None else given[0].presence.astype(np.int64)
        return Lists(rows.reshape(-1), offsets_of(present * len(buckets)))

    return of_several


def _map_id(t: tr.MapId) -> Apply:
    if t.table:
        return lambda given: _each_id(given[0], lambda ids: single_values.map_by_place(ids, t.table))
    if not t.drop:
        return lambda given: _each_id(given[0], lambda ids: single_values.map_ids(ids, t.mapping, t.default)[0])

    def of_known(given: Sequence[FeatureValues]) -> FeatureValues:
        (feature,) = given
        if feature.values.dtype.kind != "i":
            raise UnfitFeatureError("it takes ids, which are whole numbers")
        mapped, found = single_values.map_ids(feature.values, t.mapping, 0)
        if isinstance(feature, Numbers):
            return Numbers(mapped, both_present(feature.presence, found)).where_present(mapped)
        before = np.concatenate(([0], np.cumsum(found, dtype=np.int64)))
        weights = None if feature.weights is None else feature.weights[found]
        return Lists(mapped[found], before[feature.offsets], weights)

    return of_known


def _local_hour(t: tr.GetLocalHour) -> Apply:
    if t.offset is None:
        return lambda given: _each_id(given[0], lambda times: single_values.local_hour(times, t.offset_s))

    def by_feature(given: Sequence[FeatureValues]) -> FeatureValues:
        times, offsets = given
        if not isinstance(times, Numbers) or not isinstance(offsets, Numbers):
            raise UnfitFeatureError("with offset= it takes one number a row, and not lists")
        if times.values.dtype.kind != "i" or offsets.values.dtype.kind != "i":
            raise UnfitFeatureError("it takes seconds as whole numbers")
        hours = single_values.local_hour(times.values, offsets.values)
        return Numbers(hours, both_present(times.presence, offsets.presence)).where_present(hours)

    return by_feature


def _first_x(t: tr.FirstX) -> Apply:
    def first(given: Sequence[FeatureValues]) -> FeatureValues:
        (feature,) = given
        if not isinstance(feature, Lists):
            raise UnfitFeatureError("it takes lists, and not one number a row")
        if t.by == "position":
            return lists.first_x(feature, t.x)
        if feature.weights is None:
            raise UnfitFeatureError("by='score' takes lists with weights; this one has none")
        return lists.best_x(feature, feature.weights, t.x)

    return first


def _ngram(t: tr.NGram) -> Apply:
    if not t.vocabularies and t.form == "hash":
        return lambda given: hashing.hashed_windows(_ids(given[0]), t.n, t.salt)
    if not t.vocabularies:
        return lambda given: hashing.flat_windows(_ids(given[0]), t.n)

    def of_features(given: Sequence[FeatureValues]) -> FeatureValues:
        presence: Array | None = None
        firsts = []
        for feature in given:
            numbers = _first_ids(feature)
            presence = both_present(presence, numbers.presence)
            firsts.append(numbers.values)
        made = single_values.mixed_radix(firsts, t.vocabularies)
        return Numbers(made, presence).where_present(made)

    return of_features


def _first_ids(feature: FeatureValues) -> Numbers:
    """Return the first id of each list; an empty one has none."""
    ids = _ids(feature)
    if isinstance(feature, Numbers):
        return feature
    some = ids.lengths > 0
    values = np.zeros(len(ids), np.int64)
    values[some] = ids.values[ids.offsets[:-1][some]]
    return Numbers(values, None if some.all() else some)


def _onehot(t: tr.Onehot) -> Apply:
    def places(given: Sequence[FeatureValues]) -> FeatureValues:
        numbers = _floats(given[0])
        values = numbers.values if numbers.presence is None else numbers.values[numbers.presence]
        present = np.ones(len(numbers), np.int64) if numbers.presence is None else numbers.presence.astype(np.int64)
        if t.form == "vector":
            return Lists(single_values.onehot_vectors(values, t.low, t.high, t.count), offsets_of(present * t.count))
        found = single_values.onehot_places(values, t.low, t.high, t.count)
        present[present > 0] = found >= 0
        return Lists(found[found >= 0], offsets_of(present))

    return places


def _custom(t: tr.CustomTransform) -> Apply:
    function, parameters = find_transform(t.name), dict(t.parameters)

    def call(given: Sequence[FeatureValues]) -> FeatureValues:
        made = function(*given, **parameters)
        if not isinstance(made, (Numbers, Lists)) or len(made) != len(given[0]):
            raise UnfitFeatureError(f"{t.name} must return Numbers or Lists with a row for each of {len(given[0])}")
        return made

    return call
