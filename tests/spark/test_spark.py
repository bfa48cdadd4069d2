"""The offline join on Spark publishes what the one on DuckDB does, and Spark reads what we publish."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.cli.main import main
from penstock.warehouse.joining import JoinRules, join_logs
from penstock.warehouse.layout import reorder
from penstock.warehouse.spark_join import SparkJoin
from tests.warehouse.logs import DAY, FEATURES, START, column_digests, published, write_logs


@pytest.fixture(scope="module")
def spark():
    return SparkJoin("local[2]")


@pytest.mark.parametrize("keep_negatives", [1.0, 0.4])
def test_both_engines_publish_the_same_table_column_by_column(tmp_path, spark, keep_negatives):
    logged, events = write_logs(tmp_path)
    rules = JoinRules(keep_negatives=keep_negatives, seed=3)
    here = ps.Table.create(tmp_path / "duckdb", FEATURES)
    there = ps.Table.create(tmp_path / "spark", FEATURES)
    count = join_logs(here, logged, events, now_s=START + 10 * DAY, rules=rules)
    assert join_logs(there, logged, events, now_s=START + 10 * DAY, rules=rules, engine=spark) == count > 50
    assert column_digests(there) == column_digests(here)
    assert set(column_digests(there)) == {"key", "time", "label", "f1", "f2", "f5", "f8"}
    sizes = [sorted((file.partition, file.rows, file.size) for file in t.snapshot().files) for t in (here, there)]
    assert sizes[0] == sizes[1]
    assert join_logs(there, logged, events, now_s=START + 10 * DAY, rules=rules, engine=spark) == 0, "once"


def test_one_engine_goes_on_where_the_other_stopped(tmp_path, spark):
    logged, events = write_logs(tmp_path)
    whole = ps.Table.create(tmp_path / "whole", FEATURES)
    join_logs(whole, logged, events, now_s=START + 10 * DAY)
    mixed = ps.Table.create(tmp_path / "mixed", FEATURES)
    assert join_logs(mixed, logged, events, now_s=START + 80_000, engine=spark) == 77
    assert join_logs(mixed, logged, events, now_s=START + DAY + 20_000) == 26
    assert join_logs(mixed, logged, events, now_s=START + 10 * DAY, engine=spark) == 97
    assert published(mixed) == published(whole)


def test_a_part_is_several_files_where_that_is_asked_for_and_of_an_encrypted_table_too(tmp_path, spark, monkeypatch):
    monkeypatch.setattr(spark, "_files", 3)
    logged, events = write_logs(tmp_path)
    assert main(["table", "key", str(tmp_path / "key")]) == 0
    table = ps.Table.create(tmp_path / "t", FEATURES, key=f"file:{tmp_path / 'key'}")
    assert join_logs(table, logged, events, now_s=START + 10 * DAY, engine=spark) == 200
    assert len(table.snapshot().files) == 9 and sorted(published(table)) == list(range(200))
    with pytest.raises(ps.CorruptRecordError, match="name its key"):
        published(ps.Table(tmp_path / "t"))


def test_the_command_joins_on_spark(tmp_path, spark, capsys):
    logged, events = write_logs(tmp_path)
    table = ps.Table.create(tmp_path / "t", FEATURES)
    arguments = ["--logged", logged, "--events", events, "--now", START + 10 * DAY, "--spark", "local[2]"]
    assert main(["table", "join", table.url, *map(str, arguments)]) == 0
    assert "200 rows appended; the table is at version 3" in capsys.readouterr().out


def test_spark_and_polars_read_the_same_sums(tmp_path, spark):
    import polars as pl

    logged, events = write_logs(tmp_path)
    table = ps.Table.create(tmp_path / "t", FEATURES)
    join_logs(table, logged, events, now_s=START + 10 * DAY)
    reorder(table, order=[5, 2], stripe=ps.StripeSize(rows=16))
    ours = published(table)
    sums = (sum(row["f1"] or 0 for row in ours.values()), sum(sum(row["f5"]) for row in ours.values()))
    files = [f"{table.url}/{file.path}" for file in table.snapshot().files]
    read = spark._spark.read.parquet(*files)
    assert read.selectExpr("sum(f1)", "sum(aggregate(f5, 0L, (a, x) -> a + x))").first()[:] == sums
    frame = pl.scan_delta(table.url).select(pl.col("f1").sum(), pl.col("f5").list.sum().sum()).collect()
    assert frame.row(0) == sums
