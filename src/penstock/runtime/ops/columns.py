"""Operators on columns as steps: select, drop, rename, and those that compute columns of columns.

`@computes(ops.X)` stands before a function that returns, for an operator, how the columns that it gives are made of
those that it needs. That is called once an element: of a row with values, of a batch with arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

import msgspec

from penstock.core.errors import InvalidPipelineError
from penstock.graph import ops
from penstock.graph.parameters import short_label
from penstock.runtime.blame import blame
from penstock.runtime.building import Step, step_of
from penstock.runtime.calling import Calling, call_each
from penstock.runtime.contract import Chunk
from penstock.runtime.ordered import Outcome
from penstock.runtime.stats import StageMeter

Change: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]
Compute: TypeAlias = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""From the columns that an operator needs to those that it gives."""
AnyColumnOperator = TypeVar("AnyColumnOperator", bound=ops.ColumnOperator)


class ColumnsStep(msgspec.Struct):
    """Makes another dict of each; what `change` cannot find is missing from the element."""

    label: str
    needs: tuple[str, ...]
    change: Change

    def run(self, chunk: Chunk) -> Outcome:
        out: list[Any] = []
        try:
            out.extend(map(self.change, chunk.elements))
        except (KeyError, TypeError, AttributeError):
            return _stopped(chunk, out, unfit_columns(self.label, self.needs, chunk.elements[len(out)]), self.label)
        return Outcome(Chunk(out, chunk.marks, chunk.idents))


class ComputeStep(msgspec.Struct):
    """Adds the columns that an operator gives, or puts them in the place of those with their names."""

    label: str
    needs: tuple[str, ...]
    compute: Compute

    def run(self, chunk: Chunk) -> Outcome:
        out: list[Any] = []
        try:
            call_each(self._with_given, chunk.elements, out)
        except Exception as error:
            return _stopped(chunk, out, error, self.label)
        return Outcome(Chunk(out, chunk.marks, chunk.idents))

    def _with_given(self, element: Any) -> dict[str, Any]:
        try:
            needed = {column: element[column] for column in self.needs}
        except (KeyError, TypeError, IndexError):
            raise unfit_columns(self.label, self.needs, element) from None
        return {**element, **self.compute(needed)}


def computes(
    operator: type[AnyColumnOperator],
) -> Callable[[Callable[[AnyColumnOperator], Compute]], Callable[[AnyColumnOperator], Compute]]:
    """Register how the columns that an operator gives are made of those that it needs."""

    def register(make: Callable[[AnyColumnOperator], Compute]) -> Callable[[AnyColumnOperator], Compute]:
        @step_of(operator)
        def step(node: AnyColumnOperator, calling: Calling, meter: StageMeter) -> Step:
            return ComputeStep(short_label(node), node.needs, make(node))

        return make

    return register


@step_of(ops.Select)
def _select_step(node: ops.Select, calling: Calling, meter: StageMeter) -> Step:
    columns = node.columns
    return ColumnsStep(short_label(node), columns, lambda row: {column: row[column] for column in columns})


@step_of(ops.Drop)
def _drop_step(node: ops.Drop, calling: Calling, meter: StageMeter) -> Step:
    dropped = frozenset(node.columns)

    def drop(row: dict[str, Any]) -> dict[str, Any]:
        if not dropped <= row.keys():
            raise KeyError(dropped)
        return {column: value for column, value in row.items() if column not in dropped}

    return ColumnsStep(short_label(node), node.columns, drop)


@step_of(ops.Rename)
def _rename_step(node: ops.Rename, calling: Calling, meter: StageMeter) -> Step:
    new_names = dict(node.names)

    def rename(row: dict[str, Any]) -> dict[str, Any]:
        if not new_names.keys() <= row.keys():
            raise KeyError(new_names)
        return {new_names.get(column, column): value for column, value in row.items()}

    return ColumnsStep(short_label(node), tuple(new_names), rename)


def unfit_columns(label: str, needs: tuple[str, ...], element: Any) -> InvalidPipelineError:
    """Return what to say of an element that lacks columns which are needed."""
    if isinstance(element, dict):
        missing = ", ".join(repr(column) for column in needs if column not in element)
        return InvalidPipelineError(
            f"{label}: an element has no column {missing}; it has the columns {sorted(map(str, element))}"
        )
    return InvalidPipelineError(f"{label}: an element is a {type(element).__name__}, not a dict")


def _stopped(chunk: Chunk, out: list[Any], error: Exception, label: str) -> Outcome:
    """Return what was made before an element that failed."""
    idents = None if chunk.idents is None else chunk.idents[: len(out)]
    return Outcome(Chunk(out, chunk.marks, idents), blame(error, label, chunk.marks.origin(len(out))))
