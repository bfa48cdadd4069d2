"""Writing one file of a table: columns in the table's order, ids delta-packed, zstd, statistics where they help."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa

from penstock.core.errors import InvalidArgumentError
from penstock.sources.delta_log import PARTITION, LoggedFile
from penstock.warehouse.encryption import FileEncryption
from penstock.warehouse.features import Feature

ROW_COLUMNS = {"key": pa.int64(), "time": pa.int64(), "label": pa.float32()}
"""What every row has beside its features: whose it is, when it was logged (seconds), and what came of it."""
KINDS = {
    "dense": pa.float32(),
    "sparse": pa.list_(pa.int64()),
    "scored": pa.list_(pa.struct([("id", pa.int64()), ("score", pa.float32())])),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StripeSize:
    """How much of a file is written, and later read, at a time: at most so many rows and so many bytes of memory.

    >>> StripeSize(rows=4096).rows_of(bytes_per_row=1 << 20)
    256
    """

    rows: int = 1 << 16
    bytes: int = 256 << 20

    def __post_init__(self) -> None:
        if self.rows < 1 or self.bytes < 1:
            raise InvalidArgumentError(f"rows={self.rows}, bytes={self.bytes}: a stripe has at least one of either")

    def rows_of(self, bytes_per_row: float) -> int:
        """Return how many rows a stripe gets."""
        return int(max(1, min(self.rows, self.bytes // max(1.0, bytes_per_row))))


def checked_rows(rows: pa.Table, features: Sequence[Feature]) -> pa.Table:
    """Return rows as they are written: the row's own columns, then features, each of its type.

    A feature that is not among the rows is left out of the file: readers find it empty.
    """
    for name in ROW_COLUMNS:
        if name not in rows.column_names:
            raise InvalidArgumentError(f"the rows have no column {name!r}; each row needs {', '.join(ROW_COLUMNS)}")
    known = {feature.column: feature for feature in features}
    for name in rows.column_names:
        if name not in known and name not in ROW_COLUMNS:
            raise InvalidArgumentError(
                f"column {name!r} is no feature that is written: register it with Table.add_features, or drop it"
            )
    types: dict[str, Any] = {
        **ROW_COLUMNS,
        **{name: KINDS[known[name].kind] for name in rows.column_names if name in known},
    }
    arrays, names = [], []
    for name, kind in types.items():
        column = rows.column(name)
        if column.type != kind:
            try:
                column = column.cast(kind)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise InvalidArgumentError(f"column {name!r} is {column.type} and not {kind}: {error}") from error
        arrays.append(column)
        names.append(name)
    return pa.table(arrays, names=names)


def in_order(rows: pa.Table, order: Sequence[int]) -> pa.Table:
    """Return the rows' columns with the features of `order` first, the others as they stand."""
    own = [name for name in rows.column_names if name in ROW_COLUMNS]
    there = set(rows.column_names)
    first = [name for name in (f"f{number}" for number in order) if name in there]
    rest = set(first) | set(own)
    return rows.select([*own, *first, *(name for name in rows.column_names if name not in rest)])


def write_file(
    folder: Path, partition: str, rows: pa.Table, stripe: StripeSize, encryption: FileEncryption | None = None
) -> tuple[LoggedFile, str]:
    """Write rows as a new file below the table's folder; return it, and its statistics as the log has them.

    It is on disk when this returns, and belongs to the table when it is committed.
    """
    return write_stripes(folder, partition, [rows], rows.schema, stripe, encryption)


def write_stripes(
    folder: Path,
    partition: str,
    tables: Iterable[pa.Table],
    schema: pa.Schema,
    stripe: StripeSize,
    encryption: FileEncryption | None = None,
) -> tuple[LoggedFile, str]:
    """Write tables of one schema, one after the other, into one file."""
    import pyarrow.parquet as pq

    suffix = ".parquet" if encryption is None else encryption.suffix(schema)
    path = f"{PARTITION}={partition}/part-{uuid4().hex}{suffix}"
    target = folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    statistics = _Statistics()
    properties = encryption.properties(target.name, schema) if encryption is not None else None
    with open(target, "xb") as file:
        with pq.ParquetWriter(file, schema, encryption_properties=properties, **_options(schema, properties)) as writer:
            for table in tables:
                statistics.add(table)
                writer.write_table(table, row_group_size=stripe.rows_of(table.nbytes / max(1, table.num_rows)))
            if encryption is not None:
                writer.add_key_value_metadata(encryption.note(target.name, schema))
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    return LoggedFile(path, size, partition, statistics.rows), statistics.json()


def _options(schema: pa.Schema, encryption: Any) -> dict[str, Any]:
    encodings: dict[str, str] = {}
    for field in schema:
        if pa.types.is_int64(field.type):
            encodings[field.name] = "DELTA_BINARY_PACKED"
        elif pa.types.is_list(field.type):
            inner = f"{field.name}.list.element"
            encodings[inner if pa.types.is_int64(field.type.value_type) else f"{inner}.id"] = "DELTA_BINARY_PACKED"
    return {
        "compression": "zstd",
        "use_dictionary": False,
        "column_encoding": encodings or None,
        "write_statistics": [name for name in ROW_COLUMNS if name in schema.names],
        "write_page_checksum": encryption is None,  # encrypted pages are signed
        "store_schema": False,
    }


class _Statistics:
    """Least, greatest and nulls of the row's own columns, for engines that skip files by them."""

    def __init__(self) -> None:
        self.rows = 0
        self._least: dict[str, Any] = {}
        self._greatest: dict[str, Any] = {}
        self._nulls = dict.fromkeys(ROW_COLUMNS, 0)

    def add(self, table: pa.Table) -> None:
        import pyarrow.compute as pc

        self.rows += table.num_rows
        for name in ROW_COLUMNS:
            if name not in table.column_names:
                continue
            self._nulls[name] += table[name].null_count
            bounds = pc.min_max(table[name]).as_py()
            if bounds["min"] is None or bounds["min"] != bounds["min"]:
                continue
            self._least[name] = min(bounds["min"], self._least.get(name, bounds["min"]))
            self._greatest[name] = max(bounds["max"], self._greatest.get(name, bounds["max"]))

    def json(self) -> str:
        import json

        return json.dumps(
            {"numRecords": self.rows, "minValues": self._least, "maxValues": self._greatest, "nullCount": self._nulls}
        )
