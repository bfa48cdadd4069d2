"""Predicates over Arrow columns, to the rules of `graph.expressions`.

`check_predicate` refuses what cannot be compared, `row_mask` says for every row whether it is kept, `may_be_true`
whether any row of a group can be, from the bounds of its columns. Arrow's own comparisons round to a common type; here
a literal is moved to the nearest value of the column's type instead, so that the answer is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from penstock.core.errors import InvalidArgumentError
from penstock.graph.expressions import And, Column, Compare, Expression, IsIn, IsNull, Not, Or
from penstock.graph.literals import NANOSECONDS, Scalar, literal_kind, parse_time
from penstock.sources.columns import is_text, leaf_kind, plain_array

ColumnOf: TypeAlias = Callable[[str], Any]
"""Return the Arrow array of a column."""

_FUNCTIONS = {
    "==": "equal",
    "!=": "not_equal",
    "<": "less",
    "<=": "less_equal",
    ">": "greater",
    ">=": "greater_equal",
}


def check_predicate(expression: Expression, types: Mapping[str, Any]) -> None:
    """Raise if a column is not there, or of a type that its literals do not compare with."""
    match expression:
        case And() | Or():
            check_predicate(expression.left, types)
            check_predicate(expression.right, types)
        case Not():
            check_predicate(expression.operand, types)
        case Column():
            if not pt.is_boolean(_type_of(expression, expression.name, types)):
                raise InvalidArgumentError(f"{expression!r} is no column of bools: compare it with a value")
        case Compare():
            _check_literal(expression, expression.column, types, expression.value)
        case IsIn():
            _type_of(expression, expression.column, types)
            for value in expression.values:
                _check_literal(expression, expression.column, types, value)
        case IsNull():
            _type_of(expression, expression.column, types)
        case _:
            raise TypeError(f"unknown expression {expression!r}")


def _type_of(expression: Expression, column: str, types: Mapping[str, Any]) -> Any:
    if column not in types:
        raise InvalidArgumentError(f"predicate {expression!r}: no column {column!r}; there are {', '.join(types)}")
    return types[column]


def _check_literal(expression: Expression, column: str, types: Mapping[str, Any], value: Scalar) -> None:
    arrow = _type_of(expression, column, types)
    family = _family(arrow)
    allowed = {"number": (bool, int, float), "text": (str,), "bytes": (bytes,), "time": (str,)}.get(family, ())
    if not isinstance(value, allowed):
        told = " or ".join(kind.__name__ for kind in allowed) or "nothing (only is_null works)"
        raise InvalidArgumentError(f"predicate {expression!r}: column {column!r} of type {arrow} compares with {told}")
    if family == "time":
        parse_time(column, str(value))


def _family(arrow: Any) -> str:
    kind = leaf_kind(arrow)
    while pt.is_dictionary(arrow) or pt.is_run_end_encoded(arrow):
        arrow = arrow.value_type
    if kind in ("number", "bool", "decimal"):
        return "number"
    if kind == "object":
        return "text" if is_text(arrow) else "bytes"
    return "time" if pt.is_timestamp(arrow) or pt.is_date(arrow) else "other"


def row_mask(expression: Expression, column_of: ColumnOf) -> Any:
    """Return a boolean array, null where the predicate is unknown."""
    import pyarrow.compute as pc

    match expression:
        case And():
            return pc.and_kleene(row_mask(expression.left, column_of), row_mask(expression.right, column_of))
        case Or():
            return pc.or_kleene(row_mask(expression.left, column_of), row_mask(expression.right, column_of))
        case Not():
            return pc.invert(row_mask(expression.operand, column_of))
        case Column():
            return _decoded(column_of(expression.name))
        case Compare():
            return _compare(column_of(expression.column), expression)
        case IsIn():
            return _is_in(column_of(expression.column), expression)
        case IsNull():
            column = _decoded(column_of(expression.column))
            if pa.types.is_struct(column.type):  # a row has a dict there, whose fields are null
                return pa.array(np.zeros(len(column), bool))
            return column.is_null()
        case _:
            raise TypeError(f"unknown expression {expression!r}")


def _compare(column: pa.Array, expression: Compare) -> Any:
    import pyarrow.compute as pc

    column = _decoded(column)
    array, family = _comparable(column)
    if family in ("text", "bytes"):
        return pc.call_function(_FUNCTIONS[expression.op], [array, pa.scalar(expression.value, array.type)])
    literal = _as_number(column.type, expression.column, expression.value)
    return (_compare_ints if family == "int" else _compare_floats)(array, expression.op, literal)


def _compare_ints(array: pa.Array, op: str, literal: int | float | Fraction) -> Any:
    import pyarrow.compute as pc

    limits = np.iinfo(str(array.type))
    if literal in (math.inf, -math.inf):
        literal = limits.max + 1 if literal > 0 else limits.min - 1
    below, above = math.floor(literal), math.ceil(literal)
    if op in ("==", "!="):
        if below != above or not limits.min <= below <= limits.max:
            return _everywhere(array, op == "!=")
        return pc.call_function(_FUNCTIONS[op], [array, pa.scalar(below, array.type)])
    if op in ("<", "<="):
        greatest = above - 1 if op == "<" else below
        if not limits.min <= greatest <= limits.max:
            return _everywhere(array, greatest > limits.max)
        return pc.less_equal(array, pa.scalar(greatest, array.type))
    least = below + 1 if op == ">" else above
    if not limits.min <= least <= limits.max:
        return _everywhere(array, least < limits.min)
    return pc.greater_equal(array, pa.scalar(least, array.type))


def _compare_floats(array: pa.Array, op: str, literal: int | float | Fraction) -> Any:
    import pyarrow.compute as pc

    near = float(literal)
    if near == literal:
        return pc.call_function(_FUNCTIONS[op], [array, pa.scalar(near, pa.float64())])
    if op in ("==", "!="):
        return _everywhere(array, op == "!=")
    if op in ("<", "<="):
        return pc.less_equal(
            array, pa.scalar(near if near < literal else math.nextafter(near, -math.inf), pa.float64())
        )
    return pc.greater_equal(array, pa.scalar(near if near > literal else math.nextafter(near, math.inf), pa.float64()))


def _is_in(column: pa.Array, expression: IsIn) -> Any:
    import pyarrow.compute as pc

    column = _decoded(column)
    array, family = _comparable(column)
    values: list[Any] = list(expression.values)
    if family in ("int", "float"):
        numbers = [_as_number(column.type, expression.column, value) for value in values]
        values = _exact_ints(numbers, array.type) if family == "int" else _exact_floats(numbers)
        array = array if family == "int" else array.cast(pa.float64())
    found = pc.is_in(array, value_set=pa.array(values, array.type))
    return pc.if_else(array.is_valid(), found, pa.scalar(None, pa.bool_()))


def _exact_ints(numbers: Iterable[Any], arrow: Any) -> list[int]:
    limits = np.iinfo(str(arrow))
    return [int(number) for number in numbers if limits.min <= number <= limits.max and number == int(number)]


def _exact_floats(numbers: Iterable[Any]) -> list[float]:
    exact = [float(number) for number in numbers if float(number) == number]
    return [*exact, 0.0, -0.0] if 0.0 in exact else exact  # equal, but not to a hash table


def _as_number(arrow: Any, column: str, value: Scalar) -> int | float | Fraction:
    """Return a literal as a number of the column's own unit."""
    if not isinstance(value, str):
        assert not isinstance(value, bytes)
        return value
    unit = arrow.unit if pt.is_timestamp(arrow) else "D" if pt.is_date32(arrow) else "ms"
    return Fraction(parse_time(column, value), NANOSECONDS[unit])


