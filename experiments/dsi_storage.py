"""Reads of `experiments/dsi.py` through a server of objects and a proxy that makes each request late, by the clock."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

import penstock as ps
from penstock.graph.readers import ReadFeatures
from penstock.sources.coalescing import ReadingMeter, coalesced, gap_bytes
from penstock.sources.feature_files import FeatureFile, FooterCache
from penstock.sources.parquet_groups import byte_ranges, row_groups
from penstock.sources.sparse_files import SparseFile

SCRIPTS = Path(__file__).resolve().parent.parent / "benchmarks"
RUNS = 2


class Fetched(msgspec.Struct, frozen=True):
    """What was asked of the server for all rows, and how long that took by the clock."""

    reads: int
    nbytes: int
    seconds: float


@contextmanager
def _server(script: str, *arguments: object) -> Iterator[int]:
    """Run a script that prints its port, and end it afterwards."""
    command = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


def _fetch(path: str, size: int, reads: list[tuple[int, int]], options: tuple[tuple[str, str], ...]) -> float:
    best = float("inf")
    for _ in range(RUNS):
        file = SparseFile(path, size, options)
        began = time.perf_counter()
        file.fill(reads)
        best = min(best, time.perf_counter() - began)
        file.close()
    return best


def _ranges(table: ps.Table, version: int, node: ReadFeatures) -> Iterator[tuple[str, int, list[tuple[int, int]]]]:
    """Yield what is read of each file: its path below the table, its size, the joined reads."""
    wanted = (*node.dense, *node.sparse, *node.scored, *node.columns)
    footers = FooterCache()
    for logged in table.snapshot(version).files:
        with FeatureFile(f"{table.url}/{logged.path}", logged.size, (), footers, ReadingMeter()) as file:
            metadata, leaves_of = file.footer.metadata, file.footer.leaves
            leaves = sorted(leaf for name in wanted for leaf in leaves_of.get(name, ()))
            reads: list[tuple[int, int]] = []
            for group in row_groups(metadata, 0, metadata.num_rows):
                gap = gap_bytes(metadata.row_group(group.number).total_byte_size)
                reads += coalesced(byte_ranges(metadata, [group], leaves), gap)
            yield logged.path, logged.size, reads


def through_proxy(
    table: ps.Table, version: int, node: ReadFeatures, maps: list[Path], delay_s: float
) -> dict[str, Fetched]:
    """Return what map files, and the columns of a session, take to be fetched."""
    found: dict[str, Fetched] = {}
    of_columns = list(_ranges(table, version, node))
    of_maps = [(path.name, path.stat().st_size, [(0, path.stat().st_size)]) for path in maps]
    for name, folder, files in (("map columns", maps[0].parent, of_maps), ("feature-major", table.folder, of_columns)):
        with _server("s3_server.py", "files", folder) as near, _server("latency_proxy.py", near, delay_s * 1e3) as far:
            options = {"endpoint_url": f"http://127.0.0.1:{far}", "key": "bench", "secret": "bench"}
            given = tuple({**options, "region": "us-east-1"}.items())
            seconds = sum(_fetch(f"s3://bench/{path}", size, reads, given) for path, size, reads in files)
        counted = [read for _, _, reads in files for read in reads]
        found[name] = Fetched(len(counted), sum(stop - start for start, stop in counted), seconds)
    return found
