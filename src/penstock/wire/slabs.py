"""Slabs: on one host, batches lie in memory that both sides map, and only their places are sent.

A runner has one arena: an anonymous file (memfd), sealed so that nobody can shrink it under a reader, and gone with the
last process that has it, however that ended. Its readers map it once (`slab_reader`).

- A range belongs to its `_Range` object. It is free again when that is collected: when no array over it and no lease
  that names it is left. So memory is never written to while anybody may read it.
- A lease holds what was placed for one reader until that reader gives it back, or is known to be gone (`LeaseBook`).
  `Lending` knows the peers that readers speak through.
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
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from time import monotonic
from typing import Any, NamedTuple

import numpy as np

from penstock.core.element import Array
from penstock.wire.elements import bytes_over
from penstock.wire.frames import SlabPlaces, UseSlabs
from penstock.wire.neighbours import DescriptorServer, is_gone
from penstock.wire.ranges import ALIGNMENT, FreeRanges, ranges_to_cool
from penstock.wire.slab_reader import Mapping, array_interface

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Holder(NamedTuple):
    """A reader of slabs (`SlabReader.name`), and the number of one of its connections."""

    reader: str
    connection: int


NOBODY = Holder(secrets.token_hex(8), 0)
"""The process that has the arena: what it keeps for itself. No peer knows the name."""


class _Lease(NamedTuple):
    holder: Holder
    held: list[Any]


class LeaseBook:
    """Who holds what of an arena: leases by number. No memory here, and no lock: the arena has both.

    A lease belongs to a reader of slabs and to the connection it was sent on. Only that reader gives it back, on
    whichever of its connections: its name contains a secret of its own. What never arrived because the connection was
    closed is given back too, when the reader says on the next one what it holds (`keep_only`).
    """

    def __init__(self) -> None:
        self._leases: dict[int, _Lease] = {}
        self._next_lease = 1
        self._shares: dict[int, int] = {}
        """The leases that `share` made, each with the lease it is a share of."""
        self._readers: dict[int, tuple[int, int]] = {}
        """How many shares each lease has, and how many bytes it holds."""
        self._shared_bytes = 0
        self._outlived: dict[int, int] = {}
        """Leases that are over while readers still have shares of them, and their bytes."""

    def __len__(self) -> int:
        return len(self._leases)

    def held(self, lease: int) -> list[Any]:
        """Return what a lease keeps alive."""
        return self._leases[lease].held

    def add(self, holder: Holder, held: list[Any]) -> int:
        lease, self._next_lease = self._next_lease, self._next_lease + 1
        self._leases[lease] = _Lease(holder, held)
        return lease

    def share(self, places: SlabPlaces, holder: Holder, *, most_bytes: int | None) -> int | None:
        """Add one more lease of what a lease holds; None if that one is over, or readers hold on to too much."""
        nbytes = sum(size for _, size in places.places)
        found = self._leases.get(places.lease)
        readers, _ = self._readers.get(places.lease, (0, 0))
        if found is None or (not readers and most_bytes is not None and self._crowded(nbytes, most_bytes)):
            return None
        lease = self.add(holder, found.held)
        self._shares[lease] = places.lease
        self._readers[places.lease] = (readers + 1, nbytes)
        self._shared_bytes += 0 if readers else nbytes
        return lease

    def _crowded(self, nbytes: int, most_bytes: int) -> bool:
        return self._shared_bytes + nbytes > most_bytes and sum(self._outlived.values()) > most_bytes // 2

    def remove(self, leases: Iterable[int]) -> None:
        """End leases. One that is not known is no error."""
        for lease in leases:
            self._leases.pop(lease, None)
            if lease in self._shares:
                self._end_share(lease)
            elif lease in self._readers:
                self._outlived[lease] = self._readers[lease][1]

    def _end_share(self, lease: int) -> None:
        placed = self._shares.pop(lease)
        readers, nbytes = self._readers.pop(placed)
        if readers > 1:
            self._readers[placed] = (readers - 1, nbytes)
        else:
            self._outlived.pop(placed, None)
            self._shared_bytes -= nbytes

    def give_back(self, leases: Iterable[int], reader: str) -> None:
        """End leases that this reader holds, and no others."""
        self.remove([lease for lease in leases if (found := self._leases.get(lease)) and found.holder.reader == reader])

    def keep_only(self, held: Collection[int], holder: Holder, live: Collection[int]) -> None:
        """End what was sent to a reader on connections before this one and is not held; `live` ones are left alone."""
        kept = set(held)
        self.remove(
            [
                lease
                for lease, (other, _) in self._leases.items()
                if other.reader == holder.reader
                and other.connection < holder.connection
                and other.connection not in live
                and lease not in kept
            ]
        )

    def remove_reader(self, reader: str) -> None:
        """End all leases of a reader that is known to be gone."""
        self.remove([lease for lease, (holder, _) in self._leases.items() if holder.reader == reader])


class _Range:
    """Owns a range of the arena. Arrays over it have it as their base."""

    __slots__ = ("__array_interface__", "_pid", "_returned", "mapping", "offset", "placed", "size")

    def __init__(self, mapping: Mapping, offset: int, size: int, returned: collections.deque[tuple[int, int]]) -> None:
        self.mapping, self.offset, self.size = mapping, offset, size
        self.placed = False
        """Whether some reader has it, and may write to it."""
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


class Lending:
    """Which peers have mapped this process's arena, and what is put there for them."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._holders: dict[bytes, Holder] = {}

    def place(self, peer: bytes, buffers: Sequence[Any], *, exclusive: bool) -> SlabPlaces | None:
        """Put buffers where a peer on this host can see them, and it alone; None where there is no room."""
        holder = self._holders.get(peer)
        return None if holder is None else self.arena.place(buffers, holder, exclusive=exclusive)

    def share(self, peer: bytes, places: SlabPlaces, *, most_bytes: int) -> SlabPlaces | None:
        """Let a peer, too, read what lies there; None where peers hold on to more than `most_bytes`."""
        holder = self._holders.get(peer)
        return None if holder is None else self.arena.share(places, holder, most_bytes=most_bytes)

    def take_back(self, peer: bytes, leases: tuple[int, ...]) -> None:
        if (holder := self._holders.get(peer)) is not None:
            self.arena.give_back(leases, holder.reader)

    def admit(self, peer: bytes, message: UseSlabs) -> list[bytes]:
        """Let a peer have leases; return those whose connections are over.

        What was sent on these, and never arrived, is free.
        """
        reader, first = message.reader, message.connection + message.over
        over = [
            other
            for other, known in self._holders.items()
            if known.reader == reader and known.connection < first and known.connection not in message.live
        ]
        self._forget(over)
        if not message.over:
            self._holders[peer] = Holder(reader, message.connection)
        self.arena.keep_only(message.held, Holder(reader, first), message.live)
        return over

    def release_ended(self) -> list[bytes]:
        """Release what ended processes held, and return them. One that is merely lost may have its arrays still."""
        readers = {holder.reader for holder in self._holders.values()}
        gone = {reader for reader in readers if is_gone(reader.partition("/")[0])}
        over = [peer for peer, holder in self._holders.items() if holder.reader in gone]
        self._forget(over)
        for reader in gone:
            self.arena.release_all(reader)
        return over

    def _forget(self, peers: list[bytes]) -> None:
        for peer in peers:
            del self._holders[peer]


class _View:
    """One buffer of a lease in the process that placed it: the base of an array over it."""

    __slots__ = ("__array_interface__", "held")

    def __init__(self, held: list[Any], address: int, size: int) -> None:
        self.held = held
        self.__array_interface__ = array_interface(address, size, writable=False)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
