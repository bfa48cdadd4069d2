"""Large buffers that processes of one host share: written once by the process that has them, mapped by the others.

A buffer lies in memory without a name in the file system. Other processes of the user reach it through the descriptor
of the process that wrote it, so it is there as long as that process is, and nothing is left behind when it is killed.
Who maps it may write into it, and then has pages of its own: nobody else sees that.
"""

from __future__ import annotations

import mmap
import os
from typing import NamedTuple

LEAST_BYTES = 1 << 20  # a descriptor and a mapping for less than this cost more than copying


class HostBuffer(NamedTuple):
    """Where a buffer lies: a descriptor of a process, and how long it is."""

    pid: int
    descriptor: int
    nbytes: int


class HostMemory:
    """Buffers of this process that others map, until it is closed."""

    def __init__(self) -> None:
        self._descriptors: list[int] = []

    def put(self, content: memoryview) -> HostBuffer:
        """Write a buffer once, for all processes of this host."""
        descriptor = os.memfd_create("penstock buffer", os.MFD_CLOEXEC)
        self._descriptors.append(descriptor)
        flat = content.cast("B")
        written = 0
        while written < len(flat):
            written += os.write(descriptor, flat[written:])
        return HostBuffer(os.getpid(), descriptor, len(flat))

    def close(self) -> None:
        """Let go of the buffers. Who has mapped one keeps it."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def map_buffer(buffer: HostBuffer) -> mmap.mmap:
    """Return the buffer's memory in this process, shared until written to. `OSError`: its process is not there."""
    descriptor = os.open(f"/proc/{buffer.pid}/fd/{buffer.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, buffer.nbytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
