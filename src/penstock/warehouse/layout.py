"""Layout: files written again in another order or size, and copies of popular columns on a faster tier.

A file is rewritten stripe by stripe, so that memory holds one stripe. Nothing is changed in place: new files are
committed in the place of old ones, which stay until `vacuum`, for sessions that read an older version.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

import msgspec
import pyarrow as pa

from penstock.core.errors import InvalidArgumentError, TableConflictError
from penstock.sources.delta_log import LoggedFile
from penstock.sources.tiers import TIER_FILE, TieredFile, read_tier
from penstock.warehouse.committing import commit_replacement
from penstock.warehouse.features import publish
from penstock.warehouse.read_log import LoggedRead, ReadLog
from penstock.warehouse.read_together import order_by_readers
from penstock.warehouse.table import Table
from penstock.warehouse.writing import ROW_COLUMNS, StripeSize, in_order, write_stripes

TRIES = 10
SMALL_FILE_BYTES = 128 << 20

FileChange: TypeAlias = Callable[[pa.Table, LoggedFile], pa.Table]
"""Make other columns of a stripe's rows; all stripes of a file get the same ones."""


def read_stripes(table: Table, file: LoggedFile, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Yield the stripes of a file, in the order of its rows and columns."""
    with table.open_file(table.folder / file.path) as opened:
        for number in range(opened.num_row_groups):
            yield opened.read_row_group(number, columns=None if columns is None else list(columns))


def rewrite(
    table: Table,
    files: Sequence[Sequence[LoggedFile]],
    *,
    read_version: int,
    operation: str,
    change: FileChange | None = None,
    order: Sequence[int] | None = None,
    stripe: StripeSize | None = None,
) -> int | None:
    """Write each group of files of one day as one new file, commit all of it at once, and return the version."""
    groups = [list(group) for group in files if group]
    if not groups:
        return None
    size = stripe or table.stripe
    added = [_rewritten(table, group, change, table.order if order is None else order, size) for group in groups]
    removed = [file for group in groups for file in group]
    try:
        return commit_replacement(
            table.url, added, removed, read_version=read_version, operation=operation, changes_data=change is not None
        )
    except TableConflictError:
        for file, _ in added:
            (table.folder / file.path).unlink(missing_ok=True)
        raise


def _rewritten(
    table: Table, group: Sequence[LoggedFile], change: FileChange | None, order: Sequence[int], size: StripeSize
) -> tuple[LoggedFile, str]:
    def stripes() -> Iterator[pa.Table]:
        for file in group:
            for stripe in read_stripes(table, file):
                yield change(stripe, file) if change is not None else stripe

    parts = regrouped(stripes(), size)
    first = next(parts, None)
    if first is None:
        raise InvalidArgumentError(f"{group[0].path} has no rows to write again")
    names = in_order(first, order).column_names
    schema = first.select(names).schema

    def tables() -> Iterator[pa.Table]:
        yield first.select(names)
        for part in parts:
            yield _conformed(part, schema)

    return write_stripes(table.folder, group[0].partition, tables(), schema, size, table.encryption)


def _conformed(part: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return a table with the columns of a schema; what is not there is null."""
    there = {name: number for number, name in enumerate(part.column_names)}
    columns = [
        part.column(there[field.name]) if field.name in there else pa.nulls(part.num_rows, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def regrouped(stripes: Iterable[pa.Table], size: StripeSize) -> Iterator[pa.Table]:
    """Yield tables of a stripe's size each; columns that only some stripes have are null in the others."""
    held: list[pa.Table] = []
    rows = 0
    for stripe in stripes:
        held.append(stripe)
        rows += stripe.num_rows
        want = size.rows_of(stripe.nbytes / max(1, stripe.num_rows))
        if rows >= want:
            joined = pa.concat_tables(held, promote_options="default").combine_chunks()
            whole = rows - rows % want
            for start in range(0, whole, want):
                yield joined.slice(start, want).combine_chunks()
            held, rows = [joined.slice(whole)] if rows > whole else [], rows - whole
    if rows:
        yield pa.concat_tables(held, promote_options="default").combine_chunks()


def again(table: Table, work: Callable[[], int | None]) -> int | None:
    """Do work that other commits may stand in the way of, from what is there then."""
    for _ in range(TRIES - 1):
        try:
            return work()
        except TableConflictError:
            continue
    return work()


def popular_order(table: Table, reads: Iterable[LoggedRead]) -> list[int]:
    """Return the features in the order in which their columns are written: what is read together side by side.

    What the table does not know takes no room, and is as small as a number.
    """
    log, known = list(reads), table.features
    lists = {number for number, feature in known.items() if feature.kind != "dense"}
    return order_by_readers(log, {number for read in log for number in read.features} - lists)


def reorder(
    table: Table,
    *,
    order: Sequence[int] | None = None,
    partitions: Sequence[str] | None = None,
    stripe: StripeSize | None = None,
) -> int | None:
    """Write files again with features side by side that are read together: by the read log, or in a given order."""
    chosen = popular_order(table, ReadLog(table.own_folder).read()) if order is None else list(order)
    if not chosen:
        raise InvalidArgumentError(f"{table.url} has no read log to order features by; name an order=")
    table.set_order(chosen)
    if stripe is not None:
        table.set_stripe(stripe)

    def work() -> int | None:
        snapshot = table.snapshot()
        files = [[file] for file in snapshot.files if partitions is None or file.partition in partitions]
        return rewrite(table, files, read_version=snapshot.version, operation="REORDER", order=chosen, stripe=stripe)

    return again(table, work)


def compact(
    table: Table, *, small_bytes: int = SMALL_FILE_BYTES, partitions: Sequence[str] | None = None
) -> int | None:
    """Write the small files of each day as one."""

    def work() -> int | None:
        snapshot = table.snapshot()
        days: dict[str, list[LoggedFile]] = {}
        for file in snapshot.files:
            if file.size < small_bytes and (partitions is None or file.partition in partitions):
                days.setdefault(file.partition, []).append(file)
        groups = [group for group in days.values() if len(group) > 1]
        return rewrite(table, groups, read_version=snapshot.version, operation="OPTIMIZE")

    return again(table, work)


def tier(table: Table, folder: str | os.PathLike[str], features: Sequence[int]) -> int:
    """Copy columns of all files to another folder, and return how many bytes are there.

    Files that have such a copy already keep it; copies of files that are no longer in the table are removed.
    """
    target = Path(folder).absolute()
    names = [f"f{number}" for number in features]
    known = read_tier(table.url)
    snapshot = table.snapshot()
    kept: dict[str, TieredFile] = {}
    for file in snapshot.files:
        there = known.get(file.path)
        fresh = there is not None and Path(there.path).is_relative_to(target) and _copy_has(table, there, file, names)
        kept[file.path] = there if there is not None and fresh else _copied(table, file, names, target)
    publish(table.folder / TIER_FILE, msgspec.json.encode(kept))
    paths = {copy.path for copy in kept.values()}
    for old in known.values():
        if old.path not in paths:
            Path(old.path).unlink(missing_ok=True)
    return sum(copy.size for copy in kept.values())


def _copy_has(table: Table, copy: TieredFile, file: LoggedFile, names: Sequence[str]) -> bool:
    import pyarrow.parquet as pq

    if not os.path.exists(copy.path):
        return False
    there = set(pq.read_schema(copy.path, decryption_properties=table.decryption(copy.path)).names)
    path = table.folder / file.path
    stored = set(pq.read_schema(path, decryption_properties=table.decryption(str(path))).names)
    return there == {*ROW_COLUMNS, *stored.intersection(names)}


def _copied(table: Table, file: LoggedFile, names: Sequence[str], target: Path) -> TieredFile:
    """Write some columns of a file elsewhere, in the same stripes."""
    import pyarrow.parquet as pq

    path = table.folder / file.path
    stored: Any = pq.read_schema(path, decryption_properties=table.decryption(str(path)))
    there = set(stored.names)
    wanted = [*ROW_COLUMNS, *(name for name in names if name in there)]
    stripes = (stripe.select(wanted) for stripe in read_stripes(table, file, wanted))
    schema = pa.schema([stored.field(name) for name in wanted])
    folder = target / uuid4().hex
    whole = StripeSize(rows=1 << 62, bytes=1 << 62)  # one stripe for each that is given
    written, _ = write_stripes(folder, file.partition, stripes, schema, whole, table.encryption)
    return TieredFile(str(folder / written.path), written.size)
