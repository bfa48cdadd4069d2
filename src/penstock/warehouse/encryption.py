"""Encryption at rest: Parquet's own (AES-GCM, each column's pages by themselves), one key for each file.

The table's key is 32 bytes in base64, from a file or from what a command prints. Each file is encrypted with a key made
of it and of the file's name, so that no key encrypts two files. The key is held in memory and in `storage_options`,
which are in no plan, state, journal or log.
"""

from __future__ import annotations

import base64
import binascii
import shlex
import subprocess
from pathlib import Path
from typing import Any

from penstock.core.errors import InvalidArgumentError
from penstock.sources.table_keys import KEY_BYTES, KEY_OPTION, decryption, file_key

COMMAND_WAIT_S = 60.0


class TableKey:
    """The key of a table's files."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def __repr__(self) -> str:
        return "TableKey()"

    @staticmethod
    def of(where: str) -> TableKey:
        """Return the key that a file holds or a command prints: `file:PATH` or `command:COMMAND`."""
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
            key = base64.b64decode(text.strip(), validate=True)
        except (binascii.Error, ValueError):
            key = b""
        if len(key) != KEY_BYTES:
            raise InvalidArgumentError(
                f"key={where!r}: what is there is not {KEY_BYTES} bytes in base64; `penstock table key` makes one"
            )
        return TableKey(key)

    @property
    def option(self) -> tuple[str, str]:
        """The key as one of the storage options."""
        return KEY_OPTION, base64.b64encode(self._key).decode()

    def encryption(self, name: str) -> Any:
        """Return what a file of that name is encrypted with."""
        import pyarrow.parquet.encryption as pe

        return pe.create_encryption_properties(file_key(self._key, name), plaintext_footer=False)

    def decryption(self, path: str) -> Any:
        """Return what a file is decrypted with."""
        return decryption([self.option], path)
