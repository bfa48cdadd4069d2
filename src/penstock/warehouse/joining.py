"""Offline generation: logged features and logged events, joined, labelled, flattened and published, day by day.

Rules: a row's label says whether an event with its key came within `window_s` after the row was logged. A row is
published when its window has passed, so that no label is taken from a time that had not come: `now_s` says which events
are there. Events before the row, after its window, or doubled change nothing; a row that was logged twice is one row,
the first. Rows without an event have the label 0, of which a share may be left out (`keep_negatives`), by a hash of the
key.

Each day is committed once, by number (`progress`), so that a run that was stopped is started again, and does what is
left. A growing log is joined in micro-batches by the same call: each publishes the rows whose window has passed since
the one before.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

import pyarrow as pa

from penstock.core.errors import InvalidArgumentError, MissingExtraError
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


def join_logs(
    table: Table,
    features: str | PathLike[str],
    events: str | PathLike[str],
    *,
    now_s: int,
    rules: JoinRules | None = None,
    name: str = "join",
) -> int:
    """Publish the rows whose labels are known at `now_s` and were not before, and return how many.

    `features` are Parquet files (a glob) with `key`, `time` and the maps `dense`, `sparse` and `scored`, as many of
    them as there are; `events` have `key` and `time`. `name` is whose progress it is: up to which time rows are
    published.
    """
    chosen = rules or JoinRules()
    published = table.snapshot().progress.get(name, -1)
    ready = now_s - chosen.window_s
    if ready - 1 <= published:
        return 0
    known = {number: feature for number, feature in table.features.items() if feature.written}
    count = 0
    for start, stop in _days(published + 1, ready, _first_time(features)):
        # The last second of a part is its number: parts are committed in order, and each once.
        rows = _joined(fspath(features), fspath(events), start, stop, now_s, chosen)
        if rows.num_rows:
            day = datetime.datetime.fromtimestamp(start, datetime.UTC).date().isoformat()
            table.append(_flat(rows, known), date=day, progress=(name, stop - 1))
            count += rows.num_rows
    return count


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


def _duckdb() -> Any:
    try:
        import duckdb
    except ImportError as error:
        raise MissingExtraError("duckdb", "warehouse") from error
    return duckdb


def _first_time(features: str | PathLike[str]) -> int | None:
    found = _duckdb().execute("select min(time) from read_parquet(?)", [fspath(features)]).fetchone()
    return None if found is None or found[0] is None else int(found[0])


_JOIN = """
with logged as (
    select * exclude (copy) from (
        select *, row_number() over (partition by key order by time, hash(key)) as copy
        from read_parquet($features) where time < $stop
    ) where copy = 1 and time >= $start
), happened as (select distinct key, time as event_time from read_parquet($events) where time <= $now)
select logged.*, cast(exists(
    select 1 from happened
    where happened.key = logged.key and event_time >= logged.time and event_time <= logged.time + $window
) as float) as label
from logged order by time, key
"""


def _joined(features: str, events: str, start: int, stop: int, now_s: int, rules: JoinRules) -> pa.Table:
    given = {
        "features": features,
        "events": events,
        "start": start,
        "stop": stop,
        "now": now_s,
        "window": rules.window_s,
    }
    with _duckdb().connect() as connection:
        rows = connection.execute(_JOIN, given).to_arrow_table()
    if rules.keep_negatives < 1:
        rows = rows.filter(_kept(rows, rules))
    return rows


def _kept(rows: pa.Table, rules: JoinRules) -> pa.Array:
    import hashlib

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
