"""What others see of a table while writers write, rewrite, and die."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

import penstock as ps
from penstock.sources.delta_log import read_snapshot
from penstock.warehouse.committing import commit_replacement
from penstock.warehouse.layout import compact, reorder, rewrite
from tests.waiting import wait_until
from tests.warehouse.tables import FEATURES, expected_rows, keys_of, rows_by_key, small_table, some_rows

MOMENTS = 50


def start_appender(folder, name, first, count):
    command = [sys.executable, "-m", "tests.warehouse.appender", str(folder), name, str(first), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_writer_killed_at_any_moment_leaves_the_old_or_the_new_version(tmp_path):
    table = ps.Table.create(tmp_path / "t", FEATURES)
    table.append(some_rows(5), date="2026-01-30", progress=("w", 0))
    began = time.monotonic()
    table.append(some_rows(5, first_key=5), date="2026-01-30", progress=("w", 1))
    commit_s = min(0.1, time.monotonic() - began)
    chance = random.Random(4)
    done = 2
    command = [sys.executable, "-m", "tests.warehouse.forked_writers", str(tmp_path / "t")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writers:
        assert writers.stdin is not None and writers.stdout is not None
        for moment in range(MOMENTS):
            version = table.version
            print(done, file=writers.stdin, flush=True)
            child = int(writers.stdout.readline())
            if moment % 3 == 0:  # on a busy machine too, some come as far as a commit
                wait_until(lambda before=version: table.version > before, "a commit")
            time.sleep(chance.uniform(0, 2 * commit_s))
            os.kill(child, signal.SIGKILL)
            assert writers.stdout.readline() == "ended\n"
            seen = table.snapshot()
            assert len(seen.files) >= done, f"after kill {moment}"
            assert all(
                file.rows == 5 and (tmp_path / "t" / file.path).stat().st_size == file.size for file in seen.files
            )
            assert seen.progress["w"] == len(seen.files) - 1
            done = len(seen.files)
    assert done > 5
    assert sorted(keys_of(table)) == list(range(5 * done))


def test_two_appenders_beside_reorders_lose_nothing_and_double_nothing(tmp_path):
    table = small_table(tmp_path / "t", rows=4)
    appenders = [start_appender(tmp_path / "t", f"w{n}", 1000 * (n + 1), 12) for n in range(2)]
    for appender in appenders:
        assert appender.stdout is not None and appender.stdout.readline() == "ready\n"
    reorders = 0
    while any(appender.poll() is None for appender in appenders):
        order = [feature.id for feature in FEATURES]
        random.Random(reorders).shuffle(order)
        reorder(table, order=order)
        reorders += 1
    assert [appender.wait(60) for appender in appenders] == [0, 0]
    for appender in appenders:
        appender.stdout.close()
    assert reorders > 1
    assert sorted(keys_of(table)) == [*range(12), *range(1000, 1060), *range(2000, 2060)]


def test_of_two_that_replace_the_same_file_one_is_refused(tmp_path):
    table = small_table(tmp_path / "t")
    before = table.snapshot()
    files = [[file] for file in before.files]
    compacted = rewrite(table, files, read_version=before.version, operation="A")
    assert compacted == before.version + 1
    with pytest.raises(
        ps.TableConflictError, match=r"was replaced in version 4, .* nothing was changed by this; run it"
    ):
        rewrite(table, files, read_version=before.version, operation="B")
    assert sorted(keys_of(table)) == list(range(30))
    written = {str(path.relative_to(tmp_path / "t")) for path in (tmp_path / "t").glob("date=*/*")}
    assert written == {file.path for file in (*before.files, *table.snapshot().files)}, "the refused files are removed"


def test_many_that_compact_at_once_leave_every_row_once(tmp_path):
    table = small_table(tmp_path / "t", rows=3)
    for number in range(8):
        table.append(some_rows(3, first_key=100 + number * 3), date="2026-01-30")
    threads = [threading.Thread(target=compact, args=(table,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(keys_of(table)) == [*range(9), *range(100, 124)]
    assert len(table.snapshot().files) == 3


def test_the_same_number_of_a_writer_is_committed_once(tmp_path):
    table = ps.Table.create(tmp_path / "t", FEATURES)
    assert table.append(some_rows(2), date="2026-01-30", progress=("w", 0)) == 1
    assert table.append(some_rows(2), date="2026-01-30", progress=("w", 0)) is None
    assert table.append(some_rows(2, first_key=2), date="2026-01-30", progress=("w", 1)) == 2
    assert keys_of(table) == [0, 1, 2, 3] or sorted(keys_of(table)) == [0, 1, 2, 3]


def test_older_versions_stay_readable(tmp_path):
    table = small_table(tmp_path / "t")
    assert len(keys_of(table, version=1)) == 10 and len(keys_of(table, version=3)) == 30
    with pytest.raises(ps.DataError, match="has no version 9; the newest is 3; name another"):
        ps.read_features(table, version=9)


def test_a_log_with_checkpoints_is_the_same_as_without(tmp_path):
    import deltalake

    table = small_table(tmp_path / "t")
    for number in range(3):
        table.append(some_rows(2, first_key=100 + 2 * number), date="2026-01-30", progress=("w", number))
    before = table.snapshot()
    deltalake.DeltaTable(table.url).create_checkpoint()
    assert (tmp_path / "t" / "_delta_log" / f"{before.version:020d}.checkpoint.parquet").exists()
    for version in range(before.version):
        (tmp_path / "t" / "_delta_log" / f"{version:020d}.json").unlink()
    assert table.snapshot() == before
    table.append(some_rows(2, first_key=200), date="2026-01-30")
    assert len(table.snapshot().files) == len(before.files) + 1 and table.snapshot().progress == {"w": 2}


def test_what_cannot_be_read_right_is_refused_by_name(tmp_path):
    table = small_table(tmp_path / "t")
    log = tmp_path / "t" / "_delta_log"
    protocol = '{"protocol":{"minReaderVersion":3,"minWriterVersion":7,"readerFeatures":["deletionVectors"]}}'
    (log / f"{4:020d}.json").write_text(protocol + "\n")
    with pytest.raises(ps.DataError, match="reading this table takes deletionVectors, which is not known here"):
        table.snapshot()
    with pytest.raises(ps.NoFilesError, match=r"no table is there: it has no _delta_log; ps.Table.create makes one"):
        read_snapshot(str(tmp_path / "nothing"))


def test_other_engines_read_the_same_sums(tmp_path):
    import deltalake
    import duckdb

    table = small_table(tmp_path / "t")
    reorder(table, order=[20, 11, 3], stripe=ps.StripeSize(rows=7))
    table.append(some_rows(5, first_key=300), date="2026-01-30")
    ours = rows_by_key(ps.read_features(table, columns=["key", "label"]))
    assert ours == expected_rows([some_rows(10, first_key=10 * n) for n in range(3)] + [some_rows(5, first_key=300)])
    dense = sum(row["f3"] or 0.0 for row in ours.values())
    ids = sum(sum(row["f11"]) for row in ours.values())
    theirs = deltalake.DeltaTable(table.url).to_pyarrow_table(columns=["f3", "f11"])
    assert sum(v or 0.0 for v in theirs["f3"].to_pylist()) == pytest.approx(dense)
    assert sum(sum(v or ()) for v in theirs["f11"].to_pylist()) == ids
    files = [f"{table.url}/{file.path}" for file in table.snapshot().files]
    (summed,) = duckdb.execute(f"select sum(f3) from read_parquet({files})").fetchone()
    (ids_summed,) = duckdb.execute(
        f"select sum(id::hugeint) from (select unnest(f11) as id from read_parquet({files}))"
    ).fetchone()
    assert summed == pytest.approx(dense, rel=1e-5) and ids_summed == ids


def test_a_replacement_of_what_was_only_added_to_goes_through(tmp_path):
    table = small_table(tmp_path / "t")
    before = table.snapshot()
    added = [table.write(some_rows(10, first_key=0), "2026-01-30")]
    table.append(some_rows(5, first_key=300), date="2026-01-30")
    old = [file for file in before.files if file.partition == "2026-01-30"]
    version = commit_replacement(table.url, added, old, read_version=before.version, operation="R", changes_data=False)
    assert version == before.version + 2
    assert sorted(keys_of(table)) == [*range(30), *range(300, 305)]
