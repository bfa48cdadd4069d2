"""What becomes of features and days: filled in, derived, let go, and gone for good.

Filling in runs a pipeline of yours over the rows of a day, in the order in which they are stored, and writes what it
makes beside the rows. So a feature that is filled in, derived by declared transforms, injected or logged is the same.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.api.dataset import Dataset
from penstock.core.errors import InvalidArgumentError
from penstock.core.keyed import KeyedDense, KeyedRagged
from penstock.sources.delta_log import LoggedFile, TableSnapshot, appended_files, read_commit, read_snapshot
from penstock.sources.tiers import TIER_FILE, read_tier
from penstock.warehouse.committing import commit_replacement
from penstock.warehouse.features import Feature, publish
from penstock.warehouse.layout import again, rewrite
from penstock.warehouse.leases import leases_held
from penstock.warehouse.reading import read_features
from penstock.warehouse.table import Table
from penstock.warehouse.writing import KINDS

FILL_ROWS = 4096
UNCOMMITTED_S = 3600.0  # a file that no commit names may be one that is being written


def fill(
    table: Table,
    build: Callable[[Dataset], Dataset],
    into: Mapping[str, int],
    *,
    features: Sequence[int | str] | None = None,
    partitions: Sequence[str] | None = None,
    inject: Sequence[Table] = (),
) -> int | None:
    """Compute features for rows that are stored already, and return the version that has them.

    `build` makes a pipeline of one that reads `features`; it gives a batch for each batch. `into` says which of its
    results becomes which feature: the key of a keyed column, or the name of a plain one, to the feature's id. All days
    are filled, or `partitions`.
    """
    known = table.features
    for number in into.values():
        if number not in known:
            raise InvalidArgumentError(f"feature {number} is not in the registry; add it with Table.add_features")
        if known[number].lifecycle == "reaped":
            raise InvalidArgumentError(f"feature {number} is reaped: take another id")
    targets = {name: known[number] for name, number in into.items()}

    def work() -> int | None:
        snapshot = table.snapshot()
        days = [day for day in snapshot.partitions if partitions is None or day in partitions]
        made: dict[str, dict[str, pa.Array]] = {}
        for day in days:
            reading = read_features(
                table,
                features=features,
                partitions=[day],
                columns=["key", "time", "label"],
                version=snapshot.version,
                batch=FILL_ROWS,
                inject=inject,
                tier=False,
            )
            made.update(_by_file(build(reading), snapshot, day, targets))
        rows: dict[str, int] = {}

        def with_features(stripe: pa.Table, file: LoggedFile) -> pa.Table:
            start = rows.get(file.path, 0)
            rows[file.path] = start + stripe.num_rows
            for name, column in made[file.path].items():
                part = column.slice(start, stripe.num_rows)
                if name in stripe.column_names:
                    stripe = stripe.set_column(stripe.column_names.index(name), name, part)
                else:
                    stripe = stripe.append_column(name, part)
            return stripe

        files = [[file] for file in snapshot.files if file.partition in days and file.path in made]
        return rewrite(table, files, read_version=snapshot.version, operation="FILL", change=with_features)

    return again(table, work)


def derive(
    table: Table,
    build: Callable[[Dataset], Dataset],
    into: Mapping[str, Feature],
    *,
    features: Sequence[int | str] | None = None,
) -> int | None:
    """Store what a pipeline makes as features of their own, so that sessions read them instead of making them."""
    table.add_features(into.values())
    return fill(table, build, {name: feature.id for name, feature in into.items()}, features=features)


def _by_file(
    dataset: Dataset, snapshot: TableSnapshot, day: str, targets: Mapping[str, Feature]
) -> dict[str, dict[str, pa.Array]]:
    """Return the new columns of each file of a day: batches come in the order of the files' rows."""
    parts: dict[str, list[pa.Array]] = {name: [] for name in targets}
    for batch in dataset:
        for name, feature in targets.items():
            parts[name].append(arrow_column(batch, name, feature))
    columns = {targets[name].column: pa.chunked_array(made).combine_chunks() for name, made in parts.items() if made}
    found: dict[str, dict[str, pa.Array]] = {}
    start = 0
    for file in snapshot.files:
        if file.partition != day:
            continue
        found[file.path] = {name: column.slice(start, file.rows) for name, column in columns.items()}
        start += file.rows
    for name, column in columns.items():
        if len(column) != start:
            raise InvalidArgumentError(
                f"the pipeline made {len(column)} rows of {name} for {day}, which has {start}: it must keep every row"
            )
    return found


def arrow_column(batch: Mapping[str, Any], name: str, feature: Feature) -> pa.Array:
    """Return one feature of a batch as it is stored."""
    for leaf in batch.values():
        if isinstance(leaf, KeyedDense) and name in leaf.keys:
            there = leaf.present(name)
            return pa.array(np.asarray(leaf[name], np.float32), mask=None if there.all() else ~there)
        if isinstance(leaf, KeyedRagged) and name in leaf.keys:
            return _lists(leaf, leaf.keys.index(name), feature)
    if name in batch:
        return pa.array(batch[name]).cast(KINDS[feature.kind])
    raise InvalidArgumentError(f"the pipeline makes no {name!r}; its batches have {', '.join(batch)}")


