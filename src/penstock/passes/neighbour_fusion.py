"""Maps, filters and column operators that follow each other become one: a chunk runs through all of them in one go.

Steps keep their own `on_error`. Not joined: operators that ask for different numbers of threads, and across one that
has another reader.
"""

from __future__ import annotations

from penstock.graph import ops
from penstock.graph.node import Node
from penstock.passes.sharing import IsShared, rewrite_unshared
from penstock.passes.steps import as_step, can_share_threads, is_fusable


def fuse_neighbours(root: Node) -> Node:
    return rewrite_unshared(root, _fused)


def _fused(node: Node, shared: IsShared) -> Node:
    if not is_fusable(node) or shared(node.upstream):
        return node
    below = node.upstream
    if isinstance(below, ops.Fused):
        base, steps = below.upstream, below.steps
    elif is_fusable(below):
        base, steps = below.upstream, (as_step(below),)
    else:
        return node
    if not can_share_threads(node, steps):
        return node
    return ops.Fused(upstream=base, steps=(*steps, as_step(node)))
