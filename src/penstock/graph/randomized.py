"""Which operators draw random numbers."""

from __future__ import annotations

from penstock.graph.functions import UserFunction
from penstock.graph.node import Node
from penstock.graph.ops import OfSteps, Shuffle


def takes_rng(node: Node) -> bool:
    """Say whether a function of this operator, or of a step of it, is given a generator."""
    if isinstance(node, OfSteps):
        return any(map(takes_rng, node.steps))
    return any(value.takes_rng for _, value in node.parameters() if isinstance(value, UserFunction))


def is_shuffle(node: Node) -> bool:
    return isinstance(node, Shuffle)


def draws(node: Node) -> bool:
    return is_shuffle(node) or takes_rng(node)
