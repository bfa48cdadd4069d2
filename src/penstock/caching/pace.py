"""Whether a location has become slow: against what it gave before, and against making what it gives.

Both are needed. Storage that was always slow is what was asked for, or what a choice rests on; and one that has become
slow, but still gives elements sooner than they are made, is of use.
"""

from __future__ import annotations

import threading
from collections import deque
from time import monotonic

SLOWER = 10.0  # times: the page cache and a disk, or a quiet machine and a busy one, differ by less than this together
FEW, MANY = 4, 64  # reads that say what is usual
SLOW_S = 1.0  # that slow reads go on: computing is to go on within five seconds
SLOW_READS = 2


class ReadPace:
    """One location's. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._usual: deque[float] = deque(maxlen=MANY)
        self._slow_since: float | None = None
        self._slow_reads = 0

    def slower_by(self, nbytes: int, seconds: float, compute_s: float) -> float:
        """Note a read that has just ended; return how many times slower reads have become, 0 where they have not.

        `compute_s`: how long making what was read took, over all threads.
        """
        speed = nbytes / max(seconds, 1e-9)
        with self._lock:
            usual = sorted(self._usual)[len(self._usual) // 2] if len(self._usual) >= FEW else 0.0
            if speed * SLOWER >= usual or seconds <= compute_s:
                self._usual.append(speed)
                self._slow_since = None
                return 0.0
            now = monotonic()
            if self._slow_since is None:
                self._slow_since, self._slow_reads = now - seconds, 0
            self._slow_reads += 1
            if self._slow_reads < SLOW_READS or now - self._slow_since < SLOW_S:
                return 0.0
            self._slow_since = None
            return usual / speed
