"""Received payloads in memory that is used again, and what malloc keeps.

libzmq takes the memory of every message from malloc. glibc gives what is freed at the end of its heap back to the
system, and then each page of the next batch is a fault: a third of the time of reading 9.6 MB batches.

So malloc keeps what was freed, and what is still in use lies between. Where readers hold so much that batches come and
go outside of the arena, rows and batches of several sizes leave gaps that fit nothing: on a busy machine the process
then has a multiple of what it uses. `OwnMemory` gives what is freed back to the system, but only while there is more
than there should be: getting it anew costs a fault for every page.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

KEPT_BYTES = 128 << 20
"""Freed memory that may stay with the process, in each heap of glibc's."""
FROM_HEAP_BYTES = 32 << 20
"""Larger messages are mapped one by one: glibc allows no higher threshold."""
PAUSE_S = 1.0  # until memory is given back again, where all of it is in use

_STATM = Path("/proc/self/statm")
_M_TRIM_THRESHOLD = -1  # malloc.h
_M_MMAP_THRESHOLD = -3
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@cache
def keep_freed_memory() -> None:
    """Let malloc keep freed memory, in this process. Where the user has set this, or another malloc is at work: no."""
    if any(name in os.environ for name in _VARIABLES):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return  # not glibc
    mallopt(_M_MMAP_THRESHOLD, FROM_HEAP_BYTES)
    mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return None  # not glibc
    return trim


def give_back_freed_memory() -> None:
    """Give all memory that malloc keeps to the system. Where another malloc is at work, nothing."""
    if (trim := _malloc_trim()) is not None:
        trim(0)


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
