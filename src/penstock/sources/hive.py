"""Hive partitions: folders named `key=value` are columns of all the files below them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from urllib.parse import unquote

from penstock.core.errors import DataError

NULL_VALUE = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"[+-]?\d{1,18}")


def partition_texts(path: str) -> dict[str, str | None]:
    """Return the keys of a path with their values as written; None is null.

    >>> partition_texts("s3://bucket/year=2024/city=New%20York/part-0.parquet")
    {'year': '2024', 'city': 'New York'}
    """
    found: dict[str, str | None] = {}
    for folder in path.split("/")[:-1]:
        key, mark, value = folder.partition("=")
        if mark and key:
            found[unquote(key)] = None if value == NULL_VALUE else unquote(value)
    return found


def integer_keys(paths: Sequence[str]) -> list[str]:
    """Return the keys that are integers in every path; all paths must have the same keys."""
    if not paths:
        return []
    expected = partition_texts(paths[0])
    integers = set(expected)
    for path in paths:
        texts = partition_texts(path)
        if texts.keys() != expected.keys():
            told = ", ".join(expected) or "none"
            raise DataError(
                path, f"its folders have the partition keys {', '.join(texts) or 'none'}, {paths[0]} has {told}"
            )
        integers -= {key for key, text in texts.items() if text is not None and _INTEGER.fullmatch(text) is None}
    return [key for key in expected if key in integers]


def partition_values(path: str, integers: Sequence[str]) -> Mapping[str, int | str | None]:
    """Return the values of a path's keys, as ints for those named in `integers`."""
    return {
        key: int(text) if text is not None and key in integers else text for key, text in partition_texts(path).items()
    }
