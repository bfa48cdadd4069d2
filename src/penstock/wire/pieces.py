"""Requests larger than a listener's frames, cut into pieces by the sender and put together by the receiver.

A listening socket takes small frames, since libzmq makes room for one before it knows who sends it. What is larger goes
as several messages of one frame each, in order, on one connection:

    0xc1 (no msgpack begins with it) | size of the whole: u32 | offset of this piece: u32 | piece

The receiver knows by then who sends them. It holds no more than came, drops what nobody goes on with, and has a limit
for each principal, whatever number of connections it has. A piece at offset 0 begins anew: so a request that is sent
again, or cut off by a lost connection, does no harm.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

from penstock.core.errors import ProtocolError, RefusedError

LISTENER_FRAME_BYTES = 8 << 10
"""What a listening socket takes in one frame, with what encryption adds to it. Two thousand connections that each send
most of one cost 56 MB, of which 40 are libzmq's own; frames of 16 KiB would cost 72 MB."""
PIECE_FRAME_BYTES = LISTENER_FRAME_BYTES - 64  # CURVE adds 33 bytes to a frame
MAX_REQUEST_BYTES = 64 << 20
PRINCIPAL_BYTES = 4 * MAX_REQUEST_BYTES  # the ranks of one trainer may all come back with their states at once
IDLE_S = 10.0

_MARK = 0xC1
_HEAD = struct.Struct("<BII")
_PIECE_BYTES = PIECE_FRAME_BYTES - _HEAD.size


def cut_request(message: bytes) -> list[bytes]:
    """Return a message as the frames that carry it: one if it is small.

    >>> cut_request(b"small")
    [b'small']
    >>> [len(frame) for frame in cut_request(bytes(20_000))]
    [8128, 8128, 3771]
    """
    if len(message) <= PIECE_FRAME_BYTES:
        return [message]
    check_request_size(len(message))
    return [
        _HEAD.pack(_MARK, len(message), offset) + message[offset : offset + _PIECE_BYTES]
        for offset in range(0, len(message), _PIECE_BYTES)
    ]


def check_request_size(nbytes: int) -> None:
    """Raise if a request is larger than any receiver takes."""
    if nbytes > MAX_REQUEST_BYTES:
        raise RefusedError(
            f"a request of {nbytes:,} bytes is above the limit of {MAX_REQUEST_BYTES:,}; let the source make fewer, "
            f"larger splits, or read what is behind before a state is kept"
        )


@dataclass(slots=True)
class _Unfinished:
    principal: Hashable
    size: int
    heard_at: float
    received: int = 0
    pieces: list[bytes] = field(default_factory=list)


class RequestAssembler:
    """Puts the requests of all connections of a listener together. Of one thread."""

    def __init__(self, *, principal_bytes: int = PRINCIPAL_BYTES) -> None:
        self._principal_bytes = principal_bytes
        self._unfinished: dict[bytes, _Unfinished] = {}
        self._held: Counter[Hashable] = Counter()
        """How many bytes of unfinished requests each principal has here."""

    def add(self, peer: bytes, frame: bytes, *, principal: Hashable, now: float) -> bytes | None:
        """Take a frame of a connection; return the request that is complete with it, or None if more must come.

        Raises `ProtocolError` for a piece that fits nothing, or that is one too many for its principal.

        >>> assembler = RequestAssembler()
        >>> first, second = cut_request(bytes(10_000))
        >>> assembler.add(b"peer", first, principal="trainer/a", now=0.0)
        >>> len(assembler.add(b"peer", second, principal="trainer/a", now=0.0))
        10000
        """
        if frame[:1] != b"\xc1":
            return frame
        if len(frame) <= _HEAD.size:
            raise ProtocolError("a piece of a request without its head; dropped")
        _, size, offset = _HEAD.unpack_from(frame)
        if offset == 0:
            self.drop(peer)
            if not 0 < size <= MAX_REQUEST_BYTES:
                raise ProtocolError(f"a request of {size:,} bytes is above the limit of {MAX_REQUEST_BYTES:,}; dropped")
            self._unfinished[peer] = _Unfinished(principal, size, now)
        unfinished = self._unfinished.get(peer)
        piece_bytes = len(frame) - _HEAD.size
        if unfinished is None or (unfinished.principal, unfinished.size, unfinished.received) != (
            principal,
            size,
            offset,
        ):
            self.drop(peer)
            raise ProtocolError("a piece of a request that does not follow the one before; dropped")
        if piece_bytes != min(_PIECE_BYTES, size - offset):  # many small ones would take more memory than is counted
            self.drop(peer)
            raise ProtocolError(f"a piece of {piece_bytes} bytes, which none has at {offset} of {size}; dropped")
        if self._held[principal] + piece_bytes > self._principal_bytes:
            self.drop(peer)
            raise ProtocolError(f"more than {self._principal_bytes:,} bytes of unfinished requests; dropped")
        unfinished.pieces.append(frame[_HEAD.size :])
        unfinished.received += piece_bytes
        unfinished.heard_at = now
        self._held[principal] += piece_bytes
        if unfinished.received < size:
            return None
        self.drop(peer)
        return b"".join(unfinished.pieces)

    def drop(self, peer: bytes) -> None:
        """Forget what a connection has begun."""
        unfinished = self._unfinished.pop(peer, None)
        if unfinished is not None:
            self._held[unfinished.principal] -= unfinished.received
            if not self._held[unfinished.principal]:
                del self._held[unfinished.principal]

    def drop_idle(self, now: float) -> None:
        """Forget what nobody goes on with: a connection that is lost says nothing."""
        for peer in [peer for peer, begun in self._unfinished.items() if now - begun.heard_at > IDLE_S]:
            self.drop(peer)

    @property
    def held_bytes(self) -> int:
        """How much of unfinished requests is here."""
        return self._held.total()
