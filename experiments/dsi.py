"""Storage and ingestion of feature tables: what each step of the published co-design brings, on a table like RM1.

python experiments/dsi.py [--quick] [--like rm1] [--scale 1] [--plots FOLDER]     or: make experiment E=dsi

The steps, each on top of the one before:

- `map columns`: features lie in maps; all of a row is read and decoded, then our flattening kernel picks features;
- `flattened`: a column a feature; each wanted column is a read of its own; batches pass through rows;
- `coalesced`: reads of neighbours are joined;
- `reordered`: popular features stand side by side, by the first half of the read log;
- `large stripes`: eight times the rows of a stripe;
- `feature-major`: batches are made of columns without passing through rows.

Measured for sessions of the second half of the log: processor seconds of extraction (the clock of a busy machine says
little), reads, bytes, bytes in vain. Storage time is by a model of one disk, stated, not measured: a read costs a seek
of 8 ms (and 4 and 12) and its bytes at 180 MB/s; map files are read from end to end with one seek. Nothing of it is
scaled: at full width 2,304 rows like RM1's or RM2's, and 21,504 like RM3's, are a stripe of some 256 MiB, and reads and
bytes are those of the run. "Useful rows" are rows with the features that the session asked for.

Beside it: tables III to VI of the paper beside the same of this table; popularity (which share of the bytes serves 80 %
of the traffic) and a tier of that size, taken from the first half of the log and judged on the second. Targets stand
beside what was seen; the exit code is 1 where one is missed. `--plots` draws the steps, the popularity and the sizes of
reads. Samples a second and core (tables VIII and IX) are `make bench B=session`. Standby masters are not part of this.
With --quick the table is too narrow and short for the targets on time and on reads: only those on bytes and popularity
count.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import penstock as ps
from penstock.graph.readers import ReadFeatures
from penstock.sources.coalescing import ReadingMeter, ReadingStatistics
from penstock.sources.feature_batches import FeatureBlock
from penstock.sources.feature_files import FeatureFile, FooterCache
from penstock.warehouse.column_sizes import column_bytes
from penstock.warehouse.features import Feature
from penstock.warehouse.flattening import flatten
from penstock.warehouse.generating import generate
from penstock.warehouse.layout import read_stripes, reorder, tier
from penstock.warehouse.model_statistics import ModelStatistics, model
from penstock.warehouse.read_log import LoggedRead, ReadLog, popularity

SEEKS_S = (0.008, 0.004, 0.012)
DISK_BYTES_PER_S = 180e6
BATCH = 512
STRIPES = 8  # small ones in a large one
STRIPE_ROWS = {"rm1": 2304, "rm2": 2304, "rm3": 21_504}
WHOLE_BYTES = 1 << 40  # stripes are cut by rows here


def disk_s(reads: int, nbytes: float, seek_s: float = SEEKS_S[0]) -> float:
    """Return how long the disk of the model takes."""
    return reads * seek_s + nbytes / DISK_BYTES_PER_S


class Seen:
    """One step: what a row cost."""

    def __init__(self, name: str, rows: int, cpu_s: float, reading: ReadingStatistics) -> None:
        self.name, self.rows, self.cpu_s, self.reading = name, rows, cpu_s, reading

    def rows_per_disk_s(self, seek_s: float = SEEKS_S[0]) -> float:
        return self.rows / disk_s(self.reading.reads, self.reading.read_bytes, seek_s)

    @property
    def rows_per_cpu_s(self) -> float:
        return self.rows / self.cpu_s


def node_of(table: ps.Table, features: Sequence[int]) -> ReadFeatures:
    node = ps.read_features(table, features=features, batch=BATCH).node
    assert isinstance(node, ReadFeatures)
    return node


def through_rows(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the batch after it was made into rows and back: what a format by rows in memory costs at least."""
    made = dict(batch)
    if "dense" in batch:
        dense = batch["dense"]
        by_rows = np.ascontiguousarray(dense.values.T), np.ascontiguousarray(dense.presence.T)
        made["dense"] = ps.KeyedDense(dense.keys, *(np.ascontiguousarray(part.T) for part in by_rows))
    for kind in ("sparse", "scored"):
        if kind in batch:
            made[kind] = _relisted(_relisted(batch[kind], len(batch[kind])), len(batch[kind].keys))
    return made


