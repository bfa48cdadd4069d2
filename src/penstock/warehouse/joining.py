"""Offline generation: logged features and logged events, joined, labelled, flattened and published, day by day.

Rules: a row's label says whether an event with its key came within `window_s` after the row was logged. A row is
published when its window has passed, so that no label is taken from a time that had not come: `now_s` says which events
are there. Events before the row, after its window, or doubled change nothing; a row that was logged twice is one row,
the first. Rows without an event have the label 0, of which a share may be left out (`keep_negatives`), by a hash of the
key.

The join itself runs on an engine: DuckDB in this process (`duckdb_join.py`), or Spark (`spark_join.py`). What an engine
finds is sampled, flattened and written by the functions here, so that both publish the same rows.

Each day is committed once, by number (`progress`), so that a run that was stopped is started again, and does what is
left. A growing log is joined in micro-batches by the same call: each publishes the rows whose window has passed since
the one before.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Protocol

import pyarrow as pa

from penstock.core.errors import InvalidArgumentError
from penstock.sources.delta_log import LoggedFile
from penstock.warehouse.committing import commit_append
from penstock.warehouse.features import Feature
from penstock.warehouse.flattening import flatten
from penstock.warehouse.table import Table

DAY_S = 86_400
_MAPS = ("dense", "sparse", "scored")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRules:
    """How rows get labels."""

    window_s: int = 3600
    keep_negatives: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.window_s < 0:
            raise InvalidArgumentError(f"window_s={self.window_s}: an event comes after what it is about")
        if not 0 < self.keep_negatives <= 1:
            raise InvalidArgumentError(f"keep_negatives={self.keep_negatives}: a share, above 0 and at most 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinPart:
    """Logged rows of a part of one day: those with `start_s` <= time < `stop_s`, labelled by events up to `now_s`."""

    features: str
    events: str
    start_s: int
    stop_s: int
    now_s: int
    rules: JoinRules

    @property
    def day(self) -> str:
        """The partition that its rows belong to."""
        return datetime.datetime.fromtimestamp(self.start_s, datetime.UTC).date().isoformat()


class JoinEngine(Protocol):
    """Where logs are joined."""

    def first_time(self, features: str) -> int | None:
        """Return the time of the first logged row; None: there is none."""

    def write(self, table: Table, part: JoinPart) -> Sequence[tuple[LoggedFile, str]]:
        """Join a part and write its rows as files that are not committed yet; return them as `Table.write` does."""


def join_logs(
    table: Table,
    features: str | PathLike[str],
    events: str | PathLike[str],
    *,
    now_s: int,
    rules: JoinRules | None = None,
    name: str = "join",
    engine: JoinEngine | None = None,
) -> int:
    """Publish the rows whose labels are known at `now_s` and were not before, and return how many.

    `features` are Parquet files (a glob) with `key`, `time` and the maps `dense`, `sparse` and `scored`, as many of
    them as there are; `events` have `key` and `time`. `name` is whose progress it is: up to which time rows are
    published. `engine` joins them; None: DuckDB.
    """
    from penstock.warehouse.duckdb_join import DuckDBJoin

    chosen = rules or JoinRules()
    joins = engine or DuckDBJoin()
    published = table.snapshot().progress.get(name, -1)
    ready = now_s - chosen.window_s
    if ready - 1 <= published:
        return 0
    logged, happened = fspath(features), fspath(events)
    count = 0
    for start, stop in _days(published + 1, ready, joins.first_time(logged)):
        part = JoinPart(features=logged, events=happened, start_s=start, stop_s=stop, now_s=now_s, rules=chosen)
        written = [each for each in joins.write(table, part) if each[0].rows]
        # The last second of a part is its number: parts are committed in order, and each once.
        if written and commit_append(table.url, written, progress=(name, stop - 1)) is not None:
            count += sum(file.rows for file, _ in written)
    return count


def write_joined(table: Table, rows: pa.Table, part: JoinPart) -> tuple[LoggedFile, str]:
    """Sample, flatten and write rows that an engine has joined and labelled."""
    if part.rules.keep_negatives < 1:
        rows = rows.filter(_kept(rows, part.rules))
    known = {number: feature for number, feature in table.features.items() if feature.written}
    return table.write(_flat(rows, known), part.day)


def _days(first: int, stop: int, logged_from: int | None) -> list[tuple[int, int]]:
    """Return a time cut at midnights; nothing is logged before `logged_from`.

    >>> _days(86_000, 173_000, 0)
    [(86000, 86400), (86400, 172800), (172800, 173000)]
    """
    if logged_from is None:
        return []
    cuts: list[tuple[int, int]] = []
    start = max(first, logged_from)
    while start < stop:
        end = min(stop, (start // DAY_S + 1) * DAY_S)
        cuts.append((start, end))
        start = end
    return cuts


def _kept(rows: pa.Table, rules: JoinRules) -> pa.Array:
    threshold = int(rules.keep_negatives * 2**64)
    return pa.array(
        [
            label > 0
            or int.from_bytes(hashlib.sha256(f"{rules.seed}\0{key}".encode()).digest()[:8], "little") < threshold
            for key, label in zip(rows["key"].to_pylist(), rows["label"].to_pylist())
        ],
        pa.bool_(),
    )


def _flat(rows: pa.Table, features: dict[int, Feature]) -> pa.Table:
    maps = {kind: rows[kind].combine_chunks() for kind in _MAPS if kind in rows.column_names}
    plain = {name: rows[name].combine_chunks() for name in ("key", "time", "label")}
    return pa.table({**plain, **flatten(maps, features, rows.num_rows)})
