"""A click log of 2,000,000 rows and 8 columns, six of numbers and two of strings: column batches, and rows as dicts."""

from __future__ import annotations

from typing import Any

import inputs
from harness import Bench, main, ours, peer

BATCH = 32_768
NUMBERS = ["id", "user", "day", "clicks", "price", "score"]


def run(bench: Bench) -> None:
    folder = str(inputs.parquet())
    for case, names in (("columns", None), ("columns, numbers only", NUMBERS)):
        given: dict[str, Any] = {"folder": folder, "batch": BATCH, "names": names}
        scanner = peer("pyarrow dataset scanner", "peers.pyarrow_scan:columns", **given)
        bench.compare(case, ours("ours.tables:columns", **given), [scanner], unit="rows/s", target=0.9)
    peers = [
        peer("pyarrow to_pylist", "peers.pyarrow_scan:rows", folder=folder),
        peer("DataLoader, 0 processes", "peers.torch_loader:parquet_rows", folder=folder, processes=0),
        peer("DataLoader, 2 processes", "peers.torch_loader:parquet_rows", folder=folder, processes=2),
        peer("Grain, in process", "peers.grain_loader:parquet_rows", folder=folder, processes=0),
        peer("Ray Data", "peers.ray_data:parquet_rows", folder=folder),
    ]
    bench.compare("rows", ours("ours.tables:rows", folder=folder), peers, unit="rows/s", target=1.0)


if __name__ == "__main__":
    main("parquet", run, trees_by_case=True)
