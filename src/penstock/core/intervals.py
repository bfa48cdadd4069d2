"""Sets of whole numbers as half-open ranges: what is done of a pass is a few ranges, however many splits it has."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class Intervals:
    """
    >>> done = Intervals([(0, 3)])
    >>> done.add(4); done.add(3); list(done.ranges())
    [(0, 5)]
    >>> list(Intervals([(4, 6), (0, 2), (2, 3), (5, 9), (7, 7)]).ranges())
    [(0, 3), (4, 9)]
    """

    __slots__ = ("_starts", "_stops")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in ranges:
            self.add_range(start, stop)

    def add(self, number: int) -> None:
        self.add_range(number, number + 1)

    def add_range(self, start: int, stop: int) -> None:
        if start >= stop:
            return
        first = bisect_left(self._stops, start)
        last = bisect_right(self._starts, stop)
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def with_numbers(self, numbers: Iterable[int]) -> Intervals:
        """Return a set that has these, too.

        >>> done = Intervals([(0, 3), (6, 8)])
        >>> list(done.with_numbers([3, 5]).ranges()), list(done.ranges())
        ([(0, 4), (5, 8)], [(0, 3), (6, 8)])
        """
        found = Intervals()
        found._starts, found._stops = self._starts.copy(), self._stops.copy()  # not one by one: there may be many
        for number in numbers:
            found.add(number)
        return found

    def ranges(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._stops)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._starts, number) - 1
        return at >= 0 and number < self._stops[at]

    def __len__(self) -> int:
        """How many numbers are in it."""
        return sum(self._stops) - sum(self._starts)

    def intersection(self, other: Intervals) -> Intervals:
        both = Intervals()
        theirs = list(other.ranges())
        for start, stop in self.ranges():
            for low, high in theirs:
                both.add_range(max(start, low), min(stop, high))
        return both

    def union(self, other: Intervals) -> Intervals:
        return Intervals([*self.ranges(), *other.ranges()])
