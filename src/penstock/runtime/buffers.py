"""Memory for batches, used again as soon as nobody holds it.

A fresh page costs more than the copy into it, and with new memory for every large batch a process comes to hold more
than its budget. numpy's reference to the owner of a view tells exactly when the last view is gone. Buffers that a
stream's owner gives memory for are its own affair, and are not kept.
"""

from __future__ import annotations

import math
import sys
import threading
from typing import Any

import numpy as np

from penstock.core.element import Array
from penstock.runtime.streams import Allocate

LARGE_BYTES = 64 << 10  # smaller arrays an allocator has at hand, and they are cheaper to copy than to lease
IDLE_BUFFERS = 4
_UNUSED = 3  # references to a buffer nobody else holds: the pool's list, the loop variable, getrefcount's argument


def is_large(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    """Say whether an array is worth memory that is used again, or that others see."""
    return not dtype.hasobject and math.prod(shape) * dtype.itemsize >= LARGE_BYTES


class BufferPool:
    """Batch buffers that come back by themselves when the last view of them is gone."""

    def __init__(self, allocate: Allocate | None = None) -> None:
        self._allocate = allocate
        self._owners: list[Array] = []
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return memory for a batch: of this pool if it is worth it."""
        return self.take(shape, dtype) if is_large(shape, dtype) else np.empty(shape, dtype)

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        given = None if self._allocate is None else self._allocate(shape, dtype)
        if given is not None:
            return given
        with self._lock:
            idle = 0
            for owner in self._owners:
                if sys.getrefcount(owner) == _UNUSED:
                    if owner.shape == shape and owner.dtype == dtype:
                        return owner[:]
                    idle += 1
            if idle > IDLE_BUFFERS:
                self._owners = [owner for owner in self._owners if sys.getrefcount(owner) > _UNUSED]
            owner = np.empty(shape, dtype)
            self._owners.append(owner)
            return owner[:]
