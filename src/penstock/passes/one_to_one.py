"""What a shuffle may be moved across."""

from __future__ import annotations

from typing import TypeGuard

from penstock.graph import ops
from penstock.graph.node import Node


def is_movable(node: Node) -> TypeGuard[ops.Unary]:
    """Return whether each output of this operator comes from one input alone and stands in its place.

    Not with `on_error`, which leaves elements out, nor with `batch_size`, where an element's neighbours go along. The
    lowering asks here too which shuffles are one.
    """
    return (
        isinstance(node, ops.Unary)
        and node.ONE_TO_ONE
        and getattr(node, "on_error", None) is None
        and getattr(node, "batch_size", None) is None
    )
