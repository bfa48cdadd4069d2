"""interleave: the children of several parents, read in turns.

The state is the waiting parents (see `pending`), how many children each has given, whose turn it is, and how many
children of the present turn have been given.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec
import numpy as np

from penstock.graph import ops
from penstock.runtime.blame import raise_blamed
from penstock.runtime.building import Site, builds
from penstock.runtime.calling import MakeChildren
from penstock.runtime.contract import Chunk, Fixed, Idents, Stage, State
from penstock.runtime.ops.pending import Moment, MomentMarks, OpenedAt, PendingInput, Waiting
from penstock.runtime.randomness import child_paths
from penstock.runtime.stats import StageMeter


class _ParentAtWork(msgspec.Struct):
    parent: Waiting
    children: Iterator[Any]
    given: int = 0


class _Turn(msgspec.Struct, frozen=True):
    """A moment: the parents at work in turn order, each with its children given; the first is at its turn."""

    pending: Moment
    given: tuple[tuple[int, int], ...]
    in_turn: int

    def state(self) -> State:
        anchor, distances, taken = self.pending.state()
        oldest = min((ordinal for ordinal, _ in self.given), default=0)
        return [anchor, distances, taken, [[ordinal - oldest, given] for ordinal, given in self.given], self.in_turn]


class Interleaving(Stage):
    """Parents are held in a ring; the one at its turn gives `block` children, then goes to the back."""

    _in_turn: int

    def __init__(
        self,
        meter: StageMeter,
        upstream: Stage,
        *,
        label: str,
        children: MakeChildren,
        cycle: int,
        block: int,
        with_idents: bool,
    ) -> None:
        super().__init__(meter, upstream)
        self._input = PendingInput(upstream)
        self._label = label
        self._children = children
        self._cycle = cycle
        self._block = block
        self._with_idents = with_idents

    def open(self, pass_: int, state: State) -> None:
        *pending, ring, self._in_turn = state or (None, [], 0, [], 0)
        parents = {parent.ordinal: parent for parent in self._input.open(pass_, pending)}
        self._ring = [self._enter(parents[ordinal], given) for ordinal, given in ring]
        self._ended = False
        self._error: BaseException | None = None
        self._now: Moment = OpenedAt(state)

    def _enter(self, parent: Waiting, given: int) -> _ParentAtWork:
        ident = None if parent.ident is None else parent.ident[0]
        try:
            children = iter(self._children(parent.element, ident))
            return _ParentAtWork(parent, children, sum(1 for _ in islice(children, given)))
        except Exception as error:
            raise_blamed(error, self._label, parent.origin)

    def _pull(self, want: int) -> Chunk:
        if self._error is not None:
            raise self._error
        out: list[Any] = []
        moments, origins, idents = [self._now], [], []
        try:
            while len(out) < want and self._refill(may_ask=not out):
                slot = self._ring[0]
                try:
                    child = next(slot.children)
                except StopIteration:
                    self._leave(slot)
                    continue
                except Exception as error:
                    raise_blamed(error, self._label, slot.parent.origin)
                out.append(child)
                origins.append(slot.parent.origin)
                if self._with_idents:
                    idents.append(self._child_ident(slot))
                slot.given += 1
                self._in_turn += 1
                if self._in_turn == self._block:
                    self._ring.append(self._ring.pop(0))
                    self._in_turn = 0
                self._now = self._moment()
                moments.append(self._now)
        except Exception as error:
            if not out:
                raise
            self._error = error
        if not out:
            return Chunk((), Fixed(self._now.state()))
        return Chunk(out, MomentMarks(moments, origins), np.concatenate(idents) if idents else None)

    def _refill(self, *, may_ask: bool) -> bool:
        """Bring the ring to its size; False if there is nothing to read, or nothing without asking the input."""
        while len(self._ring) < self._cycle and not self._ended:
            if not self._input.at_hand and not may_ask:
                return False
            parent = self._input.take(self._cycle - len(self._ring))
            if parent is None:
                self._ended = True
                self._now = self._moment() if not self._ring else self._now
            else:
                self._ring.append(self._enter(parent, 0))
        return bool(self._ring)

    def _leave(self, slot: _ParentAtWork) -> None:
        self._ring.remove(slot)
        self._input.give(slot.parent)
        self._in_turn = 0
        if self._ended and not self._ring:
            self._now = self._moment()

    def _moment(self) -> Moment:
        return _Turn(self._input.moment(), tuple((s.parent.ordinal, s.given) for s in self._ring), self._in_turn)

    def _child_ident(self, slot: _ParentAtWork) -> Idents:
        assert slot.parent.ident is not None
        ident = slot.parent.ident.copy()
        ident[:, 2] = child_paths(ident[:, 2], np.array([slot.given]))
        return ident


@builds(ops.Interleave)
def _interleaving(node: ops.Interleave, at: Site, upstream: Stage) -> Stage:
    return Interleaving(
        at.meter,
        upstream,
        label=at.meter.label,
        children=at.calling.children(node.function, node.salt),
        cycle=node.cycle,
        block=node.block,
        with_idents=at.with_idents,
    )
