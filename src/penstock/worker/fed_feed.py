"""A stream whose reader sends it units: what each output is made of, by the indices of elements."""

from __future__ import annotations

import threading

from penstock.runtime.streams import StreamStopped
from penstock.wire.frames import Units
from penstock.wire.jobs import FeedSpec
from penstock.worker.feeds import LOOK_AGAIN_S, StaleStream, StreamFeed

MOST_UNITS = 1 << 20  # of one stream at a time; readers send a few hundred ahead
MOST_INDICES = 1 << 24  # in all units of a process, at about 40 bytes each: 64 batches of 65,536 are a fourth of that


class FedUnits:
    """What is known of one stream's units. Any thread may call.

    The reader sends units ahead, a bounded number of them, and all it still needs again with each opening. A unit's
    number in its stream says which it is, so nothing depends on when, how often or by which opening it came.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.start = 0
        """The number of the first unit, in the whole epoch."""
        self._units: dict[int, tuple[int, ...]] = {}
        self._end: int | None = None
        self._taken = 0
        self.indices = 0
        """How many there are in all units that are held."""

    def take(self, message: Units, room: int = MOST_INDICES) -> None:
        """Hear of units, and keep them if they fit; `room`: for so many more indices."""
        with self.changed:
            more = sum(map(len, message.units))
            if len(self._units) + len(message.units) <= MOST_UNITS and more <= room:
                for ordinal, unit in enumerate(message.units, message.first):
                    self.indices += len(unit) - len(self._units.get(ordinal, ()))
                    self._units[ordinal] = unit
            self.start = message.start
            if message.ended:
                self._end = message.first + len(message.units)
            # Those that are held are looked through, not those that were taken: nobody has checked that number.
            for ordinal in [held for held in self._units if held < message.taken]:
                self.indices -= len(self._units.pop(ordinal))
            self._taken = max(self._taken, message.taken)
            self.changed.notify_all()

    def get(self, ordinal: int) -> tuple[int, ...] | None:
        """Return a unit; None: it is not known yet, or there is none."""
        return self._units.get(ordinal)

    def ends_before(self, ordinal: int) -> bool:
        return self._end is not None and ordinal >= self._end

    def is_behind(self, ordinal: int) -> bool:
        """Say whether the reader has this unit's output and will not send the unit again."""
        return ordinal < self._taken


class FedFeed(StreamFeed):
    """Units 0, 1, 2, ... of a stream, as its reader sends them. Waits while it is behind."""

    def __init__(self, units: FedUnits, feed: FeedSpec) -> None:
        self._known = units
        self._feed = feed
        self._stopped = False

    def next_split(self, source: int, pass_: int, after: int | None) -> int | None:
        ordinal = 0 if after is None else after + 1
        known = self._known
        with known.changed:
            while known.get(ordinal) is None:
                if self._stopped:
                    raise StreamStopped
                if known.ends_before(ordinal):
                    return None
                if known.is_behind(ordinal):
                    raise _read(ordinal)
                known.changed.wait(LOOK_AGAIN_S)
        return ordinal

    def known_split(self, source: int, pass_: int, after: int) -> int | None:
        return after + 1 if self._known.get(after + 1) is not None else None

    def unit(self, ordinal: int) -> tuple[int, ...]:
        found = self._known.get(ordinal)
        if found is None:
            raise _read(ordinal)
        return found

    def number(self, ordinal: int) -> int:
        return self._known.start + ordinal * self._feed.of + self._feed.number

    def stop(self) -> None:
        with self._known.changed:
            self._stopped = True
            self._known.changed.notify_all()


def _read(ordinal: int) -> StaleStream:
    return StaleStream(f"unit {ordinal} has been read, and its reader does not have it any more")
