"""Checks a plan after each pass, so that a broken pass is found where it broke and not in somebody's training run.

A plan is read from the root down as *anchors*, operators that no pass moves or removes, and what stands between two of
them. The anchors must be the same before and after, with the same parameters and in the same order: so states keep
their shape and counters count the same elements. Between two anchors,

- functions are called in the same order, with the same salts and policies, on what the same filters let through;
- shuffles stay on their side of everything that leaves elements out, with their seeds and salts; those that only
  one-to-one operators lie between count as one, of the largest size.

Filters on columns may end up in the predicate of a source. Selects, drops and renames may go, but none may come. Nor
may feature transforms, or change their order: those of which nothing is needed may go, but for samplings.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeAlias

import msgspec

from penstock.core.errors import PenstockError
from penstock.graph import ops
from penstock.graph.expressions import (
    And,
    Arithmetic,
    Column,
    Compare,
    CompareValues,
    Expression,
    IsIn,
    IsNull,
    Not,
    Operand,
    Or,
)
from penstock.graph.node import Node
from penstock.graph.parameters import short_label
from penstock.graph.readers import ColumnarSource, SourceNode
from penstock.graph.transforms import FeatureTransform, Sampling
from penstock.graph.traverse import walk
from penstock.passes.no_ops import is_identity

Token: TypeAlias = tuple[Any, ...]
"""What an operator does, for comparison; objects of the user's are compared by identity."""
PLAIN = (type(None), bool, int, float, str, bytes)


class InvalidPlanError(PenstockError):
    """A pass made a plan that is not the same pipeline: our mistake, not the user's."""

    def __init__(self, pass_name: str, operator: Node, what: str) -> None:
        self.pass_name, self.operator, self.what = pass_name, operator, what
        super().__init__(
            f"internal error: the pass {pass_name!r} made an invalid plan at {short_label(operator)}: {what}; "
            "nothing was run. Until it is mended, the pipeline runs with optimize=False"
        )


class _Wrong(Exception):
    def __init__(self, operator: Node, what: str) -> None:
        self.operator, self.what = operator, what
        super().__init__(what)


def verify(before: Node, after: Node, *, pass_name: str) -> None:
    """Raise `InvalidPlanError` unless `after` is a plan, and of the same pipeline as `before`."""
    try:
        _check_acyclic(after)
        for node in walk(after):
            _check_operator(node)
        _check_same_pipeline(before, after)
    except _Wrong as wrong:
        raise InvalidPlanError(pass_name, wrong.operator, wrong.what) from None


# One graph


def _check_acyclic(root: Node) -> None:
    done: set[Node] = set()
    above: set[Node] = set()
    pending = [root]
    while pending:
        node = pending[-1]
        if node in above or node in done:
            pending.pop()
            above.discard(node)
            done.add(node)
            continue
        above.add(node)
        for upstream in node.inputs:
            if upstream in above:
                raise _Wrong(upstream, "it reads itself")
            pending.append(upstream)


def _check_operator(node: Node) -> None:
    if isinstance(node, ops.Hole):
        raise _Wrong(node, "a hole outside of a step")
    if not isinstance(node, SourceNode) and not node.inputs:
        raise _Wrong(node, "its input is missing")
    if isinstance(node, SourceNode) and node.inputs:
        raise _Wrong(node, "a source has an input")
    if isinstance(node, ops.OfSteps):
        for step in node.steps:
            if not (ops.is_one_to_one(step) if isinstance(node, ops.FusedBatch) else ops.is_step(step)):
                raise _Wrong(step, f"it cannot be a step of a {node.name}")
            if not isinstance(step.inputs[0], ops.Hole):
                raise _Wrong(step, "a step does not stand on a hole")


# Two graphs


class _Place(msgspec.Struct, frozen=True):
    """Where a stretch between two anchors begins: below steps that a fused batch above has taken in, at a node."""

    taken_in: tuple[Node, ...]
    node: Node


class _Stretch(msgspec.Struct):
    """What stands between two anchors, from the top down, and the lower anchor."""

    anchor: Node
    calls: list[Token] = []
    """Functions, conditions and whatever else computes, in order."""
    order: list[Token] = []
    """Shuffles and whatever leaves elements out, in order."""
    transforms: list[FeatureTransform] = []
    """Feature transforms that leave out nothing, from the last to the first."""
    column_choices: int = 0
    prefetches: Counter[int] = msgspec.field(default_factory=Counter)

    def add(self, node: Node) -> None:
        match node:
            case ops.Shuffle():
                self._add_shuffle(node)
            case ops.Filter(predicate=Expression() as condition):
                self.add_condition(condition)
            case ops.Map() if is_identity(node.function) and ops.is_one_to_one(node):
                pass
            case ops.Prefetch():
                if node.size is not None:
                    self.prefetches[node.size] += 1
            case ops.ColumnChoice():
                self.column_choices += 1
            case ops.TransformFeatures():
                for transform in reversed(node.transforms):
                    if not isinstance(transform, Sampling):
                        self.transforms.append(transform)
                        continue
                    self.calls.append(("sampling", transform))
                    self.order.append(("sampling", transform))
            case _:
                token = _token(node)
                self.calls.append(token)
                if not ops.is_one_to_one(node):
                    self.order.append(token)

    def add_condition(self, condition: Expression) -> None:
        """Add a condition and, from the last to the first, those joined in it."""
        while isinstance(condition, And):
            self.add_condition(condition.right)
            condition = condition.left
        self.calls.append(_shape(condition))
        self.order.append(_shape(condition))

    def _add_shuffle(self, node: ops.Shuffle) -> None:
        size = float("inf") if node.size is None else node.size
        if self.order and self.order[-1][0] == "shuffle":
            *same, larger = self.order[-1]
            self.order[-1] = (*same, max(larger, size))
        else:
            self.order.append(("shuffle", node.seed, node.salt, node.reshuffle, size))


