"""Rewriting that knows which operators have more than one reader.

Every reader runs its own copy of what it reads, so giving one of them a rewritten input is never wrong. But a source's
number is part of its elements' identity: a rewrite that makes two sources of a shared one would change their random
numbers. And work that is one line in a plan should not become two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from penstock.graph import ops
from penstock.graph.node import Node
from penstock.graph.traverse import readers_of, walk

IsShared: TypeAlias = Callable[[Node], bool]


def rewrite_unshared(root: Node, rule: Callable[[Node, IsShared], Node]) -> Node:
    """Return the graph with `rule` applied bottom up, as `traverse.rewrite`; the rule is told what is shared."""
    shared = {node for node, readers in readers_of(root).items() if len(readers) > 1}
    made: dict[Node, Node] = {}
    for old in walk(root):
        inputs = [made[upstream] for upstream in old.inputs]
        moved = any(new is not upstream for new, upstream in zip(inputs, old.inputs))
        made[old] = rule(old.with_inputs(*inputs) if moved else old, shared.__contains__)
        if old in shared:
            shared.add(made[old])
    return made[root]


def stacked(operators: Iterable[ops.Unary], base: Node) -> Node:
    """Return `base` with the operators, given from the top down, standing on it."""
    for operator in reversed(list(operators)):
        base = operator.with_inputs(base)
    return base
