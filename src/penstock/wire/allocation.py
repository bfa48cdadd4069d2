"""Received payloads in memory that is used again, and what malloc keeps.

libzmq takes the memory of every message from malloc. glibc gives what is freed at the end of its heap back to the
system, and then each page of the next batch is a fault: a third of the time of reading 9.6 MB batches.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache

KEPT_BYTES = 128 << 20
"""Freed memory that may stay with the process, in each heap of glibc's."""
FROM_HEAP_BYTES = 32 << 20
"""Larger messages are mapped one by one: glibc allows no higher threshold."""

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
