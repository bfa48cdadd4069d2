"""Memory for large arrays of ever another length, used again once nobody holds it.

An allocator gives memory of tens of megabytes back to the system when it is free, and takes it anew for the next array:
each of its pages is then cleared by the system before it is written, which costs more than what is written. numpy's
reference from a view to its owner tells exactly when the last view is gone.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np

from penstock.core.element import Array

LARGE_BYTES = 1 << 20  # smaller arrays an allocator has at hand
IDLE_BLOCKS = 2
SPARE = 8  # a block has room for an eighth more than is asked for: the next array is a little longer or shorter


def _references(blocks: list[Array]) -> list[int]:
    return [sys.getrefcount(block) for block in blocks]


(_UNUSED,) = _references([np.empty(1)])  # of a block that only its list holds, as this interpreter counts


class RecycledMemory:
    """Memory that comes back by itself; for any thread.

    >>> memory = RecycledMemory()
    >>> first = memory.empty(1 << 20, np.int64)
    >>> place = first.ctypes.data
    >>> del first
    >>> memory.empty((1 << 20) - 5, np.int64).ctypes.data == place
    True
    """

    def __init__(self) -> None:
        self._blocks: list[Array] = []
        self._lock = threading.Lock()

    def empty(self, count: int, dtype: Any) -> Array:
        """Return an array of so many numbers, whatever is in them."""
        nbytes = count * np.dtype(dtype).itemsize
        if nbytes < LARGE_BYTES:
            return np.empty(count, dtype)
        with self._lock:
            return self._block(nbytes)[:nbytes].view(dtype)

    def joined(self, pieces: list[Array], dtype: Any) -> Array:
        """Return one array of several, copied."""
        made = self.empty(sum(map(len, pieces)), dtype)
        return np.concatenate(pieces, out=made) if pieces else made

    def _block(self, nbytes: int) -> Array:
        held = [references > _UNUSED for references in _references(self._blocks)]
        for block, in_use in zip(self._blocks, held):
            # A much larger one would be held by what is small.
            if not in_use and nbytes <= block.nbytes <= 2 * nbytes:
                return block
        if held.count(False) > IDLE_BLOCKS:
            self._blocks = [block for block, in_use in zip(self._blocks, held) if in_use]
        made = np.empty(nbytes + nbytes // SPARE, np.uint8)
        self._blocks.append(made)
        return made
