"""Who holds what of a runner's shared memory: the runner's book of leases, and what a reader was sent and gives back.

At the runner:

- A lease holds what was placed for one reader until that reader gives it back, or is known to be gone (`LeaseBook`).
- `Lending` knows the peers that readers speak through.

At a reader (`SlabReader`):

- A lease begins when the message that names it arrives, and ends with the last array over it: also with none, where
  nobody looked at what arrived. `returned` says which have ended; the runner is told by the next message to it.
- What was under way on a connection when that was closed never arrives. So the last message on it says what is held,
  and so does the first one on the next, should the last be lost: the rest is the runner's again.
- Arrays are writable where that was asked for. The first descriptor never is; the runner gives one that is when it
  knows the job, which it does once it has sent something. Where it does not, arrays are copies.
"""

from __future__ import annotations

import collections
import fcntl
import mmap
import os
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.core.element import Array
from penstock.core.errors import CodecError
from penstock.wire.frames import SlabPlaces, UseSlabs
from penstock.wire.neighbours import is_gone, process_name, receive_descriptor

if TYPE_CHECKING:
    from penstock.wire.slabs import Arena

COPY_BELOW_BYTES = 1 << 20  # what is smaller is copied: the lease goes back at once, and nothing small pins a range
RETURN_BYTES, RETURN_LEASES = 4 << 20, 4  # so much is given back without waiting for another occasion
RETURN_LARGE_BYTES = 32 << 20  # in fewer leases too; sooner, a message for each costs more than what it frees
CONNECT_S = 2.0
_FORGOTTEN_AT_ONCE_BYTES = 4 << 20  # about a millisecond of a system call that keeps the GIL


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
    """Who holds what of an arena: leases by number. Any thread may use it.

    A lease belongs to a reader of slabs and to the connection it was sent on. Only that reader gives it back, on
    whichever of its connections: its name contains a secret of its own. What never arrived because the connection was
    closed is given back too, when the reader says on the next one what it holds (`keep_only`).
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
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
        with self._lock:
            return self._leases[lease].held

    def add(self, holder: Holder, held: list[Any]) -> int:
        with self._lock:
            lease, self._next_lease = self._next_lease, self._next_lease + 1
            self._leases[lease] = _Lease(holder, held)
            return lease

    def share(self, places: SlabPlaces, holder: Holder, *, most_bytes: int | None = None) -> SlabPlaces | None:
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
            lease = self.add(holder, found.held)
            self._shares[lease] = places.lease
            self._readers[places.lease] = (readers + 1, nbytes)
            self._shared_bytes += 0 if readers else nbytes
        return SlabPlaces(lease, places.places)

    def _crowded(self, nbytes: int, most_bytes: int) -> bool:
        return self._shared_bytes + nbytes > most_bytes and sum(self._outlived.values()) > most_bytes // 2

    def remove(self, leases: Iterable[int]) -> None:
        """End leases. One that is not known is no error."""
        with self._lock:
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
        """End leases that this reader holds, and no others, whatever it says."""
        self._remove_where(lambda lease, holder: holder.reader == reader, leases)

    def keep_only(self, held: Collection[int], holder: Holder, live: Collection[int]) -> None:
        """End what was sent to a reader on connections before this one and is not held; `live` ones are left alone."""
        kept = set(held)
        self._remove_where(
            lambda lease, other: (
                other.reader == holder.reader
                and other.connection < holder.connection
                and other.connection not in live
                and lease not in kept
            )
        )

    def remove_reader(self, reader: str) -> None:
        """End all leases of a reader that is known to be gone."""
        self._remove_where(lambda lease, holder: holder.reader == reader)

    def _remove_where(self, over: Callable[[int, Holder], bool], among: Iterable[int] | None = None) -> None:
        with self._lock:
            known = self._leases if among is None else [lease for lease in among if lease in self._leases]
            self.remove([lease for lease in known if over(lease, self._leases[lease].holder)])


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
        return None if holder is None else self.arena.leases.share(places, holder, most_bytes=most_bytes)

    def take_back(self, peer: bytes, leases: tuple[int, ...]) -> None:
        if (holder := self._holders.get(peer)) is not None:
            self.arena.leases.give_back(leases, holder.reader)

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
        self.arena.leases.keep_only(message.held, Holder(reader, first), message.live)
        return over

    def release_ended(self) -> list[bytes]:
        """Release what ended processes held, and return them. One that is merely lost may have its arrays still."""
        readers = {holder.reader for holder in self._holders.values()}
        gone = {reader for reader in readers if is_gone(reader.partition("/")[0])}
        over = [peer for peer, holder in self._holders.items() if holder.reader in gone]
        self._forget(over)
        for reader in gone:
            self.arena.leases.remove_reader(reader)
        return over

    def _forget(self, peers: list[bytes]) -> None:
        for peer in peers:
            del self._holders[peer]


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


class SlabLease:
    """What was sent in one message. Its memory goes back when this and all arrays over it are gone."""

    __slots__ = ("_copied", "_pid", "_places", "_returned", "lease", "mapping")

    def __init__(
        self, places: SlabPlaces, mapping: Mapping, returned: collections.deque[int], *, copied: bool = False
    ) -> None:
        self._returned, self._pid = returned, os.getpid()
        self.lease, self._places, self.mapping = places.lease, places.places, mapping
        self._copied = copied

    def arrays(self) -> list[Array]:
        """Return its buffers, for `decode_run`."""
        pieces = [np.asarray(_Piece(self, offset, size)) for offset, size in self._places]
        if self._copied or sum(size for _, size in self._places) < COPY_BELOW_BYTES:
            return [piece.copy() for piece in pieces]
        return pieces

    # At the interpreter's end the module is empty, and arrays may still be let go of.
    def __del__(self, _getpid: Callable[[], int] = os.getpid) -> None:
        if self._pid == _getpid():
            self._returned.append(self.lease)


class _Piece:
    """One buffer of a lease: the base of the arrays over it."""

    __slots__ = ("__array_interface__", "lease")

    def __init__(self, lease: SlabLease, offset: int, size: int) -> None:
        self.lease = lease
        address, writable = lease.mapping.address + offset, lease.mapping.writable
        self.__array_interface__ = array_interface(address, size, writable=writable)


class SlabReader:
    """See the module. One thread reads; arrays may be dropped in any."""

    def __init__(self, arena: str, mapping: Mapping, *, writable: bool) -> None:
        """Use `connect`."""
        self.name = f"{process_name()}/{secrets.token_hex(8)}"
        """The process, and a secret: nobody else can give back what this reader holds."""
        self._arena = arena
        self._mapping: Mapping | None = mapping
        self._wants_writable = writable
        self._asked = not writable
        self._connections = 0
        self._live: set[int] = set()
        self._held: dict[int, int] = {}
        """The bytes of each lease that has not been told to have ended."""
        self._ended: collections.deque[int] = collections.deque()
        self._owed: list[int] = []
        self._owed_bytes = 0
        self._pid = os.getpid()

    @staticmethod
    def connect(arena: str, deadline_s: float = CONNECT_S, *, writable: bool = True) -> SlabReader | None:
        """Return a reader of the arena of that name; None: it is not on this host (any more).

        Where others read the same memory it is mapped so that this process cannot write to it (`writable` false).
        """
        mapping = _map(arena, deadline_s, writable=False) if arena else None
        return None if mapping is None else SlabReader(arena, mapping, writable=writable)

    def open_connection(self) -> UseSlabs:
        """Return what is to be said first on a new connection to the runner."""
        self._connections += 1
        self._drain()
        message = UseSlabs(
            reader=self.name, connection=self._connections, live=tuple(self._live), held=tuple(self._held)
        )
        self._live.add(self._connections)
        return message

    def close_connection(self, connection: int) -> UseSlabs:
        """Return what is to be said last on a connection. Nothing arrives on it any more."""
        self._live.discard(connection)
        self._drain()
        return UseSlabs(
            reader=self.name, connection=connection, live=tuple(self._live), held=tuple(self._held), over=True
        )

    def claim(self, places: SlabPlaces) -> SlabLease:
        """Begin a lease that has arrived."""
        self._ask_for_writable()
        if self._mapping is None:
            raise CodecError("this reader of slabs is closed")
        for offset, size in places.places:
            if offset < 0 or size < 0 or offset + size > self._mapping.size:
                raise CodecError(f"a place ({offset}, {size}) outside of an arena of {self._mapping.size} bytes")
        self._held[places.lease] = sum(size for _, size in places.places)
        copied = self._wants_writable and not self._mapping.writable
        return SlabLease(places, self._mapping, self._ended, copied=copied)

    def _ask_for_writable(self) -> None:
        if self._asked:
            return
        self._asked = True
        mapping = _map(self._arena, CONNECT_S, writable=True)
        if mapping is not None and self._mapping is not None:
            self._mapping = mapping

    @property
    def owes_much(self) -> bool:
        """So much is to be given back that it should not wait."""
        self._drain()
        least = RETURN_BYTES if len(self._owed) >= RETURN_LEASES else RETURN_LARGE_BYTES
        return self._owed_bytes >= least

    def returned(self) -> tuple[int, ...]:
        """Return the leases that ended since the last call: they are to be given back."""
        if self._pid != os.getpid():
            return ()
        self._drain()
        ended, self._owed, self._owed_bytes = tuple(self._owed), [], 0
        return ended

    def _drain(self) -> None:
        while self._ended:
            lease = self._ended.popleft()
            self._owed.append(lease)
            self._owed_bytes += self._held.pop(lease, 0)

    def close(self) -> None:
        """Take no more leases. Memory is unmapped when the last array over it is gone."""
        self._mapping = None


def _map(arena: str, deadline_s: float, *, writable: bool) -> Mapping | None:
    received = receive_descriptor(arena, deadline_s, writable=writable)
    if received is None:
        return None
    descriptor, size = received
    try:
        # What could shrink under us would kill this process at the first access beyond its end.
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if not sealed or not 0 < size <= os.fstat(descriptor).st_size:
            return None
        return Mapping(descriptor, size, writable=writable)
    except OSError:
        return None
    finally:
        os.close(descriptor)
