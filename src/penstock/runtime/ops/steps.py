"""map and filter as steps: what a transform does to a chunk. A step never keeps anything from one chunk to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from penstock.core.errors import InvalidPipelineError
from penstock.graph import ops
from penstock.graph.expressions import Expression
from penstock.graph.parameters import short_label
from penstock.runtime.blame import blame
from penstock.runtime.building import Step, step_of
from penstock.runtime.calling import Calling, Calls, call_each
from penstock.runtime.column_filters import is_column_batch, kept_rows
from penstock.runtime.contract import Chunk, Selected
from penstock.runtime.ordered import Outcome
from penstock.runtime.quarantine import Quarantine
from penstock.runtime.repeating import repeat_some
from penstock.runtime.stats import StageMeter


class CallingStep(msgspec.Struct):
    """Base of steps that call a user's function."""

    calls: Calls


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


class FilterStep(CallingStep):
    def run(self, chunk: Chunk) -> Outcome:
        flags, judged, error = self.calls.results(chunk)
        judged = range(len(flags)) if judged is None else judged
        try:
            kept = [k for k, flag in zip(judged, flags) if flag]
        except Exception:
            kept, wrong, error = self._until_unclear(judged, flags, chunk)
            return Outcome(_select(chunk, [chunk.elements[k] for k in kept], kept, wrong), error)
        total = len(flags) if error is not None else len(chunk.elements)
        return Outcome(_select(chunk, [chunk.elements[k] for k in kept], kept, total), error)

    def _until_unclear(
        self, judged: Sequence[int], flags: Sequence[Any], chunk: Chunk
    ) -> tuple[list[int], int, Exception]:
        """Return what is kept before the first element whose answer is neither true nor false, which, and the error."""
        kept: list[int] = []
        for k, flag in zip(judged, flags):
            try:
                if flag:
                    kept.append(k)
            except Exception as raised:
                label = self.calls.label
                error = raised if not isinstance(flag, np.ndarray) else _many_answers(label, flag)
                return kept, k, blame(error, label, chunk.marks.origin(k))
        raise AssertionError("an answer was unclear when it was asked for first")


def _many_answers(label: str, flags: np.ndarray[Any, Any]) -> InvalidPipelineError:
    return InvalidPipelineError(
        f"{label} returned an array of shape {list(flags.shape)}; a filter keeps or leaves out whole elements. "
        "For rows of column batches use filter(col(...)) after the reader, or unbatch() before the filter"
    )


@step_of(ops.Map)
def _map_step(node: ops.Map, calling: Calling, meter: StageMeter) -> Step:
    return MapStep(calling.calls(node, node.function, node.salt, meter))


class ExpressionFilterStep(msgspec.Struct):
    """Keeps the elements for which an expression is true; of a column batch, the rows."""

    label: str
    expression: Expression

    def run(self, chunk: Chunk) -> Outcome:
        judged: list[Any] = []
        error: BaseException | None = None
        over_columns = is_column_batch(chunk.elements[0], self.expression) if chunk.elements else False
        try:
            call_each(self._kept_rows if over_columns else self.expression.evaluate, chunk.elements, judged)
        except Exception as raised:
            error = blame(raised, self.label, chunk.marks.origin(len(judged)))
        if over_columns:
            kept = [k for k, batch in enumerate(judged) if batch is not None]
            out = [judged[k] for k in kept]
        else:
            kept = [k for k, flag in enumerate(judged) if flag]
            out = [chunk.elements[k] for k in kept]
        return Outcome(_select(chunk, out, kept, len(judged)), error)

    def _kept_rows(self, batch: Any) -> Any:
        return kept_rows(batch, self.expression)


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
    visit = chunk.visit
    if chunk.made:
        return Outcome(chunk)
    for step in steps:
        if visit is not None and visit.is_kept and isinstance(step, CallingStep) and step.calls.quarantine is None:
            repeat_some(step.calls.label, step.run, chunk)
        outcome = step.run(chunk)
        chunk = outcome.chunk
        error = outcome.error or error
        if not chunk.elements:
            break
    chunk.visit = visit
    return Outcome(chunk, error)


def quarantines_of(steps: Sequence[Step]) -> list[Quarantine]:
    found = [step.calls.quarantine for step in steps if isinstance(step, CallingStep)]
    return [quarantine for quarantine in found if quarantine is not None]
