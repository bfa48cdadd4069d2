"""An operator's parameters as people read them: what was given, in the words of the call that made it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from penstock.graph.expressions import Expression
from penstock.graph.fields import defaults_of
from penstock.graph.functions import Payload, UserFunction
from penstock.graph.node import Node
from penstock.graph.ops import FusedBatch, OfSteps, SkipErrors
from penstock.graph.transforms import FeatureTransform

INTERNAL = frozenset({"salt", "prefix_key"})  # given by position, not by the user
_LONG_TEXT = 60
_MANY_ITEMS = 6


def given_parameters(record: Any) -> Iterator[tuple[str, Any, bool]]:
    """Yield (name, value, is required) of the public parameters of an operator that differ from their defaults.

    A parameter at its default is as good as absent: so a later release may add one, and old fingerprints stay valid.
    """
    names, defaults = record.__struct_fields__, defaults_of(type(record))
    public = record.parameters() if isinstance(record, Node) else ((name, getattr(record, name)) for name in names)
    for name, value in public:
        default = defaults.get(name, msgspec.NODEFAULT)
        # The types are compared first: True is not 1, and comparing an expression makes another expression.
        if type(value) is not type(default) or value != default:
            yield name, value, default is msgspec.NODEFAULT


def label(node: Node) -> str:
    """Return the operator as a call: `map(augment, rng)`, `batch(256, drop_last=True)`."""
    if isinstance(node, OfSteps):
        batch = [f"batch({_arguments(node)})"] if isinstance(node, FusedBatch) else []
        return "fused: " + " + ".join([*map(label, node.steps), *batch])
    return f"{node.name}({_arguments(node)})"


def short_label(node: Node) -> str:
    """Return the operator with its functions only: `map(augment)`, `batch`."""
    if isinstance(node, OfSteps):
        return label(node)
    names = [value.name for _, value in node.parameters() if isinstance(value, UserFunction)]
    return f"{node.name}({', '.join(names)})" if names else node.name


def _arguments(node: Node) -> str:
    shown = []
    for name, value, required in given_parameters(node):
        if name not in INTERNAL and name != "steps":
            shown.append(text(value) if required else f"{name}={text(value)}")
    return ", ".join(shown)


def text(value: Any) -> str:
    """Return a value in few words. Nothing is loaded, and no address shows.

    >>> text((1, 2)), text(("a.txt",)), text(tuple(range(99)))
    ('(1, 2)', "'a.txt'", '(0, 1, 2, 3, 4, 5, … 99 in all)')
    """
    match value:
        case UserFunction():
            return f"{value.name}, rng" if value.takes_rng else value.name
        case Payload():
            return value.name
        case SkipErrors():
            given = [f"{name}={text(part)}" for name, part, _ in given_parameters(value)]
            return f"skip({', '.join(given)})" if given else "skip"
        case FeatureTransform():
            return f"{', '.join(value.outputs) or 'rows'} = {value.OP}({', '.join(value.inputs)})"
        case Node():
            return label(value)
        case Expression() | None | bool() | int() | float() | np.generic():
            return repr(value.item() if isinstance(value, np.generic) else value)
        case str() | bytes():
            return _shortened(repr(value))
        case tuple() | list() if len(value) == 1:
            return text(value[0])
        case tuple() | list():
            shown = [text(part) for part in value[:_MANY_ITEMS]]
            return f"({', '.join(shown)}{f', … {len(value)} in all' if len(value) > _MANY_ITEMS else ''})"
        case dict():
            return _shortened("{" + ", ".join(f"{text(key)}: {text(part)}" for key, part in value.items()) + "}")
    return f"a {type(value).__qualname__}"


def _shortened(shown: str) -> str:
    return shown if len(shown) <= _LONG_TEXT else f"{shown[: _LONG_TEXT // 2]} … {shown[-_LONG_TEXT // 3 :]}"
