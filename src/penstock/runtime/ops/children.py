"""flat_map and unbatch: some outputs, its children, for each input.

The state is `[children given, state before their parent]`. Children are taken from the iterable as they are wanted,
never all at once: a parent may have more of them than fit in memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec
import numpy as np

from penstock.core.element import Element, batch_rows
from penstock.graph import ops
from penstock.runtime.blame import blame
from penstock.runtime.building import Site, builds
from penstock.runtime.calling import MakeChildren
from penstock.runtime.contract import Chunk, Fixed, Idents, Marks, Origin, Stage, State
from penstock.runtime.flight import Flight
from penstock.runtime.randomness import child_paths
from penstock.runtime.stats import StageMeter

PARENTS_AT_ONCE = 64


class _Run(msgspec.Struct):
    """Consecutive children of one parent inside an output chunk."""

    first: int
    """The place in the chunk of the run's first child."""
    given: int
    """How many children were given before it."""
    parent: tuple[Marks, int]
    complete: bool = False


class _RunMarks(msgspec.Struct, frozen=True):
    runs: list[_Run]
    total: int

    def at(self, k: int) -> State:
        run, inside = self._find(max(k - 1, 0))
        marks, parent = run.parent
        last_of_run = (self.runs[-1] is run and k == self.total) or self._next_first(run) == k
        if k and last_of_run and run.complete:
            return [0, marks.at(parent + 1)]
        return [run.given + (inside + 1 if k else 0), marks.at(parent)]

    def origin(self, k: int) -> Origin | None:
        run, _ = self._find(k)
        marks, parent = run.parent
        return marks.origin(parent)

    def _find(self, place: int) -> tuple[_Run, int]:
        run = self.runs[bisect_right(self.runs, place, key=lambda run: run.first) - 1]
        return run, place - run.first

    def _next_first(self, run: _Run) -> int | None:
        following = bisect_right(self.runs, run.first, key=lambda run: run.first)
        return self.runs[following].first if following < len(self.runs) else None


class FlatMapping(Stage):
    _drop: int

    def __init__(
        self,
        meter: StageMeter,
        upstream: Stage,
        *,
        label: str,
        children: MakeChildren,
        with_idents: bool,
        flight: Flight | None = None,
    ) -> None:
        super().__init__(meter, upstream)
        self.upstream = upstream
        self._label = label
        self._children = children
        self._with_idents = with_idents
        self._flight = flight

    def open(self, pass_: int, state: State) -> None:
        self._drop, upstream_state = state or (0, None)
        self.upstream.open(pass_, upstream_state)
        self._parents = Chunk((), Fixed(upstream_state))
        self._next_parent = 0
        self._open_children: Iterator[Any] | None = None
        self._given = 0
        self._error: BaseException | None = None
        if self._flight is not None:
            self._flight.reset()

    def _pull(self, want: int) -> Chunk:
        if self._error is not None:
            raise self._error
        out: list[Any] = []
        runs: list[_Run] = []
        idents: list[Idents] = []
        while not out:
            if self._open_children is None and self._next_parent == len(self._parents.elements):
                self._parents, self._next_parent = self._take_parents(min(want, PARENTS_AT_ONCE)), 0
                if not self._parents.elements:
                    return Chunk((), Fixed([0, self._parents.marks.at(0)]))
            try:
                self._work(want, out, runs, idents)
            except Exception as error:
                self._error = blame(error, self._label, self._parents.marks.origin(self._next_parent))
            if self._error is not None and not out:
                raise self._error
        return Chunk(out, _RunMarks(runs, len(out)), np.concatenate(idents) if idents else None)

    def _take_parents(self, want: int) -> Chunk:
        return self.upstream.pull(want) if self._flight is None else self._flight.take(self.upstream, want)

    def _work(self, want: int, out: list[Any], runs: list[_Run], idents: list[Idents]) -> None:
        if self._flight is None:
            self._gather(want, out, runs, idents)
            return
        origin = self._parents.marks.origin(self._next_parent)
        waiting = len(self._parents.elements) - self._next_parent
        self._flight.record(origin, waiting, lambda: self._gather(want, out, runs, idents))

    def _gather(self, want: int, out: list[Any], runs: list[_Run], idents: list[Idents]) -> None:
        """Add children of the parents at hand, up to `want`."""
        while len(out) < want and self._next_parent < len(self._parents.elements):
            parent = (self._parents.marks, self._next_parent)
            if self._open_children is None:
                ident = None if self._parents.idents is None else self._parents.idents[self._next_parent]
                self._open_children = iter(self._children(self._parents.elements[self._next_parent], ident))
                self._given = sum(1 for _ in islice(self._open_children, self._drop))
                self._drop = 0
            room = want - len(out)
            run = _Run(len(out), self._given, parent)
            try:
                out.extend(islice(self._open_children, room))
            finally:
                count = len(out) - run.first
                self._given += count
                if count:
                    runs.append(run)
                    if self._with_idents:
                        idents.append(self._child_idents(run.given, count))
            if count < room:
                run.complete = True
                self._open_children = None
                self._next_parent += 1

    def _child_idents(self, first: int, count: int) -> Idents:
        assert self._parents.idents is not None
        idents = np.repeat(self._parents.idents[self._next_parent][None], count, axis=0)
        idents[:, 2] = child_paths(idents[:, 2], np.arange(first, first + count))
        return idents


@builds(ops.FlatMap)
def _flat_mapping(node: ops.FlatMap, at: Site, upstream: Stage) -> Stage:
    return FlatMapping(
        at.meter,
        upstream,
        label=at.meter.label,
        children=at.calling.children(node.function, node.salt),
        with_idents=at.with_idents,
        flight=at.placement.flight(),
    )


@builds(ops.Unbatch)
def _unbatching(node: ops.Unbatch, at: Site, upstream: Stage) -> Stage:
    return FlatMapping(
        at.meter, upstream, label=at.meter.label, children=_rows_of, with_idents=at.with_idents, flight=None
    )


def _rows_of(batch: Element, ident: Idents | None) -> Iterable[Element]:
    return batch_rows(batch)
