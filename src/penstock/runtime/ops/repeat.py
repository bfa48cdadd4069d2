"""repeat and with_epoch: passes over an input. The state is `[passes done, state inside the pass]`.

A pass without elements ends it, or an empty input would be asked for ever. `EmptyPasses` says what that means in a
stream, which gets a part of every pass.
"""

from __future__ import annotations

import weakref

import msgspec

from penstock.graph import ops
from penstock.graph.ops import NEVER_ENDS, MemorySlot
from penstock.runtime.building import Site, builds
from penstock.runtime.contract import Chunk, CountedMarks, Fixed, Marks, Origin, Stage, State
from penstock.runtime.empty_passes import EmptyPasses
from penstock.runtime.pass_numbers import PassesOver
from penstock.runtime.stats import StageMeter


class _PassMarks(msgspec.Struct, frozen=True):
    passes: int
    marks: Marks

    def at(self, k: int) -> State:
        return [self.passes, self.marks.at(k)]

    def origin(self, k: int) -> Origin | None:
        return self.marks.origin(k)


class Repeating(Stage):
    _passes: int

    def __init__(self, meter: StageMeter, upstream: Stage, passes_over: PassesOver, *, empty: EmptyPasses) -> None:
        super().__init__(meter, upstream)
        self.upstream = upstream
        self._passes_over = passes_over
        self._empty = empty
        self._stopped = False

    def open(self, pass_: int, state: State) -> None:
        self._outer_pass = pass_
        self._passes, upstream_state = state or (0, None)
        self._given_in_pass = upstream_state is not None
        self._end: Marks = Fixed(upstream_state)
        self._over = False
        self._empty.gave()
        if self._more():
            self._empty.begin_pass()
            self.upstream.open(self._inner_pass(), upstream_state)

    def _more(self) -> bool:
        count = self._passes_over.count
        return not self._over and (count == NEVER_ENDS or self._passes < count)

    def _inner_pass(self) -> int:
        return self._passes_over.number(self._outer_pass, self._passes)

    def _next_pass(self) -> None:
        self._passes += 1
        self._given_in_pass = False
        if self._more():
            self._empty.begin_pass()
            self.upstream.open(self._inner_pass(), None)

    def _gave(self) -> None:
        self._given_in_pass = True
        self._empty.gave()

    def _pass_ended(self, end: Marks) -> None:
        self._end = end
        if not self._given_in_pass and self._empty.were_enough():
            self._over = True  # an empty input stays empty for ever
        else:
            self._next_pass()

    def _pull(self, want: int) -> Chunk:
        while self._more() and not self._stopped:
            chunk = self.upstream.pull(want)
            if chunk.elements:
                self._gave()
                return Chunk(chunk.elements, _PassMarks(self._passes, chunk.marks), chunk.idents)
            self._pass_ended(chunk.marks)
        return Chunk((), _PassMarks(self._passes, self._end))

    def stop(self) -> None:
        self._stopped = True  # passes without elements would follow each other, and nothing in between see it
        super().stop()

    def skip(self, count: int) -> int:
        passed = 0
        while passed < count and self._more() and not self._stopped:
            step = self.upstream.skip(count - passed)
            passed += step
            if step:
                self._gave()
            if passed < count:
                self._pass_ended(self.upstream.pull(1).marks)
        return passed


_epoch_ends: weakref.WeakKeyDictionary[MemorySlot, dict[int, State]] = weakref.WeakKeyDictionary()
"""Where epochs of `with_epoch` ended in this process, so that the next one need not skip from the beginning."""


class Epochs(Stage):
    """Cuts an endless repetition of the input into epochs of equal length; epoch e begins where e - 1 ended."""

    def __init__(self, meter: StageMeter, repeated: Repeating, count: int, slot: MemorySlot) -> None:
        super().__init__(meter, repeated)
        self._repeated = repeated
        self._count = count
        self._slot = slot

    def open(self, pass_: int, state: State) -> None:
        self._epoch = pass_
        if state is not None:
            self._given, inner = state
            self._repeated.open(0, inner)
            if self._given == self._count:
                self._end_at(inner)
            return
        self._given = 0
        known = {0: None, **_epoch_ends.get(self._slot, {})}
        nearest = max(epoch for epoch in known if epoch <= pass_)
        self._repeated.open(0, known[nearest])
        self._repeated.skip((pass_ - nearest) * self._count)

    def _pull(self, want: int) -> Chunk:
        if self._given >= self._count:
            return Chunk((), Fixed([self._given, self._end]))
        chunk = self._repeated.pull(min(want, self._count - self._given))
        marks = CountedMarks(self._given, chunk.marks)
        self._given += len(chunk.elements)
        if self._given == self._count:
            self._end_at(chunk.marks.at(len(chunk.elements)))
        return Chunk(chunk.elements, marks, chunk.idents)

    def _end_at(self, state: State) -> None:
        self._end = state
        _epoch_ends.setdefault(self._slot, {})[self._epoch + 1] = state


@builds(ops.Repeat)
def _repeating(node: ops.Repeat, at: Site, upstream: Stage) -> Stage:
    return Repeating(at.meter, upstream, at.passes_over(node, node.upstream), empty=at.empty_passes(node))


@builds(ops.WithEpoch)
def _epochs(node: ops.WithEpoch, at: Site, upstream: Stage) -> Stage:
    passes_over, empty = at.passes_over(node, node.upstream), at.empty_passes(node)
    return Epochs(at.meter, Repeating(StageMeter("repeat"), upstream, passes_over, empty=empty), node.count, node.slot)
