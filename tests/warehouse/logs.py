"""Logs of features and events, and what they are published as."""

from __future__ import annotations

import hashlib

import pyarrow as pa
import pyarrow.parquet as pq

import penstock as ps
from tests.warehouse.tables import rows_by_key

FEATURES = [ps.Feature(id=1), ps.Feature(id=2), ps.Feature(id=5, kind="sparse"), ps.Feature(id=8, kind="scored")]
HOUR, DAY = 3600, 86_400
START = 20_000 * DAY


def write_features(path, rows):
    """Write (key, time) rows; their features are a function of the key, and row 13 has none."""
    scored = pa.map_(pa.int64(), pa.list_(pa.struct([("id", pa.int64()), ("score", pa.float32())])))
    columns = {
        "key": pa.array([key for key, _ in rows], pa.int64()),
        "time": pa.array([time for _, time in rows], pa.int64()),
        "dense": pa.array([dense_of(key) for key, _ in rows], pa.map_(pa.int64(), pa.float32())),
        "sparse": pa.array([[(5, [key] * (key % 3))] for key, _ in rows], pa.map_(pa.int64(), pa.list_(pa.int64()))),
        "scored": pa.array([[(8, [{"id": key, "score": 0.5}])] for key, _ in rows], scored),
    }
    pq.write_table(pa.table(columns), path)


def dense_of(key):
    return [] if key == 13 else [(1, key / 2), *([(2, 1.0)] if key % 2 else []), (99, 7.0)]


def write_events(path, rows):
    pq.write_table(pa.table({"key": [key for key, _ in rows], "time": [time for _, time in rows]}), path)


def write_logs(folder):
    """Write logs with rows that come twice, and events that are early, late, doubled or of no row."""
    rows = [(key, START + key * 1000) for key in range(200)]
    write_features(folder / "features-0.parquet", rows[:120])
    write_features(folder / "features-1.parquet", [*rows[110:], (7, START + 9_999)])
    at = dict(rows)
    write_events(
        folder / "events-0.parquet",
        [
            (3, at[3] + 10),
            (3, at[3] + 10),  # doubled
            (4, at[4] - 1),  # before
            (5, at[5] + HOUR),  # in the last second
            (6, at[6] + HOUR + 1),  # late
            (190, at[190] + 5),
            (777, START),  # of a row that was never logged
        ],
    )
    return folder / "features-*.parquet", folder / "events-*.parquet"


def published(table):
    return rows_by_key(ps.read_features(table, columns=["key", "label"])) if table.snapshot().files else {}


def column_digests(table):
    """Return a digest of each column's values, in the order of the rows' keys."""
    rows = pa.concat_tables(
        [pq.read_table(table.folder / file.path, partitioning=None) for file in table.snapshot().files],
        promote_options="default",
    ).sort_by("key")
    return {
        name: hashlib.sha256(repr(rows[name].to_pylist()).encode()).hexdigest() for name in sorted(rows.column_names)
    }
