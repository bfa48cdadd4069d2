"""Batches of what operators leave of a sampler's lists: one a list, none where nothing is left of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from penstock.core.element import Element
from penstock.runtime.blame import RowOrigins
from penstock.runtime.contract import Chunk, Idents, Marks, Points, RegroupingStage, Stage, State
from penstock.runtime.stats import StageMeter
from penstock.runtime.streaming.units import POSITION_BITS


class UnitBatching(RegroupingStage):
    """Joins the rows of a unit, which their identities name. A unit has ended when a row of another is there."""

    def __init__(
        self, meter: StageMeter, upstream: Stage, *, label: str, size: int, join: Callable[[Sequence[Element]], Element]
    ) -> None:
        super().__init__(meter, upstream)
        self._upstream, self._label, self._size, self._join = upstream, label, size, join

    def open(self, pass_: int, state: State) -> None:
        self._upstream.open(pass_, state)
        self._rows: list[Element] = []
        self._unit = -1
        self._start: tuple[Marks, int] | None = None
        self._ident: Idents | None = None
        self._origins = RowOrigins()
        self._error: Exception | None = None

    def _pull(self, want: int) -> Chunk:
        while self._error is None:
            chunk = self._upstream.pull(want * self._size)
            start = self._start or (chunk.marks, 0)
            if not chunk.elements:
                return self._last(start, (chunk.marks, 0))
            batches, ends, idents = self._cut(chunk)
            if batches:
                return Chunk(batches, Points(start, ends), np.concatenate(idents))
        raise self._error

    def _cut(self, chunk: Chunk) -> tuple[list[Element], list[tuple[Marks, int]], list[Idents]]:
        assert chunk.idents is not None
        units = (chunk.idents[:, 2] >> np.uint64(POSITION_BITS)).tolist()
        batches: list[Element] = []
        ends: list[tuple[Marks, int]] = []
        idents: list[Idents] = []
        for k, (element, unit) in enumerate(zip(chunk.elements, units)):
            if unit != self._unit and self._rows:
                try:
                    batches.append(self._join(self._rows))
                except Exception as error:
                    self._error = self._origins.blame(error, self._label)
                    break
                ends.append((chunk.marks, k))
                assert self._ident is not None
                idents.append(self._ident)
                self._rows = []
            if not self._rows:
                self._unit, self._start, self._ident = unit, (chunk.marks, k), chunk.idents[k : k + 1]
                self._origins.clear()
            self._origins.add(len(self._rows), chunk.marks, k)
            self._rows.append(element)
        return batches, ends, idents

    @property
    def has_rest(self) -> bool:
        return bool(self._rows)

    def _last(self, start: tuple[Marks, int], end: tuple[Marks, int]) -> Chunk:
        rows, self._rows, self._start = self._rows, [], None
        if not rows:
            return Chunk((), Points(end, ()))
        try:
            return Chunk([self._join(rows)], Points(start, [end]), self._ident)
        except Exception as error:
            raise self._origins.blame(error, self._label) from error.__cause__
