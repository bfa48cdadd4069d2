"""How the functions that a graph names are called: as steps over chunks, or for the children of an element."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from penstock.core.element import Element, batch_rows
from penstock.core.errors import InvalidPipelineError
from penstock.graph import ops
from penstock.graph.expressions import Expression
from penstock.graph.functions import UserFunction
from penstock.graph.node import Node
from penstock.graph.parameters import short_label as label_of
from penstock.runtime.contract import Idents
from penstock.runtime.ops import steps as step_kinds
from penstock.runtime.ops.children import MakeChildren
from penstock.runtime.quarantine import Quarantine
from penstock.runtime.randomness import ElementGenerators, derive_key
from penstock.runtime.stats import StageMeter

MakeQuarantine: TypeAlias = Callable[[Node, ops.SkipErrors, StageMeter], Quarantine]


@dataclass(frozen=True, slots=True)
class Calling:
    seed: int
    quarantine: MakeQuarantine

    def step(self, node: Node, meter: StageMeter) -> step_kinds.Step:
        match node:
            case ops.Map():
                return step_kinds.MapStep(self.calls(node, node.function, meter))
            case ops.Filter(predicate=Expression() as expression):
                return step_kinds.ExpressionFilterStep(label_of(node), expression)
            case ops.Filter(predicate=UserFunction() as function):
                return step_kinds.FilterStep(self.calls(node, function, meter))
            case ops.Select():
                return step_kinds.ColumnsStep(label_of(node), node.columns, step_kinds.select_columns(node.columns))
            case ops.Drop():
                return step_kinds.ColumnsStep(label_of(node), node.columns, step_kinds.drop_columns(node.columns))
            case ops.Rename():
                old_names = tuple(old for old, _ in node.names)
                return step_kinds.ColumnsStep(label_of(node), old_names, step_kinds.rename_columns(node.names))
        raise InvalidPipelineError(f"{node.name} cannot be a step of a fused operator")

    def calls(self, node: ops.Map | ops.Filter, function: UserFunction, meter: StageMeter) -> step_kinds.Calls:
        quarantine = None if node.on_error is None else self.quarantine(node, node.on_error, meter)
        return step_kinds.Calls(label_of(node), function.resolve, self._generators(node, function), quarantine)

    def children(self, node: ops.FlatMap | ops.Unbatch | ops.Interleave) -> MakeChildren:
        if isinstance(node, ops.Unbatch):
            return _rows_of
        return _children_of(node.function.resolve, self._generators(node, node.function))

    def _generators(
        self, node: ops.Map | ops.Filter | ops.FlatMap | ops.Interleave, function: UserFunction
    ) -> ElementGenerators | None:
        return ElementGenerators(derive_key("rng", self.seed, node.salt)) if function.takes_rng else None


def threads_of(nodes: Iterable[Node]) -> int | None:
    """Return how many threads the user asked for; None: it is for us to find out."""
    asked = [threads for node in nodes if (threads := getattr(node, "threads", None)) is not None]
    return max(asked) if asked else None


def _rows_of(batch: Element, ident: Idents | None) -> Iterable[Element]:
    return batch_rows(batch)


def _children_of(resolve: Callable[[], Callable[..., Any]], generators: ElementGenerators | None) -> MakeChildren:
    def children(element: Element, ident: Idents | None) -> Iterable[Element]:
        if generators is None:
            return resolve()(element)  # type: ignore[no-any-return]
        assert ident is not None
        return resolve()(element, rng=generators.fresh(ident))  # type: ignore[no-any-return]

    return children
