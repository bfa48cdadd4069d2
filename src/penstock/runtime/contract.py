"""The contract every stage of a running pipeline keeps.

1. `open(pass_, state)` places a stage, and everything above it, at the start of a pass or at a state.
2. `pull(want)` returns 1 to `want` elements in order; an empty chunk is the end, and stays the end.
3. A chunk carries its `marks`: `marks.at(k)` is the state just after its first k elements. Marks are immutable, cost
   nothing until asked, and stay true however far the stage has run ahead. So state is what was received, never what
   was prefetched.
4. Opening at `marks.at(k)` yields exactly what followed element k: `testing.conformance` checks it for every operator
   at every position.
5. A stage calls its input again only while it has nothing to return: when the input raises, nothing made before is
   lost. An error is never the end: a user's `StopIteration` leaves a pull as a `RuntimeError`.
6. `stop()` may come at any time, from any thread: whoever waits in a pull is woken and sees the end. `close()` follows
   it and gives files and buffers back; neither waits for user code, and both may be called twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np

from penstock.core.element import Element
from penstock.core.errors import never_the_end
from penstock.runtime.stats import StageMeter

State: TypeAlias = Any
"""JSON-able: None, ints, strings and lists of them."""

Idents: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]
"""Shape (n, 3): place (source, pass, split), index, path of children. Travels only where an `rng` function needs it."""


class Origin(msgspec.Struct, frozen=True):
    """Where an element came from, for people."""

    split: int
    index: int
    path: str = ""
    offset: int | None = None
    source: int = 0
    """Number of the source in its graph."""

    def __str__(self) -> str:
        where = f"element {self.index} of split {self.split}"
        if self.path:
            where += f" ({self.path}" + (f", byte {self.offset}" if self.offset is not None else "") + ")"
        return where


class Marks(Protocol):
    def at(self, k: int) -> State:
        """Return the state just after the first k elements of the chunk."""

    def origin(self, k: int) -> Origin | None:
        """Say where element k of the chunk came from, where that is known."""


class Visit:
    """What a source stage and a caching point say to each other about a split that is being read."""

    __slots__ = ()

    @property
    def is_kept(self) -> bool:
        """Whether what is made of it is to be kept at a point that it has not passed."""
        return False


class Chunk(msgspec.Struct):
    elements: Sequence[Element]
    marks: Marks
    idents: Idents | None = None
    visit: Visit | None = None
    """Of which visit to a split they are, below a caching point; None: nothing is kept of them."""
    made: bool = False
    """They are what a caching point further down was to make of them: the steps before it hand them on."""

    def __len__(self) -> int:
        return len(self.elements)

    def head_and_rest(self, count: int) -> tuple[Chunk, Chunk | None]:
        """Cut after `count` elements."""
        if count >= len(self.elements):
            return self, None
        return self.part(0, count), self.part(count, len(self.elements))

    def part(self, start: int, stop: int) -> Chunk:
        """Return the elements from start to stop as a chunk."""
        if start == 0 and stop == len(self.elements):
            return self
        marks = self.marks if start == 0 else Shifted(self.marks, start)
        idents = None if self.idents is None else self.idents[start:stop]
        return Chunk(self.elements[start:stop], marks, idents, self.visit, self.made)


class Shifted(msgspec.Struct, frozen=True):
    """The marks of a chunk without its first elements."""

    marks: Marks
    by: int

    def at(self, k: int) -> State:
        return self.marks.at(self.by + k)

    def origin(self, k: int) -> Origin | None:
        return self.marks.origin(self.by + k)


class Selected(msgspec.Struct, frozen=True):
    """The marks of a chunk of which only some elements are left.

    The state after an element includes the dropped ones before the next: they would be dropped again, so both ends
    of the gap are right, and the later one does not repeat the work.
    """

    marks: Marks
    kept: Sequence[int]
    total: int

    def at(self, k: int) -> State:
        if k == 0:
            return self.marks.at(0)
        return self.marks.at(self.kept[k] if k < len(self.kept) else self.total)

    def origin(self, k: int) -> Origin | None:
        return self.marks.origin(self.kept[k])


class Points(msgspec.Struct, frozen=True):
    """Marks for outputs that end at given places of input chunks: `ends[i]` is (marks, k) just after output i."""

    start: tuple[Marks, int]
    ends: Sequence[tuple[Marks, int]]

    def at(self, k: int) -> State:
        marks, at = self.ends[k - 1] if k else self.start
        return marks.at(at)

    def origin(self, k: int) -> Origin | None:
        marks, at = self.ends[k - 1] if k else self.start
        return marks.origin(at)


class CountedMarks(msgspec.Struct, frozen=True):
    """The marks of an operator that counts along its input: the state is `[elements given, input's state]`."""

    given: int
    marks: Marks

    def at(self, k: int) -> State:
        return [self.given + k, self.marks.at(k)]

    def origin(self, k: int) -> Origin | None:
        return self.marks.origin(k)


class Fixed(msgspec.Struct, frozen=True):
    """The marks of an empty chunk: one state."""

    state: State

    def at(self, k: int) -> State:
        return self.state

    def origin(self, k: int) -> Origin | None:
        return None


class Computed(msgspec.Struct, frozen=True):
    """Marks whose states a function gives; where elements came from is not known."""

    state_at: Callable[[int], State]

    def at(self, k: int) -> State:
        return self.state_at(k)

    def origin(self, k: int) -> Origin | None:
        return None


class Stage:
    """One running operator. Subclasses define `_open` and `_pull`; `meter` measures without their help."""

    def __init__(self, meter: StageMeter, *inputs: Stage) -> None:
        self.meter = meter
        self.inputs = inputs

    def open(self, pass_: int, state: State) -> None:
        raise TypeError(f"{type(self).__name__} does not say how to open")

    def pull(self, want: int) -> Chunk:
        span = self.meter.begin()
        chunk: Chunk | None = None
        try:
            chunk = self._pull(want)
            return chunk
        except StopIteration as error:  # out of a user's code: a stage's own end is an empty chunk
            raise never_the_end(error, self.meter.label) from error
        finally:
            made = () if chunk is None else chunk.elements
            self.meter.end(span, made, self._count_of(made))

    def _pull(self, want: int) -> Chunk:
        raise TypeError(f"{type(self).__name__} does not say how to pull")

    def _count_of(self, made: Sequence[Element]) -> int:
        """Return how many elements are counted for what was made."""
        return len(made)

    def skip(self, count: int) -> int:
        """Pass over up to `count` elements as cheaply as possible; return how many there were."""
        passed = 0
        while passed < count:
            chunk = self.pull(min(count - passed, SKIP_CHUNK))
            if not chunk.elements:
                break
            passed += len(chunk.elements)
        return passed

    @property
    def repeatable(self) -> bool:
        """Whether a pass, opened again, gives the same elements in the same order."""
        return all(stage.repeatable for stage in self.inputs)

    def run_ahead(self, allowed: bool) -> None:
        """Say whether stages from here up may make more than they are asked for; a restore skips too much for that."""
        for stage in self.inputs:
            stage.run_ahead(allowed)

    def stop(self) -> None:
        for stage in self.inputs:
            stage.stop()

    def close(self) -> None:
        for stage in self.inputs:
            stage.close()


class RegroupingStage(Stage):
    """A stage that makes groups. Where it is asked to keep its rest, it ends where its last whole group ended."""

    @property
    def has_rest(self) -> bool:
        """Whether, at the end, there are elements that fill no group."""
        raise TypeError(f"{type(self).__name__} does not tell of its rest")


SKIP_CHUNK = 1024
