"""Looking at a dataset before it is read: its first element, any one by its index, and what an element holds."""

from __future__ import annotations

import operator
from typing import Any

from penstock.api.iteration import DatasetIterator, Plan
from penstock.core.element import Element, Ragged, is_namedtuple
from penstock.core.errors import EmptyInputError, InvalidArgumentError, InvalidPipelineError
from penstock.core.keyed import KeyedDense, KeyedRagged
from penstock.graph import ops
from penstock.graph.length import known_length
from penstock.graph.node import Node
from penstock.graph.parameters import short_label
from penstock.graph.readers import SourceNode
from penstock.sources.base import IndexableSource


def first_element(plan: Plan) -> Element:
    """Return the element that the next iteration begins with, which stays the next one."""
    return _first_of(plan, plan)


def _first_of(plan: Plan, of: Plan) -> Element:
    following = plan.next_epoch
    with DatasetIterator(of, epoch=following, seed=plan.seed, threads=1) as iterator:
        plan.next_epoch = following
        for element in iterator:
            return element
    raise EmptyInputError("the dataset is empty: it has no element to look at")


def element_at(plan: Plan, index: int) -> Element:
    """Return an element of the next iteration by its number; nothing is computed for those before it."""
    try:
        index = operator.index(index)
    except TypeError:
        raise InvalidArgumentError(
            f"dataset[{index!r}]: an index is a whole number; skip() and take() give a part"
        ) from None
    _check_indexable(plan)
    count = known_length(plan.node, plan.source_length)
    assert count is not None, "an indexable source knows its length, and the operators keep it"
    if not -count <= index < count:
        raise IndexError(f"index {index} of a dataset of {count:,} elements")
    rest = Plan(ops.Skip(upstream=plan.node, count=index % count))
    rest.share_sources(plan)
    return _first_of(plan, rest)


def _check_indexable(plan: Plan) -> None:
    node: Node = plan.node
    while not isinstance(node, SourceNode):
        traits = node.traits
        if not isinstance(node, ops.Unary) or not (isinstance(node, ops.Shuffle) or traits.keeps_order):
            raise _not_indexable(node, "gives other elements than its input")
        if traits.may_skip:
            raise _not_indexable(node, "may leave elements out")
        node = node.upstream
    if not isinstance(plan.source_of(node), IndexableSource):
        raise _not_indexable(node, "can only be read in order")


def _not_indexable(node: Node, why: str) -> InvalidPipelineError:
    return InvalidPipelineError(
        f"dataset[i]: {short_label(node)} {why}, so that an element has no index; look at peek(), or iterate"
    )


def described(element: Element) -> dict[str, str]:
    """Return what an element holds: each leaf by its path, with its type, and its shape if it is an array.

    >>> import numpy as np
    >>> described({"image": np.zeros((2, 3), "u1"), "at": (1.5, "x")})
    {'image': 'uint8[2, 3]', 'at[0]': 'float', 'at[1]': 'str'}
    """
    found: dict[str, str] = {}
    _describe(element, "", found)
    return found


def _describe(value: Any, path: str, found: dict[str, str]) -> None:
    if isinstance(value, dict):
        for key, part in value.items():
            _describe(part, f"{path}.{key}" if path else str(key), found)
    elif is_namedtuple(value):
        for name, part in zip(value._fields, value):
            _describe(part, f"{path}.{name}" if path else name, found)
    elif isinstance(value, (list, tuple)):
        for place, part in enumerate(value):
            _describe(part, f"{path}[{place}]", found)
    else:
        found[path] = _type_of(value)


def _type_of(leaf: Any) -> str:
    if isinstance(leaf, Ragged):
        return f"ragged {leaf.values.dtype}"
    if isinstance(leaf, (KeyedDense, KeyedRagged)):
        return f"{'dense' if isinstance(leaf, KeyedDense) else 'ragged'} of {len(leaf.keys)} features"
    if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
        dtype = str(leaf.dtype).removeprefix("torch.")
        return f"{dtype}{list(leaf.shape)}" if len(leaf.shape) else dtype
    return "None" if leaf is None else type(leaf).__name__
