from __future__ import annotations

from graph_examples import mapped, source

from penstock.graph import ops
from penstock.graph.node import Node
from penstock.graph.traverse import numbered, operators_between, readers_of, rewrite, walk


def chain(length: int) -> Node:
    node = source()
    for _ in range(length):
        node = ops.Skip(upstream=node, count=0)
    return node


def diamond() -> tuple[Node, Node, ops.Zip]:
    shared = ops.Take(upstream=source(), count=5)
    left, right = ops.Skip(upstream=shared, count=1), ops.Skip(upstream=shared, count=2)
    return shared, left, ops.Zip(upstreams=(left, right))


def test_walk_yields_inputs_before_readers_and_shared_operators_once() -> None:
    shared, left, top = diamond()
    assert [node.name for node in walk(top)] == ["range", "take", "skip", "skip", "zip"]
    order = list(walk(top))
    assert order.index(shared) < order.index(left) < order.index(top)


def test_rewrite_keeps_sharing_and_applies_the_rule_once_to_a_shared_operator() -> None:
    shared, _, top = diamond()
    seen: list[Node] = []

    def larger_take(node: Node) -> Node:
        seen.append(node)
        return ops.Take(upstream=node.upstream, count=9) if isinstance(node, ops.Take) else node

    new = rewrite(top, larger_take)
    left, right = new.inputs
    assert left.inputs[0] is right.inputs[0]
    assert left.inputs[0] is not shared and left.inputs[0].count == 9  # type: ignore[attr-defined]
    assert sum(isinstance(node, ops.Take) for node in seen) == 1


def test_rewrite_returns_the_same_object_where_nothing_changed() -> None:
    _, _, top = diamond()
    assert rewrite(top, lambda node: node) is top


def test_five_thousand_chained_operators_need_no_recursion() -> None:
    long = chain(5000)
    assert len(list(walk(long))) == 5001
    without = rewrite(long, lambda node: node.inputs[0] if isinstance(node, ops.Skip) else node)
    assert without.name == "range"
    assert numbered(long)[long] == 5001


def test_operators_between_are_those_on_a_way_from_one_to_the_other() -> None:
    shared, left, top = diamond()
    above = ops.Batch(upstream=top, size=2)
    assert operators_between(shared, above) == [left, top.upstreams[1], top]
    assert operators_between(top, above) == []
    assert operators_between(mapped(abs), above) == []


def test_readers_of_lists_every_reader() -> None:
    shared, left, top = diamond()
    assert readers_of(top)[shared] == [left, top.upstreams[1]]
    assert readers_of(top)[top] == []
