"""The values that columns are compared with: what is allowed, how it travels, and how it compares."""

from __future__ import annotations

import math
import re
from typing import Any, TypeAlias

import numpy as np

from penstock.core.errors import CodecError, InvalidArgumentError

Scalar: TypeAlias = str | bytes | bool | int | float

_HOUR = 3_600 * 10**9
NANOSECONDS = {
    "W": 168 * _HOUR,
    "D": 24 * _HOUR,
    "h": _HOUR,
    "m": _HOUR // 60,
    "s": 10**9,
    "ms": 10**6,
    "us": 1000,
    "ns": 1,
}
"""Of each unit of numpy's times that has a fixed length."""

_ISO_TIME = re.compile(r"[+-]?\d{4,}(-\d\d(-\d\d([T ]\d\d(:\d\d(:\d\d(\.\d{1,9})?)?)?Z?)?)?)?")
_ALLOWED = "a column is compared with str, bytes, bool, int or float"


def literal_kind(value: object) -> str:
    if isinstance(value, str):
        return "text"
    return "bytes" if isinstance(value, bytes) else "number"


def check_literal(column: str, op: str, value: Any) -> Scalar:
    """Check a value and turn numpy's scalars into Python's."""
    if isinstance(value, (np.str_, np.bytes_, np.bool_, np.integer, np.floating)):
        value = value.item()
    shown = f"col({column!r}) {op} {value!r}"
    if value is None:
        raise InvalidArgumentError(f"{shown}: nothing equals null; use col({column!r}).is_null()")
    if hasattr(value, "isoformat") or isinstance(value, np.datetime64):
        raise InvalidArgumentError(f"{shown}: write a time as ISO text in UTC, such as '2024-01-31T12:00:00'")
    if not isinstance(value, (str, bytes, bool, int, float)):
        raise InvalidArgumentError(
            f"{shown}: {_ALLOWED}, not with {type(value).__name__}; a function in filter() can do more"
        )
    if isinstance(value, float) and math.isnan(value):
        raise InvalidArgumentError(f"{shown}: nothing equals NaN; compare with a number")
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise InvalidArgumentError(f"{shown}: integers lie in [-2**63, 2**64)")
    return value


def literal_to_plain(value: Scalar) -> Any:
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, float) and math.isinf(value):
        return ["float", str(value)]  # JSON has no infinity
    return value


def literal_from_plain(plain: Any) -> Scalar:
    match plain:
        case ["bytes", str(text)]:
            return bytes.fromhex(text)
        case ["float", str(text)]:
            return float(text)
        case bool() | int() | float() | str():
            return plain
    raise CodecError(f"{plain!r} is not a value that a column is compared with")


def alike(column: str, value: Any, literal: Scalar) -> tuple[Any, Any]:
    """Return both sides so that Python compares them by value, or say why they cannot be."""
    if isinstance(value, np.datetime64) and isinstance(literal, str):
        return nanoseconds_of(value), parse_time(column, literal)
    if isinstance(value, np.generic):
        value = value.item()  # or numpy would round the literal to the column's precision
    if isinstance(value, (str, bytes, bool, int, float)) and literal_kind(value) == literal_kind(literal):
        return value, literal
    raise InvalidArgumentError(
        f"col({column!r}) holds {type(value).__name__}, which does not compare with {literal!r} "
        f"({type(literal).__name__})"
    )


def parse_time(column: str, text: str) -> int:
    """Return an ISO date or time, taken as UTC, in nanoseconds since 1970.

    >>> parse_time("when", "1970-01-02"), parse_time("when", "1970-01-01T00:00:00.5")
    (86400000000000, 500000000)
    """
    wrong = f"col({column!r}) is a time and {text!r} is not one in UTC, such as 2024-01-31T12:00:00"
    if _ISO_TIME.fullmatch(text) is None:  # numpy would take "today" too, and other offsets with a warning
        raise InvalidArgumentError(wrong)
    try:
        return nanoseconds_of(np.datetime64(text.removesuffix("Z")))
    except ValueError as error:
        raise InvalidArgumentError(f"{wrong} ({error})") from None


def nanoseconds_of(moment: np.datetime64) -> int:
    """Return a moment as Python's int: numpy's own comparison wraps around where the units lie far apart."""
    if np.datetime_data(moment.dtype)[0] in ("Y", "M"):
        moment = moment.astype("M8[D]")
    unit, count = np.datetime_data(moment.dtype)
    return int(moment.astype(np.int64)) * count * NANOSECONDS[unit]
