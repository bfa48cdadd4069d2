"""Pipelines for the tests of `graph`, and an example of every operator, made from its annotations."""

from __future__ import annotations

import types
import typing
from typing import Any

from penstock.graph import ops, readers
from penstock.graph import transforms as tr
from penstock.graph.codec import RECORDS
from penstock.graph.expressions import Expression, col
from penstock.graph.functions import Payload, UserFunction
from penstock.graph.node import Node

OPERATORS = sorted((cls for cls in RECORDS.values() if issubclass(cls, Node)), key=lambda cls: cls.__name__)
TRANSFORMS = [
    tr.Bucketize("a", out="1", borders=((1.0, 2.5), (3.0,))),
    tr.SigridHash("a", out="2", salt=-1, max_value=2**63 - 1),
    tr.FirstX("a", out="3", x=5, by="score"),
    tr.ComputeScore("a", "b", out="4", mode="cosine"),
    tr.EnumerateIds("a", out="5"),
    tr.PositiveModulus("a", out="6", divisor=7),
    tr.IdListTransform("a", "b", out="7", distinct=True),
    tr.BoxCox("a", out="8", lambda1=0.5, lambda2=1.0),
    tr.Logit("a", out="9", epsilon=0.01),
    tr.MapId("a", out="10", mapping=((-(2**63), 1),), default=4, drop=True),
    tr.GetLocalHour("a", out="11", offset="b"),
    tr.NGram(("a", "b"), out="12", n=3, form="flat", salt=1, vocabularies=((1, 2), (3,))),
    tr.Onehot("a", out="13", low=0.0, high=1.0, count=3, form="index"),
    tr.Clamp("a", out="14", low=-1.0, high=float("inf")),
    tr.Cartesian("a", "b", out="15", limit=9),
    tr.Sampling("file", "row", rate=0.5, seed=3),
    tr.CustomTransform("acme.double", ("a",), out="16", parameters=(("by", 2), ("name", "x"))),
]
"""One of each, with no parameter at its default."""
# Only what the annotations alone cannot tell.
SPECIAL: dict[type, dict[str, Any]] = {
    ops.Map: {"on_error": None},
    ops.Batch: {"drop_last": False},
    ops.TransformFeatures: {"transforms": tuple(TRANSFORMS)},
    ops.BucketByLength: {"boundaries": (10, 20), "batch_sizes": (8, 4, 2)},
}


def source(stop: int = 10) -> Node:
    return readers.Range(start=0, stop=stop)


def mapped(fn: Any, upstream: Node | None = None, **fields: Any) -> ops.Map:
    return ops.Map(upstream=upstream or source(), function=UserFunction.of(fn), **fields)


def double(x: int) -> int:
    return x * 2


def example(cls: type[Any]) -> Any:
    """Return an instance with no parameter at its default."""
    hints = typing.get_type_hints(cls)
    fields = {name: value_for(hints[name]) for name in cls.__struct_fields__}
    private = getattr(cls, "PRIVATE", ())
    given = {name: value for name, value in fields.items() if name not in private}
    return cls(**given | SPECIAL.get(cls, {}))


def value_for(hint: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return arguments[-1]
    if origin in (typing.Union, types.UnionType):
        return value_for(arguments[0])
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            first = value_for(arguments[0])
            return (
                first,
                *((source(20),) if arguments[0] is Node else ()),
                *((0.25,) if arguments[0] is float else ()),
            )
        return tuple(map(value_for, arguments))
    made = {
        int: 3,
        float: 0.75,
        bool: True,
        str: "text",
        Any: 7,
        Node: source(),
        UserFunction: UserFunction.of(double),
        Payload: Payload([1, 2, 3]),
        Expression: col("x") > 3,
        ops.SkipErrors: ops.SkipErrors(budget=5, quarantine="bad.jsonl"),
    }
    return made.get(hint)
