"""WebDataset's reader: one `curl` per shard, piped; alone or under a DataLoader's processes."""

from __future__ import annotations

from collections.abc import Iterator

import layout
import tasks
import webdataset
from side import Workload
from torch.utils.data import DataLoader

PACKAGES = ("webdataset", "torch")


def samples(endpoint: str, processes: int) -> Workload:
    urls = [f"{endpoint}/bench/{name}" for name in layout.shard_names()]

    def open_pipeline(n: int) -> Iterator[int]:
        times = tasks.passes(n, layout.SAMPLES)
        dataset = webdataset.WebDataset(
            urls * times,
            shardshuffle=False,
            handler=webdataset.reraise_exception,
            workersplitter=webdataset.split_by_worker,
        )
        if not processes:
            return (1 for _ in dataset)
        return (1 for _ in DataLoader(dataset, batch_size=None, num_workers=processes, prefetch_factor=16))

    return Workload(open=open_pipeline, first=layout.SAMPLES, packages=PACKAGES)
