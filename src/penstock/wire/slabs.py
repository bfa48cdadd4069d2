"""Slabs: on one host, batches lie in memory that both sides map, and only their places are sent.

A runner has one arena: an anonymous file (memfd), sealed so that nobody can shrink it under a reader, and gone with the
last process that has it, however that ended. Its readers map it once.

- A range belongs to its `_Range` object. It is free again when that is collected: when no array over it and no lease
  that names it is left. So memory is never written to while anybody may read it.
- A lease holds what was placed for one reader until the reader gives it back, or is known to be gone.
- `__del__` may run at any point of any thread, so it takes no lock: it appends to a deque, which the next call drains.
- After a fork the child takes nothing from the arena and gives nothing back.
"""

from __future__ import annotations

import collections
import fcntl
import math
import mmap
import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from penstock.core.errors import CodecError
from penstock.wire.descriptors import DescriptorServer, receive_descriptor
from penstock.wire.elements import bytes_over
from penstock.wire.frames import SlabPlaces
from penstock.wire.ranges import ALIGNMENT, FreeRanges

Array = np.ndarray[Any, Any]

COPY_BELOW_BYTES = (
    1 << 20
)  # a reader copies what is smaller: the lease goes back at once, and nothing small pins a range
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class _Mapping:
    """The whole of an arena in this process. Unmapped when nothing over it is left."""

    __slots__ = ("address", "bytes", "size", "writable")

    def __init__(self, descriptor: int, size: int, *, writable: bool = True) -> None:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self.bytes = np.frombuffer(mmap.mmap(descriptor, size, access=access), np.uint8)
        self.address: int = self.bytes.__array_interface__["data"][0]
        self.size = size
        self.writable = writable


class _Range:
    """Owns a range of the arena. Arrays over it have it as their base."""

    __slots__ = ("__array_interface__", "_pid", "_returned", "mapping", "offset", "placed", "size")

    def __init__(self, mapping: _Mapping, offset: int, size: int, returned: collections.deque[tuple[int, int]]) -> None:
        self.mapping, self.offset, self.size = mapping, offset, size
        self.placed = False
        """Some reader has it, and may write to it."""
        self._returned, self._pid = returned, os.getpid()
        self.__array_interface__ = _interface(mapping.address + offset, size)

    def __del__(self) -> None:
        if self._pid == os.getpid():
            self._returned.append((self.offset, self.size))


