"""Messages as bytes and frames, and back: of bytes that anybody may have sent.

- Any message: `decode_message`, and who sent the frame it came in.
- The control plane: an ask or a tell is one message. Its version is looked at before anything else is: what is too old
  or too new is refused. The body of an ask is encoded once, however often it is sent.
- The data plane, from a runner: a header and its buffers (`pack`, `Assembly`).
- Requests to either, larger than a listener's frames: cut into pieces (`cut_request`, `RequestAssembler`). One that has
  buffers is packed into one frame first.

libzmq promises that the parts of a message arrive together. When a connection is lost while they are being taken it may
break that promise, with an assertion that ends the process. So no message has parts: a small header with its buffers
goes in one frame,

    0xc1 (no msgpack begins with it) | length of the header, count and sizes of the buffers: u32 each | header | buffers

each buffer at a multiple of 16 bytes, so that arrays over the received copy are aligned. A large buffer follows as a
message of its own, as it lies in memory: its size is given as `FOLLOWS`, and what it belongs to waits for it.

A listening socket takes small frames, since libzmq makes room for one before it knows who sends it. What is larger goes
as several messages of one frame each, in order, on one connection:

    0xc1 | size of the whole: u32 | offset of this piece: u32 | piece

The receiver knows by then who sends them. It holds no more than came, drops what nobody goes on with, and has a limit
for each principal, whatever number of connections it has. A piece at offset 0 begins anew: so a request that is sent
again, or cut off by a lost connection, does no harm.
"""

from __future__ import annotations

import struct
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from penstock.core import errors
from penstock.core.errors import CodecError, PenstockError, ProtocolError, RefusedError
from penstock.wire.messages import OLDEST_PROTOCOL, PROTOCOL, Answer, Ask, Push, Refused, Request, Tell
from penstock.wire.principals import Principal

UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError)
"""msgspec raises its own error for most of what is no message, but Python's for text that is no Unicode, for lists in
lists in lists and, before 0.19, for a map with maps as keys. Whoever decodes in a thread that others depend on has to
know all four."""

_Message = TypeVar("_Message")
_Body = TypeVar("_Body")


def decode_message(decoder: msgspec.msgpack.Decoder[_Message], frame: bytes | memoryview) -> _Message:
    """Return the message in a frame; raise `ProtocolError` for anything else.

    >>> decode_message(msgspec.msgpack.Decoder(str), b"\\xa1a")
    'a'
    """
    try:
        return decoder.decode(frame)
    except UNDECODABLE as error:
        raise ProtocolError(f"these bytes are not a message: {error}; dropped") from error


# What has come, and who sent it

_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)  # as enums they cost more than asking does


def has_arrived(socket: zmq.Socket[bytes]) -> bool:
    """Say whether there is something to receive: a fifth of what being told by `zmq.Again` costs."""
    return bool(int(socket.getsockopt(_EVENTS)) & _POLLIN)


KEY_PROPERTY = "Penstock-Key"
"""The property of a connection that says which key was shown: a principal may have several, and one be revoked."""


def sender_of(frame: zmq.Frame) -> Principal:
    """Return who sent a message, as the guard said when its connection was made."""
    text = frame.get("User-Id")
    assert isinstance(text, str)
    return _parsed(text)


def key_of(frame: zmq.Frame) -> str:
    """Return the verifier of the key that the sender of a message has shown."""
    text = frame.get(KEY_PROPERTY)
    assert isinstance(text, str)
    return text


_parsed = lru_cache(4096)(Principal.parse)


# Asks and tells


class _Envelope(msgspec.Struct, frozen=True, array_like=True):
    protocol: int
    number: int
    position: int
    body: msgspec.Raw
    proof: bytes = b""


class _Opened(msgspec.Struct, Generic[_Body], frozen=True):
    number: int
    position: int
    body: _Body
    proof: bytes


_envelopes = msgspec.msgpack.Decoder(_Envelope)
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_told: msgspec.msgpack.Decoder[Answer | Push] = msgspec.msgpack.Decoder(Answer | Push)
_encoder = msgspec.msgpack.Encoder()


def encode_body(body: Request | Answer | Push) -> msgspec.Raw:
    return msgspec.Raw(_encoder.encode(body))


def encode_ask(number: int, seen: int, body: msgspec.Raw, proof: bytes = b"") -> bytes:
    """`proof` came with the position that was seen: see `wire.positions`."""
    return _encoder.encode(_Envelope(PROTOCOL, number, seen, body, proof))


