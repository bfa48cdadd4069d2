"""Inputs that an operator has taken but not given yet, kept in the state as positions.

The state is `[state before the oldest, distances of the waiting ones from it, inputs taken since it]`. Restoring opens
the input before the oldest one, passes over what was given, which costs one-to-one maps nothing, and takes the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import msgspec

from penstock.runtime.contract import Chunk, Idents, Marks, Origin, Stage, State


class Moment(Protocol):
    """A frozen point in an operator's life, of which the state can be asked later."""

    def state(self) -> State: ...


class MomentMarks(msgspec.Struct, frozen=True):
    """`moments[k]` is the moment after k outputs, `origins[k]` where output k came from."""

    moments: Sequence[Moment]
    origins: Sequence[Origin | None]

    def at(self, k: int) -> State:
        return self.moments[k].state()

    def origin(self, k: int) -> Origin | None:
        return self.origins[k]


class OpenedAt(msgspec.Struct, frozen=True):
    """The moment of opening: the state it was opened with."""

    given: State

    def state(self) -> State:
        return self.given


class Waiting(msgspec.Struct, frozen=True):
    ordinal: int
    element: Any
    place: tuple[Marks, int]
    ident: Idents | None

    @property
    def origin(self) -> Origin | None:
        marks, k = self.place
        return marks.origin(k)


class Snapshot(msgspec.Struct, frozen=True):
    """What was waiting at one moment, oldest first, and how far the input had been read."""

    waiting: tuple[tuple[int, tuple[Marks, int]], ...]
    ordinal: int
    place: tuple[Marks, int]

    def state(self) -> State:
        if not self.waiting:
            marks, k = self.place
            return [marks.at(k), [], 0]
        first, (marks, k) = self.waiting[0]
        return [marks.at(k), [ordinal - first for ordinal, _ in self.waiting], self.ordinal - first]


class PendingInput:
    """Reads an input and remembers the place of every element until it is given."""

    def __init__(self, upstream: Stage) -> None:
        self.upstream = upstream

    def open(self, pass_: int, state: State) -> Iterator[Waiting]:
        """Place the input and yield what was waiting, oldest first."""
        anchor, distances, taken = state or (None, [], 0)
        self._waiting: dict[int, tuple[Marks, int]] = {}
        self._ordinal = 0
        self._chunk: Chunk | None = None
        self._next = 0
        self.upstream.open(pass_, anchor)
        self.upstream.run_ahead(False)
        try:
            for distance in distances:
                self._pass_over(distance - self._ordinal)
                restored = self.take(1)
                assert restored is not None, "the input ended before an element that was waiting"
                yield restored
            self._pass_over(taken - self._ordinal)
        finally:
            self.upstream.run_ahead(True)

    def _pass_over(self, count: int) -> None:
        if count:
            self._ordinal += self.upstream.skip(count)
            self._chunk = None

    def take(self, want: int) -> Waiting | None:
        """Return the next element, which waits from now on; None at the end. `want` is how many more are of use."""
        if not self.at_hand:
            self._chunk, self._next = self.upstream.pull(want), 0
            if not self._chunk.elements:
                return None
        assert self._chunk is not None
        place = (self._chunk.marks, self._next)
        ident = None if self._chunk.idents is None else self._chunk.idents[self._next : self._next + 1]
        taken = Waiting(self._ordinal, self._chunk.elements[self._next], place, ident)
        self._waiting[self._ordinal] = place  # arrivals are in order: a dict keeps the oldest first
        self._ordinal += 1
        self._next += 1
        return taken

    def look(self, want: int) -> None:
        """Make sure that there is a moment: right after opening, only a pull tells where the input stands."""
        if self._chunk is None:
            self._chunk, self._next = self.upstream.pull(want), 0

    @property
    def at_hand(self) -> int:
        """How many elements can be taken without asking the input."""
        return 0 if self._chunk is None else len(self._chunk.elements) - self._next

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def give(self, waiting: Waiting) -> None:
        del self._waiting[waiting.ordinal]

    def moment(self) -> Moment:
        """Freeze the present moment. At least one element, or the end, has been taken before."""
        assert self._chunk is not None
        return Snapshot(tuple(self._waiting.items()), self._ordinal, (self._chunk.marks, self._next))
