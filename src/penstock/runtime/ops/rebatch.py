"""rebatch: batches of another size, cut and joined by columns.

The state is `[rows taken, state before their batch]`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from penstock.core.element import Element, batch_length, slice_batch
from penstock.graph import ops
from penstock.runtime.blame import blame
from penstock.runtime.building import Site, builds
from penstock.runtime.collate import Empty, join_batches
from penstock.runtime.contract import Chunk, Fixed, Idents, Marks, Origin, RegroupingStage, Stage, State
from penstock.runtime.randomness import child_paths
from penstock.runtime.stats import StageMeter


class _RowMarks(msgspec.Struct, frozen=True):
    """`points[k]` is (rows taken of a batch, the place before that batch) after k outputs.

    `begins[k]` is the batch that has the first row of output k, which may be of a later chunk than the place before.
    """

    points: Sequence[tuple[int, tuple[Marks, int]]]
    begins: Sequence[tuple[Marks, int]] = ()

    def at(self, k: int) -> State:
        rows, (marks, at) = self.points[k]
        return [rows, marks.at(at)]

    def origin(self, k: int) -> Origin | None:
        marks, at = self.begins[k]
        return marks.origin(at)


class Rebatching(RegroupingStage):
    _drop: int

    def __init__(
        self,
        meter: StageMeter,
        upstream: Stage,
        *,
        size: int,
        drop_last: bool,
        keep_rest: bool = False,
        empty: Empty = np.empty,
    ) -> None:
        super().__init__(meter, upstream)
        self.upstream = upstream
        self._size = size
        self._drop_last = drop_last
        self._keep_rest = keep_rest
        self._empty = empty

    def open(self, pass_: int, state: State) -> None:
        self._drop, upstream_state = state or (0, None)
        self.upstream.open(pass_, upstream_state)
        self._parts: list[Element] = []
        self._rest: Chunk | None = None
        self._have = 0
        self._ident: Idents | None = None
        self._begin: tuple[Marks, int] = (Fixed(None), 0)
        self._point: tuple[int, tuple[Marks, int]] = (self._drop, (Fixed(upstream_state), 0))
        self._untouched = True
        self._error: BaseException | None = None

    def _pull(self, want: int) -> Chunk:
        chunk = self._rest or self._next_batches(want)
        head, self._rest = chunk.head_and_rest(want)
        return head

    def _next_batches(self, want: int) -> Chunk:
        if self._error is not None:
            raise self._error
        points = [self._point]
        begins: list[tuple[Marks, int]] = []
        out: list[Element] = []
        idents: list[Idents] = []
        while not out:
            chunk = self.upstream.pull(max(1, want))
            if not chunk.elements:
                return self._last(points, (0, (chunk.marks, 0)))
            if self._untouched:
                # The same place as the one it was opened at, but one that says which split it is in.
                self._point = points[0] = (self._drop, (chunk.marks, 0))
                self._untouched = False
            for k, batch in enumerate(chunk.elements):
                ident = None if chunk.idents is None else chunk.idents[k : k + 1]
                try:
                    self._add(batch, chunk.marks, k, ident, out, points, begins, idents)
                except Exception as error:
                    self._error = blame(error, self.meter.label, chunk.marks.origin(k))
                    break
            if self._error is not None and not out:
                raise self._error
        self._point = points[-1]
        return Chunk(out, _RowMarks(points, begins), np.concatenate(idents) if idents else None)

    def _add(
        self,
        batch: Element,
        marks: Marks,
        k: int,
        ident: Idents | None,
        out: list[Element],
        points: list[tuple[int, tuple[Marks, int]]],
        begins: list[tuple[Marks, int]],
        idents: list[Idents],
    ) -> None:
        rows, start = batch_length(batch), self._drop
        self._drop = 0
        while start < rows:
            stop = min(rows, start + self._size - self._have)
            if not self._parts:
                self._begin = marks, k  # a batch is known by its first row
                if ident is not None:
                    self._ident = ident.copy()
                    self._ident[:, 2] = child_paths(ident[:, 2], np.array([start]))
            self._parts.append(slice_batch(batch, start, stop))
            self._have += stop - start
            start = stop
            if self._have == self._size:
                out.append(join_batches(self._parts, self._empty))
                begins.append(self._begin)
                points.append((0, (marks, k + 1)) if stop == rows else (stop, (marks, k)))
                if self._ident is not None:
                    idents.append(self._ident)
                self._parts, self._have = [], 0

    @property
    def has_rest(self) -> bool:
        return bool(self._parts)

    def _last(self, points: list[tuple[int, tuple[Marks, int]]], end: tuple[int, tuple[Marks, int]]) -> Chunk:
        if self._keep_rest and self._parts:
            return Chunk((), _RowMarks(points))
        parts, self._parts, self._have = self._parts, [], 0
        self._point = end
        if not parts or self._drop_last:
            return Chunk((), _RowMarks([end]))
        return Chunk([join_batches(parts)], _RowMarks([*points, end], [self._begin]), self._ident)


@builds(ops.Rebatch)
def _rebatching(node: ops.Rebatch, at: Site, upstream: Stage) -> Stage:
    return Rebatching(
        at.meter,
        upstream,
        size=node.size,
        drop_last=node.drop_last,
        keep_rest=at.keep_rest,
        empty=at.placement.empty,
    )
