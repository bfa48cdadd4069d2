"""Transforms in stacks: whatever is applied together, and in whichever order, each result is what it is by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.graph import ops
from penstock.graph import transforms as tr
from penstock.kernels.features import FeatureValues, Lists, Numbers
from penstock.runtime import feature_schedule
from penstock.runtime.feature_batches import FeatureBatches, _Sources
from penstock.runtime.feature_schedule import alike
from penstock.runtime.feature_transforms import application

DENSE = tuple(f"d{number}" for number in range(9))
SPARSE = tuple(f"s{number}" for number in range(8))
SCORED = tuple(f"w{number}" for number in range(3))


def batch(rows: int, seed: int, *, nulls: bool = True) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    presence = rng.random((len(DENSE), rows)) < 0.7
    dense = np.where(presence | (not nulls), rng.normal(size=presence.shape), 0).astype(np.float32)

    def lists(keys: tuple[str, ...], *, weighed: bool) -> ps.KeyedRagged:
        offsets = np.concatenate(([0], np.cumsum(rng.integers(0, 7, len(keys) * rows)))).astype(np.int64)
        ids = rng.integers(-50, 50, offsets[-1])
        return ps.KeyedRagged(keys, ids, offsets, rng.random(len(ids)).astype(np.float32) if weighed else None)

    return {
        "dense": ps.KeyedDense(DENSE, dense, presence if nulls else None),
        "sparse": lists(SPARSE, weighed=False),
        "scored": lists(SCORED, weighed=True),
        "time": rng.integers(0, 10**9, rows),
    }


def many() -> list[tr.FeatureTransform]:
    """Return transforms of which many are alike, over neighbours, over what is scattered, and over what others make."""
    made: list[tr.FeatureTransform] = []
    for name in DENSE:
        made += [
            tr.BoxCox(name, out=f"{name}_n", lambda1=0.0, lambda2=4.0),
            tr.Clamp(f"{name}_n", out=f"{name}_c", low=0, high=1),
        ]
        made += [tr.Bucketize(name, out=f"{name}_b", borders=(-0.5, 0.0, 0.5))]
    for name in (*SPARSE, *SCORED):
        made += [tr.FirstX(name, out=f"{name}_x", x=3), tr.SigridHash(f"{name}_x", out=f"{name}_h", max_value=1009)]
    for number in range(8):
        one, other = SPARSE[number * 3 % 8], (*SCORED, *SPARSE)[number * 5 % 11]
        made += [tr.Cartesian(one, other, out=f"p{number}", limit=4), tr.NGram((f"p{number}",), out=f"g{number}", n=2)]
        made += [tr.ComputeScore(one, f"{other}_h", out=f"j{number}", mode="jaccard")]
        made += [
            tr.IdListTransform(one, other, out=f"i{number}"),
            tr.SigridHash(f"i{number}", out=f"h{number}", salt=number % 2, max_value=97),
        ]
        made += [tr.NGram((one, other), out=f"v{number}", vocabularies=((1, 2, 3), (4, 5)))]
        made += [tr.Clamp(f"v{number}", out=f"vc{number}", low=1, high=3)]
    return [*made, tr.GetLocalHour("time", out="hour"), tr.GetLocalHour("time", out="later", offset="hour")]


def operator(transforms: list[tr.FeatureTransform], **outputs: Any) -> ops.TransformFeatures:
    named: dict[str, Any] = {"within": ("dense", "sparse", "scored"), "columns": ("time",), **outputs}
    made = ps.from_items([]).transform_features(*transforms, **named).node
    assert isinstance(made, ops.TransformFeatures)
    return made


def one_by_one(node: ops.TransformFeatures, given: Mapping[str, Any]) -> dict[str, FeatureValues]:
    sources = _Sources(node, given)
    features = {
        name: sources.stacks[place.stack].cut(place.at, place.at + 1) for name, place in sources.places().items()
    }
    for each in node.transforms:
        features[each.out] = application(each)([features[name] for name in each.inputs])
    return features


def same(made: Any, expected: FeatureValues) -> bool:
    if isinstance(expected, Lists):
        return np.array_equal(made.values, expected.values) and np.array_equal(made.offsets, expected.offsets)
    values = expected.values
    if expected.presence is not None and values.dtype.kind == "f":
        values = np.where(expected.presence, values, np.float32(np.nan))
    return made.dtype == values.dtype and made.tobytes() == values.tobytes()


@pytest.mark.parametrize(("stacked", "copied"), [(1 << 15, 1 << 11), (200, 40), (1 << 30, 0), (0, 0)])
def test_whatever_is_applied_together_gives_what_it_gives_by_itself(monkeypatch, stacked, copied):
    monkeypatch.setattr(feature_schedule, "STACKED_VALUES", stacked)
    monkeypatch.setattr(feature_schedule, "COPIED_VALUES", copied)
    node = operator(many())
    batches = FeatureBatches(node)
    # The schedule is made with the first; others have other sizes, no rows at all, or nothing that is null.
    for given in (batch(40, 1), batch(40, 2), batch(7, 3), batch(0, 4), batch(25, 5, nulls=False), batch(300, 6)):
        expected = one_by_one(node, given)
        made = batches.made(given)
        assert list(made) == [each.out for each in node.transforms]
        assert [name for name in made if not same(made[name], expected[name])] == []


def test_what_is_put_together_is_what_the_features_are_by_themselves():
    transforms = many()
    dense = tuple(each.out for each in transforms if each.out[0] in "dj" and each.out[-1] != "b")
    sparse = tuple(each.out for each in transforms if each.out[-1] in "hb" or each.out[0] in "gi")
    node = operator(transforms, dense=(*dense, "d3"), sparse=(*sparse, "s2", "w1"))
    batches = FeatureBatches(node)
    for given in (batch(30, 1), batch(12, 2)):
        expected, made = one_by_one(node, given), batches.made(given)
        for name in node.dense:
            values = expected[name]
            assert isinstance(values, Numbers)
            assert made["dense"][name].tobytes() == values.values.tobytes()
            there = np.ones(len(values), np.bool_) if values.presence is None else values.presence
            assert np.array_equal(made["dense"].present(name), there)
        for name in node.sparse:
            values = expected[name]
            if isinstance(values, Numbers):  # a list of one, where there is a number
                kept = slice(None) if values.presence is None else values.presence
                assert np.array_equal(made["sparse"][name].values, values.values[kept])
            else:
                assert same(made["sparse"][name], values)


def test_transforms_that_differ_in_their_features_alone_are_one_step():
    transforms: list[tr.FeatureTransform] = [
        tr.BoxCox(name, out=f"{name}_n", lambda1=0.0, lambda2=4.0) for name in DENSE
    ]
    transforms += [tr.Clamp(f"{name}_n", out=f"{name}_c", low=0, high=1) for name in DENSE]
    transforms += [tr.Clamp("d0", out="another", low=0, high=2), tr.Clamp("d0", out="sign", low=-0.0, high=2)]
    groups = alike(transforms, DENSE)
    assert sorted(len(group.transforms) for group in groups) == [1, 1, 9, 9]
    made = FeatureBatches(operator(transforms)).made(batch(5, 1))
    assert len(made) == 20


def test_a_feature_that_is_made_anew_is_read_as_the_order_says():
    transforms = [
        tr.Clamp("d0", out="before", low=-1, high=1),
        tr.BoxCox("d0", out="d0", lambda1=0.0, lambda2=4.0),
        tr.Clamp("d0", out="after", low=-1, high=1),
    ]
    node = operator(transforms)
    given = batch(20, 1)
    expected, made = one_by_one(node, given), FeatureBatches(node).made(given)
    assert all(same(made[name], expected[name]) for name in ("before", "d0", "after"))
    assert not np.array_equal(made["before"], made["after"], equal_nan=True)


def test_what_does_not_fit_is_told_with_the_transform_that_it_does_not_fit():
    transforms = [tr.FirstX(name, out=f"{name}_x", x=2) for name in ("s0", "s1", "d4", "d5")]
    with pytest.raises(ps.InvalidPipelineError, match=r"d4_x = FirstX.*takes lists"):
        FeatureBatches(operator(transforms)).made(batch(5, 1))


def test_a_registered_transform_sees_the_rows_of_one_batch_and_feature():
    seen: list[int] = []

    def ranked(numbers: Numbers) -> Numbers:
        seen.append(len(numbers))
        return Numbers(np.argsort(np.argsort(numbers.values)).astype(np.float32), numbers.presence)

    ps.register_transform("tests.ranked", ranked)
    batches = FeatureBatches(
        operator([ps.transforms.Custom("tests.ranked", (name,), out=f"{name}_r") for name in DENSE])
    )
    for rows in (12, 12, 5):
        made = batches.made(batch(rows, rows))
        assert all(np.nanmax(column) < rows for column in made.values())
    assert seen == [12] * 18 + [5] * 9
