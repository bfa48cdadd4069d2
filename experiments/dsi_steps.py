"""The steps of `experiments/dsi.py`: the same rows read and transformed in older ways, and what that cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import penstock as ps
from penstock.core.element import Array
from penstock.graph.ops import TransformFeatures
from penstock.graph.readers import ReadFeatures
from penstock.runtime.feature_batches import FeatureBatches
from penstock.sources.coalescing import ReadingMeter, ReadingStatistics
from penstock.sources.feature_batches import FeatureBlock
from penstock.sources.feature_files import FeatureFile, FooterCache
from penstock.warehouse.flattening import flatten
from penstock.warehouse.layout import read_stripes
from penstock.warehouse.session import SessionPlan, dataset_of

SEEKS_S = (0.008, 0.004, 0.012)
DISK_BYTES_PER_S = 180e6
BATCH = 512


def disk_s(reads: int, nbytes: float, seek_s: float = SEEKS_S[0]) -> float:
    """Return how long the disk of the model takes."""
    return reads * seek_s + nbytes / DISK_BYTES_PER_S


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One step: what its rows cost."""

    name: str
    rows: int
    cpu_s: float
    with_transforms_s: float
    """The same with the session's transforms; 0: that was not measured."""
    reading: ReadingStatistics

    def rows_per_disk_s(self, seek_s: float = SEEKS_S[0]) -> float:
        return self.rows / disk_s(self.reading.reads, self.reading.read_bytes, seek_s)

    @property
    def rows_per_cpu_s(self) -> float:
        return self.rows / self.cpu_s

    @property
    def transformed_per_cpu_s(self) -> float:
        return self.rows / self.with_transforms_s


class Work(NamedTuple):
    """A session as its two operators: what is read, and what is made of it."""

    read: ReadFeatures
    transform: TransformFeatures


def work_of(session: ps.Session, version: int) -> Work:
    """Return a session's operators, over its table at a version."""
    node: Any = dataset_of(session, SessionPlan(replace(session, version=version))).node
    found: dict[type, Any] = {}
    while True:
        found[type(node)] = node
        inputs = node.inputs
        if not inputs:
            return Work(found[ReadFeatures], found[TransformFeatures])
        (node,) = inputs


