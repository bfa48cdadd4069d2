"""A sampler that feeds a run in its own process.

The sampler is the trainer's code: it is drawn from while the trainer is in `next()`, and at no other time. Up to
`ahead` units are then known to the threads of the run; one that needs more while the trainer waits draws them itself,
because the trainer waits for just that.

A unit's ordinal is its number in the epoch, so that a state made of ordinals stays true when the epoch is resumed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from penstock.client.sampling import REFILL_AT, Drawing, SamplerPlace, Unit
from penstock.runtime.streams import StreamStopped

LOOK_AGAIN_S = 1.0


class LocalUnits:
    """The units of one epoch, from where a sampler stands. Any thread may ask."""

    def __init__(self, drawing: Drawing, ahead: int) -> None:
        self._drawing, self._ahead = drawing, ahead
        self._changed = threading.Condition()
        self._kept: deque[tuple[Unit, SamplerPlace]] = deque()
        self._kept_from = drawing.place().units
        self._end: SamplerPlace | None = None
        self._reader_waits = False
        self._stopped = False
        self._error: BaseException | None = None

    # The reader's side

    def reader_came(self, needed: int) -> None:
        """The trainer is in `next()`, and no unit before `needed` is asked for again."""
        with self._changed:
            while self._kept and self._kept_from < needed:
                self._kept.popleft()
                self._kept_from += 1
            if len(self._kept) <= REFILL_AT * self._ahead:
                while self._end is None and self._error is None and len(self._kept) < self._ahead:
                    self._draw()
            self._reader_waits = True
            self._changed.notify_all()

    def reader_left(self) -> None:
        with self._changed:
            self._reader_waits = False

    def place(self, ordinal: int | None) -> SamplerPlace:
        """Return where the sampler stood before a unit; None: after the last one."""
        with self._changed:
            offset = len(self._kept) if ordinal is None else ordinal - self._kept_from
            if offset < len(self._kept):
                return self._kept[offset][1]
            return self._end or self._drawing.place()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _draw(self) -> None:
        place = self._drawing.place()
        try:
            unit = self._drawing.draw()
        except BaseException as error:
            self._error = error
            return
        if unit is None:
            self._end = place
        else:
            self._kept.append((unit, place))

    # The run's side

    def next_split(self, source: int, pass_: int, after: int | None) -> int | None:
        ordinal = 0 if after is None else after + 1
        with self._changed:
            while ordinal >= self._kept_from + len(self._kept):
                if self._stopped:
                    raise StreamStopped
                if self._error is not None:
                    raise self._error
                if self._end is not None:
                    return None
                if self._reader_waits:
                    self._draw()
                else:
                    self._changed.wait(LOOK_AGAIN_S)
        return ordinal

    def known_split(self, source: int, pass_: int, after: int) -> int | None:
        with self._changed:
            return after + 1 if after + 1 < self._kept_from + len(self._kept) else None

    def prefer(self, source: int, pass_: int, ordinals: Sequence[int]) -> None:
        return  # the sampler decides

    def select(self, leftover: int) -> None:
        raise TypeError("a sampler's epoch has no leftovers")

    def unit(self, ordinal: int) -> Unit:
        with self._changed:
            return self._kept[ordinal - self._kept_from][0]

    def number(self, ordinal: int) -> int:
        return ordinal
