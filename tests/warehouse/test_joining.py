"""Logs become labelled rows, once, whatever comes late, twice or never."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time

import pytest

import penstock as ps
from penstock.warehouse.joining import JoinRules, join_logs
from tests.warehouse.logs import (
    DAY,
    FEATURES,
    HOUR,
    START,
    column_digests,
    published,
    write_events,
    write_features,
    write_logs,
)

BATCHES = 100


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


def test_a_hundred_micro_batches_of_a_growing_log_killed_between_any_two_or_within_one_equal_one_batch(tmp_path):
    """Logs grow by a file before each micro-batch; every second process is killed at some moment of its work."""
    chance = random.Random(7)
    rows = [(key, START + key * 1000) for key in range(200)]
    events = [(key, time + chance.randrange(-600, 2 * HOUR)) for key, time in rows if key % 3 == 0]
    table = ps.Table.create(tmp_path / "growing", FEATURES)
    logged, happened = tmp_path / "features-*.parquet", tmp_path / "events-*.parquet"
    command = [sys.executable, "-m", "tests.warehouse.forked_joins", table.url, str(logged), str(happened)]
    killed = 0
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as joins:
        assert joins.stdin is not None and joins.stdout is not None
        for batch in range(BATCHES):
            now = START + 2000 * (batch + 1)
            added = rows[2 * batch : 2 * batch + 2]
            write_features(tmp_path / f"features-{batch:03d}.parquet", [*added, *added[:1]])  # and one of them twice
            late = [event for event in events if now - 2000 <= event[1] < now]
            write_events(tmp_path / f"events-{batch:03d}.parquet", [*late, *late[:1], (999_999, now)])
            print(now, file=joins.stdin, flush=True)
            child = int(joins.stdout.readline())
            if batch % 2:
                time.sleep(chance.uniform(0, 0.12))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
                    killed += 1
            assert joins.stdout.readline() == "ended\n"
        joins.stdin.close()
    write_events(tmp_path / "events-last.parquet", [event for event in events if event[1] >= START + 2000 * BATCHES])
    join_logs(table, logged, happened, now_s=START + 10 * DAY)
    whole = ps.Table.create(tmp_path / "whole", FEATURES)
    join_logs(whole, logged, happened, now_s=START + 10 * DAY)
    assert killed > 10 and len(table.snapshot().files) > 20 > len(whole.snapshot().files)
    assert column_digests(table) == column_digests(whole)
    assert sorted(published(table)) == list(range(200))


def test_negatives_are_sampled_by_their_key(logs):
    table = ps.Table.create(logs / "t", FEATURES)
    rules = JoinRules(keep_negatives=0.3, seed=2)
    join_logs(table, logs / "features-*.parquet", logs / "events-*.parquet", now_s=START + 10 * DAY, rules=rules)
    rows = published(table)
    assert {key for key, row in rows.items() if row["label"]} == {3, 5, 190} and 30 < len(rows) < 100
