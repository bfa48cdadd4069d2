from __future__ import annotations

from typing import Any

import msgspec
import pytest
from graph_examples import double, mapped, source

from penstock.graph import ops, readers
from penstock.graph.difference import difference
from penstock.graph.fingerprint import OperatorSummary, fingerprint, summary
from penstock.graph.functions import UserFunction
from penstock.graph.node import Node

TABLE = {"a": 1}


def helper(x: int) -> int:
    return x + TABLE["a"]


def make(scale: int, size: int = 1) -> Any:
    def augment(x: int, size: int = size) -> int:
        return helper(x) * scale * size

    return augment


def pipeline(
    *, fn: Any = None, shuffle: int = 100, batch: int | None = 8, stop: int = 10, extra: bool = False, salt: int = 3
) -> Node:
    node: Node = ops.Shuffle(upstream=source(stop), size=shuffle)
    node = mapped(fn or make(2), node, salt=salt)
    if extra:
        node = ops.Filter(upstream=node, predicate=UserFunction.of(bool))
    return node if batch is None else ops.Batch(upstream=node, size=batch)


CHANGES: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    ({"fn": make(3)}, ["map(make.augment) [operator 3]: captured variable 'scale' changed"]),
    ({"fn": make(2, 5)}, ["map(make.augment) [operator 3]: default of 'size' changed"]),
    ({"shuffle": 1000}, ["shuffle [operator 2]: size 100 → 1000"]),
    ({"batch": None}, ["batch was removed"]),
    ({"extra": True}, ["filter(bool) was added [operator 4]"]),
    ({"stop": 20}, ["source range [operator 1]: stop 10 → 20"]),
    ({"shuffle": 1000, "batch": 9}, ["shuffle [operator 2]: size 100 → 1000", "batch [operator 4]: size 8 → 9"]),
    ({"salt": 4}, ["operators draw other random numbers: their positions in the pipeline changed"]),
    ({"salt": 4, "extra": True}, ["filter(bool) was added [operator 4]"]),
]


@pytest.mark.parametrize(("change", "sentences"), CHANGES)
def test_a_difference_is_named(change: dict[str, Any], sentences: list[str]) -> None:
    expected = [sentence.replace("make.augment", "augment") for sentence in sentences]
    assert difference(pipeline(), pipeline(**change)) == expected
    assert (fingerprint(pipeline()) == fingerprint(pipeline(**change))) == (not expected)


def test_another_function_is_named_with_its_name() -> None:
    (first, *_) = difference(pipeline(), pipeline(fn=double))
    assert first == "map(double) [operator 3]: function augment → double"


def test_a_change_in_a_helper_names_the_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    before = summary(pipeline())
    monkeypatch.setitem(TABLE, "a", 2)
    assert difference(before, pipeline()) == ["map(augment) [operator 3]: global 'TABLE' in helper changed"]


def test_changed_files_are_named() -> None:
    read = ops.Batch(upstream=readers.ReadParquet(paths=("a/*.parquet",)), size=1)
    before, after = (summary(read, source_digest=lambda _, digest=digest: digest) for digest in ("1", "2"))
    assert difference(before, after) == ["source read_parquet [operator 1]: files changed"]


def test_a_summary_survives_being_written_down() -> None:
    kept = msgspec.json.decode(msgspec.json.encode(summary(pipeline())), type=list[OperatorSummary])
    assert difference(kept, pipeline()) == []
    assert difference(kept, pipeline(shuffle=5)) == ["shuffle [operator 2]: size 100 → 5"]


def test_inputs_connected_differently_are_named() -> None:
    one, two = ops.Skip(upstream=source(), count=1), ops.Skip(upstream=source(), count=2)
    before = ops.Zip(upstreams=(one, two))
    shared = source()
    after = ops.Zip(upstreams=(ops.Skip(upstream=shared, count=1), ops.Skip(upstream=shared, count=2)))
    assert fingerprint(before) == fingerprint(after)
    assert difference(before, ops.Zip(upstreams=(two, one)))


def test_one_of_two_equal_maps_removed_is_one_difference() -> None:
    two = mapped(abs, mapped(double))
    assert difference(two, mapped(abs)) == ["map(double) was removed"]
    assert difference(mapped(double), two) == ["map(abs) was added [operator 3]"]


def test_long_pipelines_are_compared_quickly() -> None:
    def chain(odd: int) -> Node:
        node = source()
        for i in range(2000):
            node = ops.Skip(upstream=node, count=5 if i == odd else 1)
        return node

    assert difference(chain(1000), chain(-1)) == ["skip [operator 1002]: count 5 → 1"]