class Arena:
    """A runner's shared memory, of which at most `max_bytes` are ever used. Any thread may use it."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = -(-max_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._free = FreeRanges(self.max_bytes)
        self._returned: collections.deque[tuple[int, int]] = collections.deque()
        self._leases: dict[int, tuple[str, list[Any]]] = {}
        self._next_lease = 1
        self._shares: dict[int, int] = {}
        """Leases made by `share`, and of which lease."""
        self._readers: dict[int, tuple[int, int]] = {}
        """How many of them each lease has, and its bytes."""
        self._shared_bytes = 0
        self._outlived: dict[int, int] = {}
        """Leases that are over while readers still have shares of them, and their bytes."""
        self._closed = False
        self._descriptor = os.memfd_create("penstock", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._descriptor, self.max_bytes)  # sparse: a page takes memory when it is first written to
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self._mapping = _Mapping(self._descriptor, self.max_bytes)
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

    def place(self, buffers: Sequence[Any], owner: str = "", *, exclusive: bool = True) -> SlabPlaces | None:
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
            lease, self._next_lease = self._next_lease, self._next_lease + 1
            self._leases[lease] = (owner, held)
        return SlabPlaces(lease, tuple(places))

    def share(self, places: SlabPlaces, owner: str = "", *, most_bytes: int | None = None) -> SlabPlaces | None:
        """Return one more lease of what a lease holds, for a reader that only reads; None if that one is over.

        None as well where readers hold on to too much: more than `most_bytes`, and half of that is theirs alone. What
        several of them hold counts once.
        """
        nbytes = sum(size for _, size in places.places)
        with self._lock:
            found = self._leases.get(places.lease)
            readers, _ = self._readers.get(places.lease, (0, 0))
            if found is None or (not readers and most_bytes is not None and self._crowded(nbytes, most_bytes)):
                return None
            lease, self._next_lease = self._next_lease, self._next_lease + 1
            self._leases[lease] = (owner, found[1])
            self._shares[lease] = places.lease
            self._readers[places.lease] = (readers + 1, nbytes)
            self._shared_bytes += 0 if readers else nbytes
        return SlabPlaces(lease, places.places)

    def _crowded(self, nbytes: int, most_bytes: int) -> bool:
        return self._shared_bytes + nbytes > most_bytes and sum(self._outlived.values()) > most_bytes // 2

    def _end_share(self, lease: int) -> None:
        placed = self._shares.pop(lease)
        readers, nbytes = self._readers.pop(placed)
        if readers > 1:
            self._readers[placed] = (readers - 1, nbytes)
        else:
            self._outlived.pop(placed, None)
            self._shared_bytes -= nbytes

    def views(self, places: SlabPlaces) -> list[Array]:
        """Return the buffers of a lease as they lie here, read-only. They keep the memory as a lease does."""
        with self._lock:
            held = self._leases[places.lease][1]
        return [np.asarray(_View(held, self._mapping.address + offset, size)) for offset, size in places.places]

    def release(self, leases: Iterable[int], owner: str | None = None) -> None:
        """Take leases back; with `owner`, only those that are that reader's. One that is not known is no error."""
        with self._lock:
            for lease in leases:
                if owner is None or self._leases.get(lease, (None,))[0] == owner:
                    self._leases.pop(lease, None)
                    if lease in self._shares:
                        self._end_share(lease)
                    elif lease in self._readers:
                        self._outlived[lease] = self._readers[lease][1]

    def release_all(self, owner: str) -> None:
        """Take back all leases of a reader that is known to be gone."""
        with self._lock:
            mine = [lease for lease, (holder, _) in self._leases.items() if holder == owner]
        self.release(mine, owner)

    def close(self) -> None:
        """Hand out nothing any more. Memory is unmapped when the last array over it is gone."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            dropped, self._leases = self._leases, {}
        dropped.clear()
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
        while self._returned:
            self._free.give(*self._returned.popleft())

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
        self.__array_interface__ = _interface(address, size, writable=False)


class _Lease:
    """What a reader holds of one lease; when all arrays over it are gone, so is this."""

    __slots__ = ("_pid", "_returned", "lease", "mapping")

    def __init__(self, lease: int, mapping: _Mapping, returned: collections.deque[int]) -> None:
        self.lease, self.mapping = lease, mapping
        self._returned, self._pid = returned, os.getpid()

    def __del__(self) -> None:
        if self._pid == os.getpid():
            self._returned.append(self.lease)


class _Piece:
    """One buffer of a lease: the base of the arrays over it."""

    __slots__ = ("__array_interface__", "lease")

    def __init__(self, lease: _Lease, offset: int, size: int) -> None:
        self.lease = lease
        self.__array_interface__ = _interface(lease.mapping.address + offset, size, writable=lease.mapping.writable)


class SlabReader:
    """A client's view of a runner's arena. One thread reads; arrays may be dropped in any."""

    def __init__(self, descriptor: int, size: int, *, writable: bool = True) -> None:
        """Use `connect`. The descriptor stays the caller's."""
        self._mapping: _Mapping | None = _Mapping(descriptor, size, writable=writable)
        self._returned: collections.deque[int] = collections.deque()
        self._pid = os.getpid()

    @staticmethod
    def connect(name: str, deadline_s: float = 2.0, *, writable: bool = True) -> SlabReader | None:
        """Return a reader of the arena of that name; None: it is not on this host (any more).

        Where others read the same memory it is mapped so that this process cannot write to it (`writable` false).
        """
        received = receive_descriptor(name, deadline_s) if name else None
        if received is None:
            return None
        descriptor, size = received
        try:
            # What could shrink under us would kill this process at the first access beyond its end.
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not sealed or not 0 < size <= os.fstat(descriptor).st_size:
                return None
            return SlabReader(descriptor, size, writable=writable)
        except OSError:
            return None
        finally:
            os.close(descriptor)

    def buffers(self, places: SlabPlaces) -> list[Array]:
        """Return the buffers of a lease, for `decode_run`. The lease ends with the last array over them."""
        if self._mapping is None:
            raise CodecError("this reader of slabs is closed")
        for offset, size in places.places:
            if offset < 0 or size < 0 or offset + size > self._mapping.size:
                raise CodecError(f"a place ({offset}, {size}) outside of an arena of {self._mapping.size} bytes")
        lease = _Lease(places.lease, self._mapping, self._returned)
        pieces = [np.asarray(_Piece(lease, offset, size)) for offset, size in places.places]
        if sum(piece.nbytes for piece in pieces) < COPY_BELOW_BYTES:
            return [piece.copy() for piece in pieces]
        return pieces

    def returned(self) -> tuple[int, ...]:
        """Return the leases that ended since the last call: they are to be given back."""
        if self._pid != os.getpid():
            return ()
        ended = []
        while self._returned:
            ended.append(self._returned.popleft())
        return tuple(ended)

    def close(self) -> None:
        """Take no more leases. Memory is unmapped when the last array over it is gone."""
        self._mapping = None


def _interface(address: int, size: int, *, writable: bool = True) -> dict[str, Any]:
    return {"version": 3, "typestr": "|u1", "shape": (size,), "data": (address, not writable)}


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
