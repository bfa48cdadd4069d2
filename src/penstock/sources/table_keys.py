"""Keys of encrypted table files, as readers find them among the storage options.

Two forms of file. Where no column has a key of its own, the whole file has one key, made of the table's key and the
file's name. Where some have, the file's name ends with `.keyed.parquet`: each column has a random key, kept in the file
and wrapped with the named key that the column belongs to. Such a file says in its footer, which the table's key
encrypts, which column belongs to which name, with a check of each key: Arrow ends the process, instead of raising, when
the sizes of a column are asked for without its key, so a reader asks here first.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import secrets
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from penstock.core.errors import CorruptRecordError, InvalidArgumentError
from penstock.sources.storage import Options

KEY_BYTES = 32
KEY_OPTION = "penstock_table_key"
"""Not for the storage: `storage_options` is what reaches workers and nothing else sees."""
TABLE_KEY = "table"
"""The name of the key of footers, and of columns that name no other."""
KEYED = ".keyed.parquet"
COLUMN_KEYS = b"penstock.column_keys"
_NONCE_BYTES = 16
_CHECK_BYTES = 32


def parse_ring(text: str) -> dict[str, bytes]:
    """Return keys by name: lines of a name and a key in base64; a key alone is the table's.

    >>> ring = parse_ring("table " + "A" * 43 + "=\\n" + "ads " + "B" * 43 + "=")
    >>> sorted(ring), len(ring["ads"])
    (['ads', 'table'], 32)
    """
    ring: dict[str, bytes] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, encoded = line.rpartition(" ")
        try:
            key = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            key = b""
        if len(key) != KEY_BYTES:
            raise InvalidArgumentError(
                f"what is there is not {KEY_BYTES} bytes in base64; `penstock table key` makes one"
            )
        ring[name.strip() or TABLE_KEY] = key
    if TABLE_KEY not in ring:
        raise InvalidArgumentError(f"no key of the name {TABLE_KEY!r} is there, and footers are encrypted with it")
    return ring


def ring_text(ring: Mapping[str, bytes]) -> str:
    """Return keys as `parse_ring` reads them."""
    return "\n".join(f"{name} {base64.b64encode(key).decode()}" for name, key in sorted(ring.items()))


def file_key(key: bytes, name: str) -> bytes:
    """Return the key of one file, by its name without folders.

    >>> file_key(bytes(32), "part-1.parquet") == file_key(bytes(32), "part-2.parquet")
    False
    """
    return hmac.new(key, name.encode(), hashlib.sha256).digest()


def key_check(key: bytes, name: str) -> str:
    """Return by what a key is known to be the one of a file."""
    return hmac.new(key, b"check\0" + name.encode(), hashlib.sha256).hexdigest()


def decryption(options: Options, path: str) -> Any:
    """Return what a file is decrypted with; None: there is no key, and files are plain."""
    text = dict(options).get(KEY_OPTION)
    if text is None:
        return None
    import pyarrow.parquet.encryption as pe

    if path.endswith(KEYED):
        settings = pe.DecryptionConfiguration()
        return crypto_factory(text).file_decryption_properties(pe.KmsConnectionConfig(), settings)
    own = file_key(parse_ring(text)[TABLE_KEY], file_name(path))
    return pe.create_decryption_properties(own, allow_plaintext_files=True)


@lru_cache(maxsize=8)
def crypto_factory(text: str) -> Any:
    """Return Arrow's maker of keys for files, over a ring; it outlives the files it made keys for."""
    import pyarrow.parquet.encryption as pe

    ring = parse_ring(text)

    class RingClient(pe.KmsClient):  # type: ignore[misc, unused-ignore]
        """Wraps the keys of columns with those of the ring."""

        def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> bytes:
            return wrapped(ring[master_key_identifier], key_bytes)

        def unwrap_key(self, wrapped_key: bytes, master_key_identifier: str) -> bytes:
            return unwrapped(ring[master_key_identifier], wrapped_key)

    return pe.CryptoFactory(lambda _: RingClient())


def wrapped(key: bytes, content: bytes) -> bytes:
    """Return up to 32 bytes encrypted and signed with a key, in base64.

    >>> unwrapped(b"k" * 32, wrapped(b"k" * 32, b"secret"))
    b'secret'
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    hidden = _masked(key, nonce, content)
    return base64.b64encode(nonce + hidden + hmac.new(key, b"sign" + nonce + hidden, hashlib.sha256).digest())


def unwrapped(key: bytes, content: bytes) -> bytes:
    """Return what was wrapped with the same key."""
    raw = base64.b64decode(content)
    nonce, hidden, signed = raw[:_NONCE_BYTES], raw[_NONCE_BYTES:-_CHECK_BYTES], raw[-_CHECK_BYTES:]
    if not hmac.compare_digest(signed, hmac.new(key, b"sign" + nonce + hidden, hashlib.sha256).digest()):
        raise ValueError("the key is not the one it was wrapped with")
    return _masked(key, nonce, hidden)


def _masked(key: bytes, nonce: bytes, content: bytes) -> bytes:
    mask = hmac.new(key, b"hide" + nonce, hashlib.sha256).digest()
    if len(content) > len(mask):
        raise ValueError(f"{len(content)} bytes are more than one key")
    return bytes(a ^ b for a, b in zip(content, mask))


class ColumnKeys:
    """Which columns of a file this reader has the keys of."""

    def __init__(self, options: Options, path: str, note: bytes | None) -> None:
        """`note` is what the file's footer says under `COLUMN_KEYS`; None: the columns have no keys of their own."""
        self._path = path
        self._missing: dict[str, str] = {}
        """Of each column that cannot be read, why."""
        if note is None:
            return
        ring = parse_ring(dict(options)[KEY_OPTION])
        for name, (check, columns) in json.loads(note).items():
            if name not in ring:
                why = f"the key {name!r}, which is not among those of this table"
            elif not hmac.compare_digest(key_check(ring[name], file_name(path)), check):
                why = f"another key {name!r} than this table was opened with"
            else:
                continue
            self._missing.update(dict.fromkeys(columns, why))

    def check(self, columns: Iterable[str]) -> None:
        """Raise, with file and column, if one of them cannot be decrypted."""
        for column in columns if self._missing else ():
            if column in self._missing:
                raise CorruptRecordError(
                    self._path,
                    f"column {column!r} is encrypted with {self._missing[column]}; add it to ps.Table's key=",
                )

    def check_all(self) -> None:
        """Raise if any column cannot be decrypted."""
        self.check(list(self._missing))


def file_name(path: str) -> str:
    """Return a path without its folders."""
    return path.rpartition("/")[2]


def storage_options(options: Options) -> Options:
    """Return the options without the key: what the storage is given."""
    return {name: value for name, value in dict(options).items() if name != KEY_OPTION}
