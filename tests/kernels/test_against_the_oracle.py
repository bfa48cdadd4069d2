"""Kernels give what plain Python gives, row by row: of empty lists, nulls, NaN, infinities and the ends of 64 bits."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from penstock.graph import transforms as tr
from tests.kernels import oracle
from tests.kernels.features_kit import applied
from tests.kernels.test_vectors import same

ENDS = [0, 1, -1, 2**63 - 1, -(2**63), 2**53 + 1, 2**24 + 1]
ids = st.one_of(st.integers(-5, 5), st.sampled_from(ENDS), st.integers(-(2**63), 2**63 - 1))
floats = st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, 1.0, 2.5, float("nan"), float("inf")]))
id_lists = st.lists(st.lists(ids, max_size=8), min_size=1, max_size=6)
weighed_lists = st.lists(st.lists(st.tuples(ids, floats), max_size=8), min_size=1, max_size=6)
maybe_ids = st.lists(st.none() | ids, min_size=1, max_size=8)
maybe_floats = st.lists(st.none() | floats, min_size=1, max_size=8)
float_lists = st.lists(st.lists(floats, max_size=6), min_size=1, max_size=5)
probabilities = st.lists(st.none() | st.floats(-0.5, 1.5, width=32), min_size=1, max_size=8)
borders = st.lists(st.integers(-4, 4).map(lambda n: n / 2) | st.floats(-1e40, 1e40), min_size=1, max_size=9).map(
    lambda found: tuple(sorted(b for n, b in enumerate(sorted(found)) if sorted(found)[:n].count(b) < 2))
)
mappings = st.dictionaries(ids, ids, min_size=1).map(lambda found: tuple(found.items()))
seeds = st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63)])
divisors = st.sampled_from([1, 2, 3, 64, 100, 1000003, 2**62, 2**63 - 1])


def made(cls: type[tr.FeatureTransform], **parameters: Any) -> st.SearchStrategy[tr.FeatureTransform]:
    return st.builds(lambda **given: cls("a", out="c", **given), **parameters)  # type: ignore[call-arg]


def made_of_two(cls: type[tr.FeatureTransform], **parameters: Any) -> st.SearchStrategy[tr.FeatureTransform]:
    return st.builds(lambda **given: cls("a", "b", out="c", **given), **parameters)  # type: ignore[call-arg]


MODES = st.sampled_from(
    [
        *("has_id_overlap", "id_overlap_count", "get_max_count", "jaccard"),
        *("cosine", "score_sum", "score_min", "score_max"),
    ]
)
small_weights = st.lists(
    st.lists(st.tuples(st.integers(-3, 3), st.floats(-8, 8, width=32)), max_size=8), min_size=1, max_size=6
)
CASES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "Bucketize of numbers": (made(tr.Bucketize, borders=borders), (maybe_floats,)),
    "Bucketize of ids": (made(tr.Bucketize, borders=borders), (maybe_ids,)),
    "Bucketize of lists": (made(tr.Bucketize, borders=borders), (float_lists,)),
    "Bucketize by several": (made(tr.Bucketize, borders=st.tuples(borders, borders)), (maybe_floats,)),
    "SigridHash": (made(tr.SigridHash, salt=seeds, max_value=divisors), (id_lists,)),
    "SigridHash of numbers": (made(tr.SigridHash, salt=seeds, max_value=divisors), (maybe_ids,)),
    "FirstX": (made(tr.FirstX, x=st.integers(0, 9)), (id_lists,)),
    "FirstX with weights": (made(tr.FirstX, x=st.integers(0, 9)), (weighed_lists,)),
    "FirstX by score": (made(tr.FirstX, x=st.integers(0, 9), by=st.just("score")), (weighed_lists.filter(any),)),
    "ComputeScore": (made_of_two(tr.ComputeScore, mode=MODES), (small_weights, small_weights)),
    "ComputeScore of ids": (made_of_two(tr.ComputeScore, mode=MODES), (id_lists, id_lists)),
    "Enumerate": (made(tr.EnumerateIds), (id_lists,)),
    "PositiveModulus": (made(tr.PositiveModulus, divisor=divisors), (maybe_ids,)),
    "IdListTransform": (made_of_two(tr.IdListTransform, distinct=st.booleans()), (weighed_lists, id_lists)),
    "BoxCox": (
        made(tr.BoxCox, lambda1=st.sampled_from([0, 0.5, 1, 2, -1]), lambda2=st.sampled_from([0, 1, -2.5])),
        (maybe_floats,),
    ),
    "Logit": (made(tr.Logit, epsilon=st.sampled_from([1e-6, 0.01, 0.25])), (probabilities,)),
    "MapId": (
        made(tr.MapId, mapping=mappings, default=ids),
        (id_lists,),
    ),
    "MapId that drops": (
        made(tr.MapId, mapping=mappings, drop=st.just(True)),
        (maybe_ids,),
    ),
    "MapId by table": (made(tr.MapId, table=st.lists(ids, min_size=1, max_size=5).map(tuple)), (maybe_ids,)),
    "GetLocalHour": (made(tr.GetLocalHour, offset_s=ids), (maybe_ids,)),
    "GetLocalHour by feature": (made(tr.GetLocalHour, offset=st.just("b")), (maybe_ids, maybe_ids)),
    "NGram": (
        st.builds(lambda n, salt, form: tr.NGram(("a",), out="c", n=n, salt=salt, form=form),
                  st.integers(1, 4), seeds, st.sampled_from(["hash", "flat"])),
        (id_lists,),
    ),
    "NGram of features": (
        st.just(tr.NGram(("a", "b"), out="c", vocabularies=((0, 1, 2**63 - 1), (-1, 5)))), (maybe_ids, id_lists)
    ),
    "Onehot": (
        made(tr.Onehot, low=st.sampled_from([-1, 0.5]), high=st.sampled_from([1, 3.25]), count=st.integers(1, 5),
             form=st.sampled_from(["vector", "index"])),
        (maybe_floats,),
    ),
    "Clamp": (made(tr.Clamp, low=st.sampled_from([-2, 0]), high=st.sampled_from([0, 7])), (maybe_floats,)),
    "Clamp of ids": (made(tr.Clamp, low=ids.filter(lambda n: n < 0), high=ids.filter(lambda n: n >= 0)), (id_lists,)),
    "Cartesian": (made_of_two(tr.Cartesian, limit=st.integers(1, 20)), (id_lists, id_lists)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_kernels_give_what_plain_python_gives(name: str) -> None:
    transforms, features = CASES[name]

    @given(transforms, st.tuples(*features))
    @settings(max_examples=80, deadline=None)
    def compare(transform: tr.FeatureTransform, inputs: tuple[list[Any], ...]) -> None:
        count = min(map(len, inputs))
        inputs = tuple(rows[:count] for rows in inputs)
        wanted = [oracle.apply(transform, *rows) for rows in zip(*inputs)]
        assert same(wanted, found := applied(transform, *inputs)), found

    compare()


def test_every_transform_is_compared() -> None:
    compared = {name.split()[0] for name in CASES}
    assert compared == set(tr.BY_OP) - {"Sampling", "Custom"}
