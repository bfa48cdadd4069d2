"""Broken passes are found, by name and operator."""

from __future__ import annotations

import pytest
from msgspec.structs import force_setattr, replace

import penstock as ps
from penstock.graph import ops, readers
from penstock.graph.functions import UserFunction
from penstock.graph.traverse import rewrite
from penstock.passes import InvalidPlanError, Pass, optimize
from penstock.passes.verify import verify
from tests.passes.golden import col, csv, f, g, keep, noisy, parquet, skip


def changing(kind, change):
    """Return a pass that does `change` to the operators of a kind."""
    return lambda root: rewrite(root, lambda node: change(node) if isinstance(node, kind) else node)


def removing(kind):
    return changing(kind, lambda node: node.upstream)


def swapping(kind):
    """Return a pass that puts operators of a kind below what they stand on."""
    return changing(kind, lambda node: node.upstream.with_inputs(node.with_inputs(node.upstream.upstream)))


def step(node, upstream=None):
    return node.with_inputs(upstream or ops.Hole())


def in_a_circle(node):
    below = replace(node.upstream)
    changed = node.with_inputs(below)
    force_setattr(below, "upstream", changed)
    return changed


def without_input(node):
    changed = replace(node)
    force_setattr(changed, "upstream", None)
    return changed


def two_sources_of_one(root):
    first, second = root.inputs
    return root.with_inputs(first.with_inputs(replace(first.upstream)), second)


def one_source_of_two(root):
    first, second = root.inputs
    return root.with_inputs(first, second.with_inputs(first.upstream))


