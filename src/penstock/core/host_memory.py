"""Large buffers that processes of one host share: written once by the process that has them, mapped by the others.

A buffer lies in memory without a name in the file system. Other processes of the user reach it through the descriptor
of the process that wrote it, so it is there as long as that process is, and nothing is left behind when it is killed.
Who maps it may write into it, and then has pages of its own: nobody else sees that.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from typing import NamedTuple

LEAST_BYTES = 1 << 20  # a descriptor and a mapping for less than this cost more than copying
ALIGNED_BYTES = 64
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


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


class AttachedBuffer(NamedTuple):
    """Where a buffer lies behind the bytes of a graph, and how long it is."""

    offset: int
    nbytes: int


class AttachedMemory:
    """Buffers that travel behind the bytes of a graph, for hosts on which this process has no memory."""

    def __init__(self) -> None:
        self._contents: list[memoryview] = []
        self.nbytes = 0

    def put(self, content: memoryview) -> AttachedBuffer:
        """Take a buffer, whose content is read when the graph is written."""
        flat = content.cast("B")
        buffer = AttachedBuffer(self.nbytes, len(flat))
        self._contents.append(flat)
        self.nbytes += len(flat) + padding_bytes(len(flat))
        return buffer

    def pieces(self) -> Iterator[bytes | memoryview]:
        """Yield what to write, in order."""
        for content in self._contents:
            yield content
            yield bytes(padding_bytes(len(content)))


def padding_bytes(length: int) -> int:
    """Return how much is missing to where a buffer may begin.

    >>> padding_bytes(60), padding_bytes(64)
    (4, 0)
    """
    return -length % ALIGNED_BYTES


def new_buffer() -> int:
    """Return the descriptor of an empty buffer that can be sealed."""
    return os.memfd_create("penstock buffer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def seal(descriptor: int) -> None:
    """Let nobody change a buffer any more, its maker included."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)


def is_sealed(descriptor: int) -> bool:
    """Say whether a buffer is as it will stay."""
    try:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS)
    except OSError:
        return False  # it is no such memory


def map_buffer(buffer: HostBuffer) -> mmap.mmap:
    """Return the buffer's memory in this process, shared until written to. `OSError`: its process is not there."""
    descriptor = os.open(f"/proc/{buffer.pid}/fd/{buffer.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, buffer.nbytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
