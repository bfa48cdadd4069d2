"""Predicates on columns that a source can evaluate itself.

Rules: null is neither equal nor unequal to anything, so a comparison with it is unknown, `~unknown` is unknown too
(SQL's three-valued logic), and a predicate keeps only what it is *true* for. Numbers compare by their exact value
whatever their types, bools count as 0 and 1; text against a time is read as an ISO date in UTC; any other mixture of
types is an error and never quietly false. A source that evaluates a predicate itself must keep to the same rules.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Never, TypeAlias, cast, get_args

import numpy as np

from penstock.core.errors import CodecError, InvalidArgumentError
from penstock.graph.arithmetic import COMPARE, SIGNS, Comparison, Sign, check_name, compute, number_of, value_in
from penstock.graph.literals import Scalar, alike, check_literal, literal_from_plain, literal_kind, literal_to_plain


class Expression:
    """Built from `col("name")` with `+ - * / // %`, `== != < <= > >=`, `.isin([...])`, `.is_null()` and `& | ~`.

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
                return Compare(name, cast(Comparison, op), literal_from_plain(value))
            case ["isin", str(name), [*values]]:
                return IsIn(name, tuple(map(literal_from_plain, values)))
            case ["compare", op, left, right] if op in get_args(Comparison):
                return CompareValues(_operand_from(left), cast(Comparison, op), _operand_from(right))
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


class Calculates:
    """What can be calculated with: a column, or what was calculated of columns and numbers."""

    __slots__ = ()

    def __add__(self, other: Any) -> Arithmetic:
        return Arithmetic("+", self, other)

    def __radd__(self, other: Any) -> Arithmetic:
        return Arithmetic("+", other, self)

    def __sub__(self, other: Any) -> Arithmetic:
        return Arithmetic("-", self, other)

    def __rsub__(self, other: Any) -> Arithmetic:
        return Arithmetic("-", other, self)

    def __mul__(self, other: Any) -> Arithmetic:
        return Arithmetic("*", self, other)

    def __rmul__(self, other: Any) -> Arithmetic:
        return Arithmetic("*", other, self)

    def __truediv__(self, other: Any) -> Arithmetic:
        return Arithmetic("/", self, other)

    def __rtruediv__(self, other: Any) -> Arithmetic:
        return Arithmetic("/", other, self)

    def __floordiv__(self, other: Any) -> Arithmetic:
        return Arithmetic("//", self, other)

    def __mod__(self, other: Any) -> Arithmetic:
        return Arithmetic("%", self, other)

    def __eq__(self, value: object) -> Expression:  # type: ignore[override]
        return self._compared("==", value)

    def __ne__(self, value: object) -> Expression:  # type: ignore[override]
        return self._compared("!=", value)

    def __lt__(self, value: Any) -> Expression:
        return self._compared("<", value)

    def __le__(self, value: Any) -> Expression:
        return self._compared("<=", value)

    def __gt__(self, value: Any) -> Expression:
        return self._compared(">", value)

    def __ge__(self, value: Any) -> Expression:
        return self._compared(">=", value)

    __hash__ = object.__hash__

    def _compared(self, op: Comparison, value: Any) -> Expression:
        if isinstance(self, Column) and not isinstance(value, Calculates):
            return Compare(self.name, op, cast(Scalar, value))
        return CompareValues(self, op, value)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Column(Calculates, Expression):
    """A column; as a predicate by itself, a column of bools."""

    name: str

    def __post_init__(self) -> None:
        check_name(self.name)

    def columns(self) -> frozenset[str]:
        return frozenset((self.name,))

    def truth(self, row: Mapping[str, Any]) -> bool | None:
        value = value_in(row, self.name)
        if value is None or isinstance(value, (bool, np.bool_)):
            return None if value is None else bool(value)
        raise InvalidArgumentError(f"{self!r} holds {type(value).__name__}, not bool: compare it with a value")

    def to_plain(self) -> list[Any]:
        return ["col", self.name]

    def isin(self, values: Iterable[Scalar]) -> Expression:
        """Return whether the column holds one of `values`."""
        if isinstance(values, (str, bytes)):
            raise InvalidArgumentError(f"isin({values!r}) takes a list of values; for one value use ==")
        return IsIn(self.name, tuple(values))

    def is_null(self) -> Expression:
        """Return whether the column holds nothing."""
        return IsNull(self.name)

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
        check_name(self.column)
        if self.op not in get_args(Comparison):
            raise InvalidArgumentError(f"{self.op!r} is not one of {', '.join(get_args(Comparison))}")
        object.__setattr__(self, "value", check_literal(self.column, self.op, self.value))

    def columns(self) -> frozenset[str]:
        return frozenset((self.column,))

    def truth(self, row: Mapping[str, Any]) -> bool | None:
        value, literal = value_in(row, self.column), self.value
        if value is None:
            return None
        if type(value) is not type(literal):
            value, literal = alike(self.column, value, literal)
        return bool(COMPARE[self.op](value, literal))

    def to_plain(self) -> list[Any]:
        return [self.op, self.column, literal_to_plain(self.value)]

    def __repr__(self) -> str:
        return f"col({self.column!r}) {self.op} {self.value!r}"


