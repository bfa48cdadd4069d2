"""batch, padded_batch and ragged_batch: rows gathered in order and collated. A batch adds no state of its own.

With `keep_rest` the last rows that do not fill a batch are not given: the end is where the last batch ended. Where
`sizes` are given, they say how many rows each batch has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from penstock.core.element import Element
from penstock.core.errors import InvalidPipelineError
from penstock.graph import ops
from penstock.graph.functions import UserFunction
from penstock.runtime.blame import RowOrigins
from penstock.runtime.building import Site, builds
from penstock.runtime.collate import CollatesInto, Empty, collate, ragged_leaves, stack_leaves
from penstock.runtime.contract import Chunk, Idents, Marks, Points, RegroupingStage, Stage, State
from penstock.runtime.ops.unit_batches import UnitBatching
from penstock.runtime.stats import StageMeter
from penstock.runtime.streaming.units import Sizes

Collate = Callable[[Sequence[Element]], Element]


class Batching(RegroupingStage):
    def __init__(
        self,
        meter: StageMeter,
        upstream: Stage,
        *,
        label: str,
        size: int,
        drop_last: bool,
        collate: Collate,
        keep_rest: bool = False,
        sizes: Sizes | None = None,
    ) -> None:
        super().__init__(meter, upstream)
        self.upstream = upstream
        self._label = label
        self._size = size
        self._drop_last = drop_last
        self._collate = collate
        self._keep_rest = keep_rest
        self._sizes_from = sizes

    def open(self, pass_: int, state: State) -> None:
        self.upstream.open(pass_, state)
        self._sizes = None if self._sizes_from is None else self._sizes_from(state)
        self._rows: list[Element] = []
        self._origins = RowOrigins()
        self._ident: Idents | None = None
        self._start: tuple[Marks, int] | None = None
        self._error: Exception | None = None

    def _pull(self, want: int) -> Chunk:
        if self._error is not None:
            raise self._error
        while True:
            chunk = self.upstream.pull(want * self._size - len(self._rows))
            here = (chunk.marks, 0)
            start = self._start or here
            if not chunk.elements:
                return self._last(start, here)
            batches, ends, idents = self._cut(chunk)
            if batches:
                return Chunk(batches, Points(start, ends), np.concatenate(idents) if idents else None)
            if self._error is not None:
                raise self._error

    def _cut(self, chunk: Chunk) -> tuple[list[Element], list[tuple[Marks, int]], list[Idents]]:
        batches: list[Element] = []
        ends: list[tuple[Marks, int]] = []
        idents: list[Idents] = []
        done = 0
        while done < len(chunk.elements):
            if not self._rows:
                if self._sizes is not None:
                    self._size = next(self._sizes)
                self._start = (chunk.marks, done)
                self._origins.clear()
                self._ident = None if chunk.idents is None else chunk.idents[done : done + 1]
            taken = min(self._size - len(self._rows), len(chunk.elements) - done)
            self._origins.add(len(self._rows), chunk.marks, done)
            self._rows.extend(chunk.elements[done : done + taken])
            done += taken
            if len(self._rows) == self._size:
                try:
                    batches.append(self._collate(self._rows))
                except Exception as error:
                    self._error = self._origins.blame(error, self._label)
                    break
                ends.append((chunk.marks, done))
                if self._ident is not None:
                    idents.append(self._ident)
                self._rows, self._start = [], None
        return batches, ends, idents

    @property
    def has_rest(self) -> bool:
        return bool(self._rows)

    def _last(self, start: tuple[Marks, int], end: tuple[Marks, int]) -> Chunk:
        if self._keep_rest:
            return Chunk((), Points(start, ()))
        rows, self._rows, self._start = self._rows, [], None
        if not rows or self._drop_last:
            return Chunk((), Points(end, ()))
        try:
            return Chunk([self._collate(rows)], Points(start, [end]), self._ident)
        except Exception as error:
            raise self._origins.blame(error, self._label) from error.__cause__


def stacking(empty: Empty) -> Collate:
    """Return what makes arrays of rows, in memory that `empty` gives."""
    leaf = partial(stack_leaves, empty=empty)
    return lambda rows: collate(rows, "", leaf)


@builds(ops.Batch)
def _stacked(node: ops.Batch, at: Site, upstream: Stage) -> Stage:
    join = stacking(at.placement.empty) if node.collate is None else _collating(node.collate, at.placement.empty)
    if node.mask is not None:
        join = _masking(join, node.size, node.mask)
    return batching(node.name, node.size, node.drop_last, join, at, upstream)


def _collating(function: UserFunction, empty: Empty) -> Collate:
    def join(rows: Sequence[Element]) -> Element:
        collate = function.resolve()
        made: Element = collate.collate_into(rows, empty) if isinstance(collate, CollatesInto) else collate(list(rows))
        return made

    return join


def _masking(join: Collate, size: int, name: str) -> Collate:
    def masked(rows: Sequence[Element]) -> Element:
        batch = join([*rows, *[rows[-1]] * (size - len(rows))])
        if not isinstance(batch, dict) or name in batch:
            there = f"have a column {name!r} already" if isinstance(batch, dict) else f"are {type(batch).__name__}s"
            raise InvalidPipelineError(
                f"batch({size}, mask={name!r}) adds a column to batches, which {there}; give elements as dicts, and "
                "the mask a name of its own"
            )
        return {**batch, name: np.arange(size) < len(rows)}

    return masked


@builds(ops.RaggedBatch)
def _ragged(node: ops.RaggedBatch, at: Site, upstream: Stage) -> Stage:
    return batching(node.name, node.size, node.drop_last, lambda rows: collate(rows, "", ragged_leaves), at, upstream)


def batching(label: str, size: int, drop_last: bool, join: Collate, at: Site, upstream: Stage) -> Stage:
    """Return the stage that makes outputs of `size` elements each, by `join`; `label` names it in errors."""
    if at.placement.thinned_units:
        return UnitBatching(at.meter, upstream, label=label, size=size, join=join)
    return Batching(
        at.meter,
        upstream,
        label=label,
        size=size,
        drop_last=drop_last,
        collate=join,
        keep_rest=at.keep_rest,
        sizes=at.placement.sizes,
    )
