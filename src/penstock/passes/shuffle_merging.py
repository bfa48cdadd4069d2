"""Shuffles under shuffles become one.

The lowering takes shuffles that reach each other through one-to-one operators for one, the largest size counting; this
says the same in the graph, so that the operators between them can be fused and the plan shows what runs.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.graph import ops
from penstock.graph.node import Node
from penstock.graph.traverse import rewrite
from penstock.passes.one_to_one import is_movable
from penstock.passes.sharing import stacked


def merge_shuffles(root: Node) -> Node:
    return rewrite(root, _merged)


def _merged(node: Node) -> Node:
    """Return the upper shuffle with its own seed, in the largest size, without those it reaches below."""
    if not isinstance(node, ops.Shuffle):
        return node
    sizes = [node.size]
    kept: list[ops.Unary] = []
    reached: list[ops.Unary] = []
    base, below = node.upstream, node.upstream
    while isinstance(below, ops.Shuffle) or is_movable(below):
        if isinstance(below, ops.Shuffle):
            sizes.append(below.size)
            kept += reached
            reached, base = [], below.upstream
        else:
            reached.append(below)
        below = below.upstream
    if len(sizes) == 1:
        return node
    given = [size for size in sizes if size is not None]
    return replace(node, upstream=stacked(kept, base), size=max(given) if len(given) == len(sizes) else None)
