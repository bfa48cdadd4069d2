"""Penstock over WebDataset shards in an object store."""

from __future__ import annotations

from collections.abc import Iterator

import layout
import tasks
from side import Workload


def samples(endpoint: str) -> Workload:
    import penstock as ps

    options = {"endpoint_url": endpoint, "key": "bench", "secret": "bench", "region": "us-east-1"}
    last = layout.SHARDS - 1
    shards = ps.read_webdataset(f"s3://bench/shard-{{0000..{last:04d}}}.tar", storage_options=options)

    def open_pipeline(n: int) -> Iterator[int]:
        return (1 for _ in shards.repeat(tasks.passes(n, layout.SAMPLES)))

    return Workload(open=open_pipeline, first=layout.SAMPLES, packages=("penstock", "obstore"))
