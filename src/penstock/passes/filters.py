"""Filters on columns move into the columnar source below them, which need not decode what they leave out.

The source gives an element the same index with a predicate as without, so identities and states stay as they are. Not
moved: across a shuffle (its blocks would hold other elements), a take, skip or enumerate (they would count others), a
function, or into a source that

- reads batches of columns: they would be cut elsewhere (`Dataset.filter` itself means the rows of such batches);
- puts something in the place of nulls: the predicate would meet the null instead;
- passes over bad records: other records would be read, and so be bad.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from penstock.graph import ops
from penstock.graph.expressions import (
    And,
    Arithmetic,
    Column,
    Compare,
    CompareValues,
    Expression,
    IsIn,
    IsNull,
    Not,
    Operand,
    Or,
)
from penstock.graph.node import Node
from penstock.graph.readers import ColumnarSource
from penstock.graph.traits import Columns
from penstock.passes.columns import columns_at
from penstock.passes.rewriting import IsShared, rewrite_unshared, stacked

MAX_CONDITIONS = 100  # joined by `&`; expressions are evaluated recursively, filters in a row are not


def push_filters(root: Node) -> Node:
    known: dict[Node, Columns] = {}
    return rewrite_unshared(root, lambda node, shared: _pushed(node, shared, known))


def _pushed(node: Node, shared: IsShared, known: dict[Node, Columns]) -> Node:
    if not isinstance(node, ops.Filter) or not isinstance(node.predicate, Expression) or node.on_error is not None:
        return node
    return _with_condition(node.upstream, node.predicate, shared, known, _can_filter) or node


def filtered_batches(node: Node, condition: Expression) -> Node | None:
    """Return the operators with the condition in the reader of column batches that they begin with.

    This is what a filter over column batches means, and no optimization: it leaves rows out, and batches stay full.
    None: they do not begin with one, or what is between may have changed its columns.
    """
    return _with_condition(node, condition, lambda _: False, {}, _reads_batches)


def _reads_batches(source: ColumnarSource, condition: Expression) -> bool:
    return source.batch is not None and _has_columns(source, condition)


def _with_condition(
    below: Node,
    condition: Expression,
    shared: IsShared,
    known: dict[Node, Columns],
    can_filter: Callable[[ColumnarSource, Expression], bool],
) -> Node | None:
    """Return `below` with the condition in its source, where it means the same there."""
    passed: list[ops.Unary] = []
    # A filter on columns that is still below could not be moved; this one would find the same in its way.
    while not shared(below) and ops.passes_states(below) and not below.traits.may_skip:
        names = below.names_below(condition.columns(), columns_at(below.upstream, known))
        if names is None:
            return None
        condition = renamed(condition, names)
        passed.append(below)
        below = below.upstream
    if shared(below) or not isinstance(below, ColumnarSource) or not can_filter(below, condition):
        return None
    joined = condition if below.predicate is None else And(below.predicate, condition)
    return stacked(passed, replace(below, predicate=joined))


def _can_filter(source: ColumnarSource, condition: Expression) -> bool:
    keeps_nulls = source.nulls is None or (isinstance(source.nulls, str) and source.nulls == "error")
    has_columns = _has_columns(source, condition)
    reads_all = source.on_error is None
    return source.batch is None and keeps_nulls and has_columns and reads_all and _conditions(source) < MAX_CONDITIONS


def _has_columns(source: ColumnarSource, condition: Expression) -> bool:
    return not _calculates(condition) and (source.columns is None or condition.columns() <= set(source.columns))


def _conditions(source: ColumnarSource) -> int:
    count, rest = 1, source.predicate
    while isinstance(rest, And):
        count, rest = count + 1, rest.left
    return count


def renamed(expression: Expression, names: Mapping[str, str]) -> Expression:
    """Return the expression over columns of other names.

    >>> renamed((Column("x") > 3) & ~Column("y").is_null(), {"x": "a", "y": "b"})
    (col('a') > 3) & ~col('b').is_null()
    """
    match expression:
        case And(left=left, right=right):
            return And(renamed(left, names), renamed(right, names))
        case Or(left=left, right=right):
            return Or(renamed(left, names), renamed(right, names))
        case Not(operand=operand):
            return Not(renamed(operand, names))
        case Column(name=name):
            return Column(names[name])
        case Compare():
            return Compare(names[expression.column], expression.op, expression.value)
        case IsIn():
            return IsIn(names[expression.column], expression.values)
        case IsNull(column=column):
            return IsNull(names[column])
        case CompareValues():
            return CompareValues(
                _renamed_operand(expression.left, names), expression.op, _renamed_operand(expression.right, names)
            )
    raise TypeError(f"unknown expression {expression!r}")


def _renamed_operand(operand: Operand, names: Mapping[str, str]) -> Operand:
    match operand:
        case Column(name=name):
            return Column(names[name])
        case Arithmetic():
            return dataclasses.replace(
                operand, left=_renamed_operand(operand.left, names), right=_renamed_operand(operand.right, names)
            )
    return operand


def _calculates(expression: Expression) -> bool:
    """Say whether a condition calculates, which sources do not."""
    match expression:
        case And() | Or():
            return _calculates(expression.left) or _calculates(expression.right)
        case Not():
            return _calculates(expression.operand)
    return isinstance(expression, CompareValues)
