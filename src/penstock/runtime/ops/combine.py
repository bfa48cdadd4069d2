"""zip and concatenate: several inputs, each with its own state.

In a stream of a job, what is over must show in the state: there the ends of the inputs behind are kept in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.core.element import Element
from penstock.graph import ops
from penstock.runtime.building import Site, builds
from penstock.runtime.contract import Chunk, Fixed, Marks, Origin, Stage, State
from penstock.runtime.stats import StageMeter


class _ZipMarks(msgspec.Struct, frozen=True):
    """The state is the list of the inputs' states."""

    marks: Sequence[Marks]

    def at(self, k: int) -> State:
        return [marks.at(k) for marks in self.marks]

    def origin(self, k: int) -> Origin | None:
        return self.marks[0].origin(k)


class Zipping(Stage):
    def __init__(self, meter: StageMeter, upstreams: Sequence[Stage]) -> None:
        super().__init__(meter, *upstreams)

    def open(self, pass_: int, state: State) -> None:
        for stage, stage_state in zip(self.inputs, state or [None] * len(self.inputs)):
            stage.open(pass_, stage_state)
        self._rests: list[Chunk | None] = [None] * len(self.inputs)
        self._end: Chunk | None = None

    def _pull(self, want: int) -> Chunk:
        if self._end is not None:
            return self._end
        for i, stage in enumerate(self.inputs):
            if self._rests[i] is None:
                self._rests[i] = stage.pull(want)
        chunks = [rest for rest in self._rests if rest is not None]
        count = min(want, *map(len, chunks))
        marks = _ZipMarks([chunk.marks for chunk in chunks])
        if not count:
            self._end = Chunk((), marks)
            return self._end
        heads: list[Chunk] = []
        for i, chunk in enumerate(chunks):
            head, self._rests[i] = chunk.head_and_rest(count)
            heads.append(head)
        elements: list[Element] = list(zip(*(head.elements for head in heads)))
        return Chunk(elements, marks, heads[0].idents)

    def skip(self, count: int) -> int:
        if any(rest is not None for rest in self._rests):
            return super().skip(count)
        return min(stage.skip(count) for stage in self.inputs)


class _WhichMarks(msgspec.Struct, frozen=True):
    """The state is `[number of the input, its state]`, and the ends of those behind where they are kept."""

    which: int
    marks: Marks
    ends: Sequence[Marks]

    def at(self, k: int) -> State:
        return [self.which, self.marks.at(k), *(end.at(0) for end in self.ends)]

    def origin(self, k: int) -> Origin | None:
        return self.marks.origin(k)


class Concatenating(Stage):
    _which: int

    def __init__(self, meter: StageMeter, upstreams: Sequence[Stage], *, keep_ends: bool = False) -> None:
        super().__init__(meter, *upstreams)
        self._keep_ends = keep_ends

    def open(self, pass_: int, state: State) -> None:
        self._pass = pass_
        self._which, inner, *ends = state or (0, None)
        self._ends: tuple[Marks, ...] = tuple(map(Fixed, ends))
        if self._which < len(self.inputs):
            self.inputs[self._which].open(pass_, inner)

    def _pull(self, want: int) -> Chunk:
        while self._which < len(self.inputs):
            chunk = self.inputs[self._which].pull(want)
            if chunk.elements:
                return Chunk(chunk.elements, _WhichMarks(self._which, chunk.marks, self._ends), chunk.idents)
            self._turn()
        return Chunk((), _WhichMarks(self._which, Fixed(None), self._ends))

    def _turn(self) -> None:
        if self._keep_ends:
            self._ends += (self.inputs[self._which].pull(1).marks,)
        self._which += 1
        if self._which < len(self.inputs):
            self.inputs[self._which].open(self._pass, None)

    def skip(self, count: int) -> int:
        passed = 0
        while passed < count and self._which < len(self.inputs):
            passed += self.inputs[self._which].skip(count - passed)
            if passed < count:
                self._turn()
        return passed


@builds(ops.Zip)
def _zipping(node: ops.Zip, at: Site, *upstreams: Stage) -> Stage:
    return Zipping(at.meter, upstreams)


@builds(ops.Concatenate)
def _concatenating(node: ops.Concatenate, at: Site, *upstreams: Stage) -> Stage:
    return Concatenating(at.meter, upstreams, keep_ends=not at.placement.alone)
