"""The offline join on Spark: the same job, spread over a cluster.

Spark joins and labels; each task then samples, flattens and writes its rows as a file of the table, with the functions
that the other engine uses, and returns what it wrote. The driver commits. A task that was tried twice leaves a file
that no commit names, which `vacuum` removes. Executors need this package and the table's folder, under the same path.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from penstock.core.errors import InvalidArgumentError, MissingExtraError
from penstock.sources.delta_log import LoggedFile
from penstock.warehouse.joining import JoinPart, write_joined
from penstock.warehouse.table import Table

_WRITTEN = "path string, size long, partition string, rows long, stats string"


class SparkJoin:
    """Joins logs on Spark. `master` is a cluster's address, or `local[n]` for n threads here.

    Each part of a day becomes `files` files. A Spark session that this process has already is used as it is.
    """

    def __init__(self, master: str = "local[*]", *, files: int = 1) -> None:
        if files < 1:
            raise InvalidArgumentError(f"files={files}: a part of a day is at least one file")
        self._files = files
        try:
            from pyspark.sql import SparkSession
        except ImportError as error:
            raise MissingExtraError("pyspark", "spark") from error
        if master.startswith("local"):
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        self._spark: Any = (
            SparkSession.builder.master(master)
            .appName("penstock table join")
            .config("spark.ui.enabled", "false")
            .getOrCreate()
        )

    def first_time(self, features: str) -> int | None:
        """Return the time of the first logged row; None: there is none."""
        found = self._spark.read.parquet(features).agg({"time": "min"}).first()
        return None if found is None or found[0] is None else int(found[0])

    def write(self, table: Table, part: JoinPart) -> Sequence[tuple[LoggedFile, str]]:
        """Join a part on the cluster, whose tasks write its rows."""
        rows = self._joined(part).repartitionByRange(self._files, "time", "key").sortWithinPartitions("time", "key")
        told = rows.mapInArrow(_writer(table, part), _WRITTEN).collect()
        return [(LoggedFile(row.path, row.size, row.partition, row.rows), row.stats) for row in told]

    def _joined(self, part: JoinPart) -> Any:
        from pyspark.sql import Window
        from pyspark.sql import functions as F

        # Of a row that was logged twice at one time, the one in the first file counts, and there the first.
        first = Window.partitionBy("key").orderBy("time", "_metadata.file_name", "_metadata.row_index")
        logged = (
            self._spark.read.parquet(part.features)
            .where(F.col("time") < part.stop_s)
            .withColumn("copy", F.row_number().over(first))
            .where((F.col("copy") == 1) & (F.col("time") >= part.start_s))
            .drop("copy")
        )
        happened = (
            self._spark.read.parquet(part.events)
            .where(F.col("time") <= part.now_s)
            .select(F.col("key").alias("event_key"), F.col("time").alias("event_time"))
        )
        hits = (F.col("event_key") == F.col("key")) & F.col("event_time").between(
            F.col("time"), F.col("time") + part.rules.window_s
        )
        labelled = logged.select("key", "time").join(happened, hits, "left_semi").withColumn("label", F.lit(1.0))
        return logged.join(labelled.select("key", "label"), "key", "left").withColumn(
            "label", F.coalesce("label", F.lit(0.0)).cast("float")
        )


def _writer(table: Table, part: JoinPart) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return what a task does; of a key it is told where it lies, and reads it there."""
    return partial(_write_task, url=table.url, key=table.key_source, part=part)


def _write_task(
    batches: Iterable[pa.RecordBatch], *, url: str, key: str | None, part: JoinPart
) -> Iterator[pa.RecordBatch]:
    rows = [batch for batch in batches if batch.num_rows]
    if rows:
        file, stats = write_joined(Table(url, key=key), pa.Table.from_batches(rows), part)
        yield pa.RecordBatch.from_pylist([{**file._asdict(), "stats": stats}])
