"""An arena's memory as one process maps it."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_FORGOTTEN_AT_ONCE_BYTES = 4 << 20  # about a millisecond of a system call that keeps the GIL


class Mapping:
    """The whole of an arena in this process. Unmapped when nothing over it is left."""

    __slots__ = ("_memory", "address", "bytes", "size", "writable")

    def __init__(self, descriptor: int, size: int, *, writable: bool) -> None:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._memory = mmap.mmap(descriptor, size, access=access)
        self.bytes = np.frombuffer(self._memory, np.uint8)
        self.address: int = self.bytes.__array_interface__["data"][0]
        self.size = size
        self.writable = writable

    def forget(self, offset: int, size: int) -> None:
        """Give the pages of a range back to the system: they are zero from now on, in every process."""
        for begin in range(offset, offset + size, _FORGOTTEN_AT_ONCE_BYTES):
            length = min(_FORGOTTEN_AT_ONCE_BYTES, offset + size - begin)
            self._memory.madvise(mmap.MADV_REMOVE, begin, length)


def array_interface(address: int, size: int, *, writable: bool) -> dict[str, Any]:
    return {"version": 3, "typestr": "|u1", "shape": (size,), "data": (address, not writable)}
