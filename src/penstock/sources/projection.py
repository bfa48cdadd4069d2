"""Which columns of a file a node reads, whether they are the same in all files, and how files become splits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
import pyarrow as pa

from penstock.core.errors import DataError
from penstock.graph.readers import ColumnarSource
from penstock.sources.base import FileRange, Split
from penstock.sources.columns import check_column
from penstock.sources.cutting import SplitStep, cut_neighbours
from penstock.sources.listing import FileInfo
from penstock.sources.predicates import check_predicate

T = TypeVar("T")

LISTING_THREADS = 32  # footers far away are waited for; those at hand are parsed without the GIL


class Projection(msgspec.Struct, frozen=True):
    """What a node reads of one file."""

    names: tuple[str, ...]
    """The columns of its elements, in order."""
    read: tuple[str, ...]
    """The columns to read from the file: those, and what the predicate looks at."""
    types: Mapping[str, Any]
    """The Arrow type of every column there is."""
    constants: Mapping[str, Any]
    """Columns that the path tells and not the file, as Arrow scalars."""

    def complete(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Add the constant columns."""
        if not self.constants:
            return batch
        arrays = [pa.repeat(scalar, batch.num_rows) for scalar in self.constants.values()]
        return pa.RecordBatch.from_arrays([*batch.columns, *arrays], names=[*batch.schema.names, *self.constants])


def project(node: ColumnarSource, path: str, schema: pa.Schema, constants: Mapping[str, Any]) -> Projection:
    """Return what to read of a file, or say which column it does not have."""
    types = {**dict(zip(schema.names, schema.types)), **{name: scalar.type for name, scalar in constants.items()}}
    if len(set(schema.names)) != len(schema.names):
        raise DataError(path, f"it has two columns of one name, among {', '.join(schema.names)}")
    if not types:
        raise DataError(path, "it has no columns")
    names = tuple(types) if node.columns is None else node.columns
    missing = [name for name in names if name not in types]
    if missing:
        raise DataError(path, f"no column {', '.join(map(repr, missing))}; there are {', '.join(types)}")
    for name in names:
        check_column(name, types[name])
    if node.predicate is not None:
        check_predicate(node.predicate, types)
    looked_at = node.predicate.columns() if node.predicate is not None else frozenset()
    read = tuple(name for name in types if name not in constants and (name in names or name in looked_at))
    used = {name: scalar for name, scalar in constants.items() if name in names or name in looked_at}
    return Projection(names, read, types, used)


def check_same_columns(path: str, found: Projection, first_path: str, first: Projection) -> None:
    """Refuse a file whose columns are not those of the first: batches would change their form in mid-epoch."""
    if set(found.names) != set(first.names):
        name = sorted(set(found.names) ^ set(first.names))[0]
        has, lacks = (path, first_path) if name in found.names else (first_path, path)
        raise DataError(lacks, f"no column {name!r}, which {has} has", remedy="say with columns= what to read")
    for name in {*first.names, *first.read}:
        if found.types[name] != first.types[name]:
            raise DataError(path, f"column {name!r} is {found.types[name]}, but {first.types[name]} in {first_path}")


def side_by_side(look_at: Callable[[FileInfo], T], files: Sequence[FileInfo]) -> list[T]:
    """Look at many files on threads. Not on those of `io_threads`: these wait for requests, which run there."""
    pool = ThreadPoolExecutor(LISTING_THREADS, thread_name_prefix="penstock-listing")
    try:
        return list(pool.map(look_at, files))
    finally:
        pool.shutdown(cancel_futures=True)


def group_ranges(ranges: Sequence[tuple[FileRange, float]], step: SplitStep, note: str = "") -> list[Split]:
    """Return splits of neighbouring ranges, each given with its bytes."""
    cuts = cut_neighbours([size for _, size in ranges], [piece.path for piece, _ in ranges], step)
    return [Split(files=tuple(piece for piece, _ in ranges[start:stop]), note=note) for start, stop in cuts]