def encode_tell(number: int, position: int, body: Answer | Push, proof: bytes = b"") -> bytes:
    return _encoder.encode(_Envelope(PROTOCOL, number, position, encode_body(body), proof))


def decode_ask(frame: bytes | memoryview) -> Ask:
    """Return the ask in a frame; raise `ProtocolError` for anything else."""
    opened = _open(frame, _requests)
    return Ask(PROTOCOL, opened.number, opened.position, opened.body, opened.proof)


def decode_tell(frame: bytes | memoryview) -> Tell:
    """Return the answer or push in a frame; raise `ProtocolError` for anything else."""
    opened = _open(frame, _told)
    return Tell(PROTOCOL, opened.number, opened.position, opened.body, opened.proof)


def _open(frame: bytes | memoryview, bodies: msgspec.msgpack.Decoder[_Body]) -> _Opened[_Body]:
    envelope = decode_message(_envelopes, frame)
    if not OLDEST_PROTOCOL <= envelope.protocol <= PROTOCOL:
        raise ProtocolError(
            f"a message of protocol {envelope.protocol}, but this release speaks {OLDEST_PROTOCOL} to {PROTOCOL}; "
            f"upgrade the older side"
        )
    return _Opened(envelope.number, envelope.position, decode_message(bodies, envelope.body), envelope.proof)


def refusal(refused: Refused) -> PenstockError:
    """Return the error a refusal stands for: the class its `kind` names, or `RefusedError`.

    >>> type(refusal(Refused(reason="no", kind="state_mismatch"))).__name__
    'StateMismatchError'
    """
    name = refused.kind if refused.kind.endswith("Error") else _class_name(refused.kind)
    known = getattr(errors, name, None)
    if isinstance(known, type) and issubclass(known, PenstockError):
        try:
            return known(refused.reason)
        except TypeError:  # a class whose message is made of several fields
            pass
    return RefusedError(refused.reason)


def _class_name(kind: str) -> str:
    return "".join(part.capitalize() for part in kind.split("_")) + "Error"


# A header and its buffers

_MARK = b"\xc1"
MARK = _MARK[0]  # of what no msgpack begins with: a header with buffers, or a piece of a request
FOLLOWS = (1 << 32) - 1
FOLLOW_FROM_BYTES = 64 << 10  # a zero-copy frame costs about what copying this much does
ONE_FRAME_BYTES = 256 << 10  # and so does a message of its own
_ALIGN = 16


class ReceivedBuffer:
    """A buffer that came in such a frame: writable, and nobody else's."""

    __slots__ = ("buffer",)

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer


def pack(header: bytes, buffers: Sequence[Any], *, whole: bool = False) -> tuple[bytes, list[Any]]:
    """Return the frame, and the buffers that follow it, each in a message of its own; of a `whole` frame, none do."""
    if not buffers:
        return header, []
    views = [memoryview(buffer) for buffer in buffers]
    together = whole or sum(view.nbytes for view in views) < ONE_FRAME_BYTES
    inside = [together or view.nbytes < FOLLOW_FROM_BYTES for view in views]
    sizes = [view.nbytes if here else FOLLOWS for view, here in zip(views, inside)]
    out = [_MARK, struct.pack(f"<{2 + len(sizes)}I", len(header), len(sizes), *sizes), header]
    at = sum(map(len, out))
    for view in (view for view, here in zip(views, inside) if here):
        out.append(bytes(-at % _ALIGN))
        out.append(_bytes_of(view))  # type: ignore[arg-type]
        at += -at % _ALIGN + view.nbytes
    return b"".join(out), [buffer for buffer, here in zip(buffers, inside) if not here]


def _bytes_of(view: memoryview) -> memoryview:
    return view.cast("B") if view.nbytes else memoryview(b"")  # what is empty in some dimension cannot be cast


