"""Each batch takes the one-to-one operators right before it: threads write their results where the batch lies.

What stays out: anything before an operator that leaves elements out (a row's place in its batch must be known before it
is computed), before one that asks for other threads, and before one that has another reader.
"""

from __future__ import annotations

from penstock.graph import ops
from penstock.graph.node import Node
from penstock.passes.one_to_one import is_movable
from penstock.passes.sharing import IsShared, rewrite_unshared
from penstock.passes.steps import as_step, can_share_threads


def fuse_batches(root: Node) -> Node:
    return rewrite_unshared(root, _fused)


def _fused(node: Node, shared: IsShared) -> Node:
    if not isinstance(node, ops.Batch):
        return node
    steps: list[Node] = []
    below = node.upstream
    while is_movable(below) and not shared(below) and can_share_threads(below, steps):
        steps.append(below)
        below = below.upstream
    if not any(isinstance(step, ops.Map) for step in steps):
        return node  # threads would gain nothing; column operators are better off with what comes before them
    fused = tuple(map(as_step, reversed(steps)))
    return ops.FusedBatch(upstream=below, steps=fused, size=node.size, drop_last=node.drop_last)
