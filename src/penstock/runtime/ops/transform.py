"""map, filter, select, drop, rename and their fusions: steps over chunks, on threads where that helps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from penstock.core.errors import InvalidPipelineError
from penstock.graph import ops
from penstock.graph.node import Node
from penstock.runtime.blame import blame
from penstock.runtime.building import Site, Step, builds, make_step
from penstock.runtime.calling import Calls
from penstock.runtime.contract import Chunk, Idents, Marks, Origin, Stage, State
from penstock.runtime.flight import Flight
from penstock.runtime.ops.steps import quarantines_of, run_steps
from penstock.runtime.ordered import Buffering, Ordered, Outcome
from penstock.runtime.pool import ThreadPool
from penstock.runtime.stats import StageMeter
from penstock.runtime.tuning import Tuner


class Transform(Ordered):
    """Steps that keep the state of their input: one-to-one, or leaving elements out."""

    def __init__(
        self,
        meter: StageMeter,
        upstream: Stage,
        pool: ThreadPool | None,
        tuner: Tuner,
        room: Buffering,
        *,
        steps: Sequence[Step],
        one_to_one: bool,
        flight: Flight | None = None,
    ) -> None:
        super().__init__(meter, upstream, pool, tuner, room, flight)
        self.steps = steps
        self._one_to_one = one_to_one

    def _work(self, task: Chunk) -> Outcome:
        if self._flight is None:
            return run_steps(self.steps, task)
        return self._flight.record(task.marks.origin(0), len(task.elements), lambda: run_steps(self.steps, task))

    def _open_upstream(self, pass_: int, state: State) -> None:
        for quarantine in quarantines_of(self.steps):
            quarantine.pass_ = pass_
        super()._open_upstream(pass_, state)

    def skip(self, count: int) -> int:
        """Nothing is computed for what is skipped, unless it decides what counts."""
        if self._one_to_one:
            with self._feed:  # nobody takes an input meanwhile, and whoever did has reserved a slot
                at_hand = self._rest or self._slots or (self._flight is not None and self._flight.rest)
                if not at_hand and self._end is None:
                    return self.upstream.skip(count)
        return super().skip(count)


class _GroupMarks(msgspec.Struct, frozen=True):
    """Outputs of a group of inputs; the state inside is `[outputs given, state before the group]`."""

    start: tuple[Marks, int]
    end: tuple[Marks, int]
    count: int
    offset: int

    def at(self, k: int) -> State:
        done = self.offset + k
        marks, at = self.end if done == self.count else self.start
        return [0 if done == self.count else done, marks.at(at)]

    def origin(self, k: int) -> Origin | None:
        marks, at = self.start
        return marks.origin(at)


class _Group(msgspec.Struct):
    elements: list[Any]
    idents: list[Idents]
    start: tuple[Marks, int]
    end: tuple[Marks, int]
    dropped: int


class GroupedMap(Ordered):
    """`map(fn, batch_size=n)`: groups are counted from the start of the pass, so a resume finds the same ones."""

    _drop: int

    def __init__(
        self,
        meter: StageMeter,
        upstream: Stage,
        pool: ThreadPool | None,
        tuner: Tuner,
        room: Buffering,
        *,
        size: int,
        calls: Calls,
        flight: Flight | None = None,
    ) -> None:
        super().__init__(meter, upstream, pool, tuner, room, flight)
        self._size = size
        self._calls = calls

    def _open_upstream(self, pass_: int, state: State) -> None:
        self._drop, upstream_state = state or (0, None)
        self.upstream.open(pass_, upstream_state)

    def _gather(self, want: int) -> Chunk:
        group: _Group | None = None
        while True:
            chunk = self.upstream.pull(self._size - (len(group.elements) if group else 0))
            if not chunk.elements:
                if group is None:
                    return Chunk((), _GroupMarks((chunk.marks, 0), (chunk.marks, 0), 0, 0))
                break
            end = (chunk.marks, len(chunk.elements))
            if group is None:
                group = _Group([], [], (chunk.marks, 0), end, self._drop)
            group.elements.extend(chunk.elements)
            group.end = end
            if chunk.idents is not None:
                group.idents.append(chunk.idents)
            if len(group.elements) == self._size:
                break
        self._drop = 0
        return Chunk([group], group.start[0])

    def _work(self, task: Chunk) -> Outcome:
        (group,) = task.elements
        if self._flight is None:
            return self._call(group)
        marks, at = group.start
        return self._flight.record(marks.origin(at), len(group.elements), lambda: self._call(group))

    def _call(self, group: _Group) -> Outcome:
        calls, function, count = self._calls, self._calls.function, len(group.elements)
        origin = group.start[0].origin(group.start[1])
        try:
            if calls.generators is None:
                out = function(group.elements)
            else:
                out = function(group.elements, rng=calls.generators.at(group.idents[0][0]))
            out = list(out)
        except Exception as error:
            return Outcome(Chunk((), group.start[0]), blame(error, calls.label, origin))
        if len(out) != count:
            wrong = InvalidPipelineError(
                f"{calls.label} was given {count} elements and returned {len(out)}; map(batch_size=) must return one "
                "result per element: use flat_map() to change their number"
            )
            return Outcome(Chunk((), group.start[0]), blame(wrong, calls.label, origin))
        marks = _GroupMarks(group.start, group.end, count, group.dropped)
        idents = np.concatenate(group.idents)[group.dropped :] if group.idents else None
        return Outcome(Chunk(out[group.dropped :], marks, idents))


def transform(nodes: Sequence[Node], at: Site, upstream: Stage) -> Stage:
    """Return the stage that runs some operators as steps."""
    threads = ops.threads_of(nodes)
    return Transform(
        at.meter,
        upstream,
        at.pool,
        at.resources.tuner(threads, at.meter),
        at.resources.room(),
        steps=[make_step(node, at.calling, at.meter) for node in nodes],
        one_to_one=all(node.traits.one_to_one for node in nodes),
        flight=None if threads == 0 else at.placement.flight(),
    )


@builds(ops.Fused)
def _fused(node: ops.Fused, at: Site, upstream: Stage) -> Stage:
    return transform(node.steps, at, upstream)


@builds(ops.Map)
def _grouped_map(node: ops.Map, at: Site, upstream: Stage) -> Stage:
    assert node.batch_size is not None, "any other map is a step"
    return GroupedMap(
        at.meter,
        upstream,
        at.pool,
        at.resources.tuner(node.threads, at.meter),
        at.resources.room(),
        size=node.batch_size,
        calls=at.calling.calls(node, node.function, node.salt, at.meter),
        flight=at.placement.flight(),
    )
