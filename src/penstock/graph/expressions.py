"""Predicates on columns that a source can evaluate itself.

Rules: null is neither equal nor unequal to anything, so a comparison with it is unknown, `~unknown` is unknown too
(SQL's three-valued logic), and a predicate keeps only what it is *true* for. Numbers compare by their exact value
whatever their types, bools count as 0 and 1; text against a time is read as an ISO date in UTC; any other mixture of
types is an error and never quietly false. A source that evaluates a predicate itself must keep to the same rules.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Never, TypeAlias, cast, get_args

import numpy as np

from penstock.core.errors import CodecError, InvalidArgumentError

Scalar: TypeAlias = str | bytes | bool | int | float
Comparison: TypeAlias = Literal["==", "!=", "<", "<=", ">", ">="]

_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
NANOSECONDS = dict(
    W=604_800 * 10**9, D=86_400 * 10**9, h=3_600 * 10**9, m=60 * 10**9, s=10**9, ms=10**6, us=1_000, ns=1
)
_ISO_TIME = re.compile(r"[+-]?\d{4,}(-\d\d(-\d\d([T ]\d\d(:\d\d(:\d\d(\.\d{1,9})?)?)?Z?)?)?)?")
_ALLOWED = "a column is compared with str, bytes, bool, int or float"


class Expression:
    """Built from `col("name")` with `== != < <= > >=`, `.isin([...])`, `.is_null()` and `& | ~`.

    Compared by identity, as operators are: compare `to_plain()` where the structure is meant.
    """

    __slots__ = ()

    def columns(self) -> frozenset[str]:
        """Return the names of the columns it looks at."""
        raise NotImplementedError

    def truth(self, row: Mapping[str, Any]) -> bool | None:
        """Return true, false, or None for unknown."""
        raise NotImplementedError

    def evaluate(self, row: Mapping[str, Any]) -> bool:
        """Return whether it is true for a row.

        >>> (col("x") > 3).evaluate({"x": 4}), (~(col("x") > 3)).evaluate({"x": None})
        (True, False)
        """
        return self.truth(row) is True

    def to_plain(self) -> list[Any]:
        """Return it as nested lists of JSON values.

        >>> ((col("x") > 3) & ~col("y").is_null()).to_plain()
        ['and', ['>', 'x', 3], ['not', ['is_null', 'y']]]
        """
        raise NotImplementedError

    @staticmethod
    def from_plain(plain: Any) -> Expression:
        """Return the expression that `to_plain` gave."""
        match plain:
            case ["col", str(name)]:
                return Column(name)
            case ["==" | "!=" | "<" | "<=" | ">" | ">=" as op, str(name), value]:
                return Compare(name, cast(Comparison, op), _literal_from_plain(value))
            case ["isin", str(name), [*values]]:
                return IsIn(name, tuple(map(_literal_from_plain, values)))
            case ["is_null", str(name)]:
                return IsNull(name)
            case ["and", left, right]:
                return And(Expression.from_plain(left), Expression.from_plain(right))
            case ["or", left, right]:
                return Or(Expression.from_plain(left), Expression.from_plain(right))
            case ["not", operand]:
                return Not(Expression.from_plain(operand))
        raise CodecError(f"{plain!r} is not an expression on columns")

    def __and__(self, other: object) -> Expression:
        return And(self, _operand(other, "&"))

    def __or__(self, other: object) -> Expression:
        return Or(self, _operand(other, "|"))

    def __invert__(self) -> Expression:
        return Not(self)

    def __rand__(self, other: object) -> Expression:
        return And(_operand(other, "&"), self)

    def __ror__(self, other: object) -> Expression:
        return Or(_operand(other, "|"), self)

    def __bool__(self) -> Never:
        raise TypeError(
            f"{self!r} is true or false only for a row: join expressions with & and |, negate with ~ "
            "(not `and`, `or`, `not`, `in` or a < b < c), each comparison in parentheses"
        )


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Column(Expression):
    """A column; as a predicate by itself, a column of bools."""

    name: str

    def __post_init__(self) -> None:
        _check_name(self.name)

    def columns(self) -> frozenset[str]:
        return frozenset((self.name,))

    def truth(self, row: Mapping[str, Any]) -> bool | None:
        value = _value(row, self.name)
        if value is None or isinstance(value, (bool, np.bool_)):
            return None if value is None else bool(value)
        raise InvalidArgumentError(f"{self!r} holds {type(value).__name__}, not bool: compare it with a value")

    def to_plain(self) -> list[Any]:
        return ["col", self.name]

    def isin(self, values: Iterable[Scalar]) -> Expression:
        if isinstance(values, (str, bytes)):
            raise InvalidArgumentError(f"isin({values!r}) takes a list of values; for one value use ==")
        return IsIn(self.name, tuple(values))

    def is_null(self) -> Expression:
        return IsNull(self.name)

    def __eq__(self, value: object) -> Expression:  # type: ignore[override]
        return Compare(self.name, "==", cast(Scalar, value))

    def __ne__(self, value: object) -> Expression:  # type: ignore[override]
        return Compare(self.name, "!=", cast(Scalar, value))

    def __lt__(self, value: Scalar) -> Expression:
        return Compare(self.name, "<", value)

    def __le__(self, value: Scalar) -> Expression:
        return Compare(self.name, "<=", value)

    def __gt__(self, value: Scalar) -> Expression:
        return Compare(self.name, ">", value)

    def __ge__(self, value: Scalar) -> Expression:
        return Compare(self.name, ">=", value)

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"col({self.name!r})"


def col(name: str) -> Column:
    """Name a column of a row, to build a predicate from.

    >>> (col("x") > 3) & ~col("label").isin(["cat", "dog"])
    (col('x') > 3) & ~col('label').isin(['cat', 'dog'])
    """
    return Column(name)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Compare(Expression):
    """A column compared with a value."""

    column: str
    op: Comparison
    value: Scalar

    def __post_init__(self) -> None:
        _check_name(self.column)
        if self.op not in get_args(Comparison):
            raise InvalidArgumentError(f"{self.op!r} is not one of {', '.join(get_args(Comparison))}")
        object.__setattr__(self, "value", _literal(self.column, self.op, self.value))

    def columns(self) -> frozenset[str]:
        return frozenset((self.column,))

    def truth(self, row: Mapping[str, Any]) -> bool | None:
        value, literal = _value(row, self.column), self.value
        if value is None:
            return None
        if type(value) is not type(literal):
            value, literal = _alike(self.column, value, literal)
        return bool(_COMPARE[self.op](value, literal))

    def to_plain(self) -> list[Any]:
        return [self.op, self.column, _literal_to_plain(self.value)]

    def __repr__(self) -> str:
        return f"col({self.column!r}) {self.op} {self.value!r}"


class _Members:
    __slots__ = ("_members",)  # beside the fields: a set's order must not reach a fingerprint
    _members: frozenset[Scalar]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class IsIn(_Members, Expression):
    """Whether a column's value is one of several."""

    column: str
    values: tuple[Scalar, ...]

    def __post_init__(self) -> None:
        _check_name(self.column)
        values = tuple(_literal(self.column, "isin", value) for value in self.values)
        if len({_kind(value) for value in values}) > 1:
            raise InvalidArgumentError(f"isin({list(values)!r}): the values must be all text, all bytes or all numbers")
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "_members", frozenset(values))

    def __reduce__(self) -> tuple[Any, ...]:
        return IsIn, (self.column, self.values)

    def columns(self) -> frozenset[str]:
        return frozenset((self.column,))

    def truth(self, row: Mapping[str, Any]) -> bool | None:
        value = _value(row, self.column)
        if value is None:
            return None
        if self.values and type(value) is not type(self.values[0]):
            if isinstance(value, np.datetime64):
                return any(operator.eq(*_alike(self.column, value, each)) for each in self.values)
            value, _ = _alike(self.column, value, self.values[0])
        return value in self._members

    def to_plain(self) -> list[Any]:
        return ["isin", self.column, [_literal_to_plain(value) for value in self.values]]

    def __repr__(self) -> str:
        return f"col({self.column!r}).isin({list(self.values)!r})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class IsNull(Expression):
    """Whether a column has no value; itself never unknown."""

    column: str

    def __post_init__(self) -> None:
        _check_name(self.column)

    def columns(self) -> frozenset[str]:
        return frozenset((self.column,))

    def truth(self, row: Mapping[str, Any]) -> bool | None:
        return _value(row, self.column) is None

    def to_plain(self) -> list[Any]:
        return ["is_null", self.column]

    def __repr__(self) -> str:
        return f"col({self.column!r}).is_null()"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class And(Expression):
    left: Expression
    right: Expression

    def columns(self) -> frozenset[str]:
        return self.left.columns() | self.right.columns()

    def truth(self, row: Mapping[str, Any]) -> bool | None:
        left = self.left.truth(row)
        if left is False:
            return False
        right = self.right.truth(row)
        return right if left is True or right is False else None

    def to_plain(self) -> list[Any]:
        return ["and", self.left.to_plain(), self.right.to_plain()]

    def __repr__(self) -> str:
        return f"{_grouped(self.left, And)} & {_grouped(self.right)}"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Or(Expression):
    left: Expression
    right: Expression

    def columns(self) -> frozenset[str]:
        return self.left.columns() | self.right.columns()

    def truth(self, row: Mapping[str, Any]) -> bool | None:
        left = self.left.truth(row)
        if left is True:
            return True
        right = self.right.truth(row)
        return right if left is False or right is True else None

    def to_plain(self) -> list[Any]:
        return ["or", self.left.to_plain(), self.right.to_plain()]

    def __repr__(self) -> str:
        return f"{_grouped(self.left, Or)} | {_grouped(self.right)}"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Not(Expression):
    operand: Expression

    def columns(self) -> frozenset[str]:
        return self.operand.columns()

    def truth(self, row: Mapping[str, Any]) -> bool | None:
        truth = self.operand.truth(row)
        return None if truth is None else not truth

    def to_plain(self) -> list[Any]:
        return ["not", self.operand.to_plain()]

    def __repr__(self) -> str:
        return f"~{_grouped(self.operand)}"


