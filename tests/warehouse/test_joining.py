"""Logs become labelled rows, once, whatever comes late, twice or never."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.warehouse.joining import JoinRules, join_logs
from tests.warehouse.logs import DAY, FEATURES, START, published, write_logs

@pytest.fixture
def logs(tmp_path):
    write_logs(tmp_path)
    return tmp_path


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
