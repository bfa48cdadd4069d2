"""Only the columns that are needed are read, and only once said which.

What is known of the columns of dict elements runs along the graph: upwards, which there are; downwards, which are
needed. Each operator says what it knows (`columns_given`, `columns_needed`). Both stop at a function: it may look at
any column, and add or remove some, even a filter's (in place).
"""

from __future__ import annotations

from dataclasses import replace

from penstock.graph import ops
from penstock.graph.node import Node
from penstock.graph.readers import SourceNode
from penstock.graph.traits import Columns, either
from penstock.graph.traverse import rewrite, walk


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
    """Let sources that can leave out columns read only those that are asked for above.

    The selects stay where they are: they also fix the order of the keys. `merge_columns` removes them where the
    source's own order has become the right one.
    """
    needed = needed_columns(root)

    def rule(node: Node) -> Node:
        if not isinstance(node, SourceNode) or (asked := needed[node]) is None:
            return node
        return node.projected(asked) or node

    return rewrite(root, rule)


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
