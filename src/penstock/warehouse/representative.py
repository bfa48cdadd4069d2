"""The session of a representative table: what a model like RM1 to RM3 reads of it, and what it makes of that.

Every sparse feature is cut to its first ids and hashed, every dense one normalised. Derived features, as many as
the model has, are made of three to five operators each, by six recipes in turn over the features that are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from penstock.core.errors import InvalidArgumentError
from penstock.graph import transforms as tr
from penstock.warehouse.model_statistics import ModelStatistics
from penstock.warehouse.read_log import ReadLog
from penstock.warehouse.session import Session
from penstock.warehouse.table import Table

KEPT_IDS = 50
TABLE_ROWS = 1_000_003  # of an embedding table: what ids are hashed to
BORDERS = tuple(-2.0 + step / 4 for step in range(17))


def representative_session(
    table: Table, statistics: ModelStatistics, *, batch: int = 512, features: Sequence[int] | None = None
) -> Session:
    """Return the session over some features; None: over those that the table's first logged read names."""
    if features is None:
        reads = ReadLog(table.own_folder).read()
        if not reads:
            raise InvalidArgumentError(f"{table.url} has no read log: `penstock table generate` makes a table with one")
        features = reads[0].features
    known = table.features
    dense = [f"f{number}" for number in features if known[number].kind == "dense"]
    lists = [f"f{number}" for number in features if known[number].kind != "dense"]
    made: list[tr.FeatureTransform] = [tr.BoxCox(name, out=f"{name}_n", lambda1=0.0, lambda2=4.0) for name in dense]
    for name in lists:
        made += [tr.FirstX(name, out=f"{name}_x", x=KEPT_IDS), _hashed(f"{name}_x", f"{name}_h")]
    numbers = [f"{name}_n" for name in dense]
    ids = [f"{name}_h" for name in lists]
    for place in range(statistics.derived if lists and dense else 0):
        steps, number = _derived(place, dense, lists)
        made += steps
        (numbers if number else ids).append(steps[-1].out)
    return Session(table=table, transforms=made, dense=numbers, sparse=ids, batch=batch)


def _hashed(name: str, out: str, salt: int = 0) -> tr.SigridHash:
    return tr.SigridHash(name, out=out, salt=salt, max_value=TABLE_ROWS)


def _derived(place: int, dense: Sequence[str], lists: Sequence[str]) -> tuple[list[tr.FeatureTransform], bool]:
    """Return the operators of one derived feature, and whether it is a number."""
    one, other = (lists[(place * step) % len(lists)] for step in (1, 7))
    number = dense[place % len(dense)]
    names = (f"d{place}_{step}" for step in range(5))
    a, b, c, d = islice(names, 4)
    salt = place + 1
    few: list[tr.FeatureTransform] = [tr.FirstX(one, out=a, x=5), tr.FirstX(other, out=b, x=5)]
    match place % 6:
        case 0:
            return [tr.FirstX(one, out=a, x=10), tr.NGram((a,), out=b, n=2, salt=salt), _hashed(b, c)], False
        case 1:
            return [*few, tr.Cartesian(a, b, out=c, limit=25), _hashed(c, d, salt)], False
        case 2:
            bucket = tr.Bucketize(a, out=b, borders=BORDERS)
            return [tr.Clamp(number, out=a, low=-3, high=3), bucket, _hashed(b, c, salt)], False
        case 3:
            shared = tr.IdListTransform(a, b, out=c)
            return [*few, shared, tr.PositiveModulus(c, out=d, divisor=97), _hashed(d, f"d{place}_4", salt)], False
        case 4:
            score = tr.ComputeScore(a, b, out=c, mode="jaccard")
            return [*few, score, tr.Logit(c, out=d)], True
    squeezed = tr.Clamp(number, out=a, low=-3, high=3)
    return [squeezed, tr.BoxCox(a, out=b, lambda1=0.5, lambda2=4.0), tr.Clamp(b, out=c, low=0, high=4)], True
