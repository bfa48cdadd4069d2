"""One skipped element, run again.

The graph is lowered as it was, so that shuffles, source numbers and random numbers are the same; of its stages only
those below the failing operator are opened, at the pass and state that were written down, and asked for one element.
Everything happens in the caller's thread: a `breakpoint()` in the user's function works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from penstock.core.element import Element
from penstock.core.errors import ReplayError
from penstock.graph.codec import decode_graph
from penstock.graph.functions import UserFunction
from penstock.graph.readers import SourceNode
from penstock.runtime.blame import blame
from penstock.runtime.budget import default_budget
from penstock.runtime.building import Step
from penstock.runtime.calling import Calls
from penstock.runtime.contract import Chunk, Origin, Stage, State
from penstock.runtime.lower import Lowering
from penstock.runtime.ops.source import IndexedSource, SplitSource
from penstock.runtime.ops.steps import CallingStep, run_steps
from penstock.runtime.ops.transform import Transform
from penstock.runtime.quarantine import Quarantine, Quarantined
from penstock.sources.base import Source
from penstock.sources.registry import open_source


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the element: a result, or an error."""

    result: Element = None
    error: Exception | None = None


def replay(
    entry: Quarantined, function: UserFunction | None = None, *, called_with: Callable[[Element], None] | None = None
) -> Replayed:
    """Run a skipped element again, through `function` if one is given instead of its own.

    This loads and calls the functions stored with the element. `called_with` is told the element right before the call.
    """
    if not entry.graph:
        raise ReplayError(f"{entry.id} cannot be replayed, its pipeline could not be stored: {entry.missing}")
    root, quarantines = _lower(entry)
    if not 0 <= entry.number < len(quarantines):
        raise ReplayError(f"{entry.id} names operator {entry.number}, which its pipeline does not have")
    wanted = quarantines[entry.number]
    try:
        for stage in _stages(root):
            if isinstance(stage, (SplitSource, IndexedSource)) and stage.quarantine is wanted:
                if function is not None:
                    raise ReplayError(f"{entry.operator} calls no function that could be replaced")
                wanted.state = entry.state
                return _read_again(stage, entry)
            if isinstance(stage, Transform):
                for i, step in enumerate(stage.steps):
                    if isinstance(step, CallingStep) and step.calls.quarantine is wanted:
                        given = _input_of(stage, stage.steps[:i], entry)
                        if called_with is not None:
                            called_with(given.elements[0])
                        return _call_again(step.calls, given, function)
    finally:
        root.close()
    raise ReplayError(f"{entry.operator} does not run the way it did when {entry.id} was skipped")


class _Replaying(Quarantine):
    """Leaves out what was left out then, and writes nothing; only the failure at `state` comes out."""

    state: State = "none"

    def record(self, error: Exception, origin: Origin | None, state: State) -> Exception | None:
        return error if state == self.state else None


def _lower(entry: Quarantined) -> tuple[Stage, list[_Replaying]]:
    opened: dict[SourceNode, Source] = {}

    def source_of(node: SourceNode) -> Source:
        if node not in opened:
            opened[node] = open_source(node)
        return opened[node]

    quarantines: list[_Replaying] = []
    lowering = Lowering(
        seed=entry.seed,
        epoch=entry.epoch,
        budget=default_budget(threads=1),
        pool=None,
        source_of=source_of,
        quarantine_kind=_Replaying,
        quarantines=quarantines,  # type: ignore[arg-type]
    )
    return lowering.lower(decode_graph(entry.graph)), quarantines


def _stages(root: Stage) -> Iterator[Stage]:
    pending = [root]
    while pending:
        stage = pending.pop()
        yield stage
        pending.extend(stage.inputs)


def _read_again(stage: SplitSource | IndexedSource, entry: Quarantined) -> Replayed:
    stage.open(entry.pass_, entry.state)
    try:
        chunk = stage.pull(1)
    except Exception as error:
        return Replayed(error=error.with_traceback(None))  # nothing of the user's is in it
    _check_origin(chunk, entry)
    return Replayed(result=chunk.elements[0])


def _input_of(stage: Transform, before: Sequence[Step], entry: Quarantined) -> Chunk:
    """Return what the failing step was given: the first input from the state on that the steps before it let pass."""
    stage.upstream.open(entry.pass_, entry.state)
    while True:
        chunk = stage.upstream.pull(1)
        if chunk.elements:
            outcome = run_steps(before, chunk)
            if outcome.error is not None:
                raise outcome.error
            chunk = outcome.chunk
            if not chunk.elements:
                continue
        _check_origin(chunk, entry)
        return chunk


def _check_origin(chunk: Chunk, entry: Quarantined) -> None:
    found, then = chunk.marks.origin(0) if chunk.elements else None, entry.origin
    same = found == then or (found and then and (found.split, found.index) == (then.split, then.index))
    if not chunk.elements or not same:
        there = f"{found} comes" if chunk.elements else "the data ends"
        raise ReplayError(
            f"where {entry.origin} was, {there}: the data, or a function that decides which elements come, has changed"
        )


def _call_again(calls: Calls, given: Chunk, function: UserFunction | None) -> Replayed:
    element = given.elements[0]
    takes_rng = calls.generators is not None if function is None else function.takes_rng
    if takes_rng and (calls.generators is None or given.idents is None):
        raise ReplayError(f"the function given takes rng, which {calls.label} does not: there are no random numbers")
    try:
        call = calls.function if function is None else function.resolve()
        if calls.generators is None or given.idents is None or not takes_rng:
            return Replayed(result=call(element))
        return Replayed(result=call(element, rng=calls.generators.at(given.idents[0])))
    except Exception as error:
        return Replayed(error=blame(error, calls.label, given.marks.origin(0)))
