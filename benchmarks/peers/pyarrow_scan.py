"""pyarrow's dataset scanner, its own threads on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import layout
import pyarrow.dataset
import tasks
from side import Workload

PACKAGES = ("pyarrow", "numpy")
ROWS_AT_A_TIME = 1024  # for rows: of 1,024, 8,192 and 32,768 the fastest, the lists stay in the cache


def scan(folder: str, batch: int, times: int, **options: Any) -> Iterator[Any]:
    files = layout.parquet_files(folder)
    for _ in range(times):
        yield from pyarrow.dataset.dataset(files).scanner(batch_size=batch, **options).to_batches()


def columns(folder: str, batch: int, names: list[str] | None) -> Workload:
    """Every column to numpy; strings become arrays of `str` objects."""

    def open_pipeline(n: int) -> Iterator[int]:
        for block in scan(folder, batch, tasks.passes(n, layout.PARQUET_ROWS), columns=names):
            arrays = {
                name: column.to_numpy(zero_copy_only=False) for name, column in zip(block.schema.names, block.columns)
            }
            yield len(arrays) and block.num_rows

    return Workload(open=open_pipeline, first=layout.PARQUET_ROWS, packages=PACKAGES)


def rows(folder: str) -> Workload:
    def open_pipeline(n: int) -> Iterator[int]:
        for block in scan(folder, ROWS_AT_A_TIME, tasks.passes(n, layout.PARQUET_ROWS)):
            yield tasks.look_at(block.to_pylist())

    return Workload(open=open_pipeline, first=layout.PARQUET_ROWS, packages=PACKAGES)
