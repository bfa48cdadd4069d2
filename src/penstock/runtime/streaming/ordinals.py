"""Which splits of a pass a source reads, in which order, and how it writes down where it stands.

A split's *ordinal* is its place in the pass's order. Alone, a pipeline reads all of them, and a place is
`[ordinal, index]`, or `[ordinal, index, offset]`: how many splits are behind, how many elements of the present one, and
the reader's own hint to get there. In a stream a feed names the ordinals: see `runtime.streams`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from penstock.runtime.contract import State
from penstock.runtime.streams import PASS_ENDED, PLACE, SplitFeed

OPEN_AHEAD = 6  # remote splits whose first requests are under way before they are needed


class Ordinals(Protocol):
    """The splits of one pass of one source."""

    source: int
    end: int
    """The ordinal that stands for the end of the pass."""

    def first(self) -> int: ...

    def after(self, ordinal: int) -> int: ...

    def ahead(self, ordinal: int) -> Iterable[int]:
        """Return ordinals that will follow for sure: it pays to open them early."""

    def prefer(self, ordinals: Sequence[int]) -> None:
        """Hear which splits should come first, where there is a choice."""

    def state(self, ordinal: int, index: int, offset: int | None = None) -> State: ...

    # Where splits are ranges of positions, split o is those from starts[o] to starts[o + 1]

    def stretch(self, ordinal: int, starts: Sequence[int], count: int) -> int:
        """Return up to which position can be read on from a split without asking what follows."""

    def after_stretch(self, ordinal: int) -> int: ...

    def at_position(self, ordinal: int, position: int, starts: Sequence[int]) -> State:
        """Return the state at a position in the stretch that begins with a split."""


class AllSplits:
    """Every split of the pass."""

    def __init__(self, source: int, count: int) -> None:
        self.source = source
        self.end = count

    def first(self) -> int:
        return 0

    def after(self, ordinal: int) -> int:
        return ordinal + 1

    def prefer(self, ordinals: Sequence[int]) -> None:
        """All come, in their order."""

    def ahead(self, ordinal: int) -> Iterable[int]:
        return range(ordinal + 1, min(ordinal + 1 + OPEN_AHEAD, self.end))

    def state(self, ordinal: int, index: int, offset: int | None = None) -> State:
        return [ordinal, index] if offset is None else [ordinal, index, offset]

    def stretch(self, ordinal: int, starts: Sequence[int], count: int) -> int:
        return count

    def after_stretch(self, ordinal: int) -> int:
        return self.end

    def at_position(self, ordinal: int, position: int, starts: Sequence[int]) -> State:
        ordinal = max(bisect_right(starts, position) - 1, 0)
        return [ordinal, position - starts[ordinal]]


class FedSplits:
    """Those the feed names. What it is asked for is this stream's for ever: so nothing is asked for early."""

    end = PASS_ENDED

    def __init__(self, feed: SplitFeed, source: int, pass_: int, read: Counter[int]) -> None:
        """`read` counts, by source, the splits that were named."""
        self.source = source
        self._feed = feed
        self._pass = pass_
        self._read = read

    def first(self) -> int:
        return self._next(None)

    def after(self, ordinal: int) -> int:
        return self._next(ordinal)

    def _next(self, after: int | None) -> int:
        ordinal = self._feed.next_split(self.source, self._pass, after)
        if ordinal is None:
            return PASS_ENDED
        self._read[self.source] += 1
        return ordinal

    def prefer(self, ordinals: Sequence[int]) -> None:
        self._feed.prefer(self.source, self._pass, ordinals)

    def ahead(self, ordinal: int) -> Iterable[int]:
        known = self._feed.known_split(self.source, self._pass, ordinal)
        return () if known is None else (known,)

    def state(self, ordinal: int, index: int, offset: int | None = None) -> State:
        place = [PLACE, self.source, self._pass, ordinal, index]
        return place if offset is None else [*place, offset]

    def stretch(self, ordinal: int, starts: Sequence[int], count: int) -> int:
        return starts[ordinal + 1] if ordinal + 1 < len(starts) else count

    def after_stretch(self, ordinal: int) -> int:
        return self.after(ordinal)

    def at_position(self, ordinal: int, position: int, starts: Sequence[int]) -> State:
        return self.state(ordinal, 0 if ordinal == PASS_ENDED else position - starts[ordinal])


def read_place(state: State) -> tuple[int, int, int | None] | None:
    """Return (ordinal, index, offset) of a source's state, of either kind; None: the beginning."""
    if state is None:
        return None
    ordinal, index, *offset = state[3:] if state[0] == PLACE else state
    return ordinal, index, offset[0] if offset else None
