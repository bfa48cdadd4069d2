"""The input of a tail: what is left of each ended stream, one after the other. The state is `[which, state inside]`.

What is left of a stream is what the operator that regroups had not given: everything after its state. For a batch that
is what its input yields from there on; for a rebatch the first batch begins in its middle; for windows the elements
that were waiting come first, as they do for rounds. Where nothing regroups, it is what the whole pipeline yields.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np

from penstock.core.element import batch_length, slice_batch
from penstock.runtime.contract import Chunk, Fixed, Marks, Origin, Stage, State
from penstock.runtime.ops.pending import PendingInput, Waiting
from penstock.runtime.stats import StageMeter
from penstock.runtime.streaming.sharding import StreamShare
from penstock.runtime.streams import Left, SplitFeed

Advance = Callable[[int, Left], State]
"""(pass, leftover) → the state after the outputs to discard."""


class Remainder(Protocol):
    """Reads what an operator had not given at a state of its own; its states are of that operator's kind."""

    def open(self, pass_: int, state: State) -> None: ...

    def pull(self, want: int) -> Chunk: ...


class PlainRemainder:
    """For operators without a state of their own, and for whole pipelines."""

    def __init__(self, upstream: Stage) -> None:
        self._upstream = upstream

    def open(self, pass_: int, state: State) -> None:
        self._upstream.open(pass_, state)

    def pull(self, want: int) -> Chunk:
        return self._upstream.pull(want)


class _RowsMarks(msgspec.Struct, frozen=True):
    rows: int
    """How many rows of the first batch were taken before."""
    marks: Marks

    def at(self, k: int) -> State:
        return [0 if k else self.rows, self.marks.at(k)]

    def origin(self, k: int) -> Origin | None:
        return self.marks.origin(k)


class RowsRemainder:
    """For a rebatch: batches, the first without the rows that were taken of it."""

    _rows: int

    def __init__(self, upstream: Stage) -> None:
        self._upstream = upstream

    def open(self, pass_: int, state: State) -> None:
        self._rows, upstream_state = state or (0, None)
        self._upstream.open(pass_, upstream_state)

    def pull(self, want: int) -> Chunk:
        chunk = self._upstream.pull(want)
        rows = self._rows
        if not rows or not chunk.elements:
            return Chunk(chunk.elements, _RowsMarks(0, chunk.marks), chunk.idents)
        self._rows = 0
        first = chunk.elements[0]
        elements = [slice_batch(first, rows, batch_length(first)), *chunk.elements[1:]]
        return Chunk(elements, _RowsMarks(rows, chunk.marks), chunk.idents)


class _WaitingMarks(msgspec.Struct, frozen=True):
    """Elements that were waiting: as they are given, the state keeps its anchor and names fewer of them."""

    anchor: State
    distances: Sequence[int]
    taken: int
    waiting: Sequence[Waiting]

    def at(self, k: int) -> State:
        return [self.anchor, list(self.distances[k:]), self.taken]

    def origin(self, k: int) -> Origin | None:
        return self.waiting[k].origin


class _FollowingMarks(msgspec.Struct, frozen=True):
    """Elements that come after those that were waiting."""

    marks: Marks

    def at(self, k: int) -> State:
        return [self.marks.at(k), [], 0]

    def origin(self, k: int) -> Origin | None:
        return self.marks.origin(k)


class WaitingRemainder:
    """For windows: first the elements that were waiting, then all that follow."""

    def __init__(self, upstream: Stage) -> None:
        self._upstream = upstream
        self._input = PendingInput(upstream)

    def open(self, pass_: int, state: State) -> None:
        self._state: tuple[State, list[int], int] = state or (None, [], 0)
        self._waiting = list(self._input.open(pass_, state))
        self._given = 0

    def pull(self, want: int) -> Chunk:
        anchor, distances, taken = self._state
        given = self._given
        some = self._waiting[given : given + want]
        if some:
            self._given += len(some)
            idents = [waiting.ident for waiting in some if waiting.ident is not None]
            marks = _WaitingMarks(anchor, distances[given:], taken, some)
            return Chunk([waiting.element for waiting in some], marks, np.concatenate(idents) if idents else None)
        chunk = self._upstream.pull(want)
        return Chunk(chunk.elements, _FollowingMarks(chunk.marks), chunk.idents)


class RoundsRemainder:
    """For windows that make rounds: what is left begins between two of them, so no member counts as given."""

    def __init__(self, upstream: Stage) -> None:
        self._waiting = WaitingRemainder(upstream)

    def open(self, pass_: int, state: State) -> None:
        members_given, waiting = state or (0, None)
        assert not members_given, "a leftover begins in the middle of a round"
        self._waiting.open(pass_, waiting)

    def pull(self, want: int) -> Chunk:
        chunk = self._waiting.pull(want)
        return Chunk(chunk.elements, _RowsMarks(0, chunk.marks), chunk.idents)


class _LeftMarks(msgspec.Struct, frozen=True):
    which: int
    marks: Marks

    def at(self, k: int) -> State:
        return [self.which, self.marks.at(k)]

    def origin(self, k: int) -> Origin | None:
        return self.marks.origin(k)


class Leftovers(Stage):
    """Opens each leftover with the share its stream had, and with the feed answering for it."""

    _which: int

    def __init__(
        self,
        meter: StageMeter,
        upstream: Stage,
        remainder: Remainder,
        *,
        leftovers: Sequence[Left],
        feed: SplitFeed,
        share: StreamShare,
        advance: Advance,
    ) -> None:
        super().__init__(meter, upstream)
        self._remainder = remainder
        self._leftovers = leftovers
        self._feed = feed
        self._share = share
        self._advance = advance
        self._own_parts = share.shuffle_parts

    def open(self, pass_: int, state: State) -> None:
        self._pass = pass_
        if state is None:
            self._which = -1
            self._turn()
        else:
            self._which, inner = state
            if self._which < len(self._leftovers):
                self._select()
                self._remainder.open(pass_, inner)

    def _select(self) -> None:
        left = self._leftovers[self._which]
        self._share.shuffle_parts = left.shuffle_parts or self._own_parts
        self._share.keep = left.keep
        self._feed.select(self._which)

    def _turn(self) -> None:
        self._which += 1
        if self._which < len(self._leftovers):
            self._select()
            left = self._leftovers[self._which]
            state = self._advance(self._pass, left) if left.outputs or left.torn else left.state
            self._remainder.open(self._pass, state)

    def _pull(self, want: int) -> Chunk:
        while self._which < len(self._leftovers):
            chunk = self._remainder.pull(want)
            if chunk.elements:
                return Chunk(chunk.elements, _LeftMarks(self._which, chunk.marks), chunk.idents)
            self._turn()
        return Chunk((), Fixed([self._which, None]))
