"""Operators on columns, which say what they read and give, so that nothing else has to be read for them.

An element is a dict: a row, whose columns are values, or a batch, whose columns are arrays of as many rows. An operator
on columns needs no function. It names the columns that it *needs*, and those that it *gives*: new ones, or others in
the place of old ones. All further columns pass by it. How it is computed is registered in `runtime/ops/columns.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from msgspec.structs import replace

from penstock.core.errors import InvalidArgumentError
from penstock.graph.node import Node
from penstock.graph.ops.base import Unary
from penstock.graph.traits import Columns, Flow, Inputs, OnWorkers, Traits, either


class ColumnOperator(Unary, frozen=True, kw_only=True, eq=False):
    """Base of operators that make columns of columns, each element by itself."""

    TRAITS: ClassVar[Traits] = Traits(
        flow=Flow.STEP,
        may_skip=False,
        regroups=None,
        only_counts=False,
        holds_back=False,
        order_bound=False,
        on_workers=OnWorkers.RUNS,
        inputs=Inputs.ALL,
        same_columns=False,
        threads=None,
    )

    @property
    def needs(self) -> tuple[str, ...]:
        """Return the columns that it reads; an element without one of them is an error."""
        raise TypeError(f"{type(self).__name__} does not say which columns it needs")

    @property
    def gives(self) -> tuple[str, ...]:
        """Return the columns that it makes."""
        raise TypeError(f"{type(self).__name__} does not say which columns it gives")

    def columns_given(self, inputs: Sequence[Columns]) -> Columns:
        (below,) = inputs
        return either(below, self.gives) if below is not None and set(self.needs) <= set(below) else None

    def columns_needed(self, asked: Columns, below: Columns) -> Columns:
        if asked is None:
            return None
        return either(tuple(column for column in asked if column not in self.gives), self.needs)

    def names_below(self, columns: Iterable[str], below: Columns) -> dict[str, str] | None:
        named = {column: column for column in columns}
        return named if named.keys().isdisjoint(self.gives) else None


class ColumnChoice(ColumnOperator, frozen=True, kw_only=True, eq=False):
    """Base of operators that leave columns out or name them, and change no value: passes may remove them."""

    TRAITS: ClassVar[Traits] = replace(ColumnOperator.TRAITS, threads=0)


class Select(ColumnChoice, frozen=True, kw_only=True, eq=False):
    """These columns, in this order."""

    columns: tuple[str, ...]

    def __post_init__(self) -> None:
        check_names("select", self.columns)

    @property
    def needs(self) -> tuple[str, ...]:
        return self.columns

    @property
    def gives(self) -> tuple[str, ...]:
        return self.columns

    def columns_given(self, inputs: Sequence[Columns]) -> Columns:
        return self.columns

    def columns_needed(self, asked: Columns, below: Columns) -> Columns:
        return self.columns

    def names_below(self, columns: Iterable[str], below: Columns) -> dict[str, str] | None:
        named = {column: column for column in columns}
        return named if named.keys() <= set(self.columns) else None


class Drop(ColumnChoice, frozen=True, kw_only=True, eq=False):
    """All columns but these, which must be there."""

    columns: tuple[str, ...]

    def __post_init__(self) -> None:
        check_names("drop", self.columns)

    @property
    def needs(self) -> tuple[str, ...]:
        return self.columns

    @property
    def gives(self) -> tuple[str, ...]:
        return ()

    def columns_given(self, inputs: Sequence[Columns]) -> Columns:
        (below,) = inputs
        if below is None or not set(self.columns) <= set(below):
            return None
        return tuple(column for column in below if column not in self.columns)

    def names_below(self, columns: Iterable[str], below: Columns) -> dict[str, str] | None:
        named = {column: column for column in columns}
        return named if named.keys().isdisjoint(self.columns) else None


class Rename(ColumnChoice, frozen=True, kw_only=True, eq=False):
    """Columns under other names, in their places."""

    names: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        check_names("rename", self.needs)
        check_names("rename", self.gives)

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(old for old, _ in self.names)

    @property
    def gives(self) -> tuple[str, ...]:
        return tuple(new for _, new in self.names)

    def canonical(self) -> Node:
        return self.upstream if self.needs == self.gives else self

    def columns_given(self, inputs: Sequence[Columns]) -> Columns:
        (below,) = inputs
        if below is None or not set(self.needs) <= set(below):
            return None
        new_names = dict(self.names)
        renamed = tuple(new_names.get(column, column) for column in below)
        return renamed if len(set(renamed)) == len(renamed) else None

    def columns_needed(self, asked: Columns, below: Columns) -> Columns:
        names = None if asked is None else self.names_below(asked, below)
        return None if names is None else either(tuple(names.values()), self.needs)

    def names_below(self, columns: Iterable[str], below: Columns) -> dict[str, str] | None:
        """Return what columns are called below.

        A new name may be taken already, and which of the two columns wins depends on their order. That is excluded
        only where the old bearer of the name is renamed too, or the columns below are known.
        """
        old_names = {new: old for old, new in self.names}
        found: dict[str, str] = {}
        for column in columns:
            if column not in old_names:
                if column in self.needs:
                    return None  # there is none of that name any more
                found[column] = column
            elif column in self.needs or (below is not None and column not in below):
                found[column] = old_names[column]
            else:
                return None
        return found


def check_names(operator: str, columns: tuple[str, ...]) -> None:
    if not columns or not all(isinstance(column, str) for column in columns):
        raise InvalidArgumentError(f"{operator} needs at least one column name, all strings; got {columns!r}")
    if len(set(columns)) != len(columns):
        raise InvalidArgumentError(f"{operator} names a column twice: {columns!r}")
