"""What a Parquet footer tells of row groups: where they lie, what their columns hold, which to read together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from penstock.graph.expressions import Expression
from penstock.graph.literals import NANOSECONDS
from penstock.sources.predicates import Bounds, TimeBound, may_be_true

_UNITS = {"milliseconds": "ms", "microseconds": "us", "nanoseconds": "ns"}
UNITS_AT_ONCE = 4  # each is up to a chunk of memory
LEAST_BYTES_PER_VALUE = 8.0  # an encoded column may take next to nothing: what it decodes to does not


class RowGroup(msgspec.Struct, frozen=True):
    number: int
    first_row: int
    rows: int


def row_groups(metadata: Any, start: int, stop: int) -> list[RowGroup]:
    """Return the groups that hold the rows start to stop of a file."""
    groups: list[RowGroup] = []
    first_row = 0
    for number in range(metadata.num_row_groups):
        rows = metadata.row_group(number).num_rows
        if first_row + rows > start and first_row < stop:
            groups.append(RowGroup(number, first_row, rows))
        first_row += rows
    return groups


def read_together(groups: Sequence[RowGroup], rows: int) -> Iterator[list[RowGroup]]:
    """Yield neighbours of up to so many rows together, larger ones alone: a call to read a group of ten rows costs more
    than the ten rows."""
    unit: list[RowGroup] = []
    for group in groups:
        full = unit and sum(each.rows for each in unit) + group.rows > rows
        if unit and (full or unit[-1].number + 1 != group.number):
            yield unit
            unit = []
        unit.append(group)
    if unit:
        yield unit


def units_at_once(groups: Sequence[RowGroup], rows: int) -> int:
    """Return how many units to decode side by side: the columns of one alone take too unequal times to fill all cores.

    Of groups that have more than `rows` rows each is decoded piece by piece, and one at a time: two would lie in memory
    whole.
    """
    if any(group.rows > rows for group in groups):
        return 1
    cores: int = pa.cpu_count()
    return min(UNITS_AT_ONCE, cores)


def leaf_columns(metadata: Any, names: Iterable[str]) -> list[int]:
    """Return the numbers of the leaves below top-level columns (a list or struct has leaves of its own)."""
    wanted = set(names)
    schema = metadata.schema
    paths = (schema.column(leaf).path for leaf in range(metadata.num_columns))
    return [leaf for leaf, path in enumerate(paths) if path in wanted or path.partition(".")[0] in wanted]


def bytes_per_row(metadata: Any, group: int, leaves: Sequence[int]) -> float:
    """Return about how much memory a row takes when decoded."""
    found = metadata.row_group(group)
    rows: int = max(1, found.num_rows)
    sizes: list[int] = [found.column(leaf).total_uncompressed_size for leaf in leaves]
    return sum(max(LEAST_BYTES_PER_VALUE, size / rows) for size in sizes)


def byte_ranges(metadata: Any, groups: Iterable[RowGroup], leaves: Sequence[int]) -> list[tuple[int, int]]:
    """Return where in the file the columns of some groups lie."""
    ranges: list[tuple[int, int]] = []
    for group in groups:
        found = metadata.row_group(group.number)
        for leaf in leaves:
            column = found.column(leaf)
            start = column.data_page_offset
            if column.has_dictionary_page and column.dictionary_page_offset is not None:
                start = min(start, column.dictionary_page_offset)
            ranges.append((start, start + column.total_compressed_size))
    return ranges


def matching_groups(
    metadata: Any, groups: Sequence[RowGroup], predicate: Expression | None, known: Mapping[str, Bounds]
) -> list[RowGroup]:
    """Return the groups in which the predicate may be true. `known` has the columns that are not in the file."""
    if predicate is None:
        return list(groups)
    flat = _flat_leaves(metadata, predicate.columns())
    kept: list[RowGroup] = []
    for group in groups:
        found = metadata.row_group(group.number)

        def bounds_of(name: str, found: Any = found) -> Bounds:
            if name in known:
                return known[name]
            return _bounds(found.column(flat[name]), found.num_rows) if name in flat else Bounds(rows=found.num_rows)

        if may_be_true(predicate, bounds_of):
            kept.append(group)
    return kept


def _flat_leaves(metadata: Any, names: Iterable[str]) -> dict[str, int]:
    """Return the leaves of columns that are no lists or structs, and cannot be taken for a struct's field."""
    found: dict[str, list[int]] = {name: [] for name in names}
    for leaf in range(metadata.num_columns):
        column = metadata.schema.column(leaf)
        if column.path in found:
            found[column.path].append(leaf if column.max_repetition_level == 0 else -1)
    return {name: leaves[0] for name, leaves in found.items() if len(leaves) == 1 and leaves[0] >= 0}


def _bounds(column: Any, rows: int) -> Bounds:
    statistics = column.statistics
    if statistics is None:
        return Bounds(rows=rows)
    nulls = statistics.null_count if statistics.has_null_count else None
    if not statistics.has_min_max:
        return Bounds(rows=rows, nulls=nulls)
    low, high = _bound_values(statistics)
    floats = statistics.physical_type in ("FLOAT", "DOUBLE")
    if low is None or high is None or low != low or high != high:
        return Bounds(rows=rows, nulls=nulls, nans=floats)
    return Bounds(rows=rows, nulls=nulls, low=low, high=high, nans=floats)


def _bound_values(statistics: Any) -> tuple[Any, Any]:
    """Return least and greatest as what literals compare with, None where they are of another kind."""
    logical = json.loads(statistics.logical_type.to_json())
    kind = logical["Type"]
    if kind == "Timestamp" and logical["timeUnit"] in _UNITS:
        scale = NANOSECONDS[_UNITS[logical["timeUnit"]]]
    elif kind == "Date":
        scale = NANOSECONDS["D"]
    elif kind == "String":
        return _texts(statistics.min_raw, statistics.max_raw)
    elif kind in ("None", "Int"):
        return statistics.min, statistics.max
    else:
        return None, None
    return TimeBound(statistics.min_raw * scale), TimeBound(statistics.max_raw * scale)


def _texts(low: bytes, high: bytes) -> tuple[Any, Any]:
    try:
        return low.decode(), high.decode()
    except UnicodeDecodeError:
        return None, None  # cut off within a character
