"""Caching points that nobody put: where a job asks the service to choose them (`Placement.cache`).

Of each source there are two at most: one over the source, behind what columns it is asked for, because those are read
from the file alone; and one before the first operator that draws random numbers or mixes what splits give. A chain in
which its user put points has those, and a source that cannot tell whether its data changed has none.

They are in the plan of a runner (`worker_plan`) and not in the job's graph: the job, its states and its outputs are the
same without.
"""

from __future__ import annotations

from functools import partial

from penstock.graph import ops
from penstock.graph.functions import UserFunction
from penstock.graph.node import Node
from penstock.graph.ops.base import is_one_to_one
from penstock.graph.randomized import takes_rng
from penstock.graph.readers import SourceNode
from penstock.graph.traverse import readers_of, rewrite, walk
from penstock.passes import optimize
from penstock.runtime.cache_points import UNTOLD


def worker_plan(graph: Node, cache: str | None) -> Node:
    """Return the graph of a job as its workers run it; `cache`: where what they make is kept (`Placement.cache`)."""
    return optimize(graph if cache is None else with_points(graph, None if cache == "auto" else cache))


def with_points(root: Node, location: str | None) -> Node:
    """Return the graph with points of the service's own. `location` None: a folder of the host's user."""
    for source in [node for node in walk(root) if isinstance(node, SourceNode) and not isinstance(node, UNTOLD)]:
        for below in reversed(_places(_chain(root, source))):  # from the top down: what is below stays as it is
            root = rewrite(root, partial(_with_point, below, location))
    return root


def _with_point(below: Node, location: str | None, node: Node) -> Node:
    return ops.Autocache(upstream=node, location=location) if node is below else node


def _chain(root: Node, source: SourceNode) -> list[Node]:
    """Return the source and the operators on single inputs that stand on it, from it up."""
    readers = readers_of(root)
    chain: list[Node] = [source]
    while len(readers[chain[-1]]) == 1 and isinstance(readers[chain[-1]][0], ops.Unary):
        chain.append(readers[chain[-1]][0])
    return chain


def _places(chain: list[Node]) -> list[Node]:
    """Return the operators over which a point is put, from the source up."""
    if any(isinstance(node, ops.Autocache) for node in chain):
        return []
    places, shuffled, plain = [chain[0]], False, True
    for node in chain[1:]:
        if isinstance(node, ops.Shuffle):
            shuffled = True  # a point moves before it, with the one-to-one operators between them
            continue
        local = is_one_to_one(node) if shuffled else isinstance(node, ops.Unary) and node.traits.fuses
        if not local or takes_rng(node):
            break
        plain = plain and not shuffled and not _has_function(node)
        places = [node] if plain else [places[0], node]
    return places


def _has_function(node: Node) -> bool:
    return any(isinstance(value, UserFunction) for _, value in node.parameters())
