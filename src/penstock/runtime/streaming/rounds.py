"""Rounds: lists of outputs, one for each consumer, given one after the other.

The state is `[members given, state before their round]`. Opened inside a round, the round is made again.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from penstock.core.element import Element
from penstock.runtime.contract import Chunk, Idents, Marks, Origin, Stage, State
from penstock.runtime.randomness import child_paths
from penstock.runtime.stats import StageMeter


class _MemberMarks(msgspec.Struct, frozen=True):
    """`points[k]` is (members given, the place before their round) after k outputs."""

    points: Sequence[tuple[int, tuple[Marks, int]]]

    def at(self, k: int) -> State:
        given, (marks, at) = self.points[k]
        return [given, marks.at(at)]

    def origin(self, k: int) -> Origin | None:
        _, (marks, at) = self.points[k]
        return marks.origin(at)


class Dealing(Stage):
    _drop: int

    def __init__(self, meter: StageMeter, upstream: Stage, *, members: int) -> None:
        super().__init__(meter, upstream)
        self.upstream = upstream
        self._members = members

    def open(self, pass_: int, state: State) -> None:
        self._drop, upstream_state = state or (0, None)
        self.upstream.open(pass_, upstream_state)
        self._rest: Chunk | None = None

    def _pull(self, want: int) -> Chunk:
        head, self._rest = (self._rest or self._next_members(want)).head_and_rest(want)
        return head

    def _next_members(self, want: int) -> Chunk:
        rounds = self.upstream.pull(-(-(want + self._drop) // self._members))
        dropped, self._drop = self._drop, 0
        out: list[Element] = []
        points: list[tuple[int, tuple[Marks, int]]] = []
        idents: list[Idents] = []
        for number, members in enumerate(rounds.elements):
            first = dropped if number == 0 else 0
            points.extend((i, (rounds.marks, number)) for i in range(first, len(members)))
            out.extend(members[first:])
            if rounds.idents is not None:
                own = np.repeat(rounds.idents[number : number + 1], len(members) - first, axis=0)
                own[:, 2] = child_paths(own[:, 2], np.arange(first, len(members)))
                idents.append(own)
        points.append((0, (rounds.marks, len(rounds.elements))))
        return Chunk(out, _MemberMarks(points), np.concatenate(idents) if idents else None)