def _lists(leaf: KeyedRagged, place: int, feature: Feature) -> pa.Array:
    offsets = leaf.offsets[place * len(leaf) : (place + 1) * len(leaf) + 1]
    cut = slice(int(offsets[0]), int(offsets[-1]))
    ids = pa.array(leaf.values[cut])
    ends = pa.array((offsets - offsets[0]).astype(np.int32))
    if feature.kind == "sparse":
        return pa.ListArray.from_arrays(ends, ids)
    scores = np.ones(len(ids), np.float32) if leaf.weights is None else leaf.weights[cut]
    return pa.ListArray.from_arrays(ends, pa.StructArray.from_arrays([ids, pa.array(scores)], ["id", "score"]))


def retain(table: Table, days: int) -> list[str]:
    """Let go of the days before the last `days`, counted from the newest, and return them."""
    if days < 1:
        raise InvalidArgumentError(f"days={days}: at least one day is kept")
    dropped: list[str] = []

    def work() -> int | None:
        snapshot = table.snapshot()
        if not snapshot.files:
            return None
        newest = datetime.date.fromisoformat(snapshot.partitions[-1])
        first = (newest - datetime.timedelta(days=days - 1)).isoformat()
        old = [file for file in snapshot.files if file.partition < first]
        dropped[:] = sorted({file.partition for file in old})
        if not old:
            return None
        return commit_replacement(
            table.url, [], old, read_version=snapshot.version, operation="RETAIN", changes_data=True
        )

    again(table, work)
    return dropped


def reap(table: Table, ids: Sequence[int]) -> int | None:
    """Write files again without some features, and return the version; `vacuum` then removes the old ones for good.

    From the start of this on the features are not written any more, so that what is appended meanwhile has them only
    where its writer had begun before: files are looked through until none has them.
    """
    table.registry.move(ids, "reaped")
    names = {f"f{number}" for number in ids}

    def without(stripe: pa.Table, file: LoggedFile) -> pa.Table:
        return stripe.select([name for name in stripe.column_names if name not in names])

    version: int | None = None
    while True:

        def work() -> int | None:
            snapshot = table.snapshot()
            files = [[file] for file in snapshot.files if names & stored_columns(table, file)]
            return rewrite(table, files, read_version=snapshot.version, operation="REAP", change=without)

        done = again(table, work)
        if done is None:
            drop_stale_copies(table)
            return version
        version = done


def stored_columns(table: Table, file: LoggedFile) -> set[str]:
    """Return which columns a file has."""
    import pyarrow.parquet as pq

    path = str(table.folder / file.path)
    return set(pq.read_schema(path, decryption_properties=table.decryption(path)).names)


def drop_stale_copies(table: Table) -> None:
    """Remove copies on a faster tier of files that are no longer in the table."""
    known = read_tier(table.url)
    files = {file.path for file in table.snapshot().files}
    if known.keys() <= files:
        return
    publish(table.folder / TIER_FILE, _encoded({path: copy for path, copy in known.items() if path in files}))
    for path, copy in known.items():
        if path not in files:
            Path(copy.path).unlink(missing_ok=True)


def _encoded(value: Any) -> bytes:
    import msgspec

    return msgspec.json.encode(value)


def vacuum(table: Table) -> list[str]:
    """Remove files that neither the newest version nor one that a session holds has, and return them.

    Files that no commit names are removed when they are an hour old: a younger one may be about to be committed.
    """
    now = time.time()
    snapshot = table.snapshot()
    needed = {file.path for file in snapshot.files}
    for lease in leases_held(table.own_folder, now):
        needed.update(file.path for file in read_snapshot(table.url, lease.version).files)
        if lease.onward:
            needed.update(_added_since(table, lease.version, snapshot.version))
    named = _ever_named(table, snapshot)
    removed: list[str] = []
    for path in sorted(table.folder.glob("date=*/*.parquet")):
        relative = str(path.relative_to(table.folder))
        if relative in needed or (relative not in named and now - path.stat().st_mtime < UNCOMMITTED_S):
            continue
        path.unlink(missing_ok=True)
        removed.append(relative)
    drop_stale_copies(table)
    return removed


def _added_since(table: Table, held: int, newest: int) -> set[str]:
    """Return the files that came after a version, gone again or not: who follows the table reads each."""
    return {file.path for version in range(held + 1, newest + 1) for file in appended_files(table.url, version)}


def _ever_named(table: Table, snapshot: TableSnapshot) -> set[str]:
    """Return the files that commits of the log have added or removed."""
    named = {file.path for file in snapshot.files}
    for version in range(snapshot.version + 1):
        try:
            actions = read_commit(table.url, version)
        except FileNotFoundError:
            continue
        named.update(action.add.path for action in actions if action.add is not None)
        named.update(action.remove.path for action in actions if action.remove is not None)
    return named
