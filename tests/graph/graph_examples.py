"""Pipelines for the tests of `graph`, and an example of every operator, made from its annotations."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from penstock.graph import ops, readers
from penstock.graph.codec import RECORDS
from penstock.graph.expressions import Expression, col
from penstock.graph.functions import Payload, UserFunction
from penstock.graph.node import Node

OPERATORS = sorted((cls for cls in RECORDS.values() if issubclass(cls, Node)), key=lambda cls: cls.__name__)
# Only what the annotations alone cannot tell.
SPECIAL: dict[type, dict[str, Any]] = {
    ops.Map: {"on_error": None},
    ops.Batch: {"drop_last": False},
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
    fields = {field.name: value_for(hints[field.name]) for field in dataclasses.fields(cls)}
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
