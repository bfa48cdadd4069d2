"""Ray Data on a cluster of this machine's cores."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import layout
import numpy as np
import ray
import tasks
import tokens
from side import Workload

PACKAGES = ("ray", "numpy")
ROWS_PER_BLOCK = 125_000  # of 32 k, 125 k and 500 k the fastest for trivial rows


def start() -> None:
    ray.init(
        num_cpus=len(os.sched_getaffinity(0)),
        include_dashboard=False,
        logging_level="error",
        runtime_env={"env_vars": {"PYTHONPATH": str(Path(tasks.__file__).parent)}},
    )
    ray.data.DataContext.get_current().enable_progress_bars = False


def trivial(task: str) -> Workload:
    start()
    function = getattr(tasks, task)

    def on_row(row: dict[str, Any]) -> dict[str, Any]:
        result = function(row["id"])
        return result if isinstance(result, dict) else {"value": result}

    def open_pipeline(n: int) -> Iterator[int]:
        rows = ray.data.range(n, override_num_blocks=max(2, n // ROWS_PER_BLOCK))
        batches = rows.map(on_row).iter_batches(batch_size=tasks.BATCH, batch_format="numpy", prefetch_batches=4)
        return (len(next(iter(batch.values()))) for batch in batches)

    return Workload(open=open_pipeline, first=250_000, packages=PACKAGES, in_bursts=True)


def parquet_rows(folder: str) -> Workload:
    start()
    files = layout.parquet_files(folder)

    def open_pipeline(n: int) -> Iterator[int]:
        times = tasks.passes(n, layout.PARQUET_ROWS)
        table = ray.data.read_parquet(files * times) if n > 1 else ray.data.read_parquet(files[:1]).limit(1)
        rows = iter(table.iter_rows())
        while count := tasks.look_at(islice(rows, 1024)):
            yield count

    return Workload(open=open_pipeline, first=layout.PARQUET_ROWS, packages=(*PACKAGES, "pyarrow"), in_bursts=True)


def packed_tokens(folder: str, tokenizer: str) -> Workload:
    """Tokenizes and packs block by block; each block's last row is padded."""
    start()
    files = layout.text_files(folder)
    encode = tokens.TOKENIZERS[tokenizer](folder)

    def pack_block(block: dict[str, Any]) -> dict[str, Any]:
        rows = list(tokens.pack(encode(json.loads(line)["text"]) for line in block["text"]))
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def open_pipeline(n: int) -> Iterator[int]:
        times = tasks.passes(n, layout.TOKENS[tokenizer])
        lines = ray.data.read_text(files * times) if n > 1 else ray.data.read_text(files[:1]).limit(1)
        batches = lines.map_batches(pack_block, batch_size=512).iter_batches(batch_size=tasks.PACKED_BATCH)
        return (tokens.count_tokens(batch) for batch in batches)

    return Workload(
        open=open_pipeline, first=layout.TOKENS[tokenizer], packages=(*PACKAGES, "tiktoken"), in_bursts=True
    )
