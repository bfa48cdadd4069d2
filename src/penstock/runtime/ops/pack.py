"""pack: sequences laid side by side into rows of a fixed length.

Sequences are gathered in blocks and fitted within a block, longest first, each into the fullest row that still has
room. The state is `[rows given, state before the block]`, as with a shuffle's blocks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from penstock.core.element import Array, Element
from penstock.core.errors import InvalidPipelineError
from penstock.graph import ops
from penstock.graph.ops import PackLong
from penstock.runtime.blame import raise_blamed
from penstock.runtime.building import Site, builds
from penstock.runtime.contract import Chunk, Fixed, Idents, Marks, Origin, Stage, State
from penstock.runtime.randomness import child_paths
from penstock.runtime.stats import StageMeter


class _PackMarks(msgspec.Struct, frozen=True):
    start: tuple[Marks, int]
    end: tuple[Marks, int]
    given: int
    total: int

    def at(self, k: int) -> State:
        done = self.given + k
        if done == self.total:
            marks, at = self.end
            return [0, marks.at(at)]
        marks, at = self.start
        return [done, marks.at(at)]

    def origin(self, k: int) -> Origin | None:
        marks, at = self.start
        return marks.origin(at)


class Packing(Stage):
    _given: int

    def __init__(
        self,
        meter: StageMeter,
        upstream: Stage,
        *,
        label: str,
        length: int,
        key: str | None,
        long: PackLong,
        lookahead: int,
        value: int,
    ) -> None:
        super().__init__(meter, upstream)
        self.upstream = upstream
        self._label = label
        self._length = length
        self._key = key
        self._long = long
        self._lookahead = lookahead
        self._value = value
        self._arange = np.arange(length, dtype=np.int32)

    def open(self, pass_: int, state: State) -> None:
        self._given, upstream_state = state or (0, None)
        self.upstream.open(pass_, upstream_state)
        self._rows: list[list[Array]] = []
        self._ident: Idents | None = None
        self._marks = _PackMarks((Fixed(upstream_state), 0), (Fixed(upstream_state), 0), 0, 0)

    def _pull(self, want: int) -> Chunk:
        while self._given >= len(self._rows):
            if self._rows:
                self._given = 0
            if not self._next_block():
                return Chunk((), self._marks)
        chosen = self._rows[self._given : self._given + want]
        block = self._marks
        marks = _PackMarks(block.start, block.end, self._given, len(self._rows))
        idents = None
        if self._ident is not None:  # a row is known by the first sequence of its block and its number in it
            idents = np.repeat(self._ident, len(chosen), axis=0)
            idents[:, 2] = child_paths(idents[:, 2], np.arange(self._given, self._given + len(chosen)))
        self._given += len(chosen)
        return Chunk([self._lay_out(row) for row in chosen], marks, idents)

    def _next_block(self) -> bool:
        """Gather and fit a block; False at the end. A block may give no row, when all it has is dropped."""
        pieces: list[Array] = []
        start: tuple[Marks, int] | None = None
        end: tuple[Marks, int] | None = None
        gathered = 0
        while gathered < self._lookahead:
            chunk = self.upstream.pull(self._lookahead - gathered)
            if start is None:
                start = (chunk.marks, 0)
                self._ident = None if chunk.idents is None else chunk.idents[:1]
            end = (chunk.marks, len(chunk.elements))
            if not chunk.elements:
                break
            for k, element in enumerate(chunk.elements):
                pieces.extend(self._pieces_of(element, chunk.marks, k))
            gathered += len(chunk.elements)
        assert start is not None and end is not None
        self._rows = fit(pieces, self._length)
        self._marks = _PackMarks(start, end, 0, 0)
        return gathered > 0

    def _pieces_of(self, element: Element, marks: Marks, k: int) -> list[Array]:
        try:
            tokens = np.asarray(self._sequence_of(element))
            if tokens.ndim != 1:
                raise InvalidPipelineError(f"{self._label} takes one-dimensional sequences, not {list(tokens.shape)}")
        except Exception as error:
            raise_blamed(error, self._label, marks.origin(k))
        if len(tokens) <= self._length:
            return [tokens] if len(tokens) else []
        if self._long == "drop":
            return []
        if self._long == "truncate":
            return [tokens[: self._length]]
        return [tokens[i : i + self._length] for i in range(0, len(tokens), self._length)]

    def _sequence_of(self, element: Element) -> Any:
        if not isinstance(element, dict):
            return element if self._key is None else element[self._key]
        if self._key not in element:
            have = ", ".join(map(repr, element)) or "nothing"
            missing = "is a dict: say which of its values with key=" if self._key is None else f"has no {self._key!r}"
            raise InvalidPipelineError(f"{self._label}: an element {missing}; it has {have}")
        return element[self._key]

    def _lay_out(self, row: Sequence[Array]) -> Element:
        length = self._length
        tokens = np.full(length, self._value, row[0].dtype)
        segment_ids = np.zeros(length, np.int32)
        positions = np.zeros(length, np.int32)
        at = 0
        for segment, piece in enumerate(row, 1):
            to = at + len(piece)
            tokens[at:to] = piece
            segment_ids[at:to] = segment
            positions[at:to] = self._arange[: len(piece)]
            at = to
        return {"tokens": tokens, "segment_ids": segment_ids, "positions": positions}


def fit(pieces: Sequence[Array], length: int) -> list[list[Array]]:
    """Best fit, longest first: each piece goes into the fullest row that has room for it.

    >>> [[len(piece) for piece in row] for row in fit([np.ones(n) for n in (3, 9, 5, 7, 1)], 10)]
    [[9, 1], [7, 3], [5]]
    """
    rows: list[list[Array]] = []
    room: list[tuple[int, int]] = []  # (what is left, row), least first
    for i in sorted(range(len(pieces)), key=lambda i: (-len(pieces[i]), i)):
        piece = pieces[i]
        found = bisect_left(room, (len(piece), -1))
        if found == len(room):
            row, left = len(rows), length
            rows.append([])
        else:
            left, row = room.pop(found)
        rows[row].append(piece)
        if left > len(piece):
            insort(room, (left - len(piece), row))
    return rows


@builds(ops.Pack)
def _packing(node: ops.Pack, at: Site, upstream: Stage) -> Stage:
    return Packing(
        at.meter,
        upstream,
        label=at.meter.label,
        length=node.length,
        key=node.key,
        long=node.long,
        lookahead=node.lookahead,
        value=node.value,
    )
