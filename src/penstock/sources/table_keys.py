"""Keys of encrypted table files, as readers find them among the storage options."""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Any

from penstock.sources.storage import Options

KEY_BYTES = 32
KEY_OPTION = "penstock_table_key"
"""Not for the storage: `storage_options` is what reaches workers and nothing else sees."""


def file_key(key: bytes, name: str) -> bytes:
    """Return the key of one file, by its name without folders.

    >>> file_key(bytes(32), "part-1.parquet") == file_key(bytes(32), "part-2.parquet")
    False
    """
    return hmac.new(key, name.encode(), hashlib.sha256).digest()


def decryption(options: Options, path: str) -> Any:
    """Return what a file is decrypted with; None: there is no key, and files are plain."""
    found = dict(options).get(KEY_OPTION)
    if found is None:
        return None
    import pyarrow.parquet.encryption as pe

    name = path.rpartition("/")[2]
    return pe.create_decryption_properties(file_key(base64.b64decode(found), name), allow_plaintext_files=True)


def storage_options(options: Options) -> Options:
    """Return the options without the key: what the storage is given."""
    return {name: value for name, value in dict(options).items() if name != KEY_OPTION}
