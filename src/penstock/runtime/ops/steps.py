"""Steps: what a transform does to a chunk. A step never keeps anything from one chunk to the next.

What was made before a call failed is kept, so the hot path needs no try per element and still knows which element it
was. The loops are plain ones: `list.extend(map(...))` takes a `StopIteration` of the function for the end of the chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType, MethodType
from typing import Any, Protocol

import numpy as np

from penstock.core.element import Ragged
from penstock.core.errors import InvalidPipelineError
from penstock.graph.expressions import Expression
from penstock.runtime.blame import blame
from penstock.runtime.contract import Chunk, Selected
from penstock.runtime.ordered import Outcome
from penstock.runtime.quarantine import Quarantine
from penstock.runtime.randomness import ElementGenerators


class Step(Protocol):
    def run(self, chunk: Chunk) -> Outcome: ...


def call_each(function: Callable[[Any], Any], elements: Sequence[Any], out: list[Any]) -> None:
    """Append a result for each element; where a call raises, `out` has the results before it."""
    for element in elements:
        out.append(function(element))  # noqa: PERF401 - extend() would end at a StopIteration


class Calls:
    """Calls a user function on each element of a chunk."""

    def __init__(
        self,
        label: str,
        resolve: Callable[[], Callable[..., Any]],
        generators: ElementGenerators | None,
        quarantine: Quarantine | None,
    ) -> None:
        self.label = label
        self.resolve = resolve
        self.generators = generators
        self.quarantine = quarantine

    @cached_property
    def function(self) -> Callable[..., Any]:
        """What to call; a user's class is constructed at its first use, not when the pipeline is built.

        Of an object it is its `__call__` itself: a plain loop calls that in half the time.
        """
        resolved = self.resolve()
        call = type(resolved).__call__
        return MethodType(call, resolved) if isinstance(call, FunctionType) else resolved

    def results(self, chunk: Chunk) -> tuple[list[Any], Sequence[int] | None, BaseException | None]:
        """Return the results, which elements they belong to (None: all from the first on), and what stopped it."""
        if self.quarantine is not None:
            return self._results_or_skip(chunk, self.quarantine)
        function = self.function
        out: list[Any] = []
        try:
            if self.generators is None:
                call_each(function, chunk.elements, out)
            else:
                assert chunk.idents is not None
                at = self.generators.at
                for element, ident in zip(chunk.elements, chunk.idents):
                    out.append(function(element, rng=at(ident)))
        except Exception as error:
            return out, None, blame(error, self.label, chunk.marks.origin(len(out)))
        return out, None, None

    def _results_or_skip(
        self, chunk: Chunk, quarantine: Quarantine
    ) -> tuple[list[Any], Sequence[int], BaseException | None]:
        function = self.function
        out: list[Any] = []
        kept: list[int] = []
        quarantine.entered(len(chunk.elements))
        for k, element in enumerate(chunk.elements):
            try:
                if self.generators is None:
                    result = function(element)
                else:
                    assert chunk.idents is not None
                    result = function(element, rng=self.generators.at(chunk.idents[k]))
            except Exception as error:
                blamed = blame(error, self.label, chunk.marks.origin(k))
                over_budget = quarantine.admit(blamed, chunk.marks, k)
                if over_budget is not None:
                    return out, kept, over_budget
            else:
                out.append(result)
                kept.append(k)
        return out, kept, None


@dataclass(slots=True)
class MapStep:
    calls: Calls

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
class FilterStep:
    calls: Calls

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
            wrong = self._over_columns(chunk.elements[len(flags)]) or raised
            error = blame(wrong, self.label, chunk.marks.origin(len(flags)))
        kept = [k for k, flag in enumerate(flags) if flag]
        return Outcome(_select(chunk, [chunk.elements[k] for k in kept], kept, len(flags)), error)

    def _over_columns(self, element: Any) -> Exception | None:
        """Return the error of a filter that stands over column batches; None: it is another."""
        columns = [element.get(name) for name in self.expression.columns()] if isinstance(element, dict) else ()
        if not any(isinstance(column, (np.ndarray, Ragged)) for column in columns):
            return None
        return InvalidPipelineError(
            f"{self.label}({self.expression!r}) is given a column batch, whose columns are arrays; filter right after "
            "the reader, which then keeps rows, or unbatch() before the filter"
        )


@dataclass(slots=True)
class ColumnsStep:
    """select, drop and rename: a function of ours on dicts."""

    label: str
    columns: tuple[str, ...]
    """What an element must have."""
    change: Callable[[dict[str, Any]], dict[str, Any]]

    def run(self, chunk: Chunk) -> Outcome:
        out: list[Any] = []
        try:
            out.extend(map(self.change, chunk.elements))
        except (KeyError, TypeError, AttributeError):
            element = chunk.elements[len(out)]
            if isinstance(element, dict):
                missing = ", ".join(repr(column) for column in self.columns if column not in element)
                said = f"an element has no column {missing}; it has the columns {sorted(map(str, element))}"
            else:
                said = f"an element is a {type(element).__name__}, not a dict"
            error = InvalidPipelineError(f"{self.label}: {said}")
            idents = None if chunk.idents is None else chunk.idents[: len(out)]
            return Outcome(Chunk(out, chunk.marks, idents), blame(error, self.label, chunk.marks.origin(len(out))))
        return Outcome(Chunk(out, chunk.marks, chunk.idents))


def select_columns(columns: tuple[str, ...]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda row: {column: row[column] for column in columns}


def drop_columns(columns: tuple[str, ...]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    dropped = frozenset(columns)

    def drop(row: dict[str, Any]) -> dict[str, Any]:
        if not dropped <= row.keys():
            raise KeyError(columns)
        return {column: value for column, value in row.items() if column not in dropped}

    return drop


def rename_columns(names: tuple[tuple[str, str], ...]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    new_names = dict(names)

    def rename(row: dict[str, Any]) -> dict[str, Any]:
        if not new_names.keys() <= row.keys():
            raise KeyError(names)
        return {new_names.get(column, column): value for column, value in row.items()}

    return rename


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
    found = [step.calls.quarantine for step in steps if isinstance(step, (MapStep, FilterStep))]
    return [quarantine for quarantine in found if quarantine is not None]