def _grouped(part: Expression, chains: type[Expression] | None = None) -> str:
    """Return an operand's text, in parentheses where Python's precedence asks for them."""
    stands_alone = isinstance(part, (Column, IsIn, IsNull, Not)) or (chains is not None and isinstance(part, chains))
    return repr(part) if stands_alone else f"({part!r})"


def _operand(value: object, op: str) -> Expression:
    if isinstance(value, Expression):
        return value
    raise InvalidArgumentError(
        f"{op} joins two expressions, not {value!r}: put each comparison in parentheses, (col('x') > 3) {op} (...)"
    )


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise InvalidArgumentError(f"col({name!r}): a column's name is a str and not empty")


def _kind(value: object) -> str:
    if isinstance(value, str):
        return "text"
    return "bytes" if isinstance(value, bytes) else "number"


def _literal(column: str, op: str, value: Any) -> Scalar:
    """Check a value and turn numpy's scalars into Python's."""
    if isinstance(value, (np.str_, np.bytes_, np.bool_, np.integer, np.floating)):
        value = value.item()
    shown = f"col({column!r}) {op} {value!r}"
    if value is None:
        raise InvalidArgumentError(f"{shown}: nothing equals null; use col({column!r}).is_null()")
    if isinstance(value, Column):
        raise InvalidArgumentError(f"{shown}: {_ALLOWED}, not with another column; use a function in filter()")
    if hasattr(value, "isoformat") or isinstance(value, np.datetime64):
        raise InvalidArgumentError(f"{shown}: write a time as ISO text in UTC, such as '2024-01-31T12:00:00'")
    if not isinstance(value, (str, bytes, bool, int, float)):
        raise InvalidArgumentError(f"{shown}: {_ALLOWED}, not with {type(value).__name__}")
    if isinstance(value, float) and math.isnan(value):
        raise InvalidArgumentError(f"{shown}: nothing equals NaN; compare with a number")
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise InvalidArgumentError(f"{shown}: integers lie in [-2**63, 2**64)")
    return value


