"""Slabs: on one host, batches lie in memory that both sides map, and only their places are sent.

A runner has one arena: an anonymous file (memfd), sealed so that nobody can shrink it under a reader, and gone with the
last process that has it, however that ended. Its readers map it once (`slab_reader`).

- A range belongs to its `_Range` object. It is free again when that is collected: when no array over it and no lease
  that names it is left. So memory is never written to while anybody may read it.
- A lease holds what was placed for one reader until that reader gives it back, or is known to be gone (`leases`).
- Readers get a descriptor that they cannot write through, unless they ask for another and the runner allows it.
- Memory that has been free for a while goes back to the system (`ranges`), and with it out of all mappings.
- `__del__` may run at any point of any thread, so it takes no lock: it appends to a deque, which the next call drains.
  At the interpreter's end modules are empty, so it uses nothing of this one but what it was defined with.
- After a fork the child takes nothing from the arena and gives nothing back.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import math
import mmap
import os
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from time import monotonic
from typing import Any

import numpy as np

from penstock.wire.arrays import bytes_over
from penstock.wire.descriptors import DescriptorServer
from penstock.wire.frames import SlabPlaces
from penstock.wire.leases import NOBODY, Holder, LeaseBook
from penstock.wire.mapping import Array, Mapping, array_interface
from penstock.wire.ranges import ALIGNMENT, FreeRanges, ranges_to_cool

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class _Range:
    """Owns a range of the arena. Arrays over it have it as their base."""

    __slots__ = ("__array_interface__", "_pid", "_returned", "mapping", "offset", "placed", "size")

    def __init__(self, mapping: Mapping, offset: int, size: int, returned: collections.deque[tuple[int, int]]) -> None:
        self.mapping, self.offset, self.size = mapping, offset, size
        self.placed = False
        """Some reader has it, and may write to it."""
        self._returned, self._pid = returned, os.getpid()
        self.__array_interface__ = array_interface(mapping.address + offset, size, writable=True)

    def __del__(self, _getpid: Callable[[], int] = os.getpid) -> None:
        if self._pid == _getpid():
            self._returned.append((self.offset, self.size))


class Arena:
    """A runner's shared memory, of which at most `max_bytes` are ever used. Any thread may use it."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = -(-max_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._free = FreeRanges(self.max_bytes)
        self._returned: collections.deque[tuple[int, int]] = collections.deque()
        self._leases = LeaseBook()
        self._closed = False
        self._descriptor = os.memfd_create("penstock", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._descriptor, self.max_bytes)  # sparse: a page takes memory when it is first written to
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
            os.fchmod(self._descriptor, 0o600)  # else other users could make a descriptor they write through of it
            self._mapping = Mapping(self._descriptor, self.max_bytes, writable=True)
            self._server = DescriptorServer(self._descriptor, self.max_bytes)
        except BaseException:
            os.close(self._descriptor)
            raise

    @property
    def name(self) -> str:
        """What `SlabReader.connect` needs. It contains the secret."""
        return self._server.name

    @property
    def free_bytes(self) -> int:
        with self._lock:
            self._collect()
            return self._free.free_bytes

    @property
    def leases(self) -> int:
        return len(self._leases)

    def allow_writers(self) -> None:
        """Let readers that ask for it write to what they are given: nobody else reads that."""
        self._server.allow_writers()

    def limit(self, max_bytes: int) -> None:
        """Use less than was reserved, if nothing was used yet: what was never touched takes no memory."""
        with self._lock:
            if self._free.free_bytes == self.max_bytes and max_bytes < self.max_bytes:
                self._free = FreeRanges(max_bytes // mmap.PAGESIZE * mmap.PAGESIZE)

    def array(self, shape: Sequence[int], dtype: Any) -> Array | None:
        """Return an array in the arena, not initialised, or None: no room. Its memory is free with its last view."""
        kind = np.dtype(dtype)
        if kind.hasobject:
            return None
        size = math.prod(shape) * kind.itemsize
        owner = self._take(size) if size else None
        return None if owner is None else np.asarray(owner)[:size].view(kind).reshape(shape)

    def place(self, buffers: Sequence[Any], holder: Holder = NOBODY, *, exclusive: bool = True) -> SlabPlaces | None:
        """Return where a reader finds these buffers, or None if there is no room; they stay until it is released.

        What lies in the arena already is not copied and becomes the reader's, who may write to it. With `exclusive`
        false (somebody else reads it too, or it will be sent again) everything is copied.
        """
        contents = [bytes_over(buffer) for buffer in buffers]
        given = self._give([self._range_of(buffer) if exclusive else None for buffer in buffers])
        held: list[Any] = [buffer for buffer, found in zip(buffers, given) if found is not None]
        position = 0
        copied_bytes = sum(_aligned(content.nbytes) for content, found in zip(contents, given) if found is None)
        if copied_bytes:
            target = self._take(copied_bytes)
            if target is None:
                self._take_back(given)
                return None
            held.append(target)
            position = target.offset
        places = []
        for content, found in zip(contents, given):
            if found is not None:
                places.append((content.__array_interface__["data"][0] - self._mapping.address, content.nbytes))
                continue
            places.append((position, content.nbytes))
            self._copy(content, position)
            position += _aligned(content.nbytes)
        with self._lock:
            lease = self._leases.add(holder, held)
        return SlabPlaces(lease, tuple(places))

    def share(self, places: SlabPlaces, holder: Holder, *, most_bytes: int | None = None) -> SlabPlaces | None:
        """Return one more lease of what a lease holds, for a reader that only reads; None if that one is over.

        None as well where readers hold on to too much: more than `most_bytes`, and half of that is theirs alone. What
        several of them hold counts once.
        """
        with self._lock:
            lease = self._leases.share(places, holder, most_bytes=most_bytes)
        return None if lease is None else SlabPlaces(lease, places.places)

    def views(self, places: SlabPlaces) -> list[Array]:
        """Return the buffers of a lease as they lie here, read-only. They keep the memory as a lease does."""
        with self._lock:
            held = self._leases.held(places.lease)
        return [np.asarray(_View(held, self._mapping.address + offset, size)) for offset, size in places.places]

    def release(self, leases: Iterable[int]) -> None:
        """End leases that did not reach their reader, or are this process's own."""
        with self._lock:
            self._leases.remove(leases)

    def give_back(self, leases: Iterable[int], reader: str) -> None:
        """End leases as a reader says: its own, whatever it says. One that is not known is no error."""
        with self._lock:
            self._leases.give_back(leases, reader)

    def keep_only(self, held: Collection[int], holder: Holder, live: Collection[int]) -> None:
        """End what never reached a reader: of earlier connections that are not `live` it holds these and no others."""
        with self._lock:
            self._leases.keep_only(held, holder, live)

    def release_all(self, reader: str) -> None:
        """End all leases of a reader that is known to be gone."""
        with self._lock:
            self._leases.remove_reader(reader)

    def cool(self, now_s: float) -> int:
        """Give memory that has been free for a while back to the system; return how many bytes. Called now and then."""
        if self._pid != os.getpid():
            return 0
        with self._lock:
            self._collect()
            ranges = ranges_to_cool(self._free.idle(), now_s)
            self._free.withdraw(ranges)
        try:
            with contextlib.suppress(OSError):  # a system that cannot: then it stays, and is used again all the same
                for offset, size in ranges:
                    self._mapping.forget(offset, size)
        finally:
            with self._lock:
                self._free.give_cold(ranges)
        return sum(size for _, size in ranges)

    def close(self) -> None:
        """Hand out nothing any more. Memory is unmapped when the last array over it is gone."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            dropped, self._leases = self._leases, LeaseBook()
        del dropped
        self._server.close()
        os.close(self._descriptor)

    def _take(self, size: int) -> _Range | None:
        if self._pid != os.getpid():
            return None
        with self._lock:
            self._collect()
            found = None if self._closed else self._free.take(size)
        return None if found is None else _Range(self._mapping, *found, self._returned)

    def _give(self, ranges: list[_Range | None]) -> list[_Range | None]:
        """Mark ranges as a reader's; None for those that already are, since two would write to the same memory."""
        given: list[_Range | None] = []
        with self._lock:
            for found in ranges:
                mine = found is not None and not found.placed
                if found is not None:
                    found.placed = True
                given.append(found if mine else None)
        return given

    def _take_back(self, given: list[_Range | None]) -> None:
        for found in given:
            if found is not None:
                found.placed = False

    def _collect(self) -> None:
        if self._returned:
            now_s = monotonic()
            while self._returned:
                self._free.give(*self._returned.popleft(), now_s)

    def _range_of(self, buffer: Any) -> _Range | None:
        """Return the range of this arena that a buffer lies in, by the chain of what keeps it alive."""
        while isinstance(buffer, (np.ndarray, memoryview)):
            buffer = buffer.base if isinstance(buffer, np.ndarray) else buffer.obj
        return buffer if isinstance(buffer, _Range) and buffer.mapping is self._mapping else None

    def _copy(self, content: Array, offset: int) -> None:
        source = content.reshape(-1).view(np.uint8)
        np.copyto(self._mapping.bytes[offset : offset + source.nbytes], source)  # without the GIL


class _View:
    """One buffer of a lease in the process that placed it: the base of an array over it."""

    __slots__ = ("__array_interface__", "held")

    def __init__(self, held: list[Any], address: int, size: int) -> None:
        self.held = held
        self.__array_interface__ = array_interface(address, size, writable=False)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
