"""How many elements a pipeline has, and whether it ends, where that follows from the graph alone."""

from __future__ import annotations

from collections.abc import Callable

from penstock.graph.node import Node
from penstock.graph.readers import SourceNode
from penstock.graph.traits import Length
from penstock.graph.traverse import walk


def known_length(root: Node, source_length: Callable[[SourceNode], Length]) -> Length:
    """Return the number of elements of a pass, or None where data or functions decide (or it never ends)."""
    lengths: dict[Node, Length] = {}
    for node in walk(root):
        inputs = [lengths[upstream] for upstream in node.inputs]
        lengths[node] = source_length(node) if isinstance(node, SourceNode) else node.elements_given(inputs)
    return lengths[root]


def endless_operator(root: Node) -> Node | None:
    """Return what makes a pipeline go on for ever, as far as the graph tells; None: nothing."""
    endless: dict[Node, Node | None] = {}
    for node in walk(root):
        endless[node] = node.endless([endless[upstream] for upstream in node.inputs])
    return endless[root]
