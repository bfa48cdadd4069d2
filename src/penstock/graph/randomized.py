"""Which operators draw random numbers."""

from __future__ import annotations

from penstock.graph.functions import UserFunction
from penstock.graph.node import Node
from penstock.graph.ops import Shuffle


def takes_rng(node: Node) -> bool:
    """Say whether a function of this operator, or of a step of it, is given a generator."""
    functions = [value for _, value in node.parameters() if isinstance(value, UserFunction)]
    return any(function.takes_rng for function in functions) or any(map(takes_rng, getattr(node, "steps", ())))


def is_shuffle(node: Node) -> bool:
    return isinstance(node, Shuffle)


def draws(node: Node) -> bool:
    return is_shuffle(node) or takes_rng(node)
