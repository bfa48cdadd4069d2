"""Features filled in, derived, injected, let go and gone; days let go; snapshots held."""

from __future__ import annotations

import time

import numpy as np
import pyarrow as pa
import pytest

import penstock as ps
from penstock.core.keyed import KeyedDense, KeyedRagged
from penstock.warehouse.layout import tier
from penstock.warehouse.lifecycle import derive, fill, reap, retain, vacuum
from penstock.warehouse.read_log import ReadLog, popularity
from tests.warehouse.tables import DAYS, FEATURES, keys_of, rows_by_key, small_table, some_rows

TWICE, TAGGED = ps.Feature(id=30, name="twice"), ps.Feature(id=31, name="tagged", kind="sparse")


def twice_and_tagged(batch):
    """Return a batch of two features that are made of f0 and f10."""
    dense, lists = batch["dense"], batch["sparse"]
    return {
        "made": KeyedDense(("a",), dense.values * 2, dense.presence),
        "lists": KeyedRagged(("b",), lists.values ^ 1, lists.offsets),
    }


def logged(rows):
    """Return rows that have the two features from the start."""
    made = [None if value is None else value * 2 for value in rows["f0"].to_pylist()]
    tagged = [[number ^ 1 for number in value or ()] for value in rows["f10"].to_pylist()]
    twice = pa.array(
        np.array([0 if v is None else v for v in made], np.float32), mask=np.array([v is None for v in made])
    )
    return rows.append_column("f30", twice).append_column("f31", pa.array(tagged, pa.list_(pa.int64())))


def batches_of(table, **options):
    return list(ps.read_features(table, features=[30, 31], columns=["key"], batch=7, **options))


def test_logged_filled_in_injected_and_derived_features_are_the_same(tmp_path):
    written = [some_rows(10, first_key=10 * n) for n in range(3)]
    first = ps.Table.create(tmp_path / "logged", [*FEATURES, TWICE, TAGGED], stripe=ps.StripeSize(rows=4))
    side = ps.Table.create(tmp_path / "side", [TWICE, TAGGED])
    for day, rows in zip(DAYS, written):
        first.append(logged(rows), date=day)
        side.append(logged(rows).select(["key", "time", "label", "f30", "f31"]), date=day)
    expected = batches_of(first)
    filled = small_table(tmp_path / "filled")
    filled.add_features([TWICE, TAGGED])
    assert fill(filled, lambda ds: ds.map(twice_and_tagged), {"a": 30, "b": 31}, features=[0, 10]) == 5
    derived = small_table(tmp_path / "derived")
    derive(derived, lambda ds: ds.map(twice_and_tagged), {"a": TWICE, "b": TAGGED}, features=[0, 10])
    plain = small_table(tmp_path / "plain")
    plain.add_features([TWICE, TAGGED])
    for table, options in ((filled, {}), (derived, {}), (plain, {"inject": [side]})):
        found = batches_of(table, **options)
        assert len(found) == len(expected)
        for one, other in zip(sorted(found, key=first_key), sorted(expected, key=first_key)):
            assert one["dense"].values.tobytes() == other["dense"].values.tobytes()
            assert one["dense"] == other["dense"] and one["sparse"] == other["sparse"]
            assert one["sparse"].values.tobytes() == other["sparse"].values.tobytes()


def first_key(batch):
    return int(batch["key"][0])


def test_a_pipeline_that_loses_rows_fills_nothing(tmp_path):
    table = small_table(tmp_path / "t")
    table.add_features([TWICE])
    before = table.version
    with pytest.raises(ps.InvalidArgumentError, match="made 10 rows of f30 for 2026-01-30, which has 12: it must keep"):
        table.append(some_rows(2, first_key=90), date=DAYS[0])
        fill(
            table, lambda ds: ds.take(1).map(lambda b: {"a": b["key"][:10].astype(np.float32)}), {"a": 30}, features=[0]
        )
    assert table.version == before + 1


