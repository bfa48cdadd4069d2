"""Reading a wide feature table: ours against pyarrow's bare read of the same columns, and how long listing takes.

    python benchmarks/bench_features.py [--rows 2048] [--files 3] [--scale 1.0] [--listed 100000]

Both read the same files in turns; a ratio above 1 means that feature-major batches cost less than Arrow's own table.
Then the same rows are read from a table that is encrypted with one key, and from one of which a tenth of the columns
that are read have another key: what either costs, in processor time over the plain table's. Targets stand beside what
was seen; the exit code is 1 where one is missed.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import platform
import secrets
import statistics
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

import penstock as ps
from penstock.sources.delta_log import LoggedFile, read_snapshot
from penstock.warehouse.committing import commit_replacement
from penstock.warehouse.generating import generate
from penstock.warehouse.layout import read_stripes
from penstock.warehouse.read_log import ReadLog

LEAST_OF_BARE, MOST_LISTING_S, MOST_LISTING_MANY_S, MOST_COST = 0.8, 0.5, 2.0, 0.1


def timed(work) -> tuple[float, float]:
    began, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - cpu


def read_bare(table: ps.Table, columns: list[str]) -> int:
    """Read the columns as Arrow has them, file by file."""
    rows = 0
    for file in table.snapshot().files:
        with pq.ParquetFile(table.folder / file.path) as opened:
            for group in range(opened.num_row_groups):
                rows += opened.read_row_group(group, columns=columns).num_rows
    return rows


def read_ours(table: ps.Table, features: list[int], batch: int) -> int:
    return sum(len(made["label"]) for made in ps.read_features(table, features=features, batch=batch))


def listing(folder: Path, files: int) -> float:
    """Return how long a table of so many files takes to list, in seconds of the clock."""
    table = ps.Table.create(folder / "many", [ps.Feature(id=number) for number in range(100)])
    added = [
        (
            LoggedFile(f"date=2026-01-{n % 28 + 1:02d}/part-{n:032x}.parquet", 1000, f"2026-01-{n % 28 + 1:02d}", 10),
            STATS,
        )
        for n in range(files)
    ]
    commit_replacement(table.url, added, [], read_version=0, operation="WRITE", changes_data=True)
    return min(timed(lambda: len(ps.read_features(table, batch=10)))[0] for _ in range(3))


STATS = '{"numRecords":10}'


def encrypted(table: ps.Table, folder: Path, keyed: set[int]) -> ps.Table:
    """Return a copy of a table that is encrypted; some features have a key of their own."""
    key = folder / "keys"
    lines = [f"{name} {base64.b64encode(secrets.token_bytes(32)).decode()}" for name in ("table", "other")]
    folder.mkdir()
    key.write_text("\n".join(lines))
    features = [msgspec.structs.replace(f, key="other" if f.id in keyed else "") for f in table.features.values()]
    stripe = ps.StripeSize(rows=1 << 40, bytes=1 << 40)
    copy = ps.Table.create(folder / "t", features, stripe=stripe, key=f"file:{key}")
    for file in table.snapshot().files:
        for rows in read_stripes(table, file):
            copy.append(rows, date=file.partition)
    return copy


def cost_of_keys(table: ps.Table, folder: Path, features: list[int], batch: int, repeats: int) -> dict[str, float]:
    """Return what encryption adds to the processor time of reading, as a share; runs take turns."""
    tables = {
        "plain": table,
        "one_key": encrypted(table, folder / "one", set()),
        "column_keys": encrypted(table, folder / "several", set(features[::10])),
    }
    times: dict[str, list[float]] = {name: [] for name in tables}
    for number in range(repeats + 1):
        for name, each in tables.items():
            spent = timed(lambda each=each: read_ours(each, features, batch))[1]
            if number:
                times[name].append(spent)
    least = {name: min(spent) for name, spent in times.items()}
    return {name: least[name] / least["plain"] - 1 for name in ("one_key", "column_keys")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--files", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--listed", type=int, default=100_000)
    parser.add_argument("--table", help="a table that was generated before")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        table = ps.Table(options.table) if options.table else ps.Table(folder / "wide")
        if table.version < 0:
            generate(
                table.url, like="rm1", scale=options.scale, rows=options.rows, partitions=options.files, sessions=1
            )
        features = list(ReadLog(table.own_folder).read()[0].features)
        columns = [f"f{number}" for number in features] + ["label"]
        stored = pq.read_schema(table.folder / table.snapshot().files[-1].path).names
        columns = [column for column in columns if column in set(stored)]
        bare, ours = [], []
        for _ in range(options.repeats):
            bare.append(timed(lambda: read_bare(table, columns)))
            ours.append(timed(lambda: read_ours(table, features, options.batch)))
        few = min(timed(lambda: read_snapshot(table.url))[0] for _ in range(3))
        result = {
            "bench": "features",
            "machine": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "versions": {"pyarrow": pa.__version__, "penstock": ps.__version__},
            "stored_features": len(table.features),
            "read_features": len(features),
            "bare_s": statistics.median(wall for wall, _ in bare),
            "ours_s": statistics.median(wall for wall, _ in ours),
            "bare_cpu_s": statistics.median(cpu for _, cpu in bare),
            "ours_cpu_s": statistics.median(cpu for _, cpu in ours),
            "spread_s": [min(wall for wall, _ in ours), max(wall for wall, _ in ours)],
            "listing_wide_s": few,
            "listing_many_files": options.listed,
            "listing_many_s": listing(folder, options.listed) if options.listed else None,
        }
        cost = cost_of_keys(table, folder, features, options.batch, options.repeats)
        result["encryption_cost"] = cost
        result["ratio"] = result["bare_s"] / result["ours_s"]
        result["ratio_cpu"] = result["bare_cpu_s"] / result["ours_cpu_s"]
        targets = [
            ("reading, of pyarrow's bare read, by processor time", result["ratio_cpu"], LEAST_OF_BARE, 1),
            ("reading, of pyarrow's bare read, by the clock", result["ratio"], LEAST_OF_BARE, 1),
            ("listing at full width, s", few, MOST_LISTING_S, -1),
            ("cost of one key", cost["one_key"], MOST_COST, -1),
            ("cost of keys of columns", cost["column_keys"], MOST_COST, -1),
        ]
        if options.listed:
            targets.append((f"listing {options.listed:,} files, s", result["listing_many_s"], MOST_LISTING_MANY_S, -1))
        missed = 0
        for what, seen, target, sign in targets:
            met = sign * seen >= sign * target
            missed += not met
            print(f"  {what:52} {seen:7.3f}  {'>=' if sign > 0 else '<='} {target}  {'met' if met else 'MISSED'}")
        print(json.dumps(result))
        return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
