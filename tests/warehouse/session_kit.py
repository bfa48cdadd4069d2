"""A small table of features, and a session over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import penstock as ps

DAYS = ("2026-01-01", "2026-01-02", "2026-01-03")
ROWS = 96


def rows_of(day: int) -> pa.Table:
    rng = np.random.default_rng(day)
    ids = [rng.integers(0, 10_000, rng.integers(0, 6)).tolist() for _ in range(2 * ROWS)]
    scored = [[{"id": int(id), "score": float(id % 7)} for id in row] for row in ids[ROWS:]]
    return pa.table(
        {
            "key": np.arange(ROWS) + day * ROWS,
            "time": np.arange(ROWS) * 900,
            "label": (np.arange(ROWS) % 3 == 0).astype(np.float32),
            "f1": pa.array(rng.random(ROWS), pa.float32(), mask=rng.random(ROWS) < 0.2),
            "f2": pa.array(rng.normal(size=ROWS), pa.float32()),
            "f3": pa.array(ids[:ROWS], pa.list_(pa.int64())),
            "f4": pa.array(scored, pa.list_(pa.struct([("id", pa.int64()), ("score", pa.float32())]))),
            "f5": pa.array(rng.random(ROWS), pa.float32()),
        }
    )


def make_table(folder: Path) -> ps.Table:
    table = ps.Table.create(
        folder / "table",
        [
            ps.Feature(id=1, name="age"),
            ps.Feature(id=2),
            ps.Feature(id=3, name="pages", kind="sparse"),
            ps.Feature(id=4, kind="scored"),
            ps.Feature(id=5, name="unused"),
        ],
    )
    for number, day in enumerate(DAYS):
        table.append(rows_of(number), date=day)
    return table


def transforms() -> list[Any]:
    t = ps.transforms
    return [
        t.Logit("age", out="age_odds"),
        t.Clamp("f2", out="f2c", low=-2, high=2),
        t.FirstX("pages", out="pages3", x=3),
        t.SigridHash("pages3", out="pages_id", salt=1, max_value=500),
        t.FirstX("f4", out="best", x=2, by="score"),
        t.SigridHash("best", out="best_id", max_value=500),
        t.ComputeScore("pages", "f4", out="alike", mode="jaccard"),
        t.GetLocalHour("time", out="hour"),
        t.Clamp("unused", out="dead", low=0, high=1),
    ]


OUTPUTS: dict[str, Any] = {
    "dense": ("age_odds", "f2c", "alike"),
    "sparse": ("pages_id", "best_id", "hour"),
}


def make_session(table: ps.Table, **changes: Any) -> ps.Session:
    return ps.Session(**{"table": table, "transforms": transforms(), "batch": 32, **OUTPUTS, **changes})
