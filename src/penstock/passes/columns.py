"""Selects and drops that follow each other become one select, and a select that changes nothing goes.

A select decides which keys there are and in which order, so it is removed only where both are known to be right.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.graph import ops
from penstock.graph.node import Node
from penstock.graph.traverse import rewrite
from penstock.passes.column_flow import Columns, columns_of


def merge_columns(root: Node) -> Node:
    known: dict[Node, Columns] = {}

    def rule(node: Node) -> Node:
        while (merged := _merged(node, known)) is not node:
            node = merged
        if node not in known:
            known[node] = columns_of(node, [known[upstream] for upstream in node.inputs])
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
    left = columns_of(node, [known[node.upstream]])
    return ops.Select(upstream=node.upstream, columns=left) if left else node
