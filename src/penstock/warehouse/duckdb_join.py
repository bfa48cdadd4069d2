"""The offline join on DuckDB, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.core.errors import MissingExtraError
from penstock.sources.delta_log import LoggedFile
from penstock.warehouse.joining import JoinPart, write_joined
from penstock.warehouse.table import Table

# Of a row that was logged twice at one time, the one in the first file counts, and there the first.
_JOIN = """
with logged as (
    select * exclude (copy, filename, file_row_number) from (
        select *, row_number() over (
            partition by key order by time, parse_filename(filename), file_row_number
        ) as copy
        from read_parquet($features, filename = true, file_row_number = true) where time < $stop
    ) where copy = 1 and time >= $start
), happened as (select distinct key, time as event_time from read_parquet($events) where time <= $now)
select logged.*, cast(exists(
    select 1 from happened
    where happened.key = logged.key and event_time >= logged.time and event_time <= logged.time + $window
) as float) as label
from logged order by time, key
"""


class DuckDBJoin:
    """Joins logs on DuckDB: one process, all its cores."""

    def first_time(self, features: str) -> int | None:
        """Return the time of the first logged row; None: there is none."""
        found = _duckdb().execute("select min(time) from read_parquet(?)", [features]).fetchone()
        return None if found is None or found[0] is None else int(found[0])

    def write(self, table: Table, part: JoinPart) -> Sequence[tuple[LoggedFile, str]]:
        """Join a part and write its rows as one file."""
        given = {
            "features": part.features,
            "events": part.events,
            "start": part.start_s,
            "stop": part.stop_s,
            "now": part.now_s,
            "window": part.rules.window_s,
        }
        with _duckdb().connect() as connection:
            rows = connection.sql(_JOIN, params=given).to_arrow_table()
        return [write_joined(table, rows, part)] if rows.num_rows else []


def _duckdb() -> Any:
    try:
        import duckdb
    except ImportError as error:
        raise MissingExtraError("duckdb", "warehouse") from error
    return duckdb
