"""Graph to graph: the same elements, made with less work.

Rules every pass keeps (`verify` checks what can be seen in the graph, `tests/passes` the rest):

1. The elements and their order stay the same, bit for bit. So no salt, seed or source changes its place, and nothing
   moves that would change what a function is called with.
2. A state stays valid: saved with passes it loads without them, and the other way round. So the operators that have a
   state stay, in their order. What would remove one belongs into `canonicalize`, which always runs.
3. An error may be spared, never caused: a column or row that nobody asked for is not looked at.
4. Functions are never called, and never loaded where they were shipped.
5. A pass that changes nothing returns the graph it was given, the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from penstock.graph.node import Node
from penstock.passes.columns import merge_columns, push_projections
from penstock.passes.filters import push_filters
from penstock.passes.fusion import fuse_batches, fuse_neighbours, insert_prefetch
from penstock.passes.no_ops import canonicalize, remove_no_ops
from penstock.passes.shuffles import merge_shuffles, move_shuffles
from penstock.passes.verify import InvalidPlanError, verify

__all__ = ["PASSES", "InvalidPlanError", "Pass", "canonicalize", "optimize"]

MAX_CHANGES = 1000  # each pass settles by itself; this many mean that two of them undo each other


class Pass(msgspec.Struct, frozen=True):
    """A named rewrite of a whole graph."""

    name: str
    rewrite: Callable[[Node], Node]


PASSES: tuple[Pass, ...] = (
    # First what is not there costs nobody anything, and hides no neighbour from the others.
    Pass("remove no-ops", remove_no_ops),
    # Before maps are fused: a shuffle finds those below it through single maps.
    Pass("merge shuffles", merge_shuffles),
    # Before projections: they start from the selects that are left.
    Pass("merge columns", merge_columns),
    # Before projections: a column that only a filter looks at need not leave the source.
    Pass("push filters", push_filters),
    Pass("push projections", push_projections),
    # Before fusion, which would hide the maps.
    Pass("move shuffles", move_shuffles),
    # Before neighbours are fused: a batch takes the one-to-one operators nearest to it, the rest go together.
    Pass("fuse batches", fuse_batches),
    Pass("fuse neighbours", fuse_neighbours),
    # Last: whatever the root has become, its reader gets it ahead of time.
    Pass("insert prefetch", insert_prefetch),
)


def optimize(root: Node, passes: Sequence[Pass] = PASSES) -> Node:
    """Return a graph that gives the same elements with less work.

    A pass runs only when none before it has anything left to do: after each change, all begin again.
    """
    root = canonicalize(root)
    at = changes = 0
    while at < len(passes):
        running = passes[at]
        changed = running.rewrite(root)
        if changed is root:
            at += 1
            continue
        verify(root, changed, pass_name=running.name)
        root, at, changes = changed, 0, changes + 1
        if changes > MAX_CHANGES:
            raise InvalidPlanError(running.name, root, f"the passes do not settle after {MAX_CHANGES} changes")
    return root