rows, numbers = csv(), ps.range(9)
BROKEN = {
    # not a plan
    "circle": (numbers.map(f).map(g), in_a_circle, "reads itself"),
    "no input": (numbers.map(f).batch(2), changing(ops.Batch, without_input), "input is missing"),
    "hole": (numbers.map(f), changing(readers.Range, lambda node: ops.Hole()), "hole outside"),
    "step on its old input": (
        numbers.map(f),
        changing(ops.Map, lambda node: ops.Fused(upstream=node.upstream, steps=(node,))),
        "does not stand on a hole",
    ),
    "step that cannot be one": (
        numbers.map(f, batch_size=2),
        changing(ops.Map, lambda node: ops.Fused(upstream=node.upstream, steps=(step(node),))),
        "cannot be a step of a fused",
    ),
    "filter in a batch": (
        numbers.filter(keep).batch(2),
        changing(
            ops.Batch,
            lambda node: ops.FusedBatch(upstream=node.upstream.upstream, steps=(step(node.upstream),), size=2),
        ),
        "cannot be a step of a fused_batch",
    ),
    "skipping map in a batch": (
        numbers.map(f, on_error=skip).batch(2),
        changing(
            ops.Batch,
            lambda node: ops.FusedBatch(upstream=node.upstream.upstream, steps=(step(node.upstream),), size=2),
        ),
        "cannot be a step of a fused_batch",
    ),
    # not the same pipeline
    "lost function": (numbers.map(f).map(g), removing(ops.Map), "functions or conditions"),
    "doubled function": (numbers.map(f), changing(ops.Map, lambda n: n.with_inputs(n)), "functions or conditions"),
    "other function": (
        numbers.map(f),
        changing(ops.Map, lambda node: replace(node, function=UserFunction.of(f))),
        "functions or conditions",
    ),
    "functions in another order": (numbers.map(f).filter(keep), swapping(ops.Filter), "functions or conditions"),
    "function across a batch": (numbers.map(f).batch(2), swapping(ops.Batch), "functions or conditions"),
    "other salt": (numbers.map(noisy), changing(ops.Map, lambda n: replace(n, salt=9)), "functions or conditions"),
    "lost policy": (
        numbers.map(f, on_error=skip),
        changing(ops.Map, lambda node: replace(node, on_error=None)),
        "functions or conditions",
    ),
    "lost condition": (rows.filter(col("a") > 1), removing(ops.Filter), "functions or conditions"),
    "other condition": (
        rows.filter(col("a") > 1),
        changing(ops.Filter, lambda node: replace(node, predicate=col("a") > 2)),
        "functions or conditions",
    ),
    "condition across a shuffle": (
        parquet().shuffle(3).filter(col("a") > 1),
        swapping(ops.Filter),
        "leaves elements out",
    ),
    "condition across a map": (parquet().map(f).filter(col("a") > 1), swapping(ops.Filter), "functions or conditions"),
    "shuffle across a filter": (numbers.filter(keep).shuffle(3), swapping(ops.Shuffle), "leaves elements out"),
    "shuffle across a skipping map": (
        numbers.map(f, on_error=skip).shuffle(3),
        swapping(ops.Shuffle),
        "leaves elements out",
    ),
    "shuffle across a take": (numbers.take(5).shuffle(3), swapping(ops.Shuffle), "leaves elements out"),
    "lost shuffle": (numbers.shuffle(3), removing(ops.Shuffle), "a shuffle changed"),
    "other seed": (numbers.shuffle(3), changing(ops.Shuffle, lambda n: replace(n, seed=1)), "a shuffle changed"),
    "other shuffle salt": (
        numbers.shuffle(3),
        changing(ops.Shuffle, lambda n: replace(n, salt=9)),
        "a shuffle changed",
    ),
    "smaller shuffle": (numbers.shuffle(3), changing(ops.Shuffle, lambda n: replace(n, size=2)), "a shuffle changed"),
    "lost take": (numbers.take(3), removing(ops.Take), "take stood"),
    "other take": (numbers.take(3), changing(ops.Take, lambda node: replace(node, count=2)), "take stood"),
    "other order of counters": (numbers.take(3).skip(1), swapping(ops.Skip), "skip stood"),
    "other batch": (numbers.batch(3), changing(ops.Batch, lambda node: replace(node, size=2)), "batch stood"),
    "other cache": (numbers.cache(), changing(ops.Cache, lambda n: replace(n, slot=ops.MemorySlot())), "cache stood"),
    "other source": (numbers.map(f), changing(readers.Range, lambda node: replace(node, stop=8)), "range stood"),
    "other file": (rows, changing(readers.ReadCsv, lambda node: replace(node, paths=("b",))), "read_csv stood"),
    "other bad records": (rows, changing(readers.ReadCsv, lambda node: replace(node, on_error=skip)), "read_csv stood"),
    "more columns": (
        csv(columns=["a"]),
        changing(readers.ReadCsv, lambda node: replace(node, columns=("a", "b"))),
        "was asked for",
    ),
    "all columns": (csv(columns=["a"]), changing(readers.ReadCsv, lambda n: replace(n, columns=None)), "was asked for"),
    "new column operator": (rows, lambda node: ops.Select(upstream=node, columns=("a",)), "column operator was added"),
    "lost prefetch": (numbers.map(f).prefetch(3), removing(ops.Prefetch), "prefetch of a given size"),
    "two sources of one": (rows.map(f).zip(rows.map(g)), two_sources_of_one, "has become two"),
    "one source of two": (csv().map(f).zip(csv().map(g)), one_source_of_two, "become one"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_pass_is_named(name):
    dataset, broken, what = BROKEN[name]
    with pytest.raises(InvalidPlanError, match=what) as raised:
        optimize(dataset.node, passes=[Pass("the broken one", broken)])
    assert "internal error: the pass 'the broken one' made an invalid plan at " in str(raised.value)
    assert "optimize=False" in str(raised.value)


def test_the_operator_is_named():
    with pytest.raises(InvalidPlanError, match=r"invalid plan at skip: where it stands, take stood") as raised:
        optimize(
            numbers.map(f).take(3).node, passes=[Pass("p", lambda root: ops.Skip(upstream=root.upstream, count=3))]
        )
    assert raised.value.pass_name == "p"
    assert isinstance(raised.value.operator, ops.Skip)


def test_passes_that_undo_each_other_are_stopped():
    there = Pass("there", lambda root: root if isinstance(root, ops.Prefetch) else ops.Prefetch(upstream=root))
    back = Pass("back", lambda root: root.upstream if isinstance(root, ops.Prefetch) else root)
    with pytest.raises(InvalidPlanError, match="do not settle"):
        optimize(numbers.map(f).node, passes=[there, back])


def test_a_plan_compared_with_itself_is_valid():
    for dataset, _, _ in BROKEN.values():
        verify(dataset.node, dataset.node, pass_name="none")
