"""Operators that can run in one go become one, and the last of all runs ahead of its reader.

What becomes a step of a fused operator stands there as it was, on a `Hole`.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.graph import ops
from penstock.graph.node import Node
from penstock.graph.readers import SourceNode
from penstock.passes.rewriting import IsShared, rewrite_unshared


def fuse_batches(root: Node) -> Node:
    """Let each batch take the one-to-one operators right before it: threads write their results where the batch lies.

    What stays out: anything before an operator that leaves elements out (a row's place in its batch must be known
    before it is computed), before one that asks for other threads, and before one that has another reader.
    """
    return rewrite_unshared(root, _with_batch)


def _with_batch(node: Node, shared: IsShared) -> Node:
    if not isinstance(node, ops.Batch) or node.collate is not None or node.mask is not None:
        return node  # a function makes the batch, or rows are added to it: they are not written where they are to lie
    steps: list[Node] = []
    below = node.upstream
    while ops.is_one_to_one(below) and not shared(below) and _can_share_threads(below, steps):
        steps.append(below)
        below = below.upstream
    if all(step.traits.threads == 0 for step in steps):
        return node  # threads would gain nothing; column operators are better off with what comes before them
    fused = tuple(map(_as_step, reversed(steps)))
    return ops.FusedBatch(upstream=below, steps=fused, size=node.size, drop_last=node.drop_last)


def fuse_neighbours(root: Node) -> Node:
    """Make one of maps, filters and column operators that follow each other: a chunk runs through all in one go.

    Steps keep their own `on_error`. Not joined: operators that ask for different numbers of threads, and across one
    that has another reader.
    """
    return rewrite_unshared(root, _with_neighbour)


def _with_neighbour(node: Node, shared: IsShared) -> Node:
    if not ops.is_step(node) or shared(node.upstream):
        return node
    below = node.upstream
    if isinstance(below, ops.Fused):
        base, steps = below.upstream, below.steps
    elif ops.is_step(below):
        base, steps = below.upstream, (_as_step(below),)
    else:
        return node
    if not _can_share_threads(node, steps):
        return node
    return ops.Fused(upstream=base, steps=(*steps, _as_step(node)))


def _can_share_threads(node: Node, others: Iterable[Node]) -> bool:
    """Return whether an operator can run on the threads of some that share theirs: it has no use for any, or asks for
    the same."""
    asked = next((other.traits.threads for other in others if other.traits.threads != 0), node.traits.threads)
    return node.traits.threads in (0, asked)


def _as_step(node: Node) -> Node:
    return node.with_inputs(ops.Hole())


def insert_prefetch(root: Node) -> Node:
    """Put a prefetch at the root: the next elements are made while the reader is busy with the last.

    It has no state. At runtime it makes nothing ahead until its reader is seen to be busy elsewhere, so that it costs
    next to nothing where it does not help. Operators that only count need none of their own above it.
    """
    below = root
    while isinstance(below, ops.Unary) and below.traits.only_counts:
        below = below.upstream
    if isinstance(below, ops.Prefetch) or (isinstance(below, SourceNode) and below.IN_MEMORY):
        return root
    return ops.Prefetch(upstream=root)
