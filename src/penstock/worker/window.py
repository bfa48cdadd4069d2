"""The sliding window over a stream that several trainers read: rounds, encoded once, in the order they were made.

Pure bookkeeping: no threads, no sockets, no memory of its own. An entry holds the rounds of one frame. Entries follow
each other without a gap, the oldest goes first, and the end stays known when all of them are gone, so that making can
go on from it.
"""

from __future__ import annotations

import bisect
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from penstock.wire.frames import SlabPlaces
from penstock.wire.jobs import Cut
from penstock.worker.encoding import Frame


@dataclass(slots=True, eq=False, kw_only=True)
class Entry(Frame):
    """A frame that is kept."""

    places: SlabPlaces | None = None
    """Where the buffers lie in memory that readers on this host map; None: only here."""
    made_for: int | None = None
    """The reader that caused it."""
    packed: tuple[str, Sequence[Any]] | None = None
    """The buffers compressed, once a reader elsewhere needed them."""
    packed_bytes: int = 0
    """What that takes beside the buffers."""


_after = attrgetter("after")


class Leaving:
    """What was let go and is still on its way to somebody: the socket sends it from where it lies."""

    def __init__(self) -> None:
        self._shared: list[weakref.ref[Any]] = []
        self._own: list[weakref.ref[Any]] = []

    def add(self, entry: Entry) -> None:
        buffers = [weakref.ref(buffer) for buffer in entry.buffers if isinstance(buffer, np.ndarray)]
        if entry.places is not None:
            self._shared += buffers
        else:
            self._own += buffers

    def __bool__(self) -> bool:
        """Some of it is memory that readers map."""
        self._shared = [buffer for buffer in self._shared if buffer() is not None]
        return bool(self._shared)

    @property
    def own_bytes(self) -> int:
        """What the rest takes."""
        alive = [(ref, buffer.nbytes) for ref in self._own if (buffer := ref()) is not None]
        self._own = [ref for ref, _ in alive]
        return sum(nbytes for _, nbytes in alive)


class Window:
    """
    >>> window = Window(Cut(), 0)
    >>> for seq in (0, 3, 5):
    ...     window.add(Entry(seq=seq, count=3 if seq == 0 else 2, cut=Cut(), layout=b"", buffers=(), nbytes=10))
    >>> window.first, window.end, window.holding(4).seq, window.holding(7)
    (0, 7, 3, None)
    >>> window.evict().seq, window.first, window.holding(0).seq, window.nbytes
    (0, 3, 3, 20)
    >>> window.pack(window.oldest, "lz4", [b"1234"])
    >>> window.nbytes, window.evict().packed, window.nbytes
    (24, ('lz4', [b'1234']), 10)
    """

    def __init__(self, cut: Cut, round_: int) -> None:
        self._entries: deque[Entry] = deque()
        self.nbytes = 0
        self.end = round_
        """The first round that was not made yet."""
        self.end_cut = cut

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def first(self) -> int:
        """The oldest round here."""
        return self._entries[0].seq if self._entries else self.end

    @property
    def oldest(self) -> Entry:
        return self._entries[0]

    def holding(self, round_: int) -> Entry | None:
        """Return the first entry that has this round or a later one; None: they are yet to be made."""
        entries = self._entries
        if round_ >= self.end or not entries:
            return None
        if entries[-1].seq <= round_:
            return entries[-1]  # most readers are near the front
        return entries[bisect.bisect_right(entries, round_, key=_after)]

    def add(self, entry: Entry) -> None:
        if entry.seq != self.end:
            raise ValueError(f"round {entry.seq} after {self.end}")
        self._entries.append(entry)
        self.nbytes += entry.nbytes
        self.end, self.end_cut = entry.after, entry.cut

    def pack(self, entry: Entry, compression: str, buffers: Sequence[Any]) -> None:
        """Keep an entry in compressed form as well."""
        entry.packed = compression, buffers
        entry.packed_bytes = sum(memoryview(buffer).nbytes for buffer in buffers) if compression else 0
        self.nbytes += entry.packed_bytes

    def evict(self) -> Entry:
        """Let the oldest entry go, and return it."""
        entry = self._entries.popleft()
        self.nbytes -= entry.nbytes + entry.packed_bytes
        return entry
