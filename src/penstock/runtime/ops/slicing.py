"""take, skip, enumerate and with_length: counting along the input."""

from __future__ import annotations

from penstock.core.errors import InvalidPipelineError
from penstock.graph import ops
from penstock.graph.ops import NEVER_ENDS
from penstock.runtime.building import Site, builds
from penstock.runtime.contract import Chunk, CountedMarks, Fixed, Marks, Shifted, Stage, State
from penstock.runtime.stats import StageMeter


class _Counting(Stage):
    _given: int

    def __init__(self, meter: StageMeter, upstream: Stage) -> None:
        super().__init__(meter, upstream)
        self.upstream = upstream

    def open(self, pass_: int, state: State) -> None:
        self._given, upstream_state = state or (0, None)
        self.upstream.open(pass_, upstream_state)

    def _counted(self, chunk: Chunk) -> Chunk:
        marks = CountedMarks(self._given, chunk.marks)
        self._given += len(chunk.elements)
        return Chunk(chunk.elements, marks, chunk.idents)

    def skip(self, count: int) -> int:
        passed = self.upstream.skip(count)
        self._given += passed
        return passed


class Taking(_Counting):
    """Ends after `count`; asks its input for no more than that."""

    def __init__(self, meter: StageMeter, upstream: Stage, count: int) -> None:
        super().__init__(meter, upstream)
        self._count = count
        self._end: Marks | None = None

    def open(self, pass_: int, state: State) -> None:
        super().open(pass_, state)
        self._end = None if state is None else Fixed(state[1])

    def _pull(self, want: int) -> Chunk:
        left = want if self._count == NEVER_ENDS else self._count - self._given
        if left <= 0:
            return Chunk((), CountedMarks(self._given, self._end or Fixed(None)))
        chunk = self.upstream.pull(min(want, left))
        self._end = Shifted(chunk.marks, len(chunk.elements))
        return self._counted(chunk)

    def skip(self, count: int) -> int:
        return super().skip(count if self._count == NEVER_ENDS else min(count, self._count - self._given))


class Skipping(Stage):
    """Passes over the first elements of a pass. It has no state of its own: any state lies behind them."""

    def __init__(self, meter: StageMeter, upstream: Stage, count: int) -> None:
        super().__init__(meter, upstream)
        self.upstream = upstream
        self._count = count

    def open(self, pass_: int, state: State) -> None:
        self.upstream.open(pass_, state)
        self._due = self._count if state is None else 0

    def _pull(self, want: int) -> Chunk:
        if self._due:
            self.upstream.skip(self._due)
            self._due = 0
        return self.upstream.pull(want)

    def skip(self, count: int) -> int:
        if self._due:
            self.upstream.skip(self._due)
            self._due = 0
        return self.upstream.skip(count)


class Enumerating(_Counting):
    def __init__(self, meter: StageMeter, upstream: Stage, start: int) -> None:
        super().__init__(meter, upstream)
        self._start = start

    def _pull(self, want: int) -> Chunk:
        chunk = self._counted(self.upstream.pull(want))
        chunk.elements = list(enumerate(chunk.elements, self._start + self._given - len(chunk.elements)))
        return chunk


class LengthDeclared(_Counting):
    """Checks at the end of the pass that the declared length was true."""

    def __init__(self, meter: StageMeter, upstream: Stage, count: int) -> None:
        super().__init__(meter, upstream)
        self._count = count

    def _pull(self, want: int) -> Chunk:
        chunk = self._counted(self.upstream.pull(want))
        if self._given > self._count or (not chunk.elements and self._given != self._count):
            at_least = "at least " if chunk.elements else ""
            raise InvalidPipelineError(
                f"with_length({self._count}) was declared, but there are {at_least}{self._given} elements"
            )
        return chunk


@builds(ops.Take)
def _taking(node: ops.Take, at: Site, upstream: Stage) -> Stage:
    return Taking(at.meter, upstream, node.count)


@builds(ops.Skip)
def _skipping(node: ops.Skip, at: Site, upstream: Stage) -> Stage:
    return Skipping(at.meter, upstream, node.count)


@builds(ops.Enumerate)
def _enumerating(node: ops.Enumerate, at: Site, upstream: Stage) -> Stage:
    return Enumerating(at.meter, upstream, node.start)


@builds(ops.WithLength)
def _length_declared(node: ops.WithLength, at: Site, upstream: Stage) -> Stage:
    return LengthDeclared(at.meter, upstream, node.count)
