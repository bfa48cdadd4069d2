"""Sets of ordinals as half-open ranges: what is done of a pass is a few ranges, however many splits it has."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class RangeSet:
    """
    >>> done = RangeSet([(0, 3)])
    >>> done.add(4); done.add(3); list(done.ranges())
    [(0, 5)]
    """

    __slots__ = ("_starts", "_stops")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in ranges:
            self.add_range(start, stop)

    def add(self, ordinal: int) -> None:
        self.add_range(ordinal, ordinal + 1)

    def add_range(self, start: int, stop: int) -> None:
        if start >= stop:
            return
        first = bisect_left(self._stops, start)
        last = bisect_right(self._starts, stop)
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def ranges(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._stops)

    def __contains__(self, ordinal: int) -> bool:
        at = bisect_right(self._starts, ordinal) - 1
        return at >= 0 and ordinal < self._stops[at]

    def __len__(self) -> int:
        """How many ordinals are in it."""
        return sum(stop - start for start, stop in self.ranges())

    def intersection(self, other: RangeSet) -> RangeSet:
        both = RangeSet()
        theirs = list(other.ranges())
        for start, stop in self.ranges():
            for low, high in theirs:
                both.add_range(max(start, low), min(stop, high))
        return both

    def copy(self) -> RangeSet:
        same = RangeSet()
        same._starts, same._stops = list(self._starts), list(self._stops)
        return same
