"""Filters on columns move into the columnar source below them, which need not decode what they leave out.

The source gives an element the same index with a predicate as without, so identities and states stay as they are. Not
moved: across a shuffle (its blocks would hold other elements), a take, skip or enumerate (they would count others), a
function, or into a source that

- reads batches of columns: they would be cut elsewhere;
- puts something in the place of nulls: the predicate would meet the null instead;
- passes over bad records: other records would be read, and so be bad.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.graph import ops
from penstock.graph.expressions import And, Column, Compare, Expression, IsIn, IsNull, Not, Or
from penstock.graph.node import Node
from penstock.graph.readers import ColumnarSource
from penstock.graph.traits import Columns
from penstock.passes.columns import columns_at
from penstock.passes.sharing import IsShared, rewrite_unshared, stacked

MAX_CONDITIONS = 100  # joined by `&`; expressions are evaluated recursively, filters in a row are not


def push_filters(root: Node) -> Node:
    known: dict[Node, Columns] = {}
    return rewrite_unshared(root, lambda node, shared: _pushed(node, shared, known))


def _pushed(node: Node, shared: IsShared, known: dict[Node, Columns]) -> Node:
    if not isinstance(node, ops.Filter) or not isinstance(node.predicate, Expression) or node.on_error is not None:
        return node
    condition = node.predicate
    passed: list[ops.Unary] = []
    below = node.upstream
    # A filter on columns that is still below could not be moved; this one would find the same in its way.
    while not shared(below) and ops.passes_states(below) and not below.traits.may_skip:
        names = below.names_below(condition.columns(), columns_at(below.upstream, known))
        if names is None:
            return node
        condition = renamed(condition, names)
        passed.append(below)
        below = below.upstream
    if shared(below) or not isinstance(below, ColumnarSource) or not _can_filter(below, condition):
        return node
    joined = condition if below.predicate is None else And(below.predicate, condition)
    return stacked(passed, replace(below, predicate=joined))


def _can_filter(source: ColumnarSource, condition: Expression) -> bool:
    keeps_nulls = source.nulls is None or (isinstance(source.nulls, str) and source.nulls == "error")
    has_columns = source.columns is None or condition.columns() <= set(source.columns)
    reads_all = source.on_error is None
    return source.batch is None and keeps_nulls and has_columns and reads_all and _conditions(source) < MAX_CONDITIONS


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
    raise TypeError(f"unknown expression {expression!r}")
