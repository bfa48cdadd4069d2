"""Which parts of an arena are free, and which of them take memory.

A page that was never touched costs twenty times what a warm one does, and stays with the process from then on. So what
was given back last is handed out first, and untouched memory only where nothing given back fits:

1. A freed range waits for the next request of about its size; of those that fit the last given is taken.
2. If none fits, waiting ranges are looked at together with their neighbours, and the lowest place is cut.
3. Then untouched memory is taken, and at last a place that is warm in part.

What has been free for a while is given back to the system (`ranges_to_cool`), and is untouched again.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import NamedTuple

ALIGNMENT = 64
IDLE_S = 5.0  # memory of a burst is not kept for the next one, if that is further away than this
KEPT_BYTES = 16 << 20  # stays warm however long it is free: a trainer that pauses to evaluate finds it again
COOLED_SHARE = 4  # at most a fourth of what is idle goes at once: a need that comes and goes finds most of it again
_PAGE_BYTES = 4096
_SLACK = 1.25  # a waiting range may be so much larger than what is asked for
_MOST_PARTS = 1024  # beyond, neighbours are one part with the younger one's age: looking through many costs time

ByteRange = tuple[int, int]
"""(offset, size)"""


class IdleRange(NamedTuple):
    """A free range that takes memory, and when it was given back."""

    offset: int
    size: int
    since_s: float


class FreeRanges:
    """
    >>> free = FreeRanges(1 << 20)
    >>> first = free.take(100_000)
    >>> free.give(*first)
    >>> free.take(99_000) == first
    True
    """

    def __init__(self, size_bytes: int) -> None:
        self.free_bytes = size_bytes
        self._waiting: dict[int, list[IdleRange]] = {}
        """Ranges that wait for a request of their own size, by size; the last one given back is at the end."""
        self._warm: list[IdleRange] = []
        """Those that wait for no size in particular, by offset. Each has its own age, neighbours too."""
        self._cold: list[ByteRange] = [(0, size_bytes)]
        """What takes no memory, by offset; never adjacent to one another."""

    def take(self, size_bytes: int) -> ByteRange | None:
        """Return (offset, size) of at least `size_bytes`, or None."""
        size = rounded(size_bytes)
        if size > self.free_bytes:
            return None
        found = self._take_waiting(size) or self._take_warm(size) or self._take_cold(size) or self._take_across(size)
        if found is not None:
            self.free_bytes -= found[1]
        return found

    def give(self, offset: int, size: int, now_s: float = 0.0) -> None:
        """Give back exactly what `take` returned."""
        self._waiting.setdefault(size, []).append(IdleRange(offset, size, now_s))
        self.free_bytes += size

    def idle(self) -> list[IdleRange]:
        """Return what is free and takes memory."""
        return [*self._warm, *(one for waiting in self._waiting.values() for one in waiting)]

    def withdraw(self, ranges: Sequence[ByteRange]) -> None:
        """Keep parts of what is idle, by offset, from being handed out until they are given back."""
        for size, waiting in list(self._waiting.items()):
            kept = [one for one in waiting if not _overlaps(ranges, one)]
            if len(kept) < len(waiting):
                self._warm += [one for one in waiting if _overlaps(ranges, one)]
                self._waiting[size] = kept
                if not kept:
                    del self._waiting[size]
        self._warm = _without(sorted(self._warm), ranges)
        self.free_bytes -= sum(size for _, size in ranges)

    def give_cold(self, ranges: Iterable[ByteRange]) -> None:
        """Give back what was withdrawn: its pages are gone."""
        for one in ranges:
            bisect.insort(self._cold, one)
            self.free_bytes += one[1]
        self._cold = _joined(self._cold)

    def _take_waiting(self, size: int) -> ByteRange | None:
        fitting = [known for known in self._waiting if size <= known <= size * _SLACK]
        if not fitting:
            return None
        chosen = max(fitting, key=lambda known: self._waiting[known][-1].since_s)
        waiting = self._waiting[chosen]
        found = waiting.pop()
        if not waiting:
            del self._waiting[chosen]
        return found.offset, found.size

    def _take_warm(self, size: int) -> ByteRange | None:
        found = _lowest(self._warm, size)
        if found is None and self._waiting:
            self._warm = sorted(self.idle())
            self._waiting.clear()
            if len(self._warm) > _MOST_PARTS:
                self._warm = _with_fewer_parts(self._warm)
            found = _lowest(self._warm, size)
        if found is not None:
            self._warm = _without(self._warm, [found])
        return found

    def _take_cold(self, size: int) -> ByteRange | None:
        found = _lowest(self._cold, size)
        if found is not None:
            self._cold = _cut(self._cold, found)
        return found

    def _take_across(self, size: int) -> ByteRange | None:
        """Take a place that lies in warm and in untouched memory."""
        found = _lowest(sorted([*self._cold, *((one.offset, one.size) for one in self._warm)]), size)
        if found is not None:
            self._warm, self._cold = _without(self._warm, [found]), _cut(self._cold, found)
        return found


def ranges_to_cool(idle: Iterable[IdleRange], now_s: float) -> list[ByteRange]:
    """Return, by offset, whole pages of what has been free for a while: the longest first, and not all of it at once.

    >>> MB = 1 << 20
    >>> ranges_to_cool([IdleRange(0, 16 * MB, 99.0), IdleRange(32 * MB, 8 * MB, 90.0)], now_s=100.0)
    [(33554432, 8388608)]
    >>> ranges_to_cool([IdleRange(0, 16 * MB, 0.0)], now_s=100.0)
    []
    """
    warm_bytes = old_bytes = 0
    old: list[tuple[float, ByteRange]] = []
    for one in idle:
        pages = _whole_pages(one)
        warm_bytes += pages[1]
        if pages[1] and now_s - one.since_s >= IDLE_S:
            old.append((one.since_s, pages))
            old_bytes += pages[1]
    most_bytes = min(warm_bytes - KEPT_BYTES, max(KEPT_BYTES, old_bytes // COOLED_SHARE))
    chosen: list[ByteRange] = []
    for _, (offset, size) in sorted(old):
        part_bytes = min(size, most_bytes // _PAGE_BYTES * _PAGE_BYTES)
        if part_bytes <= 0:
            break
        chosen.append((offset + size - part_bytes, part_bytes))  # its end: places are cut at their beginning
        most_bytes -= part_bytes
    return sorted(chosen)


def rounded(size_bytes: int) -> int:
    """Return the size of the range for so many bytes: at most an eighth more, so that similar sizes share ranges.

    >>> rounded(1), rounded(5000), rounded(9_600_000)
    (64, 8192, 9961472)
    """
    if size_bytes <= _PAGE_BYTES:
        return max(ALIGNMENT, -(-size_bytes // ALIGNMENT) * ALIGNMENT)
    step = max(_PAGE_BYTES, 1 << (size_bytes.bit_length() - 5))
    return -(-size_bytes // step) * step


def _lowest(ranges: Iterable[IdleRange] | Iterable[ByteRange], size: int) -> ByteRange | None:
    """Return the lowest place of that size in ranges that are sorted by offset; neighbours count as one."""
    begin = end = 0
    for one in ranges:
        if one[0] != end:
            begin = one[0]
        end = one[0] + one[1]
        if end - begin >= size:
            return begin, size
    return None


def _without(idle: list[IdleRange], taken: Sequence[ByteRange]) -> list[IdleRange]:
    """Return what is left of idle ranges. Both are sorted by offset."""
    left: list[IdleRange] = []
    at = 0
    for one in idle:
        begin, end = one.offset, one.offset + one.size
        while at < len(taken) and taken[at][0] < end:
            cut_begin, cut_end = taken[at][0], sum(taken[at])
            if begin < cut_begin:
                left.append(IdleRange(begin, cut_begin - begin, one.since_s))
            begin = max(begin, cut_end)
            if cut_end > end:
                break  # the rest of it lies in the next one
            at += 1
        if begin < end:
            left.append(IdleRange(begin, end - begin, one.since_s))
    return left


def _overlaps(ranges: Sequence[ByteRange], one: IdleRange) -> bool:
    """Say whether any of the ranges, which are sorted by offset and apart, lies in this one."""
    after = bisect.bisect_left(ranges, (one.offset + one.size, 0))
    return after > 0 and sum(ranges[after - 1]) > one.offset


def _cut(ranges: list[ByteRange], taken: ByteRange) -> list[ByteRange]:
    return [(offset, size) for offset, size, _ in _without([IdleRange(*one, 0.0) for one in ranges], [taken])]


def _joined(ranges: list[ByteRange]) -> list[ByteRange]:
    """Return the same, sorted by offset as they are, with neighbours as one."""
    joined: list[ByteRange] = []
    for offset, size in ranges:
        if joined and sum(joined[-1]) == offset:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((offset, size))
    return joined


def _with_fewer_parts(idle: list[IdleRange]) -> list[IdleRange]:
    joined: list[IdleRange] = []
    for one in idle:
        last = joined[-1] if joined else None
        if last is not None and last.offset + last.size == one.offset:
            joined[-1] = IdleRange(last.offset, last.size + one.size, max(last.since_s, one.since_s))
        else:
            joined.append(one)
    return joined


def _whole_pages(one: IdleRange) -> ByteRange:
    begin = -(-one.offset // _PAGE_BYTES) * _PAGE_BYTES
    return begin, max(0, (one.offset + one.size) // _PAGE_BYTES * _PAGE_BYTES - begin)
