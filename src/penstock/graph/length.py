"""How many elements a pipeline has, and whether it ends, where that follows from the graph alone."""

from __future__ import annotations

from collections.abc import Callable

from penstock.graph import ops
from penstock.graph.node import Node
from penstock.graph.readers import SourceNode
from penstock.graph.traverse import walk

Length = int | None


def known_length(root: Node, source_length: Callable[[SourceNode], Length]) -> Length:
    """Return the number of elements of a pass, or None where data or functions decide (or it never ends)."""
    lengths: dict[Node, Length] = {}
    for node in walk(root):
        inputs = [lengths[upstream] for upstream in node.inputs]
        lengths[node] = source_length(node) if isinstance(node, SourceNode) else _length(node, inputs)
    return lengths[root]


def endless_operator(root: Node) -> Node | None:
    """Return what makes a pipeline go on for ever, as far as the graph tells; None: nothing."""
    endless: dict[Node, Node | None] = {}
    for node in walk(root):
        inputs = [endless[upstream] for upstream in node.inputs]
        endless[node] = _endless(node, inputs)
    return endless[root]


def _endless(node: Node, inputs: list[Node | None]) -> Node | None:
    found = [one for one in inputs if one is not None]
    match node:
        case ops.Repeat(count=ops.NEVER_ENDS) | ops.Mix(stop="never"):
            return node
        case ops.WithEpoch():
            return None
        case ops.Take(count=count) if count != ops.NEVER_ENDS:
            return None
        case ops.Zip() | ops.Mix(stop="first") if len(found) < len(inputs):
            return None
    return found[0] if found else None


def _length(node: Node, inputs: list[Length]) -> Length:
    known = [length for length in inputs if length is not None]
    match node:
        case ops.WithLength() | ops.WithEpoch():
            return node.count
        case ops.Zip():
            return min(known) if len(known) == len(inputs) else None
        case ops.Concatenate():
            return sum(known) if len(known) == len(inputs) else None
        case ops.Take(count=count) if count != ops.NEVER_ENDS and not known:
            return 0 if count == 0 else None
    if not known or isinstance(node, ops.Mix):
        return None
    count = known[0]
    match node:
        case ops.Map(on_error=None) | ops.Select() | ops.Drop() | ops.Rename() | ops.Shuffle():
            return count
        case ops.Cache() | ops.Prefetch() | ops.Enumerate() | ops.Shard():
            return count
        case ops.Batch() | ops.PaddedBatch() | ops.RaggedBatch():
            return count // node.size if node.drop_last else -(-count // node.size)
        case ops.Repeat():
            return None if node.count == ops.NEVER_ENDS else count * node.count
        case ops.Take():
            return count if node.count == ops.NEVER_ENDS else min(count, node.count)
        case ops.Skip():
            return max(0, count - node.count)
    return None