def _relisted(lists: Any, inner: int) -> Any:
    """Return lists in the other order, of runs of `inner` lists: by rows where they were by features, and back."""
    order = np.arange(len(lists.offsets) - 1).reshape(-1, inner).T.ravel()
    lengths = np.diff(lists.offsets)[order]
    offsets = np.zeros(len(lists.offsets), np.int64)
    np.cumsum(lengths, out=offsets[1:])
    places = np.repeat(lists.offsets[:-1][order] - offsets[:-1], lengths) + np.arange(offsets[-1])
    return _Lists(lists.values[places], offsets, None if lists.weights is None else lists.weights[places])


class _Lists(NamedTuple):
    """Lists one after the other, in either order."""

    values: Any
    offsets: Any
    weights: Any


def read_maps(path: Path, features: dict[int, Feature], node: ReadFeatures, meter: ReadingMeter) -> int:
    """Read all of a file of maps, flatten what is wanted, and make batches."""
    rows = 0
    meter.add(reads=1, read_bytes=path.stat().st_size)
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            table = file.read_row_group(group)
            maps = {kind: table[kind].combine_chunks() for kind in ("dense", "sparse", "scored")}
            columns = flatten(maps, features, table.num_rows)
            columns["label"] = table["label"].combine_chunks()
            rows += consume(FeatureBlock(node, columns, table.num_rows), by_rows=True)
    return rows


def consume(block: FeatureBlock, *, by_rows: bool) -> int:
    for start in range(0, len(block), BATCH):
        batch = block.batch(start, min(start + BATCH, len(block)))
        if by_rows:
            through_rows(batch)
    return len(block)


def read_columns(table: ps.Table, node: ReadFeatures, meter: ReadingMeter, *, coalesce: bool, by_rows: bool) -> int:
    """Read the table as the library does, with two of its choices taken back."""
    rows = 0
    footers = FooterCache()
    wanted = (*node.dense, *node.sparse, *node.scored, "label")
    for logged in table.snapshot().files:
        path = f"{table.url}/{logged.path}"
        with FeatureFile(path, logged.size, (), footers, meter, coalesce=coalesce) as file:
            there, _ = file.has(wanted)
            for number, _, count in file.stripes():
                rows += consume(FeatureBlock(node, file.read(number, there), count), by_rows=by_rows)
    return rows


def write_maps(table: ps.Table, folder: Path) -> list[Path]:
    """Write the table's rows with features in maps, as they were before flattening."""
    kinds = {feature.column: feature for feature in table.features.values()}
    folder.mkdir()
    paths: list[Path] = []
    for number, logged in enumerate(table.snapshot().files):
        path = folder / f"{number}.parquet"
        writer = None
        for stripe in read_stripes(table, logged):
            columns = {name: stripe[name].combine_chunks() for name in ("key", "time", "label")}
            for kind in ("dense", "sparse", "scored"):
                names = [name for name in stripe.column_names if name in kinds and kinds[name].kind == kind]
                columns[kind] = _as_map(stripe, names, kind)
            made = pa.table(columns)
            if writer is None:
                writer = pq.ParquetWriter(path, made.schema, compression="zstd", use_dictionary=False)
            writer.write_table(made)
        if writer is not None:
            writer.close()
        paths.append(path)
    return paths


def _as_map(stripe: pa.Table, names: Sequence[str], kind: str) -> pa.Array:
    rows = stripe.num_rows
    there = np.stack([np.asarray(stripe[name].combine_chunks().is_valid()) for name in names], axis=1)
    row_of, column_of = np.nonzero(there)
    offsets = np.zeros(rows + 1, np.int32)
    np.cumsum(there.sum(axis=1), out=offsets[1:])
    items = pa.concat_arrays([stripe[name].combine_chunks() for name in names])
    items = items.take(pa.array(column_of * rows + row_of))
    ids = np.array([int(name[1:]) for name in names])
    return pa.MapArray.from_arrays(pa.array(offsets), pa.array(ids[column_of]), items)


def timed(name: str, work: Callable[[ReadingMeter], int], repeats: int) -> Seen:
    meter = ReadingMeter()
    rows, best = 0, float("inf")
    for number in range(repeats):
        began = time.process_time()
        rows = work(meter if number == 0 else ReadingMeter())
        best = min(best, time.process_time() - began)
    return Seen(name, rows, best, meter.snapshot())


