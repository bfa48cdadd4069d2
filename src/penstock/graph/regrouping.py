"""Which operator makes the groups a reader gets: what is short at the end of a stream is its rest."""

from __future__ import annotations

from typing import TypeAlias

from penstock.graph import ops
from penstock.graph.node import Node

Regrouping: TypeAlias = (
    ops.Batch
    | ops.PaddedBatch
    | ops.RaggedBatch
    | ops.FusedBatch
    | ops.Rebatch
    | ops.BucketByLength
    | ops.GroupByWindow
)
REGROUPING = (
    ops.Batch,
    ops.PaddedBatch,
    ops.RaggedBatch,
    ops.FusedBatch,
    ops.Rebatch,
    ops.BucketByLength,
    ops.GroupByWindow,
)
STATELESS = (ops.Map, ops.Filter, ops.Select, ops.Drop, ops.Rename, ops.Fused, ops.Prefetch)
"""Outputs stand in the place of their inputs, or are left out, and states pass through."""


def last_regrouping(root: Node) -> Regrouping | None:
    """Return the operator whose groups arrive at the reader one for one, changed or left out, but never regrouped."""
    node = root
    while isinstance(node, STATELESS) and getattr(node, "batch_size", None) is None:
        node = node.upstream
    return node if isinstance(node, REGROUPING) else None
