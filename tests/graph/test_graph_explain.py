from __future__ import annotations

import re
import textwrap
from typing import Any

import numpy as np
import pytest
from graph_examples import OPERATORS, double, example, mapped, source

from penstock.graph import ops, readers
from penstock.graph.codec import decode_graph, encode_graph
from penstock.graph.explain import explain_mermaid, explain_text
from penstock.graph.expressions import col
from penstock.graph.functions import Payload, UserFunction
from penstock.graph.node import Node


def augment(x: Any, rng: Any) -> Any:
    return x


def linear() -> Node:
    node: Node = readers.ReadParquet(
        paths=("s3://bucket/*.parquet",),
        columns=("a", "b"),
        predicate=col("a") > 3,
        storage_options=(("secret", "hunter2"),),
    )
    node = ops.Shuffle(upstream=node, size=100, seed=7, salt=1)
    node = mapped(augment, node, threads=2, on_error=ops.SkipErrors(budget=3), salt=2)
    return ops.Batch(upstream=node, size=256, drop_last=True)


def golden(text: str) -> str:
    return textwrap.dedent(text).strip("\n")


def test_a_linear_plan_has_one_operator_a_line_and_hides_what_is_private_or_default() -> None:
    assert explain_text(linear()) == golden(
        """
        read_parquet('s3://bucket/*.parquet', columns=('a', 'b'), predicate=col('a') > 3)
        shuffle(size=100, seed=7)
        map(augment, rng, threads=2, on_error=skip(budget=3))
        batch(256, drop_last=True)
        """
    )


def test_inputs_stand_in_brackets_above_the_operator_that_joins_them() -> None:
    inner = ops.Zip(upstreams=(source(1), mapped(double, source(2))))
    shared = ops.Take(upstream=readers.FromItems(items=Payload([1])), count=5)
    node = ops.Mix(upstreams=(inner, shared, ops.Skip(upstream=shared, count=1)), weights=(0.5, 0.25, 0.25))
    assert explain_text(ops.Unbatch(upstream=node)) == golden(
        """
        ┌ ┌ range(0, 1)
        │ ├ range(0, 2)
        │ │ map(double)
        │ zip()
        ├ from_items(list)
        │ take(5)  #1
        ├ = #1
        │ skip(1)
        mix((0.5, 0.25, 0.25))
        unbatch()
        """
    )


def test_fused_steps_stand_in_one_line() -> None:
    steps = (
        ops.Map(upstream=ops.Hole(), function=UserFunction.of(double)),
        ops.Filter(upstream=ops.Hole(), predicate=UserFunction.of(bool)),
    )
    fused = ops.Fused(upstream=source(), steps=steps)
    assert explain_text(fused).splitlines()[1] == "fused: map(double) + filter(bool)"
    batched = ops.FusedBatch(upstream=fused, steps=steps[:1], size=8, drop_last=True)
    assert explain_text(batched).splitlines()[2] == "fused: map(double) + batch(8, drop_last=True)"


def test_a_plan_of_five_thousand_operators_is_drawn() -> None:
    node = source()
    for _ in range(5000):
        node = ops.Skip(upstream=node, count=1)
    assert explain_text(node).count("\n") == 5000
    assert explain_mermaid(node).count("-->") == 5000


@pytest.mark.parametrize("cls", OPERATORS, ids=lambda cls: cls.__name__)
def test_every_operator_is_explained_alike_before_and_after_a_journey(cls: type[Any]) -> None:
    node = example(cls)
    text = explain_text(node)
    assert "0x" not in text and "salt" not in text
    assert explain_text(decode_graph(encode_graph(node))) == text


def test_long_values_are_shortened_and_objects_show_no_address() -> None:
    node = readers.FromGenerator(function=UserFunction.of(double), splits=tuple(range(50)))
    assert explain_text(node) == "from_generator(double, (0, 1, 2, 3, 4, 5, … 50 in all))"
    padded = ops.PaddedBatch(upstream=source(), size=2, value=np.float32(0.5))
    assert explain_text(padded).endswith("padded_batch(2, value=0.5)")
    assert "a object" in explain_text(readers.FromGenerator(function=UserFunction.of(double), splits=(object(),)))
    assert len(explain_text(readers.ReadText(paths=("x" * 500,)))) < 100


def test_a_flowchart_quotes_what_mermaid_would_read_as_its_own() -> None:
    chart = explain_mermaid(mapped(lambda x: x, readers.ReadText(paths=('a"b<c>#1.txt',))))
    assert chart == golden(
        """
        flowchart TD
            n1[("read_text('a#34;b#60;c#62;#35;1.txt')")]
            n2["map(#60;lambda#62;)"]
            n1 --> n2
        """
    )


def test_every_line_of_a_flowchart_is_a_box_or_an_arrow() -> None:
    head, *lines = explain_mermaid(ops.Zip(upstreams=(linear(), source()))).splitlines()
    assert head == "flowchart TD"
    assert all(re.fullmatch(r'    n\d+(\["[^"\n]*"\]|\[\("[^"\n]*"\)\])|    n\d+ --> n\d+', line) for line in lines)
