"""Small tables for tests, and what they hold."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

import penstock as ps

FEATURES = [
    *(ps.Feature(id=number, name=f"dense {number}") for number in range(6)),
    *(ps.Feature(id=number, kind="sparse") for number in range(10, 14)),
    ps.Feature(id=20, kind="scored"),
]
DAYS = ["2026-01-30", "2026-01-31", "2026-02-01"]


def some_rows(count: int, *, first_key: int = 0, seed: int = 0, features=FEATURES) -> pa.Table:
    """Return rows with keys from `first_key` on; features are a function of key and seed, some of them null."""
    rng = np.random.default_rng([seed, first_key])
    columns: dict[str, object] = {
        "key": np.arange(first_key, first_key + count),
        "time": np.arange(count) * 60,
        "label": (rng.random(count) < 0.1).astype(np.float32),
    }
    for feature in features:
        missing = rng.random(count) < 0.3
        lists = [rng.integers(-(2**62), 2**62, rng.integers(0, 5)) for _ in range(count)]
        if feature.kind == "dense":
            columns[feature.column] = pa.array(rng.standard_normal(count).astype(np.float32), mask=missing)
        elif feature.kind == "sparse":
            columns[feature.column] = pa.array([None if m else v for m, v in zip(missing, lists)], pa.list_(pa.int64()))
        else:
            scored = [[{"id": int(i), "score": 0.5} for i in v] for v in lists]
            columns[feature.column] = pa.array(
                [None if m else v for m, v in zip(missing, scored)],
                pa.list_(pa.struct([("id", pa.int64()), ("score", pa.float32())])),
            )
    return pa.table(columns)


def small_table(folder, *, rows=10, days=DAYS, stripe=4, **options) -> ps.Table:
    """Return a table of one file a day."""
    table = ps.Table.create(folder, FEATURES, stripe=ps.StripeSize(rows=stripe), **options)
    for number, day in enumerate(days):
        table.append(some_rows(rows, first_key=number * rows), date=day)
    return table


def keys_of(table: ps.Table, **options) -> list[int]:
    """Return all keys, as a session reads them."""
    batches = ps.read_features(table, columns=["key"], features=[0], **options)
    return [int(key) for batch in batches for key in batch["key"]]


def rows_by_key(dataset: ps.Dataset) -> dict[int, dict[str, object]]:
    """Return each row's features, of whatever batches they came in."""
    found: dict[int, dict[str, object]] = {}
    for batch in dataset:
        for place, key in enumerate(batch["key"].tolist()):
            row: dict[str, object] = {"label": float(batch["label"][place])} if "label" in batch else {}
            if "dense" in batch:
                dense = batch["dense"]
                for number, name in enumerate(dense.keys):
                    there = dense.presence[number, place]
                    row[name] = float(dense.values[number, place]) if there else None
            for kind in ("sparse", "scored"):
                if kind in batch:
                    lists = batch[kind]
                    for number, name in enumerate(lists.keys):
                        at = number * len(lists) + place
                        cut = slice(lists.offsets[at], lists.offsets[at + 1])
                        row[name] = lists.values[cut].tolist()
                        if lists.weights is not None:
                            row[name] = list(zip(row[name], lists.weights[cut].tolist()))
            assert key not in found
            found[key] = row
    return found


def expected_rows(tables) -> dict[int, dict[str, object]]:
    """Return the same of Arrow tables, as written."""
    found: dict[int, dict[str, object]] = {}
    for table in tables:
        for row in table.to_pylist():
            told: dict[str, object] = {"label": row["label"]}
            for name, value in row.items():
                if name in ("f20",):
                    told[name] = [(pair["id"], pair["score"]) for pair in value or ()]
                elif name[0] == "f" and int(name[1:]) >= 10:
                    told[name] = value or []
                elif name[0] == "f":
                    told[name] = value
            found[row["key"]] = told
    return found
