"""What is known of the columns of dict elements along a graph: upwards, which there are; downwards, which are needed.

Both stop at a function: it may look at any column, and add or remove some, even a filter's (in place). They stop at
`cache` too: other pipelines read the same cache and may need other columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from penstock.graph import ops
from penstock.graph.expressions import Expression
from penstock.graph.node import Node
from penstock.graph.readers import ColumnarSource, ReadCsv
from penstock.graph.traverse import walk

Columns: TypeAlias = tuple[str, ...] | None
"""Names in the order of the keys; None: any, not known."""

Types: TypeAlias = dict[str, str] | None
"""The same, with a type for each."""

SAME_COLUMNS = (
    *(ops.Shuffle, ops.Take, ops.Skip, ops.Repeat, ops.Prefetch, ops.WithLength, ops.WithEpoch),
    *(ops.Batch, ops.PaddedBatch, ops.RaggedBatch, ops.Rebatch, ops.Concatenate),
)
"""The keys that come in go out, and what becomes of one does not depend on the others. (`unbatch` gives as many rows as
the shortest column has.)"""


def masks_nulls(source: ColumnarSource) -> bool:
    """Return whether columns `<name>__mask` stand beside the others."""
    return isinstance(source.nulls, str) and source.nulls == "mask"


def known_columns(root: Node) -> dict[Node, Columns]:
    """Return for each operator the keys of its elements, where they follow from the graph alone."""
    found: dict[Node, Columns] = {}
    for node in walk(root):
        found[node] = columns_of(node, [found[upstream] for upstream in node.inputs])
    return found


def columns_of(node: Node, inputs: Sequence[Columns]) -> Columns:
    """Return the keys of an operator's elements, given those of its inputs."""
    match node:
        case ColumnarSource() if not masks_nulls(node):
            return node.columns
        case ReadCsv():
            return node.columns
        case ops.Select():
            return node.columns
    below = inputs[0] if inputs and all(columns == inputs[0] for columns in inputs) else None
    if below is None:
        return None
    match node:
        case ops.Filter(predicate=Expression()):
            return below
        case ops.Drop() if set(node.columns) <= set(below):
            return tuple(column for column in below if column not in node.columns)
        case ops.Rename():
            new_names = dict(node.names)
            renamed = tuple(new_names.get(column, column) for column in below)
            return renamed if set(new_names) <= set(below) and len(set(renamed)) == len(renamed) else None
    return below if isinstance(node, SAME_COLUMNS) else None


def known_types(root: Node, source_types: Callable[[ColumnarSource], Types]) -> Types:
    """Return the keys of the last operator's elements, with their types as `source_types` tells them."""
    found: dict[Node, Types] = {}
    for node in walk(root):
        inputs = [found[upstream] for upstream in node.inputs]
        found[node] = source_types(node) if isinstance(node, ColumnarSource) else _types_of(node, inputs)
    return found[root]


def _types_of(node: Node, inputs: Sequence[Types]) -> Types:
    below = inputs[0] if inputs and all(types == inputs[0] for types in inputs) else None
    columns = None if below is None else columns_of(node, [tuple(below)])
    if below is None or columns is None:
        return None
    if isinstance(node, ops.Rename):  # in the same order
        return dict(zip(columns, below.values()))
    return {column: below[column] for column in columns} if set(columns) <= set(below) else None


def needed_columns(root: Node) -> dict[Node, Columns]:
    """Return for each operator the keys of its elements that any of its readers needs; the root's reader needs all."""
    known = known_columns(root)
    needed: dict[Node, Columns] = {root: None}
    for node in reversed(list(walk(root))):  # readers before what they read
        for upstream in node.inputs:
            asked = _asked_below(node, needed[node], known)
            needed[upstream] = _either(asked, needed[upstream]) if upstream in needed else asked
    return needed


def _either(one: Columns, other: Columns) -> Columns:
    return None if one is None or other is None else tuple(dict.fromkeys((*one, *other)))


def _asked_below(node: Node, asked: Columns, known: Mapping[Node, Columns]) -> Columns:
    """Return what an operator needs of its inputs, where `asked` is needed of it."""
    match node:
        case ops.Select():
            return node.columns
        case ops.Pack(key=str(key)):
            return (key,)
    if asked is None:
        return None
    match node:
        case ops.Filter(predicate=Expression() as expression):
            return _either(asked, tuple(sorted(expression.columns())))
        case ops.Drop():
            return _either(asked, node.columns)  # it asks for what it drops to be there
        case ops.Rename():
            names = names_below(node, asked, known[node.upstream])
            return None if names is None else _either(tuple(names.values()), tuple(old for old, _ in node.names))
        case ops.Mix(unit=None):
            return asked
    return asked if isinstance(node, SAME_COLUMNS) else None


def names_below(node: ops.Rename, columns: Iterable[str], below: Columns) -> dict[str, str] | None:
    """Return what columns above a rename are called below it; None if that cannot be told.

    A new name may be taken already, and which of the two columns wins depends on their order. That is excluded only
    where the old bearer of the name is renamed too, or the columns below are known.
    """
    old_names = {new: old for old, new in node.names}
    away = {old for old, _ in node.names}
    found: dict[str, str] = {}
    for column in columns:
        if column not in old_names:
            if column in away:
                return None  # there is none of that name any more
            found[column] = column
        elif column in away or (below is not None and column not in below):
            found[column] = old_names[column]
        else:
            return None
    return found
