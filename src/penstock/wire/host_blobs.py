"""A large blob, once on a host: the first runner that needs it fetches it, the others map what that one has.

Who binds the name that follows from the blob's own is the one that fetches; the kernel lets one process do that. It
hands out a descriptor of its memory at once, which is sealed when all of it has arrived. The others wait for the seal,
and see for themselves that what they got is the blob: its name is its hash, and sealed memory cannot be changed. Where
the process that fetches dies, its name is free, and the next one takes its place. Where any of it fails, a runner
fetches a copy of its own.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import time
import weakref
from collections.abc import Callable, Iterable

from penstock.core.errors import ProtocolError
from penstock.core.host_memory import is_sealed, new_buffer, seal
from penstock.core.ids import BlobHash
from penstock.wire.blobs import HASH_CHARACTERS
from penstock.wire.neighbours import DescriptorServer, name_for, receive_descriptor

HOST_BLOB_BYTES = 8 << 20  # two pieces: a smaller one is fetched in less time than it takes to agree
ANSWER_S = 2.0
LOOK_S = 0.02
STILL_S = 10.0  # without another byte: whoever fetches it may stand still, and others need not
ATTEMPTS = 3


class SharedBlob:
    """A blob's memory in this process, shared with others until written to, and what hands it to them."""

    def __init__(self, descriptor: int, size_bytes: int, server: DescriptorServer | None) -> None:
        """`descriptor` becomes its own."""
        try:
            self.memory = memoryview(mmap.mmap(descriptor, size_bytes, access=mmap.ACCESS_COPY))
        except BaseException:
            _let_go(descriptor, server)
            raise
        self.fetched = server is not None
        """This process has fetched it, for the others too."""
        self._finalizer = weakref.finalize(self, _let_go, descriptor, server)


def _let_go(descriptor: int, server: DescriptorServer | None) -> None:
    if server is not None:
        server.close()
    os.close(descriptor)


def share_blob(name: BlobHash, size_bytes: int, pieces: Iterable[bytes], check: Callable[[], None]) -> SharedBlob:
    """Return a blob that the processes of this host share. `pieces` fetches it, and is asked if nobody else has it.

    `check` is called while this waits; it raises where that is to end.
    """
    address = name_for(f"blob {name}")
    descriptor = new_buffer()
    server: DescriptorServer | None = None
    try:
        for _ in range(ATTEMPTS):
            try:
                server = DescriptorServer(descriptor, size_bytes, address)
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    break
            found = _received(name, address, size_bytes, check)
            if found is not None:
                os.close(descriptor)
                return SharedBlob(found, size_bytes, None)
        _write(descriptor, pieces, size_bytes)
    except BaseException:
        _let_go(descriptor, server)
        raise
    return SharedBlob(descriptor, size_bytes, server)


def _write(descriptor: int, pieces: Iterable[bytes], size_bytes: int) -> None:
    written = 0
    for piece in pieces:
        rest = memoryview(piece)
        while rest:
            count = os.write(descriptor, rest)
            rest, written = rest[count:], written + count
    if written != size_bytes:
        raise ProtocolError(f"the dispatcher sent {written} bytes of a pipeline of {size_bytes}")
    seal(descriptor)


def _received(name: BlobHash, address: str, size_bytes: int, check: Callable[[], None]) -> int | None:
    """Return the descriptor of another process's memory once all of it is there; None: it does not come, or is no blob.

    The process may have died over it: then the address is free.
    """
    received = receive_descriptor(address, ANSWER_S)
    if received is None:
        return None
    descriptor, size = received
    try:
        if size == size_bytes and _wait_sealed(descriptor, check) and _is_blob(descriptor, name, size_bytes):
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _wait_sealed(descriptor: int, check: Callable[[], None]) -> bool:
    """Wait until nobody writes any more; False: nothing has come for a while."""
    before, since = -1, time.monotonic()
    while not is_sealed(descriptor):
        check()
        length = os.fstat(descriptor).st_size
        if length != before:
            before, since = length, time.monotonic()
        if time.monotonic() > since + STILL_S:
            return False
        time.sleep(LOOK_S)
    return True


def _is_blob(descriptor: int, name: BlobHash, size_bytes: int) -> bool:
    if os.fstat(descriptor).st_size != size_bytes:
        return False
    with mmap.mmap(descriptor, size_bytes, access=mmap.ACCESS_READ) as content:
        return hashlib.blake2b(content, digest_size=HASH_CHARACTERS // 2).hexdigest() == name
