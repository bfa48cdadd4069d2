"""Encryption at rest: Parquet's own (AES-GCM, each column's pages by themselves).

A table's keys are 32 bytes in base64 each, from a file or from what a command prints: the table's own, and others by
name, for features that name one. They are held in memory and in `storage_options`, which are in no plan, state, journal
or log. `sources/table_keys.py` has how files are encrypted with them.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.core.errors import InvalidArgumentError
from penstock.sources.table_keys import (
    COLUMN_KEYS,
    KEY_OPTION,
    KEYED,
    TABLE_KEY,
    ColumnKeys,
    crypto_factory,
    decryption,
    file_key,
    file_name,
    key_check,
    parse_ring,
    ring_text,
)

COMMAND_WAIT_S = 60.0


class KeyRing:
    """The keys of a table's files, by name."""

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        self._keys = dict(keys)

    def __repr__(self) -> str:
        return f"KeyRing({', '.join(sorted(self._keys))})"

    @staticmethod
    def of(where: str) -> KeyRing:
        """Return the keys that a file holds or a command prints: `file:PATH` or `command:COMMAND`."""
        kind, mark, rest = where.partition(":")
        if kind == "file" and mark:
            try:
                text = Path(rest).read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise InvalidArgumentError(f"key={where!r}: the file cannot be read: {error}") from error
        elif kind == "command" and mark:
            try:
                done = subprocess.run(
                    shlex.split(rest), capture_output=True, text=True, timeout=COMMAND_WAIT_S, check=False
                )
            except (OSError, ValueError, subprocess.TimeoutExpired) as error:
                raise InvalidArgumentError(f"key={where!r}: the command did not run: {error}") from error
            if done.returncode:
                raise InvalidArgumentError(f"key={where!r}: the command ended with {done.returncode}: {done.stderr}")
            text = done.stdout
        else:
            raise InvalidArgumentError("key= says where the key is, as file:PATH or command:COMMAND")
        try:
            return KeyRing(parse_ring(text))
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"key={where!r}: {error}") from None

    @property
    def option(self) -> tuple[str, str]:
        """The keys as one of the storage options."""
        return KEY_OPTION, ring_text(self._keys)

    def encryption(self, key_of: Mapping[str, str]) -> FileEncryption:
        """Return how files are encrypted; `key_of` says which columns have a key of their own, and its name."""
        unknown = sorted({name for name in key_of.values() if name not in self._keys})
        if unknown:
            raise InvalidArgumentError(
                f"features name the key {unknown[0]!r}, which is not among those that were given: "
                f"{', '.join(sorted(self._keys))}; add it to key="
            )
        return FileEncryption(self._keys, key_of)

    def decryption(self, path: str) -> Any:
        """Return what a file is decrypted with."""
        return decryption([self.option], path)


class FileEncryption:
    """What the files of a table are encrypted with."""

    def __init__(self, keys: Mapping[str, bytes], key_of: Mapping[str, str]) -> None:
        self._keys, self._key_of = keys, key_of

    def suffix(self, schema: pa.Schema) -> str:
        """Return how the name of a file with these columns ends."""
        return KEYED if any(name in self._key_of for name in schema.names) else ".parquet"

    def properties(self, name: str, schema: pa.Schema) -> Any:
        """Return what Arrow encrypts a file of that name with."""
        import pyarrow.parquet.encryption as pe

        if not name.endswith(KEYED):
            return pe.create_encryption_properties(file_key(self._keys[TABLE_KEY], name), plaintext_footer=False)
        leaves: dict[str, list[str]] = {}
        for field in schema:
            leaves.setdefault(self._key_of.get(field.name, TABLE_KEY), []).extend(_leaves(field))
        settings = pe.EncryptionConfiguration(
            footer_key=TABLE_KEY, column_keys=leaves, data_key_length_bits=256, plaintext_footer=False
        )
        factory = crypto_factory(ring_text(self._keys))
        return factory.file_encryption_properties(pe.KmsConnectionConfig(), settings)

    def note(self, name: str, schema: pa.Schema) -> dict[bytes, bytes]:
        """Return what the footer of a file says of its keys."""
        if not name.endswith(KEYED):
            return {}
        columns: dict[str, list[str]] = {}
        for column in schema.names:
            if column in self._key_of:
                columns.setdefault(self._key_of[column], []).append(column)
        told = {key: [key_check(self._keys[key], name), found] for key, found in columns.items()}
        return {COLUMN_KEYS: json.dumps(told).encode()}


def _leaves(field: pa.Field) -> list[str]:
    """Return the names that Parquet has for a column's parts.

    >>> _leaves(pa.field("f1", pa.list_(pa.struct([("id", pa.int64()), ("score", pa.float32())]))))
    ['f1.list.element.id', 'f1.list.element.score']
    """
    if not pa.types.is_list(field.type):
        return [field.name]
    inner, within = f"{field.name}.list.element", field.type.value_type
    return [f"{inner}.{each.name}" for each in within] if pa.types.is_struct(within) else [inner]


def open_whole(path: Path, ring: KeyRing | None) -> Any:
    """Open a file of which all columns are to be read; the keys of all of them are needed."""
    import pyarrow.parquet as pq

    opened = pq.ParquetFile(path, decryption_properties=None if ring is None else ring.decryption(str(path)))
    if ring is not None and file_name(str(path)).endswith(KEYED):
        ColumnKeys([ring.option], str(path), (opened.metadata.metadata or {}).get(COLUMN_KEYS)).check_all()
    return opened
