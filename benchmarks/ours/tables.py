"""Penstock on Parquet files: column batches and rows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import layout
import tasks
from side import Workload

PACKAGES = ("penstock", "numpy", "pyarrow")


def columns(folder: str, batch: int, names: list[str] | None) -> Workload:
    import penstock as ps

    table = ps.read_parquet(f"{folder}/*.parquet", columns=names, batch=batch)

    def open_pipeline(n: int) -> Iterator[int]:
        return (len(columns["id"]) for columns in table.repeat(tasks.passes(n, layout.PARQUET_ROWS)))

    return Workload(open=open_pipeline, first=layout.PARQUET_ROWS, packages=PACKAGES)


def rows(folder: str) -> Workload:
    import penstock as ps

    table = ps.read_parquet(f"{folder}/*.parquet")

    def open_pipeline(n: int) -> Iterator[int]:
        each = iter(table.repeat(tasks.passes(n, layout.PARQUET_ROWS)))
        while count := tasks.look_at(islice(each, 1024)):
            yield count

    return Workload(open=open_pipeline, first=layout.PARQUET_ROWS, packages=PACKAGES)
