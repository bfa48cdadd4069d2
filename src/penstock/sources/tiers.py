"""Copies of a table's popular columns on faster storage, and where they are said to be.

A copy has the same rows in the same stripes as the file it is of, and fewer columns. The list of copies is a file
beside the table: a file that is not in it, or no longer in the table, is read from the table itself.
"""

from __future__ import annotations

import msgspec

from penstock.core.errors import CorruptRecordError
from penstock.sources.storage import Options, open_random, storage_for

TIER_FILE = "_penstock/tier.json"


class TieredFile(msgspec.Struct, array_like=True, frozen=True):
    """Where a file's copy is."""

    path: str
    size: int


def read_tier(url: str, options: Options = ()) -> dict[str, TieredFile]:
    """Return the copies by the path of their file below the table's folder."""
    path = f"{url}/{TIER_FILE}"
    found = storage_for(path, options).stat([path])[0]
    if found is None:
        return {}
    with open_random(found.path, found.size, options, etag=found.etag) as file:
        content = file.read()
    try:
        return _tiered.decode(content)
    except msgspec.DecodeError as error:
        raise CorruptRecordError(path, f"not a list of copies: {error}") from error


_tiered = msgspec.json.Decoder(dict[str, TieredFile])