def ablation(table: ps.Table, folder: Path, order: list[int], sessions: list[LoggedRead], repeats: int) -> list[Seen]:
    rows = sum(file.rows for file in table.snapshot().files) // len(table.snapshot().files)
    small = ps.StripeSize(rows=max(1, rows // STRIPES), bytes=WHOLE_BYTES)
    large = ps.StripeSize(rows=rows, bytes=WHOLE_BYTES)
    by_id = [feature.id for feature in table.features.values()]
    features = {number: table.features[number] for number in sessions[0].features}
    session = sessions[0].features
    seen: list[Seen] = []

    def step(name: str, **how: bool) -> None:
        node = node_of(table, session)
        seen.append(timed(name, lambda meter: read_columns(table, node, meter, **how), repeats))

    reorder(table, order=by_id, stripe=large)
    maps = write_maps(table, folder / "maps")
    node = node_of(table, session)
    seen.append(
        timed("map columns", lambda meter: sum(read_maps(path, features, node, meter) for path in maps), repeats)
    )
    reorder(table, order=by_id, stripe=small)
    step("flattened", coalesce=False, by_rows=True)
    step("coalesced", coalesce=True, by_rows=True)
    reorder(table, order=order, stripe=small)
    step("reordered", coalesce=True, by_rows=True)
    reorder(table, order=order, stripe=large)
    step("large stripes", coalesce=True, by_rows=True)
    step("feature-major", coalesce=True, by_rows=False)
    return seen


class Targets:
    """What was to be seen, and was."""

    def __init__(self) -> None:
        self.missed: list[str] = []

    def at_least(self, what: str, seen: float, least: float, *, counts: bool = True) -> None:
        self._say(what, f"{seen:.2f}", f">= {least:.2f}", seen >= least, counts)

    def at_most(self, what: str, seen: float, most: float, *, counts: bool = True) -> None:
        self._say(what, f"{seen:.3f}", f"<= {most:.3f}", seen <= most, counts)

    def _say(self, what: str, seen: str, target: str, met: bool, counts: bool) -> None:
        verdict = "met" if met else "MISSED" if counts else "not met (does not count with --quick)"
        print(f"  {what:64} {seen:>8}  {target:>9}  {verdict}")
        if not met and counts:
            self.missed.append(what)


def bytes_of_session(sizes: dict[int, float], read: LoggedRead) -> float:
    return sum(sizes.get(feature, 0.0) for feature in read.features)


def judged_share(order: Sequence[int], sizes: dict[int, float], reads: Sequence[LoggedRead]) -> float:
    """Return which share of all bytes, taken in an order, serves 80 % of the sessions' traffic."""
    counts: Counter[int] = Counter()
    for read in reads:
        counts.update(read.features)
    total = sum(bytes_of_session(sizes, read) for read in reads)
    served = taken = 0.0
    for feature in order:
        if served >= 0.8 * total:
            break
        served += counts[feature] * sizes.get(feature, 0.0)
        taken += sizes.get(feature, 0.0)
    return taken / sum(sizes.values())


def most_popular(order: Sequence[int], sizes: dict[int, float], share: float) -> list[int]:
    """Return the first features of an order that take so large a share of the bytes."""
    left = share * sum(sizes.values())
    chosen: list[int] = []
    for feature in order:
        left -= sizes.get(feature, 0.0)
        if left < 0:
            break
        chosen.append(feature)
    return chosen


def reading_of(table: ps.Table, read: LoggedRead) -> ReadingStatistics:
    with ps.read_features(table, features=read.features, batch=BATCH).iterator() as batches:
        for _ in batches:
            pass
        reading = batches.statistics().stages[0].reading
    assert reading is not None
    return reading


def chunk_sizes(table: ps.Table, read: LoggedRead) -> list[int]:
    """Return the bytes of each column chunk that a session reads of the table's first file."""
    wanted = {f"f{number}" for number in read.features}
    metadata = table.open_file(table.folder / table.snapshot().files[0].path).metadata
    columns = [metadata.row_group(0).column(leaf) for leaf in range(metadata.num_columns)]
    found: Counter[str] = Counter()
    for column in columns:
        name = column.path_in_schema.partition(".")[0]
        if name in wanted:
            found[name] += column.total_compressed_size
    return sorted(found.values())


PAPER_READS = {"mean": 23_200, "p5": 18, "p25": 451, "p50": 1_240, "p75": 3_920, "p95": 97_700}
"""Table VI: the sizes of an RM1 session's reads before they are joined, in bytes."""


def print_tables(
    table: ps.Table, expected: ModelStatistics, sizes: dict[int, float], reads: list[LoggedRead], chunks: list[int]
) -> None:
    """Print what the paper's tables III to VI have, of this table."""
    files = table.snapshot().files
    kinds = Counter(table.features[number].kind for number in reads[0].features)
    used = float(np.mean([len(read.features) for read in reads])) / len(sizes)
    print(f"tables of the paper, and of this table ({len(sizes)} features that are stored)")
    print(
        f"  III  {sum(file.size for file in files) / 1e6:,.0f} MB in {len(files)} days here; the paper's sessions use "
        f"{expected.used_partitions} of {expected.stored_partitions} days"
    )
    print(
        f"  IV   read: {kinds['dense']} dense and {kinds['sparse'] + kinds['scored']} sparse, of "
        f"{expected.read_dense} and {expected.read_sparse} by the paper's at this width"
    )
    stored = expected.stored_dense + expected.stored_sparse
    asked = (expected.read_dense + expected.read_sparse) / stored
    print(f"  V    {used:.1%} of the features are read, {asked:.1%} by the paper's")
    quantiles = {f"p{q}": float(np.percentile(chunks, q)) for q in (5, 25, 50, 75, 95)}
    shown = {"mean": float(np.mean(chunks)), **quantiles}
    told = ", ".join(f"{name} {value:,.0f} ({PAPER_READS[name]:,})" for name, value in shown.items())
    print(f"  VI   bytes of a column in a stripe, and of RM1's reads in the paper: {told}\n")


def draw(
    folder: Path,
    seen: list[Seen],
    order: Sequence[int],
    sizes: dict[int, float],
    reads: Sequence[LoggedRead],
    chunks: list[int],
    published: ModelStatistics,
) -> None:
    """Draw the steps, the popularity of bytes (figure 7) and the sizes of reads (table VI)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    figure, (steps, popular, read_sizes) = pyplot.subplots(1, 3, figsize=(16, 4))
    names = [step.name for step in seen]
    steps.bar(names, [step.rows_per_cpu_s / seen[0].rows_per_cpu_s for step in seen], width=0.4, align="edge")
    disk = [step.rows_per_disk_s() / seen[0].rows_per_disk_s() for step in seen]
    steps.bar(names, disk, width=-0.4, align="edge")
    steps.legend(["by processor time", "by the disk model, 8 ms"])
    steps.tick_params(axis="x", rotation=30)
    steps.set(ylabel="rows, of map columns")
    counts: Counter[int] = Counter(feature for read in reads for feature in read.features)
    stored = np.cumsum([sizes.get(feature, 0.0) for feature in order]) / sum(sizes.values())
    served = np.cumsum([counts[feature] * sizes.get(feature, 0.0) for feature in order])
    popular.plot(stored, served / sum(bytes_of_session(sizes, read) for read in reads))
    popular.axvline(published.popular_bytes, linestyle=":")
    popular.axhline(0.8, linestyle=":")
    popular.set(xlabel="share of the bytes, popular first", ylabel="share of the traffic", title="figure 7")
    read_sizes.plot(chunks, np.linspace(0, 1, len(chunks)))
    read_sizes.plot([PAPER_READS[f"p{q}"] for q in (5, 25, 50, 75, 95)], [0.05, 0.25, 0.5, 0.75, 0.95], "x")
    read_sizes.set(xscale="log", xlabel="bytes of a column in a stripe", title="table VI (x: the paper's reads)")
    figure.tight_layout()
    figure.savefig(folder / "dsi.png", dpi=120)
    print(f"drawn: {folder / 'dsi.png'}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--like", default="rm1", choices=["rm1", "rm2", "rm3"])
    parser.add_argument("--scale", type=float)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--days", type=int, default=1, help="a file each")
    parser.add_argument("--plots", type=Path, help="where plots go")
    options = parser.parse_args()
    scale = options.scale or (0.05 if options.quick else 1.0)
    rows = options.rows or (512 if options.quick else STRIPE_ROWS[options.like])
    repeats = 1 if options.quick else 2
    published = model(options.like)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        table = generate(
            folder / "table", like=options.like, scale=scale, rows=rows, partitions=options.days, sessions=64
        )
        log = ReadLog(table.own_folder).read()
        first, second = log[: len(log) // 2], log[len(log) // 2 :]
        sizes = column_bytes(table)
        share = judged_share(popularity(first), sizes, second)
        popular = most_popular(popularity(first), sizes, published.popular_bytes)
        seen = ablation(table, folder, popularity(first), second, repeats)
        judged = [reading_of(table, read) for read in second[: 2 if options.quick else 8]]
        tier(table, folder / "fast", popular)
        tiered = [reading_of(table, read) for read in second[: 2 if options.quick else 8]]
        print_tables(table, published.scaled(scale), sizes, second, chunk_sizes(table, second[0]))
        if options.plots is not None:
            draw(options.plots, seen, popularity(first), sizes, second, chunk_sizes(table, second[0]), published)
        return report(options, published, seen, sizes, second, share, judged, tiered)


def report(
    options: argparse.Namespace,
    published: ModelStatistics,
    seen: list[Seen],
    sizes: dict[int, float],
    second: list[LoggedRead],
    share: float,
    judged: list[ReadingStatistics],
    tiered: list[ReadingStatistics],
) -> int:
    maps, last = seen[0], seen[-1]
    used = float(np.mean([bytes_of_session(sizes, read) for read in second]) / sum(sizes.values()))
    print(f"a table like {options.like}: {len(sizes)} features, {last.rows} rows; a session of the log's second half\n")
    print(
        f"{'step':15} {'rows/cpu s':>10} {'x':>6} {'reads':>7} {'MB':>7} {'in vain':>8}  useful rows/disk s, x of maps"
    )
    for step in seen:
        ratios = "  ".join(f"{step.rows_per_disk_s(s) / maps.rows_per_disk_s(s):5.2f}" for s in SEEKS_S)
        reading = step.reading
        print(
            f"{step.name:15} {step.rows_per_cpu_s:10,.0f} {step.rows_per_cpu_s / maps.rows_per_cpu_s:6.2f} "
            f"{reading.reads:7} {reading.read_bytes / 1e6:7.1f} {reading.in_vain_fraction:8.1%}  {ratios}"
        )
    print(f"\nseeks of {', '.join(f'{s * 1e3:.0f} ms' for s in SEEKS_S)}; {DISK_BYTES_PER_S / 1e6:.0f} MB/s\n")
    targets, slow = Targets(), not options.quick
    targets.at_most(
        "share of the bytes that a session reads, from the published", abs(used - published.bytes_used), 0.03
    )
    targets.at_least("extraction, of map columns", last.rows_per_cpu_s / maps.rows_per_cpu_s, 3.0, counts=slow)
    own_share = bytes_of_session(sizes, second[0]) / sum(sizes.values())
    ratio = last.rows_per_disk_s() / maps.rows_per_disk_s()
    targets.at_least("useful rows through the disk model, of map columns", ratio, 2.41, counts=slow)
    targets.at_least("the same, of 1 / (share of bytes used)", ratio * own_share, 0.9, counts=slow)
    vain = float(np.mean([reading.in_vain_fraction for reading in judged]))
    targets.at_most("bytes in vain, second half of the log", vain, 0.15)
    chunks = sum(reading.column_chunks for reading in judged)
    reads = sum(reading.reads for reading in judged)
    targets.at_most("reads, of projected column chunks", reads / chunks, 1 / 20, counts=slow)
    targets.at_most(
        "share of bytes for 80 % of traffic, from the published", abs(share - published.popular_bytes), 0.03
    )
    wanted = sum(reading.read_bytes - reading.bytes_in_vain for reading in tiered)
    from_tier = sum(reading.tier_bytes for reading in tiered)
    targets.at_least("traffic that a tier of that size serves", min(1.0, from_tier / wanted), 0.8)
    return 1 if targets.missed else 0


if __name__ == "__main__":
    sys.exit(main())
