"""What can be a step of a fused operator. A step is the operator itself, standing on a `Hole`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeGuard

from penstock.graph import ops
from penstock.graph.node import Node


def is_fusable(node: Node) -> TypeGuard[ops.Unary]:
    """Return whether it can be a step: not a map with `batch_size`, which gathers groups of its own."""
    if isinstance(node, ops.Map):
        return node.batch_size is None
    return isinstance(node, (ops.Filter, ops.Select, ops.Drop, ops.Rename))


def can_share_threads(node: Node, others: Iterable[Node]) -> bool:
    """Return whether an operator can run on the threads of some that share theirs. Column operators ask for none."""
    if not isinstance(node, (ops.Map, ops.Filter)):
        return True
    asked = next((other for other in others if isinstance(other, (ops.Map, ops.Filter))), node)
    return node.threads == asked.threads


def as_step(node: Node) -> Node:
    return node.with_inputs(ops.Hole())
