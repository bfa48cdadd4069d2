"""What holds for the passes together."""

from __future__ import annotations

import functools
from textwrap import dedent

import pytest

import penstock as ps
from penstock.graph import ops, readers
from penstock.graph.codec import decode_graph, encode_graph
from penstock.graph.explain import explain_text
from penstock.graph.functions import UserFunction
from penstock.graph.ops import is_one_to_one
from penstock.graph.traverse import walk
from penstock.passes import optimize
from penstock.passes.no_ops import is_identity, remove_no_ops
from penstock.runtime.shuffling import shuffles_reached
from tests.passes.golden import Identity, children, col, csv, f, g, keep, noisy, parquet, skip


def nested(y):
    def inner(x):
        return x

    def captured(x):
        return y

    return inner, captured


def generator(x):
    yield x


async def coroutine(x):
    return x


@pytest.mark.parametrize(
    ("function", "identity"),
    [
        (lambda x: x, True),
        (lambda row=3: row, True),
        (nested(1)[0], True),
        (nested(1)[1], False),
        (lambda x, y=1: x, False),
        (lambda x, *rest: x, False),
        (lambda *x: x, False),
        (lambda x, *, y=1: x, False),
        (lambda x: (x,), False),
        (lambda x: -x, False),
        (lambda x: f, False),
        (lambda x: None, False),
        (generator, False),
        (coroutine, False),
        (int, False),
        (Identity, False),
        (Identity(), False),
        (Identity().__call__, False),
        (functools.partial(lambda x: x), False),
    ],
)
def test_only_plain_functions_that_return_their_argument_are_identities(function, identity):
    assert is_identity(UserFunction.of(function)) is identity


def test_a_shipped_identity_is_not_loaded_to_find_out():
    (node,) = [
        node
        for node in walk(decode_graph(encode_graph(ps.range(3).map(lambda x: x).node)))
        if isinstance(node, ops.Map)
    ]
    assert node.function.here is None
    assert remove_no_ops(node) is node


def test_a_shared_source_stays_one_and_reads_what_both_readers_need():
    rows = parquet()
    plan = optimize(rows.select("a").zip(rows.filter(col("c") > 1).select("b")).node)
    assert (
        explain_text(plan)
        == dedent(
            """
        ┌ read_parquet('t.parquet', columns=('a', 'b', 'c'))  #1
        │ select('a')
        ├ = #1
        │ fused: filter(col('c') > 1) + select('b')
        zip()
        prefetch()
        """
        ).strip()
    )


def test_shuffles_merge_below_an_operator_that_is_read_elsewhere():
    rows = csv().shuffle(3).map(f).map(g)
    plan = optimize(rows.shuffle(5).zip(rows).node)
    assert (
        explain_text(plan)
        == dedent(
            """
        ┌ read_csv('t.csv')  #1
        │ shuffle(size=5)
        │ fused: map(f) + map(g)
        ├ = #1
        │ shuffle(size=3)
        │ fused: map(f) + map(g)
        zip()
        prefetch()
        """
        ).strip()
    )


@pytest.mark.parametrize(
    "dataset",
    [
        *(ps.range(3).map(f), ps.range(3).map(f, on_error=skip), ps.range(3).map(f, batch_size=2)),
        *(ps.range(3).filter(keep), ps.range(3).flat_map(children), ps.range(3).batch(2), ps.range(3).prefetch()),
        *(csv().select("a"), csv().drop("a"), csv().rename({"a": "b"}), csv().take(3), csv().repeat()),
    ],
    ids=repr,
)
def test_passes_and_lowering_agree_what_a_shuffle_may_cross(dataset):
    below = ops.Shuffle(upstream=dataset.node.upstream, size=2)
    above = ops.Shuffle(upstream=dataset.node.with_inputs(below), size=3)
    assert shuffles_reached(above) == ([below] if is_one_to_one(dataset.node) else [])


@pytest.mark.parametrize(
    ("add", "left"),
    [
        (lambda node: ops.Map(upstream=node, function=UserFunction.of(f)), 3),
        (lambda node: ops.Filter(upstream=node, predicate=col("a") > 1), 3),
        (lambda node: ops.Shuffle(upstream=node, size=2), 3),
        (lambda node: ops.Take(upstream=node, count=2), 3),
        (lambda node: ops.Batch(upstream=node, size=2), 1502),
    ],
    ids=["map", "filter", "shuffle", "take", "batch"],
)
def test_a_pipeline_built_in_a_loop_is_no_problem(add, left):
    node = parquet().node
    for _ in range(1500):
        node = add(node)
    assert sum(1 for _ in walk(optimize(node))) == left


def test_salts_stay_with_their_functions():
    rows = csv().map(noisy).shuffle(3).map(noisy).shuffle(4).filter(keep).map(noisy).batch(2)

    def salts(root):
        nodes = [each for node in walk(root) for each in getattr(node, "steps", (node,))]
        return [node.salt for node in nodes if isinstance(node, ops.Map)]

    assert salts(optimize(rows.node)) == salts(rows.node)
    assert len(set(salts(rows.node))) == 3


def test_sources_are_named_for_columns_they_may_leave_out():
    """A source that gains `columns` must be looked at here: its bad records, its masks."""
    kinds = [kind for kind in vars(readers).values() if isinstance(kind, type) and issubclass(kind, readers.SourceNode)]
    gained = {kind for kind in kinds if hasattr(kind, "columns")}
    columnar = {readers.ColumnarSource, readers.ReadParquet, readers.ReadArrow, readers.ReadFeatures}
    assert gained == {readers.ReadCsv, *columnar}
