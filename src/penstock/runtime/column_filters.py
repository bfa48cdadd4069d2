"""A condition over a batch of columns: which of its rows it is true for.

Rows are judged as `Expression.evaluate` judges them one by one. Numbers of one kind are compared as arrays, which gives
the same; the rest is done by rows.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from penstock.core.element import Element, Ragged
from penstock.core.errors import InvalidPipelineError
from penstock.core.keyed import KeyedDense, KeyedRagged
from penstock.graph.arithmetic import COMPARE
from penstock.graph.expressions import And, Column, Compare, Expression, Not, Or

Flags: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]
EXACT = 1 << 53  # whole numbers up to here are floats too


def is_column_batch(element: Element, condition: Expression) -> bool:
    """Say whether an element is a batch of the columns that a condition looks at."""
    if not isinstance(element, dict):
        return False
    columns = [element.get(name) for name in condition.columns()]
    return any(isinstance(column, np.ndarray) and column.ndim > 0 for column in columns)


def kept_rows(batch: dict[str, Any], condition: Expression) -> Element | None:
    """Return the batch with the rows that the condition is true for; None: there are none."""
    true, _ = _judged(batch, condition)
    if true.all() and len(true):
        return batch
    return {name: _taken(name, column, true) for name, column in batch.items()} if true.any() else None


def _judged(batch: dict[str, Any], condition: Expression) -> tuple[Flags, Flags]:
    """Return for which rows it is true, and for which false; for the others it is unknown."""
    match condition:
        case And():
            (true, false), (also, wrong) = _judged(batch, condition.left), _judged(batch, condition.right)
            return true & also, false | wrong
        case Or():
            (true, false), (also, wrong) = _judged(batch, condition.left), _judged(batch, condition.right)
            return true | also, false & wrong
        case Not():
            true, false = _judged(batch, condition.operand)
            return false, true
        case Column() if _is(batch, condition.name, "b"):
            column = batch[condition.name]
            return column, ~column
        case Compare() if _compares_as_arrays(batch, condition):
            flags: Flags = COMPARE[condition.op](batch[condition.column], condition.value)
            return flags, ~flags
    return _by_rows(batch, condition)


def _is(batch: dict[str, Any], name: str, kinds: str) -> bool:
    column = batch.get(name)
    return isinstance(column, np.ndarray) and column.ndim == 1 and column.dtype.kind in kinds


def _compares_as_arrays(batch: dict[str, Any], condition: Compare) -> bool:
    value = condition.value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    if _is(batch, condition.column, "iu"):
        limits = np.iinfo(batch[condition.column].dtype)
        return isinstance(value, int) and limits.min <= value <= limits.max
    is_double = _is(batch, condition.column, "f") and batch[condition.column].dtype == np.float64
    return is_double and (isinstance(value, float) or abs(value) <= EXACT)


def _by_rows(batch: dict[str, Any], condition: Expression) -> tuple[Flags, Flags]:
    names = sorted(condition.columns())
    columns = [batch[name] for name in names if name in batch]
    if len(columns) < len(names) or len({len(column) for column in columns}) > 1:
        condition.truth(batch)  # says which column is missing
        raise InvalidPipelineError(f"filter({condition!r}) is given columns of different lengths")
    truths = [condition.truth(dict(zip(names, row))) for row in zip(*columns)]
    return np.array([t is True for t in truths], bool), np.array([t is False for t in truths], bool)


def _taken(name: str, column: Any, rows: Flags) -> Any:
    if isinstance(column, np.ndarray) and column.ndim > 0 and len(column) == len(rows):
        return column[rows]
    if isinstance(column, (Ragged, KeyedDense, KeyedRagged)) and len(column) == len(rows):
        return column.take(rows)
    if isinstance(column, list) and len(column) == len(rows):
        return [value for value, keep in zip(column, rows) if keep]
    raise InvalidPipelineError(
        f"filter() of a column batch: column {name!r} is a {type(column).__name__} without a row for each of "
        f"{len(rows)}; unbatch() before the filter, or drop() the column"
    )
