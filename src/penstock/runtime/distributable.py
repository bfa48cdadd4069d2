"""Which pipelines mean the same on any number of workers.

A stream sees some of the splits. An operator that counts elements from the first on, or pairs those of two inputs by
their number, would count per stream; so would a `drop_last` whose rest another operator regroups, because rests of
streams can be joined only at the end of the pipeline. They are refused, with the remedy, and never mean "per worker".
With `sharding="off"` every worker runs over everything, and nothing is refused.
"""

from __future__ import annotations

from penstock.core.errors import InvalidPipelineError
from penstock.graph import ops
from penstock.graph.node import Node
from penstock.graph.parameters import short_label
from penstock.graph.regrouping import last_regrouping, makes_rounds
from penstock.graph.traits import OnWorkers, RoundGrouping
from penstock.graph.traverse import readers_of, rewrite, walk
from penstock.passes import canonicalize


def for_workers(node: Node, sharding: str) -> Node:
    """Return the graph that workers run, or raise `InvalidPipelineError` if it has no meaning over all of them.

    A declared length is not in it: only the reader sees all elements. A source that two operators read has become two,
    so that each has its own splits.
    """
    root = rewrite(canonicalize(node), _without_readers_part)
    if sharding == "off":
        return root
    for operator in walk(root):
        if operator.traits.on_workers is OnWorkers.REFUSED:
            kept = "autocache() keeps what workers make, " if isinstance(operator, ops.Cache) else ""
            raise InvalidPipelineError(
                f"{short_label(operator)} means something only over all workers together: {kept}put it after "
                "distribute(), or use sharding='off'"
            )
    _check_rests(root)
    return _unshared(root)


def check_coordinated(root: Node) -> None:
    """Raise `InvalidPipelineError` if the outputs of a graph cannot come in rounds of one bucket."""
    last = last_regrouping(root)
    readers = readers_of(root)
    for operator in walk(root):
        regroups = operator.traits.regroups
        if regroups is not None and regroups.rounds is RoundGrouping.BUCKETS and operator is not last:
            between = _first_that_regroups(operator, readers)
            raise InvalidPipelineError(
                f"{short_label(operator)} is followed by {short_label(between)}, which would mix its buckets in a "
                f"round of coordinated reads: put {between.name}() before it"
            )
    if last is not None and makes_rounds(last):
        after = root
        while after is not last:
            for step in ops.steps_of(after):
                if step.traits.may_skip:
                    raise InvalidPipelineError(
                        f"{short_label(step)} may leave out a batch of a round of coordinated reads: "
                        f"put it before {short_label(last)}"
                    )
            (after,) = after.inputs


def _without_readers_part(node: Node) -> Node:
    return node.inputs[0] if node.traits.on_workers is OnWorkers.LEFT_TO_READER else node


def _check_rests(root: Node) -> None:
    last = last_regrouping(root)
    readers = readers_of(root)
    for operator in walk(root):
        if operator is not last and isinstance(operator, ops.Unary) and operator.drops_rest:
            between = _first_that_regroups(operator, readers)
            raise InvalidPipelineError(
                f"{short_label(operator)} is followed by {short_label(between)}, so that each worker would drop a rest "
                f"of its own: put {between.name}() before it, or leave drop_last out"
            )


def _first_that_regroups(operator: Node, readers: dict[Node, list[Node]]) -> Node:
    """Return what keeps the rests of streams from being joined: the first on the way to the reader."""
    node = operator
    while readers[node]:
        node = readers[node][0]
        if last_regrouping(node) is not operator:
            return node
    return node


def _unshared(root: Node) -> Node:
    """Return the graph with a copy of every operator for each way on which it is read. Does not recurse."""
    if all(len(readers) < 2 for readers in readers_of(root).values()):
        return root
    seen: set[Node] = set()
    pending: list[tuple[Node, list[Node]]] = [(root, [])]
    while True:
        node, made = pending[-1]
        if len(made) < len(node.inputs):
            pending.append((node.inputs[len(made)], []))
            continue
        pending.pop()
        same = node not in seen and all(new is old for new, old in zip(made, node.inputs))
        seen.add(node)
        copy = node if same else node.with_inputs(*made)
        if not pending:
            return copy
        pending[-1][1].append(copy)