def _literal_to_plain(value: Scalar) -> Any:
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, float) and math.isinf(value):
        return ["float", str(value)]  # JSON has no infinity
    return value


def _literal_from_plain(plain: Any) -> Scalar:
    match plain:
        case ["bytes", str(text)]:
            return bytes.fromhex(text)
        case ["float", str(text)]:
            return float(text)
        case bool() | int() | float() | str():
            return plain
    raise CodecError(f"{plain!r} is not a value that a column is compared with")


def _value(row: Mapping[str, Any], column: str) -> Any:
    try:
        return row[column]
    except (KeyError, TypeError, IndexError):
        if isinstance(row, Mapping):
            there = f"the row has {', '.join(map(repr, row))}" if row else "the row is empty"
        else:
            there = f"the element is not a dict but {type(row).__name__}"
        raise InvalidArgumentError(f"no column {column!r}: {there}") from None


def _alike(column: str, value: Any, literal: Scalar) -> tuple[Any, Any]:
    """Return both sides so that Python compares them by value, or say why they cannot be."""
    if isinstance(value, np.datetime64) and isinstance(literal, str):
        return _nanoseconds(value), parse_time(column, literal)
    if isinstance(value, np.generic):
        value = value.item()  # or numpy would round the literal to the column's precision
    if isinstance(value, (str, bytes, bool, int, float)) and _kind(value) == _kind(literal):
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
        return _nanoseconds(np.datetime64(text.removesuffix("Z")))
    except ValueError as error:
        raise InvalidArgumentError(f"{wrong} ({error})") from None


def _nanoseconds(moment: np.datetime64) -> int:
    """Return a moment as Python's int: numpy's own comparison wraps around where the units lie far apart."""
    if np.datetime_data(moment.dtype)[0] in ("Y", "M"):
        moment = moment.astype("M8[D]")
    unit, count = np.datetime_data(moment.dtype)
    return int(moment.astype(np.int64)) * count * NANOSECONDS[unit]
