"""What a runner's process takes of its own, beside the memory that readers map.

malloc keeps what was freed (`processes.nursery_start`), and what is still in use lies between. Where readers hold so
much that batches come and go outside of the arena, rows and batches of several sizes leave gaps that fit nothing: on a
busy machine the process then has a multiple of what it uses. So what is freed goes back to the system, but only while
there is more than there should be: getting it anew costs a fault for every page.
"""

from __future__ import annotations

import mmap
from pathlib import Path

from penstock.wire.allocation import give_back_freed_memory

PAUSE_S = 1.0  # until it is tried again, where all of it is in use
_STATM = Path("/proc/self/statm")


def own_bytes() -> int:
    """Return how much memory this process has that it shares with nobody and that no file is behind.

    >>> own_bytes() > 1 << 20
    True
    """
    _, resident, shared, *_ = map(int, _STATM.read_text().split())
    return (resident - shared) * mmap.PAGESIZE


class OwnMemory:
    """Keeps a process near what it has now, and `more_bytes`."""

    def __init__(self, more_bytes: int) -> None:
        self._most_bytes = own_bytes() + more_bytes
        self._look_at = 0.0

    def give_back(self, now: float) -> None:
        """Let go of freed memory if there is too much. Called often: where there is not, it takes some microseconds."""
        if now >= self._look_at and own_bytes() > self._most_bytes:
            give_back_freed_memory()
            self._look_at = now + (PAUSE_S if own_bytes() > self._most_bytes else 0.0)
