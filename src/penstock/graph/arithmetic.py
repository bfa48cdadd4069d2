"""Arithmetic on columns: what `col("x") * 2 + col("y")` computes, and the names that expressions look up.

Rules: a column that is null, or a division by zero, makes the result unknown. Numbers are Python's: whole ones never
overflow, `/` gives a float, and a float that is too large is infinite. Anything but numbers is an error.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, Literal, TypeAlias

import numpy as np

from penstock.core.errors import InvalidArgumentError

Comparison: TypeAlias = Literal["==", "!=", "<", "<=", ">", ">="]

COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}

Sign: TypeAlias = Literal["+", "-", "*", "/", "//", "%"]

SIGNS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}


def compute(sign: Sign, left: Any, right: Any) -> Any:
    """Return the result of two numbers; None: unknown.

    >>> compute("+", 1, 2.5), compute("/", 1, 0), compute("*", None, 2)
    (3.5, None, None)
    """
    if left is None or right is None:
        return None
    try:
        return SIGNS[sign](left, right)
    except ZeroDivisionError:
        return None
    except OverflowError:
        return float("inf") if (left < 0) == (right < 0) else float("-inf")


def number_of(column: str, value: Any) -> Any:
    """Return a column's value as a number of Python; None: it is null."""
    if value is None or type(value) in (int, float):
        return value
    if isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0 and value.dtype.kind in "biuf":
        return value.item()
    if isinstance(value, Real) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, bool):
        return int(value)
    raise InvalidArgumentError(f"column {column!r} holds {type(value).__name__}, with which one cannot calculate")


def check_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise InvalidArgumentError(f"col({name!r}): a column's name is a str and not empty")


def value_in(row: Mapping[str, Any], column: str) -> Any:
    """Return a row's value of a column."""
    try:
        return row[column]
    except (KeyError, TypeError, IndexError):
        if isinstance(row, Mapping):
            there = f"the row has {', '.join(map(repr, row))}" if row else "the row is empty"
        else:
            there = f"the element is not a dict but {type(row).__name__}"
        raise InvalidArgumentError(f"no column {column!r}: {there}") from None