Operand: TypeAlias = Calculates | int | float


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Arithmetic(Calculates):
    """Two columns or numbers, calculated with; compare it to make a predicate."""

    sign: Sign
    left: Operand
    right: Operand

    def __post_init__(self) -> None:
        _check_operands(self.sign, self.left, self.right)

    def __repr__(self) -> str:
        sides = (f"({side!r})" if isinstance(side, Arithmetic) else repr(side) for side in (self.left, self.right))
        return f" {self.sign} ".join(sides)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CompareValues(Expression):
    """What was calculated of columns and numbers, compared."""

    left: Operand
    op: Comparison
    right: Operand

    def __post_init__(self) -> None:
        _check_operands(self.op, self.left, self.right)

    def columns(self) -> frozenset[str]:
        return _columns_of(self.left) | _columns_of(self.right)

    def truth(self, row: Mapping[str, Any]) -> bool | None:
        left, right = _value_of(self.left, row), _value_of(self.right, row)
        return None if left is None or right is None else bool(COMPARE[self.op](left, right))

    def to_plain(self) -> list[Any]:
        return ["compare", self.op, _operand_plain(self.left), _operand_plain(self.right)]

    def __repr__(self) -> str:
        return f"{self.left!r} {self.op} {self.right!r}"


def _check_operands(sign: str, *operands: object) -> None:
    for each in operands:
        if not isinstance(each, (Calculates, int, float)) or isinstance(each, bool):
            raise InvalidArgumentError(f"{sign} takes columns and numbers, not {each!r}")


def _columns_of(operand: Operand) -> frozenset[str]:
    if isinstance(operand, Arithmetic):
        return _columns_of(operand.left) | _columns_of(operand.right)
    return operand.columns() if isinstance(operand, Column) else frozenset()


def _value_of(operand: Operand, row: Mapping[str, Any]) -> Any:
    if isinstance(operand, Arithmetic):
        return compute(operand.sign, _value_of(operand.left, row), _value_of(operand.right, row))
    return number_of(operand.name, value_in(row, operand.name)) if isinstance(operand, Column) else operand


def _operand_plain(operand: Operand) -> Any:
    if isinstance(operand, Arithmetic):
        return [operand.sign, _operand_plain(operand.left), _operand_plain(operand.right)]
    return operand.to_plain() if isinstance(operand, Column) else literal_to_plain(cast(Scalar, operand))


def _operand_from(plain: Any) -> Operand:
    match plain:
        case ["col", str(name)]:
            return Column(name)
        case [sign, left, right] if sign in SIGNS:
            return Arithmetic(cast(Sign, sign), _operand_from(left), _operand_from(right))
    return cast(Operand, literal_from_plain(plain))


class _Members:
    __slots__ = ("_members",)  # beside the fields: a set's order must not reach a fingerprint
    _members: frozenset[Scalar]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class IsIn(_Members, Expression):
    """Whether a column's value is one of several."""

    column: str
    values: tuple[Scalar, ...]

    def __post_init__(self) -> None:
        check_name(self.column)
        values = tuple(check_literal(self.column, "isin", value) for value in self.values)
        if len({literal_kind(value) for value in values}) > 1:
            raise InvalidArgumentError(f"isin({list(values)!r}): the values must be all text, all bytes or all numbers")
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "_members", frozenset(values))

    def __reduce__(self) -> tuple[Any, ...]:
        return IsIn, (self.column, self.values)

    def columns(self) -> frozenset[str]:
        return frozenset((self.column,))

    def truth(self, row: Mapping[str, Any]) -> bool | None:
        value = value_in(row, self.column)
        if value is None:
            return None
        if self.values and type(value) is not type(self.values[0]):
            if isinstance(value, np.datetime64):
                return any(operator.eq(*alike(self.column, value, each)) for each in self.values)
            value, _ = alike(self.column, value, self.values[0])
        return value in self._members

    def to_plain(self) -> list[Any]:
        return ["isin", self.column, [literal_to_plain(value) for value in self.values]]

    def __repr__(self) -> str:
        return f"col({self.column!r}).isin({list(self.values)!r})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class IsNull(Expression):
    """Whether a column has no value; itself never unknown."""

    column: str

    def __post_init__(self) -> None:
        check_name(self.column)

    def columns(self) -> frozenset[str]:
        return frozenset((self.column,))

    def truth(self, row: Mapping[str, Any]) -> bool | None:
        return value_in(row, self.column) is None

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
