"""Which splits of each pass were granted to whom, and which are still to be."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import msgspec

from penstock.core.ids import StreamId


class Cursor(msgspec.Struct, omit_defaults=True):
    """Which ordinals of one pass are still to be granted: those from `next` on that were not taken before their turn,
    by a checkpoint or by a stream whose host has what they give."""

    count: int
    left: int
    next: int = 0
    taken: list[tuple[int, int]] = []
    """The ordinals that were taken, as disjoint half-open ranges in ascending order."""

    def peek(self, many: int) -> tuple[int, ...]:
        """Return the next ordinals to grant, at most `many`.

        >>> Cursor(count=9, left=5, taken=[(0, 1), (3, 6)]).peek(4)
        (1, 2, 6, 7)
        """
        if not self.taken:
            return tuple(range(self.next, min(self.next + many, self.count)))
        found: list[int] = []
        at = self.next
        for start, stop in [*self.taken, (self.count, self.count)]:
            found.extend(range(at, min(start, at + many - len(found))))
            at = max(at, stop)
            if len(found) == many:
                break
        return tuple(found)

    def has_left(self, ordinal: int) -> bool:
        """
        >>> cursor = Cursor(count=9, left=4, next=1, taken=[(3, 6)])
        >>> [ordinal for ordinal in range(-1, 10) if cursor.has_left(ordinal)]
        [1, 2, 6, 7, 8]
        """
        at = bisect_right(self.taken, (ordinal, self.count))
        return self.next <= ordinal < self.count and not (at and ordinal < self.taken[at - 1][1])

    def choose(self, many: int, preferred: Sequence[int]) -> tuple[int, ...]:
        """Return the ordinals to grant, at most `many`: preferred ones while some are left, else the next ones.

        >>> Cursor(count=9, left=9).choose(2, (7, 5, 8)), Cursor(count=9, left=8, taken=[(7, 8)]).choose(2, (7,))
        ((7, 5), (0, 1))
        """
        found: dict[int, None] = {}
        for ordinal in preferred:
            if len(found) < many and self.has_left(ordinal):
                found[ordinal] = None
        return tuple(found) or self.peek(many)

    def take(self, ordinals: tuple[int, ...]) -> None:
        """Count ordinals as granted.

        >>> cursor = Cursor(count=9, left=9)
        >>> for some in ((4, 7), (0, 1), (2, 3, 5)):
        ...     cursor.take(some)
        >>> cursor.next, cursor.taken, cursor.left, cursor.peek(9)
        (6, [(7, 8)], 2, (6, 8))
        """
        self.left -= len(ordinals)
        if not self.taken and ordinals == tuple(range(self.next, self.next + len(ordinals))):
            self.next += len(ordinals)
            return
        taken = list(self.taken)
        for ordinal in ordinals:
            at = bisect_right(taken, (ordinal, self.count))
            joins_before = at > 0 and taken[at - 1][1] == ordinal
            joins_after = at < len(taken) and taken[at][0] == ordinal + 1
            start = taken[at - 1][0] if joins_before else ordinal
            stop = taken[at][1] if joins_after else ordinal + 1
            taken[at - joins_before : at + joins_after] = [(start, stop)]
        while taken and taken[0][0] <= self.next:
            self.next = max(self.next, taken.pop(0)[1])
        self.taken = taken


class Ledger(msgspec.Struct, omit_defaults=True):
    """Which stream got which splits, in which order."""

    counts: tuple[int, ...]
    lists: dict[tuple[StreamId, int, int], list[int]] = {}
    """The ordinals of the splits that were granted, by (stream, source, pass)."""
    cursors: dict[tuple[int, int], Cursor] = {}
    """How far a pass is granted, by (source, pass); absent: nothing of the pass was granted or taken."""
    reached: dict[tuple[StreamId, int], int] = {}
    """(stream, source) -> the first pass that the stream had not left at its checkpoint: it is granted nothing more of
    earlier ones."""

    def may_grow(self, stream: StreamId, source: int, pass_: int) -> bool:
        """Say whether more splits of a pass may be granted to a stream."""
        return pass_ >= self.reached.get((stream, source), 0)

    @property
    def was_passed_by(self) -> bool:
        """Whether something is left of a pass that a stream of the checkpoint had left behind."""
        latest: dict[int, int] = {}
        for (_, source), pass_ in self.reached.items():
            latest[source] = max(pass_, latest.get(source, pass_))
        return any(cursor.left and pass_ < latest.get(source, 0) for (source, pass_), cursor in self.cursors.items())

    @property
    def begun(self) -> tuple[tuple[int, int], ...]:
        """The last pass of each source of which something was granted or taken; the first, where nothing was."""
        latest = dict.fromkeys(range(len(self.counts)), 0)
        for source, pass_ in self.cursors:
            latest[source] = max(latest[source], pass_)
        return tuple(latest.items())

    @property
    def has_more(self) -> bool:
        """Whether something is left of a pass that was begun."""
        return any(cursor.left for cursor in self.cursors.values())

    def cursor(self, source: int, pass_: int) -> Cursor:
        found = self.cursors.get((source, pass_))
        return Cursor(count=self.counts[source], left=self.counts[source]) if found is None else found

    def grant(self, stream: StreamId, source: int, pass_: int, ordinals: tuple[int, ...]) -> None:
        cursor = self.cursor(source, pass_)
        if len(set(ordinals)) < len(ordinals) or not all(map(cursor.has_left, ordinals)):
            raise ValueError(f"ordinals {ordinals} of {cursor.count}, of which some were granted before")
        cursor.take(ordinals)
        self.cursors[source, pass_] = cursor
        granted = self.lists.get((stream, source, pass_))
        if granted is None:
            self.lists[stream, source, pass_] = list(ordinals)
        else:
            granted.extend(ordinals)
