"""Block shuffle: fill a block, permute it, emit it while the next one fills.

Permute a block, not a sliding buffer: a block's state is a position, `[block, offset, state before the block]`. A
stream of a job takes its share of the size, the same from its first opening to its end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from penstock.graph import ops
from penstock.runtime.building import Site, builds
from penstock.runtime.contract import Chunk, Fixed, Idents, Marks, Origin, Stage, State
from penstock.runtime.ops.source import RandomOrder
from penstock.runtime.randomness import block_permutation, derive_key
from penstock.runtime.shuffling import block_size, order_of, source_reached
from penstock.runtime.stats import StageMeter
from penstock.runtime.streaming.sharding import StreamShare


class _Block:
    """Elements in the order they came, and where they came from."""

    def __init__(self, number: int, start: tuple[Marks, int]) -> None:
        self.number = number
        self.start = start
        self.count = 0
        self.elements: list[Any] = []
        self.idents: list[Idents] = []
        self._marks: list[Marks] = []
        self._firsts: list[int] = []

    def add(self, chunk: Chunk) -> None:
        self._marks.append(chunk.marks)
        self._firsts.append(self.count)
        self.count += len(chunk.elements)
        self.elements.extend(chunk.elements)
        if chunk.idents is not None:
            self.idents.append(chunk.idents)

    @property
    def end(self) -> tuple[Marks, int]:
        return (self._marks[-1], self.count - self._firsts[-1]) if self.count else self.start

    def origin(self, place: int) -> Origin | None:
        chunk = bisect_right(self._firsts, place) - 1
        return self._marks[chunk].origin(place - self._firsts[chunk])


class _BlockMarks(msgspec.Struct, frozen=True):
    block: _Block
    order: Sequence[int]
    offset: int

    def at(self, k: int) -> State:
        done = self.offset + k
        if done == len(self.order):
            marks, at = self.block.end
            return [self.block.number + 1, 0, marks.at(at)]
        marks, at = self.block.start
        return [self.block.number, done, marks.at(at)]

    def origin(self, k: int) -> Origin | None:
        return self.block.origin(self.order[self.offset + k])


class BlockShuffle(Stage):
    _offset: int

    def __init__(
        self, meter: StageMeter, upstream: Stage, *, size: int, order: RandomOrder, share: StreamShare
    ) -> None:
        super().__init__(meter, upstream)
        self.upstream = upstream
        self._whole_size = size
        self._share = share
        self._random = order

    def open(self, pass_: int, state: State) -> None:
        self._key = self._random.key(pass_)
        self._size = self._share.of(self._whole_size)
        number, self._offset, upstream_state = state or (0, 0, None)
        self.upstream.open(pass_, upstream_state)
        self._current: _Block | None = None
        self._filling = _Block(number, (Fixed(upstream_state), 0))
        self._ended: Chunk | None = None
        self._error: Exception | None = None

    def _pull(self, want: int) -> Chunk:
        while self._current is None or self._offset >= len(self._shuffled):
            restoring = self._current is None  # the offset is that of the state, for the first block
            if not self._turn_over():
                end = self._ended
                assert end is not None
                return Chunk((), Fixed([self._filling.number, 0, end.marks.at(0)]))
            if not restoring:
                self._offset = 0
        elements = self._shuffled[self._offset : self._offset + want]
        marks = _BlockMarks(self._current, self._order, self._offset)
        idents = None if self._idents is None else self._idents[self._offset : self._offset + want]
        self._offset += len(elements)
        self._fill_some(len(elements))
        return Chunk(elements, marks, idents)

    def _turn_over(self) -> bool:
        """Finish the filling block and make it the current one; False if there is nothing in it."""
        block = self._filling
        while block.count < self._size and self._ended is None:
            # A block cut short by an error is not emitted: its order would not be that of the whole block, and a
            # state inside it would mean something else once the error is mended.
            if self._error is not None:
                raise self._error
            self._fill(self._size - block.count)
        if not block.count:
            return False
        order = block_permutation(derive_key("block", *self._key, block.number), block.count)
        self._order = order.tolist()
        self._shuffled = [block.elements[i] for i in self._order]
        self._idents = np.concatenate(block.idents)[order] if block.idents else None
        block.elements, block.idents = [], []  # the shuffled copies serve from here on
        self._current = block
        self._filling = _Block(block.number + 1, block.end)
        return True

    def _fill_some(self, count: int) -> None:
        """Take about as much as was given, so that the next block is full when this one is empty."""
        room = min(count, self._size - self._filling.count)
        if room and self._ended is None and self._error is None:
            try:
                self._fill(room)
            except Exception as error:
                self._error = error  # the current block is given first

    def _fill(self, want: int) -> None:
        chunk = self.upstream.pull(want)
        if chunk.elements:
            if not self._filling.count and isinstance(self._filling.start[0], Fixed):
                self._filling.start = (chunk.marks, 0)  # the same place, but one that says which split it is in
            self._filling.add(chunk)
        else:
            self._ended = chunk


@builds(ops.Shuffle)
def _shuffling(node: ops.Shuffle, at: Site, upstream: Stage) -> Stage:
    source = source_reached(node)
    if source is not None and at.reads_by_index(source):
        return upstream  # it reads in this order itself
    return BlockShuffle(
        at.meter, upstream, size=block_size(node), order=order_of(node, at.seed), share=at.placement.share
    )
