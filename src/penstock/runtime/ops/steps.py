"""map and filter as steps: what a transform does to a chunk. A step never keeps anything from one chunk to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.graph import ops
from penstock.graph.expressions import Expression
from penstock.graph.parameters import short_label
from penstock.runtime.blame import blame
from penstock.runtime.building import Step, step_of
from penstock.runtime.calling import Calling, Calls, call_each
from penstock.runtime.contract import Chunk, Selected
from penstock.runtime.ordered import Outcome
from penstock.runtime.quarantine import Quarantine
from penstock.runtime.stats import StageMeter


@dataclass(slots=True)
class CallingStep:
    """Base of steps that call a user's function."""

    calls: Calls


@dataclass(slots=True)
class MapStep(CallingStep):
    def run(self, chunk: Chunk) -> Outcome:
        out, kept, error = self.calls.results(chunk)
        if kept is None and error is None:
            return Outcome(Chunk(out, chunk.marks, chunk.idents))
        if kept is not None and len(kept) < len(chunk.elements):
            return Outcome(_select(chunk, out, kept, len(chunk.elements)), error)
        idents = chunk.idents
        if error is not None and idents is not None:
            idents = idents[: len(out)]
        return Outcome(Chunk(out, chunk.marks, idents), error)


@dataclass(slots=True)
class FilterStep(CallingStep):
    def run(self, chunk: Chunk) -> Outcome:
        flags, judged, error = self.calls.results(chunk)
        judged = range(len(flags)) if judged is None else judged
        kept = [k for k, flag in zip(judged, flags) if flag]
        total = len(flags) if error is not None else len(chunk.elements)
        return Outcome(_select(chunk, [chunk.elements[k] for k in kept], kept, total), error)


@step_of(ops.Map)
def _map_step(node: ops.Map, calling: Calling, meter: StageMeter) -> Step:
    return MapStep(calling.calls(node, node.function, node.salt, meter))


@dataclass(slots=True)
class ExpressionFilterStep:
    label: str
    expression: Expression

    def run(self, chunk: Chunk) -> Outcome:
        flags: list[bool] = []
        error: BaseException | None = None
        try:
            call_each(self.expression.evaluate, chunk.elements, flags)
        except Exception as raised:
            error = blame(raised, self.label, chunk.marks.origin(len(flags)))
        kept = [k for k, flag in enumerate(flags) if flag]
        return Outcome(_select(chunk, [chunk.elements[k] for k in kept], kept, len(flags)), error)


@step_of(ops.Filter)
def _filter_step(node: ops.Filter, calling: Calling, meter: StageMeter) -> Step:
    if isinstance(node.predicate, Expression):
        return ExpressionFilterStep(short_label(node), node.predicate)
    return FilterStep(calling.calls(node, node.predicate, node.salt, meter))


def _select(chunk: Chunk, out: list[Any], kept: Sequence[int], total: int) -> Chunk:
    idents = None if chunk.idents is None else chunk.idents[kept]
    return Chunk(out, Selected(chunk.marks, kept, total), idents)


def run_steps(steps: Sequence[Step], chunk: Chunk) -> Outcome:
    """Run steps one after the other over a chunk; of two failures, the one of the earlier element counts."""
    error: BaseException | None = None
    for step in steps:
        outcome = step.run(chunk)
        chunk = outcome.chunk
        error = outcome.error or error
        if not chunk.elements:
            break
    return Outcome(chunk, error)


def quarantines_of(steps: Sequence[Step]) -> list[Quarantine]:
    found = [step.calls.quarantine for step in steps if isinstance(step, CallingStep)]
    return [quarantine for quarantine in found if quarantine is not None]
