"""Which operator makes the groups a reader gets: what is short at the end of a stream is its rest."""

from __future__ import annotations

from penstock.graph import ops
from penstock.graph.node import Node
from penstock.graph.traits import RoundGrouping


def last_regrouping(root: Node) -> Node | None:
    """Return the operator whose groups arrive at the reader one for one, changed or left out, but never regrouped."""
    node = root
    while ops.passes_states(node):
        node = node.upstream
    return node if node.traits.regroups is not None else None


def makes_rounds(node: Node | None) -> bool:
    """Return whether it has to know of rounds. Outputs of others are alike, whichever of them make a round."""
    regroups = None if node is None else node.traits.regroups
    return regroups is not None and regroups.rounds is not RoundGrouping.ANY