def _decoded(array: pa.Array) -> pa.Array:
    array = plain_array(array)
    return array.dictionary_decode() if pt.is_dictionary(array.type) else array


def _comparable(array: pa.Array) -> tuple[pa.Array, str]:
    """Return an array that Arrow compares, and whether as "int", "float", "text" or "bytes"."""
    arrow = array.type
    if pt.is_integer(arrow) or pt.is_floating(arrow):
        return (array.cast(pa.float32()) if pt.is_float16(arrow) else array), "int" if pt.is_integer(arrow) else "float"
    if pt.is_boolean(arrow):
        return array.cast(pa.int8()), "int"
    if pt.is_decimal(arrow):
        return array.cast(pa.float64()), "float"
    if pt.is_timestamp(arrow) or pt.is_date64(arrow):
        return array.view(pa.int64()), "int"
    if pt.is_date32(arrow):
        return array.view(pa.int32()), "int"
    if pt.is_string_view(arrow):
        return array.cast(pa.large_string()), "text"
    if pt.is_binary_view(arrow) or pt.is_fixed_size_binary(arrow):
        return array.cast(pa.large_binary()), "bytes"
    return array, "text" if is_text(arrow) else "bytes"


def _everywhere(array: pa.Array, truth: bool) -> Any:
    import pyarrow.compute as pc

    return pc.if_else(array.is_valid(), pa.scalar(truth), pa.scalar(None, pa.bool_()))


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a column in a group of rows: no value lies outside [low, high]; None: not known."""

    rows: int
    nulls: int | None = None
    low: Any = None
    high: Any = None
    nans: bool = False
    """There may be NaNs, which bounds do not tell of."""


def may_be_true(expression: Expression, bounds_of: Callable[[str], Bounds]) -> bool:
    """Return False if no row of the group can satisfy the predicate."""
    return _outcomes(expression, bounds_of)[0]


def _outcomes(expression: Expression, bounds_of: Callable[[str], Bounds]) -> tuple[bool, bool]:
    """Return whether it can be true, and whether it can be false, for any row."""
    match expression:
        case And() | Or():
            left_true, left_false = _outcomes(expression.left, bounds_of)
            right_true, right_false = _outcomes(expression.right, bounds_of)
            if isinstance(expression, And):
                return left_true and right_true, left_false or right_false
            return left_true or right_true, left_false and right_false
        case Not():
            can_be_true, can_be_false = _outcomes(expression.operand, bounds_of)
            return can_be_false, can_be_true
        case IsNull():
            bounds = bounds_of(expression.column)
            return bounds.nulls is None or bounds.nulls > 0, bounds.nulls is None or bounds.nulls < bounds.rows
        case Column():
            return _value_outcomes(bounds_of(expression.name), "==", (True,), expression.name)
        case Compare():
            return _value_outcomes(bounds_of(expression.column), expression.op, (expression.value,), expression.column)
        case IsIn():
            return _value_outcomes(bounds_of(expression.column), "==", expression.values, expression.column)
        case _:
            raise TypeError(f"unknown expression {expression!r}")


def _value_outcomes(bounds: Bounds, op: str, literals: tuple[Scalar, ...], column: str) -> tuple[bool, bool]:
    if bounds.nulls == bounds.rows:
        return False, False
    low, high = bounds.low, bounds.high
    if low is None or high is None:
        return True, True
    values: tuple[Any, ...] = literals
    if isinstance(low, TimeBound):
        values = tuple(parse_time(column, str(value)) for value in literals)
        low, high = low.nanoseconds, high.nanoseconds
    if any(literal_kind(low) != literal_kind(value) for value in values):
        return True, True  # statistics of another kind than the column has now
    value = values[0] if values else None
    if op in ("==", "!="):
        can_equal = any(low <= each <= high for each in values)
        can_differ = low != high or low not in values or bounds.nans
        return (can_equal, can_differ) if op == "==" else (can_differ, can_equal)
    holds = {"<": low < value, "<=": low <= value, ">": high > value, ">=": high >= value}
    fails = {"<": high >= value, "<=": high > value, ">": low <= value, ">=": low < value}
    return holds[op], fails[op] or bounds.nans


class TimeBound(msgspec.Struct, frozen=True):
    """A bound of a column of times."""

    nanoseconds: int
