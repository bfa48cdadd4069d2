"""A shuffle moves above the maps it follows: `map(f).shuffle(n)` runs as `shuffle(n).map(f)`.

It is exact, because a function's random numbers are keyed by the element and not by its place, and maps have no state.
What is gained: a restored block re-reads raw records and computes only what is still due, and the maps stand beside the
batch that they are fused with.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.graph import ops
from penstock.graph.node import Node
from penstock.passes.one_to_one import is_movable
from penstock.passes.sharing import IsShared, rewrite_unshared, stacked


def move_shuffles(root: Node) -> Node:
    return rewrite_unshared(root, _moved)


def _moved(node: Node, shared: IsShared) -> Node:
    """Return the shuffle below the lowest map that it reaches.

    A select or drop is passed only to get below a map. By itself it costs nothing, and a block of narrow rows is
    smaller than one of wide rows.
    """
    if not isinstance(node, ops.Shuffle):
        return node
    passed: list[ops.Unary] = []
    below = node.upstream
    while is_movable(below) and not shared(below):
        passed.append(below)
        below = below.upstream
    while passed and not isinstance(passed[-1], ops.Map):
        passed.pop()
    if not passed:
        return node
    return stacked(passed, replace(node, upstream=passed[-1].upstream))