def _check_same_pipeline(before: Node, after: Node) -> None:
    """Walk both graphs side by side."""
    pending = [(_Place((), before), _Place((), after))]
    seen: set[tuple[_Place, _Place]] = set()
    made_of: dict[Node, Node] = {}
    became: dict[Node, Node] = {}
    while pending:
        pair = pending.pop()
        if pair in seen:
            continue
        seen.add(pair)
        old, new = map(_stretch, pair)
        _check_stretch(old, new, pair[1].node)
        if isinstance(old.anchor, SourceNode):
            # A source's number is part of its elements' identity, and each source has one.
            if became.setdefault(old.anchor, new.anchor) is not new.anchor:
                raise _Wrong(new.anchor, "a source that two operators read has become two")
            if made_of.setdefault(new.anchor, old.anchor) is not old.anchor:
                raise _Wrong(new.anchor, "two sources have become one")
        pending.extend(zip(_below(old.anchor), _below(new.anchor)))


def _stretch(place: _Place) -> _Stretch:
    nodes: list[Node] = list(place.taken_in)
    node = place.node
    while ops.passes_states(node) or isinstance(node, ops.Shuffle):
        nodes.extend(reversed(node.steps) if isinstance(node, ops.Fused) else (node,))
        node = node.upstream
    stretch = _Stretch(node)
    for each in nodes:
        stretch.add(each)
    if isinstance(node, ColumnarSource) and node.predicate is not None:
        stretch.add_condition(node.predicate)
    return stretch


def _below(anchor: Node) -> list[_Place]:
    taken_in = tuple(reversed(anchor.steps)) if isinstance(anchor, ops.FusedBatch) else ()
    return [_Place(taken_in, upstream) for upstream in anchor.inputs]


def _check_stretch(old: _Stretch, new: _Stretch, at: Node) -> None:
    if _token(old.anchor) != _token(new.anchor):
        raise _Wrong(new.anchor, f"where it stands, {short_label(old.anchor)} stood with its own parameters")
    if isinstance(old.anchor, SourceNode) and "columns" in old.anchor.NARROWED:
        _check_columns(new.anchor, *(dict(anchor.parameters())["columns"] for anchor in (old.anchor, new.anchor)))
    if old.calls != new.calls:
        raise _Wrong(at, "functions or conditions were lost, added, changed or reordered")
    if old.order != new.order:
        raise _Wrong(at, "a shuffle changed, or moved across what leaves elements out")
    rest = iter(old.transforms)
    if not all(transform in rest for transform in new.transforms):
        raise _Wrong(at, "feature transforms were added, changed or reordered")
    if new.column_choices > old.column_choices:
        raise _Wrong(at, "a column operator was added")
    if new.prefetches != old.prefetches:
        raise _Wrong(at, "a prefetch of a given size was lost or added")


def _check_columns(source: Node, old: tuple[str, ...] | None, new: tuple[str, ...] | None) -> None:
    if old is not None and (new is None or not set(new) <= set(old)):
        raise _Wrong(source, f"it reads the columns {new}, and was asked for {old} only")


def _token(node: Node) -> Token:
    """Return type and parameters of an operator, without its inputs."""
    if isinstance(node, (ops.Batch, ops.FusedBatch)):
        collate, mask = (node.collate, node.mask) if isinstance(node, ops.Batch) else (None, None)
        return ("batch", node.size, node.drop_last, None if collate is None else id(collate), mask)
    narrowed = node.NARROWED if isinstance(node, SourceNode) else ()
    values: list[Any] = [type(node).__name__]
    for name in node.__struct_fields__:
        value = getattr(node, name)
        if isinstance(value, Node) or name in ("upstreams", *narrowed):
            continue
        values.append((name, type(value).__name__, value if _is_plain(value) else id(value)))
    return tuple(values)


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN)


def _shape(condition: Expression) -> Token:
    """Return a condition without the names of its columns, which a rename may have changed."""
    match condition:
        case And(left=left, right=right) | Or(left=left, right=right):
            return (type(condition).__name__, _shape(left), _shape(right))
        case Not(operand=operand):
            return ("Not", _shape(operand))
        case Compare():
            return ("Compare", condition.op, type(condition.value).__name__, condition.value)
        case IsIn():
            return ("IsIn", condition.values)
        case Column() | IsNull():
            return (type(condition).__name__,)
        case CompareValues():
            return ("CompareValues", condition.op, _operand_shape(condition.left), _operand_shape(condition.right))
    raise TypeError(f"unknown expression {condition!r}")


def _operand_shape(operand: Operand) -> Any:
    if isinstance(operand, Arithmetic):
        return (operand.sign, _operand_shape(operand.left), _operand_shape(operand.right))
    return "column" if isinstance(operand, Column) else operand
