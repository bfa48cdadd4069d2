"""Reading many small parts of a file with few reads: neighbours are read together, with what lies between them.

A disk takes about as long to move its head as to read 1.25 MiB, and so does a request to an object store: a smaller gap
is cheaper to read than to jump over. Of a small stripe that would be all of it, so the gap is scaled with the stripe.
Where wanted parts lie far and wide, so many small gaps add up to more than what is wanted: the smallest gaps are closed
first, as long as what is read along stays below a share of what is wanted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import pairwise

import msgspec
from msgspec.structs import fields

MOST_GAP_BYTES = 5 << 18  # 1.25 MiB
GAP_SHARE = 1 / 205  # of a stripe: 1.25 MiB of one of 256 MiB
MOST_IN_VAIN = 0.17  # of what is wanted, and so less than 15 % of what is read: it is transferred and copied too


def gap_bytes(stripe_bytes: int) -> int:
    """Return up to which gap parts of a stripe are read together.

    >>> gap_bytes(256 << 20) >> 10, gap_bytes(8 << 20) >> 10
    (1278, 39)
    """
    return min(MOST_GAP_BYTES, int(stripe_bytes * GAP_SHARE))


def coalesced(ranges: Iterable[tuple[int, int]], gap: int, most_in_vain: float = MOST_IN_VAIN) -> list[tuple[int, int]]:
    """Return the reads that cover all ranges, in order; gaps up to so many bytes are read along.

    >>> coalesced([(100, 110), (0, 10), (15, 30)], gap=5)
    [(0, 30), (100, 110)]
    >>> coalesced([(0, 10), (15, 25), (26, 36)], gap=5, most_in_vain=0.1)
    [(0, 10), (15, 36)]
    """
    wanted = sorted(ranges)
    left = most_in_vain * sum(stop - start for start, stop in wanted)
    gaps = sorted((max(0, start - before), place) for place, ((_, before), (start, _)) in enumerate(pairwise(wanted)))
    closed: set[int] = set()
    for size, place in gaps:
        left -= size
        if size > gap or left < 0:
            break
        closed.add(place)
    reads = wanted[:1]
    for place, (start, stop) in enumerate(wanted[1:]):
        if place in closed:
            reads[-1] = (reads[-1][0], max(stop, reads[-1][1]))
        else:
            reads.append((start, stop))
    return reads


class ReadingStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What a source has asked its storage for."""

    reads: int = 0
    column_chunks: int = 0
    """Parts that were wanted: one a column and stripe."""
    read_bytes: int = 0
    bytes_in_vain: int = 0
    """Of those, what lay between wanted parts and was read along."""
    tier_bytes: int = 0
    """Of those, what came from a faster tier."""
    missing_columns: int = 0
    """How often a file did not have a feature: its rows have it empty."""

    @property
    def in_vain_fraction(self) -> float:
        """The share of all bytes that were read along and not wanted."""
        return self.bytes_in_vain / self.read_bytes if self.read_bytes else 0.0


class ReadingMeter:
    """Counts for one source; its readers are on several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = {field.name: 0 for field in fields(ReadingStatistics)}

    def add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count

    def snapshot(self) -> ReadingStatistics:
        with self._lock:
            return ReadingStatistics(**self._counts)
