"""What a shuffle reaches.

It asks for an order of what is below it. The shuffles that it reaches through one-to-one operators are one with it, and
a source that it reaches through operators that keep order reads in that order itself.
"""

from __future__ import annotations

from penstock.core.errors import InvalidPipelineError
from penstock.graph import ops
from penstock.graph.node import Node
from penstock.graph.readers import SourceNode
from penstock.runtime.ops.source import RandomOrder


def order_of(node: ops.Shuffle, seed: int) -> RandomOrder:
    """Return the order that a shuffle asks for; `seed` is the run's."""
    return RandomOrder(seed=seed if node.seed is None else node.seed, salt=node.salt, reshuffle=node.reshuffle)


def shuffles_reached(node: ops.Shuffle) -> list[ops.Shuffle]:
    """Return the shuffles below this one that it makes redundant: only one-to-one operators lie between."""
    found: list[ops.Shuffle] = []
    below: Node = node.upstream
    while isinstance(below, ops.Shuffle) or ops.is_one_to_one(below):
        if isinstance(below, ops.Shuffle):
            found.append(below)
        below = below.upstream
    return found


def source_reached(node: ops.Shuffle) -> SourceNode | None:
    """Return the source that can read in a shuffle's order, so that nothing has to be put in order after it."""
    below: Node = node.upstream
    while isinstance(below, ops.Unary) and (isinstance(below, ops.Shuffle) or below.traits.keeps_order):
        below = below.upstream
    return below if isinstance(below, SourceNode) else None


def block_size(node: ops.Shuffle) -> int:
    """Return how many elements a shuffle holds: of those that are one with it, the largest counts."""
    sizes = [shuffle.size for shuffle in (node, *shuffles_reached(node))]
    if None in sizes:
        raise InvalidPipelineError(
            "shuffle() without a size permutes everything, which needs an indexable source below it (range, "
            "from_items, from_torch, read_images, read_files, read_numpy); give it a size: shuffle(10_000)"
        )
    return max(size for size in sizes if size)
