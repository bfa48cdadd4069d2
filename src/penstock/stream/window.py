"""The sliding window over a stream that several trainers read: rounds, made once, in the order they were made.

An entry holds the rounds of one frame. Entries follow each other without a gap, the oldest goes first, and the end
stays known when all of them are gone, so that making can go on from it.
"""

from __future__ import annotations

import bisect
from collections import deque
from operator import attrgetter
from typing import Any

import msgspec

from penstock.wire.jobs import Cut


class Entry(msgspec.Struct, eq=False):
    """`count` rounds from `seq` on; `cut` is the state after them. `payload` is the caller's."""

    seq: int
    count: int
    cut: Cut
    nbytes: int
    payload: Any = None
    made_for: str | None = None
    """The trainer whose request caused it to be made."""

    @property
    def after(self) -> int:
        return self.seq + self.count

    def grow(self, nbytes: int) -> None:
        """It takes so much more: what it holds is kept in compressed form as well."""
        self.nbytes += nbytes


_after = attrgetter("after")


class Window:
    """
    >>> window = Window(Cut(), 0)
    >>> for seq in (0, 3, 5):
    ...     window.add(Entry(seq, 3 if seq == 0 else 2, Cut(), 10))
    >>> window.first, window.end, window.holding(4).seq, window.holding(7)
    (0, 7, 3, None)
    >>> window.evict().seq, window.first, window.holding(0).seq, window.nbytes
    (0, 3, 3, 20)
    >>> window.grow(window.oldest, 4); window.nbytes, window.evict().nbytes, window.nbytes
    (24, 14, 10)
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

    def grow(self, entry: Entry, nbytes: int) -> None:
        entry.grow(nbytes)
        self.nbytes += nbytes

    def evict(self) -> Entry:
        """Let the oldest entry go, and return it."""
        entry = self._entries.popleft()
        self.nbytes -= entry.nbytes
        return entry
