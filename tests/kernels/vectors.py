"""Published examples of each transform: parameters, the rows that are read, the rows that are made.

Those of `docs/features.md` stand here; `test_vectors.py` compares the page with this table. A row is a number, None, a
list, or a list of (id, weight).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from penstock.graph import transforms as tr

NAN = float("nan")
BIG, LOW = 2**63 - 1, -(2**63)
A = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 10, 11, 12]]
M = [[(i, float(i)) for i in row] for row in ([1, 2, 3], [0, 10], [7, 10, 10], [10, 10, 11, 13])]


class Vector(NamedTuple):
    transform: tr.FeatureTransform
    inputs: tuple[list[Any], ...]
    made: list[Any]


def one(transform: tr.FeatureTransform, rows: list[Any], made: list[Any]) -> Vector:
    return Vector(transform, (rows,), made)


def two(transform: tr.FeatureTransform, rows: list[Any], others: list[Any], made: list[Any]) -> Vector:
    return Vector(transform, (rows, others), made)


def scored(mode: Any, made: list[float]) -> Vector:
    return two(tr.ComputeScore("a", "b", out="c", mode=mode), A, M, made)


VECTORS = [
    one(tr.Bucketize("a", out="b", borders=(2.0, 5.0, 10.0)), [1, 2, 3, 5, 8, 10, 11], [0, 0, 1, 1, 2, 2, 3]),
    one(tr.Bucketize("a", out="b", borders=(0, 2, 3, 5, 500, 1000)), [1, 2, 3, 4, 5, 6], [1, 1, 2, 3, 3, 4]),
    one(
        tr.Bucketize("a", out="b", borders=(0, 2, 3, 5, 500, 1000)),
        [1.5, 2.5, 3.5, 4.5, 5.5, 6.5],
        [1, 2, 3, 3, 4, 4],
    ),
    one(tr.Bucketize("a", out="b", borders=(1, 2, 2, 3, 3)), [1.5, 2.0, 2.5, 3.0, 3.5], [1, 2, 3, 4, 5]),
    one(tr.Bucketize("a", out="b", borders=(1, 10, 100)), [[1.5, 2.5, 150.0], [10.0, 200.0]], [[1, 1, 3], [1, 3]]),
    one(tr.Bucketize("a", out="b", borders=((1, 2), (5.0,))), [0.0, 1.5, 9.0], [[0, 3], [1, 3], [2, 4]]),
    one(tr.Bucketize("a", out="b", borders=(0.5,)), [NAN, None, float("inf"), float("-inf")], [0, None, 1, 0]),
    one(tr.Bucketize("a", out="b", borders=(-1e30, 2.5, 1e30)), [LOW, 2, 3, BIG], [1, 1, 2, 2]),
    one(
        tr.SigridHash("a", out="b", max_value=100),
        list(range(17)),
        [6, 60, 54, 54, 9, 4, 91, 11, 67, 79, 2, 25, 92, 98, 83, 66, 2],
    ),
    one(tr.SigridHash("a", out="b", salt=1, max_value=100), [1], [27]),
    one(tr.SigridHash("a", out="b", max_value=100), [-1], [75]),
    one(tr.SigridHash("a", out="b", salt=7, max_value=1000003), [123456789], [722886]),
    one(tr.SigridHash("a", out="b", max_value=1), [[5, LOW], [], [BIG]], [[0, 0], [], [0]]),
    one(tr.FirstX("a", out="b", x=2), [[0, 1, 2, 3], [4, 5, 6]], [[0, 1], [4, 5]]),
    one(tr.FirstX("a", out="b", x=9), [[0, 1, 2, 3], []], [[0, 1, 2, 3], []]),
    one(tr.FirstX("a", out="b", x=0), [[0, 1], [2]], [[], []]),
    one(
        tr.FirstX("a", out="b", x=2, by="score"),
        [[(1, 0.5), (2, 9.0), (3, 1.0)], [(4, 1.0), (5, 1.0), (6, 1.0)]],
        [[(2, 9.0), (3, 1.0)], [(4, 1.0), (5, 1.0)]],
    ),
    one(tr.FirstX("a", out="b", x=1, by="score"), [[(1, NAN), (2, -5.0)], []], [[(2, -5.0)], []]),
    scored("id_overlap_count", [3, 0, 1, 3]),
    scored("get_max_count", [3, 0, 1, 3]),
    scored("has_id_overlap", [1, 0, 1, 1]),
    scored("jaccard", [1, 0, 0.2, 0.6]),
    scored("score_sum", [6, 0, 7, 31]),
    scored("score_min", [1, 0, 7, 10]),
    scored("score_max", [3, 0, 7, 11]),
    two(
        tr.ComputeScore("a", "b", out="c", mode="cosine"),
        [[(1, 1.0), (2, 2.0), (3, 3.0)], [], [(1, 0.0)]],
        [[(1, 5.0), (2, 4.0), (3, 3.0)], [(1, 1.0)], [(1, 1.0)]],
        [0.831522, 0, 0],
    ),
    two(tr.ComputeScore("a", "b", out="c", mode="jaccard"), [[]], [[]], [0]),
    one(tr.BoxCox("a", out="b", lambda1=0.5, lambda2=1), [3.0], [2.0]),
    one(tr.BoxCox("a", out="b", lambda1=0), [-5.0], [-13.815511]),
    one(tr.BoxCox("a", out="b", lambda1=0), [1.0, None, NAN], [0.0, None, NAN]),
    one(tr.BoxCox("a", out="b", lambda1=1), [1.0, 3.5, float("inf")], [0.0, 2.5, float("inf")]),
    one(tr.BoxCox("a", out="b", lambda1=2, lambda2=-1), [3.0, 1.0], [1.5, -0.5]),
    one(tr.Logit("a", out="b"), [0.5, 0.0], [0.0, -13.815510]),
    one(tr.Logit("a", out="b"), [1.0, 2.0], [13.802318, 13.802318]),
    one(tr.Logit("a", out="b", epsilon=0.25), [0.1, 0.9], [-1.0986123, 1.0986123]),
    one(tr.Logit("a", out="b"), [NAN, None, -3.0], [NAN, None, -13.815510]),
    one(tr.Logit("a", out="b"), [0.75], [1.0986123]),
    one(tr.PositiveModulus("a", out="b", divisor=5), [-7, 7, 0], [3, 2, 0]),
    one(tr.PositiveModulus("a", out="b", divisor=1), [BIG, LOW], [0, 0]),
    one(tr.PositiveModulus("a", out="b", divisor=10), [2**24 + 1, 2**53 + 1], [7, 3]),
    one(tr.PositiveModulus("a", out="b", divisor=BIG), [LOW, BIG], [BIG - 1, 0]),
    one(tr.PositiveModulus("a", out="b", divisor=8), [[-1, 9], []], [[7, 1], []]),
    Vector(tr.NGram(("a", "b"), out="c", vocabularies=((10, 20), (1, 2, 3))), ([20], [3]), [5]),
    Vector(
        tr.NGram(("a", "b"), out="c", vocabularies=((10, 20), (1, 2, 3))),
        ([10, 99, None, [20, 10], []], [2, 3, 1, 1, 1]),
        [2, 4, None, 1, None],
    ),
    one(tr.NGram(("a",), out="b", n=2, form="flat"), [[1, 2, 3, 4]], [[1, 2, 2, 3, 3, 4]]),
    one(tr.NGram(("a",), out="b", n=3, form="flat"), [[1, 2], []], [[1, 2], []]),
    one(
        tr.NGram(("a",), out="b", n=2),
        [[1, 2, 3], [1]],
        [[-5286723046509945304, -5814142665615228097], [3312372336822847760]],
    ),
    one(tr.Onehot("a", out="b", low=0, high=4, count=4), [0.0, 3.9], [[1, 0, 0, 0], [0, 0, 0, 1]]),
    one(tr.Onehot("a", out="b", low=0, high=4, count=4), [4.0, -0.1], [[0, 0, 0, 0], [0, 0, 0, 0]]),
    one(tr.Onehot("a", out="b", low=0, high=1, count=2), [NAN, None, 0.5], [[0, 0], [], [0, 1]]),
    one(tr.Onehot("a", out="b", low=0, high=4, count=4, form="index"), [2.5, 4.0, None], [[2], [], []]),
    one(tr.Onehot("a", out="b", low=-1, high=1, count=1), [0, 1], [[1], [0]]),
    one(tr.MapId("a", out="b", mapping=((7, 1), (-3, 2))), [7, -3, 5], [1, 2, 0]),
    one(tr.MapId("a", out="b", mapping=((7, 1),), default=9), [[7, 8], []], [[1, 9], []]),
    one(tr.MapId("a", out="b", mapping=((7, 1),), drop=True), [[8, 7, 7], [8]], [[1, 1], []]),
    one(tr.MapId("a", out="b", mapping=((7, 1),), drop=True), [7, 8, None], [1, None, None]),
    one(tr.MapId("a", out="b", table=(5, 6, 7)), [-1, 0, 4, BIG], [0, 5, 6, 6]),
    one(tr.Clamp("a", out="b", low=0, high=20), [-100, 100, 10], [0, 20, 10]),
    one(tr.Clamp("a", out="b", low=0, high=20), [-100.0, 100.0, 10.5], [0, 20, 10.5]),
    one(tr.Clamp("a", out="b", low=-1, high=1), [NAN, None, float("inf")], [NAN, None, 1.0]),
    one(tr.Clamp("a", out="b", low=float("-inf"), high=0), [LOW, BIG], [LOW, 0]),
    one(tr.Clamp("a", out="b", low=2, high=2), [[1, 2, 3], []], [[2, 2, 2], []]),
    two(
        tr.Cartesian("a", "b", out="c", limit=100),
        [[1, 2], [], [1]],
        [[3], [3], []],
        [[-83301723419010536, -6687226154603527206], [], []],
    ),
    two(tr.Cartesian("a", "b", out="c", limit=1), [[1, 2]], [[3]], [[-83301723419010536]]),
    two(tr.Cartesian("a", "b", out="c", limit=3), [[1, 1]], [[3, 3]], [[-83301723419010536] * 3]),
    two(tr.Cartesian("a", "b", out="c", limit=2), [[0]], [[0]], [[-405535267904115624]]),
    two(tr.Cartesian("a", "b", out="c", limit=2), [[LOW]], [[BIG]], [[-7402506626407415947]]),
    one(tr.EnumerateIds("a", out="b"), [[5, 5, 9]], [[(5, 0.0), (5, 1.0), (9, 2.0)]]),
    one(tr.EnumerateIds("a", out="b"), [[], [4]], [[], [(4, 0.0)]]),
    one(tr.EnumerateIds("a", out="b"), [[(7, 0.5), (8, 0.25)]], [[(7, 0.0), (8, 1.0)]]),
    one(tr.EnumerateIds("a", out="b"), [[LOW, BIG]], [[(LOW, 0.0), (BIG, 1.0)]]),
    one(tr.EnumerateIds("a", out="b"), [3, None], [[(3, 0.0)], []]),
    two(tr.IdListTransform("a", "b", out="c"), [[3, 1, 3, 2]], [[3, 2, 2]], [[3, 3, 2]]),
    two(tr.IdListTransform("a", "b", out="c", distinct=True), [[3, 1, 3, 2]], [[3, 2, 2]], [[3, 2]]),
    two(tr.IdListTransform("a", "b", out="c"), [[], [1]], [[1], []], [[], []]),
    two(tr.IdListTransform("a", "b", out="c"), [[(1, 0.5), (2, 0.25)]], [[2]], [[(2, 0.25)]]),
    two(tr.IdListTransform("a", "b", out="c"), [[LOW, BIG, 0]], [[BIG, LOW]], [[LOW, BIG]]),
    one(tr.GetLocalHour("a", out="b", offset_s=-3600), [0], [23]),
    one(tr.GetLocalHour("a", out="b", offset_s=19800), [1700000000], [3]),
    one(tr.GetLocalHour("a", out="b"), [0, 3599, 3600, -1, None], [0, 0, 1, 23, None]),
    two(tr.GetLocalHour("a", offset="b", out="c"), [0, 0, None], [7200, None, 0], [2, None, None]),
    one(tr.GetLocalHour("a", out="b", offset_s=BIG), [BIG, LOW], [7, 23]),
]


def published(vector: Vector) -> str:
    """Return an example as the page on features has it."""
    plain = tr.transform_to_plain(vector.transform)
    named = ("op", "out", "input", "other", "features", "offset")
    given = ", ".join(f"{name}={value}" for name, value in plain.items() if name not in named)
    read = " and ".join(f"`{rows}`" for rows in vector.inputs)
    return f"- `{vector.transform.OP}({given})`: {read} → `{vector.made}`"