def test_a_beta_feature_is_not_written_until_it_moves_on(tmp_path):
    table = ps.Table.create(tmp_path / "t", [ps.Feature(id=1, lifecycle="beta")])
    rows = some_rows(2, features=[ps.Feature(id=1)])
    with pytest.raises(ps.InvalidArgumentError, match="'f1' is no feature that is written"):
        table.append(rows, date=DAYS[0])
    table.set_lifecycle([1], "experimental")
    assert table.append(rows, date=DAYS[0]) == 1
    with pytest.raises(
        ps.InvalidArgumentError, match="feature 1 is experimental and cannot become beta; it may become"
    ):
        table.set_lifecycle([1], "beta")
    with pytest.raises(ps.InvalidArgumentError, match="is dense and cannot become sparse: take another id"):
        table.add_features([ps.Feature(id=1, kind="sparse")])


def test_reaped_values_are_in_no_file(tmp_path):
    needle = 0x5EED_5EED_5EED_5EED >> 1
    table = small_table(tmp_path / "t")
    rows = some_rows(3, first_key=70)
    column = pa.array([[needle]] * 3, pa.list_(pa.int64()))
    table.append(rows.set_column(rows.column_names.index("f13"), "f13", column), date=DAYS[0])
    tier(table, tmp_path / "fast", [13, 0])
    rest = rows_by_key(ps.read_features(table, features=[0, 12], columns=["key", "label"]))
    old = ps.read_features(table, features=[12, 13])
    assert has_bytes(tmp_path, needle)
    assert reap(table, [13]) == table.version
    vacuum(table)
    assert not has_bytes(tmp_path, needle)
    assert rows_by_key(ps.read_features(table, features=[0, 12], columns=["key", "label"])) == rest
    with pytest.raises(ps.SnapshotGoneError, match=r"feature f13 .* was reaped"):
        ps.read_features(table, features=[13])
    with pytest.raises(
        ps.SnapshotGoneError, match="version 4 of the table, f12, f13 of 2026-01-30: the file was removed"
    ):
        list(old)
    with pytest.raises(ps.InvalidArgumentError, match="'f13' is no feature that is written"):
        table.append(rows, date=DAYS[0])


def has_bytes(folder, needle):
    import pyarrow.parquet as pq

    files = [pq.ParquetFile(path).read() for path in folder.rglob("*.parquet") if "_delta_log" not in str(path)]
    lists = [value for file in files if "f13" in file.column_names for value in file["f13"].to_pylist()]
    return any(needle in (value or ()) for value in lists)


def test_a_session_that_holds_its_version_can_read_on(tmp_path):
    table = small_table(tmp_path / "t")
    with table.lease() as held:
        dataset = ps.read_features(table, features=[13], columns=["key"], version=held.version)
        reap(table, [13])
        assert vacuum(table) == []
        assert len(rows_by_key(dataset)) == 30
    assert len(vacuum(table)) == 3
    lease = table.lease(lease_s=0.05)
    lease._released.set()  # as if its holder were killed
    time.sleep(0.1)
    assert retain(table, 1) == DAYS[:2]
    assert len(vacuum(table)) == 2, "a lease that is not renewed runs out"
    assert sorted(keys_of(table)) == list(range(20, 30))


def test_vacuum_leaves_a_file_that_may_be_about_to_be_committed(tmp_path):
    table = small_table(tmp_path / "t")
    file, _ = table.write(some_rows(2), DAYS[0])
    assert vacuum(table) == [] and (tmp_path / "t" / file.path).exists()


def test_the_read_log_says_what_is_popular(tmp_path):
    table = small_table(tmp_path / "t")
    for features in ([1, 2], [2, 12], [2, 1]):
        ps.read_features(table, features=features, partitions=DAYS[:1], session="mine")
    log = ReadLog(table.own_folder).read()
    assert [read.features for read in log] == [(1, 2), (2, 12), (2, 1)] and log[0].partitions == (DAYS[0],)
    assert popularity(log) == [2, 1, 12]


def test_sessions_of_one_millisecond_are_read_in_their_order(tmp_path):
    log = ReadLog(tmp_path)
    for number in range(20):
        log.add([number], at_s=1e9 + number / 1e5)
    assert [read.features for read in log.read()] == [(number,) for number in range(20)]
