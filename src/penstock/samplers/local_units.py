"""A sampler that feeds a run in its own process.

The sampler is the trainer's code: it is drawn from while the trainer is in `next()`, and at no other time. Up to
`ahead` units are then known to the threads of the run; one that needs more while the trainer waits draws them itself,
because the trainer waits for just that.

A unit's ordinal is its number in the epoch, so that a state made of ordinals stays true when the epoch is resumed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from penstock.runtime.streams import StreamStopped
from penstock.samplers.drawing import REFILL_AT, Drawing, KeptUnits, SamplerPlace, Unit

LOOK_AGAIN_S = 1.0


class LocalUnits:
    """The units of one epoch, from where a sampler stands. Any thread may ask."""

    def __init__(self, drawing: Drawing, ahead: int) -> None:
        self._ahead = ahead
        self._changed = threading.Condition()
        """Over all that follows."""
        self._kept = KeptUnits(drawing)
        self._reader_waits = False
        self._stopped = False
        self._error: BaseException | None = None

    # The reader's side

    def reader_came(self, needed: int) -> None:
        """The trainer is in `next()`, and no unit before `needed` is asked for again."""
        with self._changed:
            kept = self._kept
            kept.forget(needed)
            if kept.next - kept.first <= REFILL_AT * self._ahead:
                while not kept.ended and self._error is None and kept.next - kept.first < self._ahead:
                    self._draw()
            self._reader_waits = True
            self._changed.notify_all()

    def reader_left(self) -> None:
        with self._changed:
            self._reader_waits = False

    def place(self, ordinal: int | None) -> SamplerPlace:
        """Return where the sampler stood before a unit; None: after the last one."""
        with self._changed:
            return self._kept.place(self._kept.next if ordinal is None else ordinal)

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _draw(self) -> None:
        try:
            self._kept.draw()
        except BaseException as error:
            self._error = error

    # The run's side

    def next_split(self, source: int, pass_: int, after: int | None) -> int | None:
        ordinal = 0 if after is None else after + 1
        with self._changed:
            while ordinal >= self._kept.next:
                if self._stopped:
                    raise StreamStopped
                if self._error is not None:
                    raise self._error
                if self._kept.ended:
                    return None
                if self._reader_waits:
                    self._draw()
                else:
                    self._changed.wait(LOOK_AGAIN_S)
        return ordinal

    def known_split(self, source: int, pass_: int, after: int) -> int | None:
        with self._changed:
            return after + 1 if after + 1 < self._kept.next else None

    def prefer(self, source: int, pass_: int, ordinals: Sequence[int]) -> None:
        return  # the sampler decides

    def select(self, leftover: int) -> None:
        raise TypeError("a sampler's epoch has no leftovers")

    def unit(self, ordinal: int) -> Unit:
        with self._changed:
            return self._kept.unit(ordinal)

    def number(self, ordinal: int) -> int:
        return ordinal
