"""What always holds before a graph runs, with passes or without: operators that say nothing are not there.

`take(-1)`, `skip(0)` and `repeat(1)` pass everything on. They cannot be left to an optional pass: `take` and `repeat`
have a state of their own, and a shuffle does not reach through any of the three, so that removing them changes which
order it asks of the source. So they mean nothing by definition, and `canonicalize` is what says so. The same goes for
a `take` of a `take`, whose states would nest.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.graph import ops
from penstock.graph.node import Node
from penstock.graph.traverse import rewrite


def canonicalize(root: Node) -> Node:
    """Return the graph that both the runtime and the passes start from; the same object if it is one already."""
    return rewrite(root, _canonical)


def _canonical(node: Node) -> Node:
    match node:
        case ops.Take(count=ops.NEVER_ENDS) | ops.Skip(count=0) | ops.Repeat(count=1):
            return node.upstream
        case ops.Rename() if all(old == new for old, new in node.names):
            return node.upstream
        case ops.Take(upstream=ops.Take() as below):
            return replace(node, upstream=below.upstream, count=min(node.count, below.count))
        case ops.Skip(upstream=ops.Skip() as below):
            return replace(node, upstream=below.upstream, count=node.count + below.count)
    return node