def unpack(frame: memoryview) -> tuple[memoryview, list[ReceivedBuffer | None]]:
    """Return the header and the buffers, None for those that follow; a frame that was not packed is all header.

    >>> header, parts = unpack(memoryview(pack(b"header", [b"abc", b""])[0]))
    >>> bytes(header), [bytes(part.buffer) for part in parts]
    (b'header', [b'abc', b''])
    >>> unpack(memoryview(pack(b"header", [bytes(1 << 20)])[0]))[1]
    [None]
    """
    if not frame.nbytes or frame[0] != MARK:
        return frame, []
    try:
        length, count = struct.unpack_from("<2I", frame, 1)
        sizes = struct.unpack_from(f"<{count}I", frame, 9)
    except struct.error as error:
        raise CodecError(f"a torn frame: {error}") from None
    start = 9 + 4 * count
    import numpy as np  # here: a dispatcher, which only asks and tells, does without it

    # One copy of everything: the received frame is neither aligned nor, while ZeroMQ holds it, ours alone.
    own = np.empty(frame.nbytes + _ALIGN, np.uint8)
    shift = -own.ctypes.data % _ALIGN
    own[shift : shift + frame.nbytes] = np.frombuffer(frame, np.uint8)
    whole = memoryview(own[shift : shift + frame.nbytes])  # type: ignore[arg-type]
    at = start + length
    parts: list[ReceivedBuffer | None] = []
    for size in sizes:
        if size == FOLLOWS:
            parts.append(None)
            continue
        at += -at % _ALIGN
        parts.append(ReceivedBuffer(whole[at : at + size]))
        at += size
    if at > frame.nbytes:
        raise CodecError(f"a frame of {frame.nbytes} bytes says it has {at}")
    return frame[start : start + length], parts


class Assembly:
    """Puts a header together with the buffers that follow it. Frames have a `buffer`, as ZeroMQ's do."""

    def __init__(self) -> None:
        self._waiting: tuple[memoryview, list[Any]] | None = None

    def add(self, frame: Any) -> tuple[memoryview, list[Any]] | None:
        """Take the next frame of a connection; return a header and all its parts, or None if more must come."""
        parts: list[Any]
        if self._waiting is None:
            header, parts = unpack(frame.buffer)
        else:
            (header, parts), self._waiting = self._waiting, None
            parts[parts.index(None)] = frame
        if None in parts:
            self._waiting = header, parts
            return None
        return header, parts


# Requests in pieces

LISTENER_FRAME_BYTES = 8 << 10
"""What a listening socket takes in one frame, with what encryption adds to it. Two thousand connections that each send
most of one cost 56 MB, of which 40 are libzmq's own; frames of 16 KiB would cost 72 MB."""
PIECE_FRAME_BYTES = LISTENER_FRAME_BYTES - 64  # CURVE adds 33 bytes to a frame
MAX_REQUEST_BYTES = 64 << 20
PRINCIPAL_BYTES = 4 * MAX_REQUEST_BYTES  # the ranks of one trainer may all come back with their states at once
IDLE_S = 10.0

_HEAD = struct.Struct("<BII")
_PIECE_BYTES = PIECE_FRAME_BYTES - _HEAD.size


def cut_request(message: bytes) -> list[bytes]:
    """Return a message as the frames that carry it: one if it is small. One with buffers is always a piece.

    >>> cut_request(b"small")
    [b'small']
    >>> [len(frame) for frame in cut_request(bytes(20_000))]
    [8128, 8128, 3771]
    """
    if len(message) <= PIECE_FRAME_BYTES and message[:1] != _MARK:
        return [message]
    check_request_size(len(message))
    return [
        _HEAD.pack(MARK, len(message), offset) + message[offset : offset + _PIECE_BYTES]
        for offset in range(0, len(message), _PIECE_BYTES)
    ]


class Outbox:
    """What waits until a dialled socket takes it: the other side has not let us in, or is busy."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._frames: deque[bytes] = deque()
        self.nbytes = 0
        """How much waits."""

    @property
    def interest(self) -> int:
        """What the socket is to be polled for."""
        return zmq.POLLIN | zmq.POLLOUT if self._frames else zmq.POLLIN

    def put(self, message: bytes) -> None:
        for frame in cut_request(message):
            self._frames.append(frame)
            self.nbytes += len(frame)

    def flush(self) -> None:
        """Send what can be sent."""
        while self._frames:
            try:
                self._socket.send(self._frames[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self.nbytes -= len(self._frames.popleft())


def check_request_size(nbytes: int) -> None:
    """Raise if a request is larger than any receiver takes."""
    if nbytes > MAX_REQUEST_BYTES:
        raise RefusedError(
            f"a request of {nbytes:,} bytes is above the limit of {MAX_REQUEST_BYTES:,}; let the source make fewer, "
            f"larger splits, or read what is behind before a state is kept"
        )


class _Unfinished(msgspec.Struct):
    principal: Hashable
    size: int
    heard_at: float
    received: int = 0
    pieces: list[bytes] = []


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
        if frame[:1] != _MARK:
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