def through_rows(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the batch after it was made into rows and back: what a format by rows in memory costs at least."""
    made = dict(batch)
    if "dense" in batch:
        dense = batch["dense"]
        by_rows = np.ascontiguousarray(dense.values.T), np.ascontiguousarray(dense.presence.T)
        made["dense"] = ps.KeyedDense(dense.keys, *(np.ascontiguousarray(part.T) for part in by_rows))
    for kind in ("sparse", "scored"):
        if kind in batch:
            by_rows = _relisted(batch[kind], len(batch[kind]))
            made[kind] = ps.KeyedRagged(batch[kind].keys, *_relisted(by_rows, len(batch[kind].keys)))
    return made


def _relisted(lists: Any, inner: int) -> _Lists:
    """Return lists in the other order, of runs of `inner` lists: by rows where they were by features, and back."""
    order = np.arange(len(lists.offsets) - 1).reshape(-1, inner).T.ravel()
    lengths = np.diff(lists.offsets)[order]
    offsets = np.zeros(len(lists.offsets), np.int64)
    np.cumsum(lengths, out=offsets[1:])
    places = np.repeat(lists.offsets[:-1][order] - offsets[:-1], lengths) + np.arange(offsets[-1])
    return _Lists(lists.values[places], offsets, None if lists.weights is None else lists.weights[places])


class _Lists(NamedTuple):
    """Lists one after the other, in either order."""

    values: Array
    offsets: Array
    weights: Array | None


def batches_of_maps(paths: Sequence[Path], table: ps.Table, node: ReadFeatures, meter: ReadingMeter) -> Iterator[Any]:
    """Read all of some files of maps, flatten what is wanted, and yield batches."""
    wanted = {number: table.features[number] for number in map(_number, (*node.dense, *node.sparse, *node.scored))}
    for path in paths:
        meter.add(reads=1, read_bytes=path.stat().st_size)
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                read = file.read_row_group(group)
                maps = {kind: read[kind].combine_chunks() for kind in ("dense", "sparse", "scored")}
                columns = flatten(maps, wanted, read.num_rows)
                columns.update({name: read[name].combine_chunks() for name in node.columns})
                yield from _cut(FeatureBlock(node, columns, read.num_rows))


def _number(column: str) -> int:
    return int(column[1:])


def _cut(block: FeatureBlock) -> Iterator[dict[str, Any]]:
    for start in range(0, len(block), BATCH):
        yield block.batch(start, min(start + BATCH, len(block)))


def batches_of_columns(
    table: ps.Table, node: ReadFeatures, meter: ReadingMeter, *, coalesce: bool
) -> Iterator[dict[str, Any]]:
    """Read the table as the library does; without `coalesce`, each column by itself."""
    footers = FooterCache()
    wanted = (*node.dense, *node.sparse, *node.scored, *node.columns)
    for logged in table.snapshot(node.version).files:
        path = f"{table.url}/{logged.path}"
        with FeatureFile(path, logged.size, (), footers, meter, coalesce=coalesce) as file:
            there, _ = file.has(wanted)
            for number, _, count in file.stripes():
                yield from _cut(FeatureBlock(node, file.read(number, there), count))


def write_maps(table: ps.Table, folder: Path) -> list[Path]:
    """Write the table's rows with features in maps, as they were before flattening."""
    kinds = {feature.column: feature for feature in table.features.values()}
    folder.mkdir(exist_ok=True)
    paths: list[Path] = []
    for number, logged in enumerate(table.snapshot().files):
        path = folder / f"{number}.parquet"
        writer = None
        for stripe in read_stripes(table, logged):
            columns = {name: stripe[name].combine_chunks() for name in ("key", "time", "label")}
            for kind in ("dense", "sparse", "scored"):
                names = [name for name in stripe.column_names if name in kinds and kinds[name].kind == kind]
                columns[kind] = _as_map(stripe, names)
            made = pa.table(columns)
            if writer is None:
                writer = pq.ParquetWriter(path, made.schema, compression="zstd", use_dictionary=False)
            writer.write_table(made)
        if writer is not None:
            writer.close()
        paths.append(path)
    return paths


def _as_map(stripe: pa.Table, names: Sequence[str]) -> pa.Array:
    rows = stripe.num_rows
    there = np.stack([np.asarray(stripe[name].combine_chunks().is_valid()) for name in names], axis=1)
    row_of, column_of = np.nonzero(there)
    offsets = np.zeros(rows + 1, np.int32)
    np.cumsum(there.sum(axis=1), out=offsets[1:])
    items = pa.concat_arrays([stripe[name].combine_chunks() for name in names])
    items = items.take(pa.array(column_of * rows + row_of))
    return pa.MapArray.from_arrays(pa.array(offsets), pa.array(np.array(list(map(_number, names)))[column_of]), items)


def timed(
    name: str,
    work: Work,
    open_batches: Callable[[ReadingMeter], Iterator[dict[str, Any]]],
    *,
    by_rows: bool,
    transformed: bool,
    repeats: int,
) -> Seen:
    """Return what a way of reading costs: the best of some runs each, with and without transforms."""
    meter = ReadingMeter()
    rows, alone, with_transforms = 0, float("inf"), float("inf")
    made = FeatureBatches(work.transform) if transformed else None
    for number in range(repeats):
        began = time.process_time()
        rows = sum(_rows(batch, by_rows) for batch in open_batches(meter if number == 0 else ReadingMeter()))
        alone = min(alone, time.process_time() - began)
        if made is None:
            continue
        began = time.process_time()
        for batch in open_batches(ReadingMeter()):
            made.made(through_rows(batch) if by_rows else batch)
        with_transforms = min(with_transforms, time.process_time() - began)
    return Seen(
        name=name,
        rows=rows,
        cpu_s=alone,
        with_transforms_s=with_transforms if transformed else 0.0,
        reading=meter.snapshot(),
    )


def _rows(batch: dict[str, Any], by_rows: bool) -> int:
    if by_rows:
        batch = through_rows(batch)
    return len(batch["label"])
