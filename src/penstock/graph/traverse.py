"""Ways through a graph. None of them recurses: a pipeline built in a loop may be thousands of operators long."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from penstock.graph.node import Node


def walk(node: Node) -> Iterator[Node]:
    """Yield every operator once, inputs before what reads them, the first input's branch first."""
    done: set[Node] = set()
    pending = [node]
    while pending:
        current = pending[-1]
        waiting = [upstream for upstream in current.inputs if upstream not in done] if current not in done else []
        if waiting:
            pending.extend(reversed(waiting))
            continue
        pending.pop()
        if current not in done:
            done.add(current)
            yield current


def rewrite(node: Node, rule: Callable[[Node], Node]) -> Node:
    """Return the graph with `rule` applied to every operator, bottom up.

    The rule sees an operator over its already rewritten inputs and returns it, or what stands in its place. An
    operator with two readers is rewritten once and stays shared; one that nothing changed stays the same object.
    """
    made: dict[Node, Node] = {}
    for old in walk(node):
        inputs = [made[upstream] for upstream in old.inputs]
        moved = any(new is not upstream for new, upstream in zip(inputs, old.inputs))
        made[old] = rule(old.with_inputs(*inputs) if moved else old)
    return made[node]


def numbered(node: Node) -> dict[Node, int]:
    """Return each operator's number as messages give it: 1 is the first source, the last is `node` itself."""
    return {operator: number for number, operator in enumerate(walk(node), 1)}


def readers_of(node: Node) -> dict[Node, list[Node]]:
    """Return for each operator those that read it; one that reads it twice is listed twice."""
    found: dict[Node, list[Node]] = {}
    for operator in walk(node):
        found[operator] = []
        for upstream in operator.inputs:
            found[upstream].append(operator)
    return found


def operators_between(below: Node, above: Node) -> list[Node]:
    """Return the operators that lie on a way from `below` up to `above`, in order, without the two themselves."""
    reached = {below}
    between: list[Node] = []
    for operator in walk(above):
        if operator not in reached and not reached.isdisjoint(operator.inputs):
            reached.add(operator)
            between.append(operator)
    return [operator for operator in between if operator is not above]
