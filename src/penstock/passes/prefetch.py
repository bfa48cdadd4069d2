"""A prefetch at the root: the next elements are made while the reader is busy with the last.

It has no state. At runtime it makes nothing ahead until its reader is seen to be busy elsewhere, so that it costs
next to nothing where it does not help.
"""

from __future__ import annotations

from penstock.graph import ops
from penstock.graph.node import Node
from penstock.graph.readers import FromItems, Range

COUNTING = (ops.Take, ops.Skip, ops.Enumerate, ops.Repeat, ops.WithLength, ops.WithEpoch)
"""Operators that only count: above a prefetch they need none of their own."""
IN_MEMORY = (Range, FromItems)


def insert_prefetch(root: Node) -> Node:
    below = root
    while isinstance(below, COUNTING):
        below = below.upstream
    if isinstance(below, (ops.Prefetch, *IN_MEMORY)):
        return root
    return ops.Prefetch(upstream=root)
