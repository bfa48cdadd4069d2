"""Which parts of an arena are free: ranges, reused last in, first out.

A page that was never touched costs twenty times what a warm one does, so a freed range waits for the next request of
about its size. Only when nothing fits are waiting ranges joined with their neighbours and cut anew.
"""

from __future__ import annotations

import bisect

ALIGNMENT = 64
_PAGE_BYTES = 4096
_SLACK = 1.25  # a waiting range may be so much larger than what is asked for


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
        self._joined: list[tuple[int, int]] = [(0, size_bytes)]
        """(offset, size), by offset; never adjacent to one another."""
        self._waiting: dict[int, list[int]] = {}
        """Offsets by size, the last given at the end."""

    def take(self, size_bytes: int) -> tuple[int, int] | None:
        """Return (offset, size) of at least `size_bytes`, or None."""
        size = rounded(size_bytes)
        found = self._take_waiting(size) or self._take_joined(size)
        if found is None and self._waiting:
            self._join()
            found = self._take_joined(size)
        if found is not None:
            self.free_bytes -= found[1]
        return found

    def give(self, offset: int, size: int) -> None:
        """Give back exactly what `take` returned."""
        self._waiting.setdefault(size, []).append(offset)
        self.free_bytes += size

    def _take_waiting(self, size: int) -> tuple[int, int] | None:
        fitting = [known for known in self._waiting if size <= known <= size * _SLACK]
        if not fitting:
            return None
        chosen = min(fitting)
        offsets = self._waiting[chosen]
        offset = offsets.pop()
        if not offsets:
            del self._waiting[chosen]
        return offset, chosen

    def _take_joined(self, size: int) -> tuple[int, int] | None:
        for position, (offset, available) in enumerate(self._joined):
            if available >= size:
                if available == size:
                    del self._joined[position]
                else:
                    self._joined[position] = (offset + size, available - size)
                return offset, size
        return None

    def _join(self) -> None:
        for size, offsets in self._waiting.items():
            for offset in offsets:
                bisect.insort(self._joined, (offset, size))
        self._waiting.clear()
        joined: list[tuple[int, int]] = []
        for offset, size in self._joined:
            if joined and sum(joined[-1]) == offset:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            else:
                joined.append((offset, size))
        self._joined = joined


def rounded(size_bytes: int) -> int:
    """Return the size of the range for so many bytes: at most an eighth more, so that similar sizes share ranges.

    >>> rounded(1), rounded(5000), rounded(9_600_000)
    (64, 8192, 9961472)
    """
    if size_bytes <= _PAGE_BYTES:
        return max(ALIGNMENT, -(-size_bytes // ALIGNMENT) * ALIGNMENT)
    step = max(_PAGE_BYTES, 1 << (size_bytes.bit_length() - 5))
    return -(-size_bytes // step) * step
