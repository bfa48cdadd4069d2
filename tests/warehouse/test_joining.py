"""Logs become labelled rows, once, whatever comes late, twice or never."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.warehouse.joining import JoinRules, join_logs
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


@pytest.fixture
def logs(tmp_path):
    rows = [(key, START + key * 1000) for key in range(200)]
    write_features(tmp_path / "features-0.parquet", rows[:120])
    write_features(tmp_path / "features-1.parquet", [*rows[110:], (7, START + 9_999)])
    at = dict(rows)
    write_events(
        tmp_path / "events-0.parquet",
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
    return tmp_path


def published(table):
    return rows_by_key(ps.read_features(table, columns=["key", "label"])) if table.snapshot().files else {}


def test_labels_come_from_the_window_and_from_nothing_else(logs):
    table = ps.Table.create(logs / "t", FEATURES)
    count = join_logs(table, logs / "features-*.parquet", logs / "events-*.parquet", now_s=START + 10 * DAY)
    rows = published(table)
    assert count == 200 and sorted(rows) == list(range(200))
    assert {key for key, row in rows.items() if row["label"]} == {3, 5, 190}
    assert rows[7] == {"label": 0.0, "f1": 3.5, "f2": 1.0, "f5": [7], "f8": [(7, 0.5)]}
    assert rows[13]["f1"] is None and rows[13]["f5"] == [13]
    assert table.snapshot().partitions == ["2024-10-04", "2024-10-05", "2024-10-06"]


def test_a_row_is_published_when_its_window_has_passed_and_no_label_is_of_the_future(logs):
    table = ps.Table.create(logs / "t", FEATURES)
    now = START + 190 * 1000 + 2
    assert join_logs(table, logs / "features-*.parquet", logs / "events-*.parquet", now_s=now) == 187
    assert max(published(table)) == 186, "rows of the last hour wait for their events"
    assert join_logs(table, logs / "features-*.parquet", logs / "events-*.parquet", now_s=now) == 0
    assert join_logs(table, logs / "features-*.parquet", logs / "events-*.parquet", now_s=now + DAY) == 13
    assert published(table)[190]["label"] == 1.0


def test_micro_batches_that_are_stopped_between_any_two_equal_one(logs):
    whole = ps.Table.create(logs / "whole", FEATURES)
    join_logs(whole, logs / "features-*.parquet", logs / "events-*.parquet", now_s=START + 10 * DAY)
    growing = ps.Table.create(logs / "growing", FEATURES)
    chance = np.random.default_rng(1)
    for now in np.sort(chance.integers(START, START + 3 * DAY, 20)).tolist():
        # A new object each time: nothing but the table remembers how far it has come.
        join_logs(ps.Table(logs / "growing"), logs / "features-*.parquet", logs / "events-*.parquet", now_s=now)
    join_logs(growing, logs / "features-*.parquet", logs / "events-*.parquet", now_s=START + 10 * DAY)
    assert len(growing.snapshot().files) > len(whole.snapshot().files)
    assert published(growing) == published(whole)


def test_negatives_are_sampled_by_their_key(logs):
    table = ps.Table.create(logs / "t", FEATURES)
    rules = JoinRules(keep_negatives=0.3, seed=2)
    join_logs(table, logs / "features-*.parquet", logs / "events-*.parquet", now_s=START + 10 * DAY, rules=rules)
    rows = published(table)
    assert {key for key, row in rows.items() if row["label"]} == {3, 5, 190} and 30 < len(rows) < 100
