"""A stream's share of a job, for the operators that take one, and the stage that keeps a share of the elements."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.runtime.contract import Chunk, CountedMarks, Marks, Origin, Stage, State
from penstock.runtime.stats import StageMeter


class StreamShare(msgspec.Struct):
    """Read by operators when they are opened. A tail changes it from leftover to leftover."""

    shuffle_parts: int = 1
    keep: tuple[int, int] | None = None

    def of(self, size: int) -> int:
        """Return the part of a shuffle's size.

        >>> [StreamShare(shuffle_parts=4).of(size) for size in (1000, 10, 1)]
        [250, 3, 1]
        """
        return max(1, -(-size // self.shuffle_parts))


class _KeptMarks(msgspec.Struct, frozen=True):
    counted: int
    marks: Marks
    kept: Sequence[int]
    total: int

    def at(self, k: int) -> State:
        place = 0 if k == 0 else self.kept[k] if k < len(self.kept) else self.total
        return [self.counted + place, self.marks.at(place)]

    def origin(self, k: int) -> Origin | None:
        return self.marks.origin(self.kept[k])


class ShardStage(Stage):
    """Keeps elements number w of each n, counted from the start of the pass.

    The state is `[elements counted, input's state]`. Alone, and where splits are shared out instead, it is not there.
    """

    _counted: int

    def __init__(self, meter: StageMeter, upstream: Stage, share: StreamShare) -> None:
        super().__init__(meter, upstream)
        self.upstream = upstream
        self._share = share

    def open(self, pass_: int, state: State) -> None:
        self._counted, upstream_state = state or (0, None)
        self._keep = self._share.keep or (0, 1)
        self.upstream.open(pass_, upstream_state)

    def _pull(self, want: int) -> Chunk:
        number, of = self._keep
        while True:
            chunk = self.upstream.pull(want * of)
            total = len(chunk.elements)
            if not total:
                return Chunk((), CountedMarks(self._counted, chunk.marks))
            kept = range((number - self._counted) % of, total, of)
            marks = _KeptMarks(self._counted, chunk.marks, kept, total)
            self._counted += total
            if kept:
                idents = None if chunk.idents is None else chunk.idents[kept.start : kept.stop : kept.step]
                return Chunk(chunk.elements[kept.start : kept.stop : kept.step], marks, idents)
