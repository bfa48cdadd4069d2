"""Shuffles become one, and move to where they cost least."""

from __future__ import annotations

from msgspec.structs import replace

from penstock.graph import ops
from penstock.graph.node import Node
from penstock.graph.traverse import rewrite
from penstock.passes.rewriting import IsShared, rewrite_unshared, stacked


def merge_shuffles(root: Node) -> Node:
    """Make one of shuffles under shuffles.

    The lowering takes shuffles that reach each other through one-to-one operators for one, the largest size counting;
    this says the same in the graph, so that the operators between them can be fused and the plan shows what runs.
    """
    return rewrite(root, _merged)


def _merged(node: Node) -> Node:
    """Return the upper shuffle with its own seed, in the largest size, without those it reaches below."""
    if not isinstance(node, ops.Shuffle):
        return node
    sizes = [node.size]
    kept: list[ops.Unary] = []
    reached: list[ops.Unary] = []
    base, below = node.upstream, node.upstream
    while isinstance(below, ops.Shuffle) or ops.is_one_to_one(below):
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


def move_shuffles(root: Node) -> Node:
    """Move a shuffle above the work that it follows: `map(f).shuffle(n)` runs as `shuffle(n).map(f)`.

    It is exact, because a function's random numbers are keyed by the element and not by its place, and one-to-one
    operators have no state. What is gained: a restored block re-reads raw records and computes only what is still due,
    and the work stands beside the batch that it is fused with.
    """
    return rewrite_unshared(root, _moved)


def _moved(node: Node, shared: IsShared) -> Node:
    """Return the shuffle below the lowest operator with work that it reaches.

    A select or drop is passed only to get below work. By itself it costs nothing, and a block of narrow rows is
    smaller than one of wide rows.
    """
    if not isinstance(node, ops.Shuffle):
        return node
    passed: list[ops.Unary] = []
    below = node.upstream
    while ops.is_one_to_one(below) and not shared(below):
        passed.append(below)
        below = below.upstream
    while passed and passed[-1].traits.threads == 0:
        passed.pop()
    if not passed:
        return node
    return stacked(passed, replace(node, upstream=passed[-1].upstream))
