"""Only the columns that are needed are read, and only once said which.

What is known of the columns of dict elements runs along the graph: upwards, which there are; downwards, which are
needed. Each operator says what it knows (`columns_given`, `columns_needed`). Both stop at a function: it may look at
any column, and add or remove some, even a filter's (in place).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from msgspec.structs import replace

from penstock.graph import ops
from penstock.graph.node import Node
from penstock.graph.readers import ColumnarSource, SourceNode
from penstock.graph.traits import Columns, either
from penstock.graph.traverse import rewrite, walk

Types: TypeAlias = dict[str, str] | None
"""Columns, with a type for each; None: not known."""


def known_columns(root: Node) -> dict[Node, Columns]:
    """Return for each operator the keys of its elements, where they follow from the graph alone."""
    found: dict[Node, Columns] = {}
    for node in walk(root):
        found[node] = node.columns_given([found[upstream] for upstream in node.inputs])
    return found


def columns_at(node: Node, known: dict[Node, Columns]) -> Columns:
    """Return the keys of an operator's elements; `known` has what was found before, and gets what is found now."""
    passed: list[Node] = []
    base = node
    while base not in known and len(base.inputs) == 1:
        passed.append(base)
        (base,) = base.inputs
    if base not in known:
        known.update(known_columns(base))
    for above in reversed(passed):
        known[above] = above.columns_given([known[upstream] for upstream in above.inputs])
    return known[node]


def known_types(root: Node, source_types: Callable[[ColumnarSource], Types]) -> Types:
    """Return the keys of the last operator's elements, with their types as `source_types` tells them."""
    found: dict[Node, Types] = {}
    for node in walk(root):
        inputs = [found[upstream] for upstream in node.inputs]
        found[node] = source_types(node) if isinstance(node, ColumnarSource) else _types_of(node, inputs)
    return found[root]


def _types_of(node: Node, inputs: Sequence[Types]) -> Types:
    below = inputs[0] if inputs and all(types == inputs[0] for types in inputs) else None
    columns = None if below is None else node.columns_given([tuple(below)] * len(inputs))
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
            asked = node.columns_needed(needed[node], known[upstream])
            needed[upstream] = either(asked, needed[upstream]) if upstream in needed else asked
    return needed


def push_projections(root: Node) -> Node:
    """Let sources that can leave out columns read only those that are asked for above, and operators make only those.

    The selects stay where they are: they also fix the order of the keys. `merge_columns` removes them where the
    source's own order has become the right one.
    """
    needed = needed_columns(root)

    made: dict[Node, Node] = {}
    for old in walk(root):  # what is needed is known of an operator as it was
        inputs = [made[upstream] for upstream in old.inputs]
        moved = any(new is not upstream for new, upstream in zip(inputs, old.inputs))
        made[old] = _lesser(old.with_inputs(*inputs) if moved else old, needed[old])
    return made[root]


def _lesser(node: Node, asked: Columns) -> Node:
    if asked is None:
        return node
    return node.projected(asked) or node if isinstance(node, SourceNode) else node.narrowed(asked)


def merge_columns(root: Node) -> Node:
    """Make one select of selects and drops that follow each other, and remove a select that changes nothing.

    A select decides which keys there are and in which order, so it is removed only where both are known to be right.
    """
    known: dict[Node, Columns] = {}

    def rule(node: Node) -> Node:
        while (merged := _merged(node, known)) is not node:
            node = merged
        columns_at(node, known)
        return node

    return rewrite(root, rule)


def _merged(node: Node, known: dict[Node, Columns]) -> Node:
    match node:
        case ops.Select() if known[node.upstream] == node.columns:
            return node.upstream
        case ops.Select(upstream=ops.Select() as below) if set(node.columns) <= set(below.columns):
            return replace(node, upstream=below.upstream)
        case ops.Select(upstream=ops.Drop() as below) if set(node.columns).isdisjoint(below.columns):
            return replace(node, upstream=below.upstream)
        case ops.Drop():
            return _as_select(node, known)
    return node


def _as_select(node: ops.Drop, known: dict[Node, Columns]) -> Node:
    """Return a drop of known columns as the select of the others: that is what can be pushed into a source."""
    left = node.columns_given([known[node.upstream]])
    return ops.Select(upstream=node.upstream, columns=left) if left else node
