"""Which operators draw random numbers."""

from __future__ import annotations

from penstock.graph.functions import UserFunction
from penstock.graph.node import Node
from penstock.graph.ops import Identified, OfSteps, Shuffle, steps_of
from penstock.graph.traverse import walk


def takes_rng(node: Node) -> bool:
    """Say whether a function of this operator, or of a step of it, is given a generator."""
    if isinstance(node, OfSteps):
        return any(map(takes_rng, node.steps))
    return any(value.takes_rng for _, value in node.parameters() if isinstance(value, UserFunction))


def is_shuffle(node: Node) -> bool:
    return isinstance(node, Shuffle)


def draws(node: Node) -> bool:
    return is_shuffle(node) or takes_rng(node)


def with_identities(root: Node) -> set[Node]:
    """Return the operators whose elements need identities: a function that takes `rng` reads them, or a reader does."""
    needing = (node for node in walk(root) if takes_rng(node) or _identified(node) is not None)
    return {below for node in needing for below in walk(node)}


def identified(root: Node) -> Identified | None:
    """Return the operator that hands identities on to a reader; None: outputs leave without them."""
    return next(filter(None, map(_identified, walk(root))), None)


def _identified(node: Node) -> Identified | None:
    return next((step for step in steps_of(node) if isinstance(step, Identified)), None)
