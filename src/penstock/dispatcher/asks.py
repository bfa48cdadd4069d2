"""Requests as they come in and answers as they go out.

The version is looked at first, and an answer is of the version of its question: a client one release older refuses what
is newer than itself. What is no message at all is counted and gets no answer, for there is nothing to pair it with.
"""

from __future__ import annotations

import msgspec

from penstock.core.errors import ProtocolError
from penstock.wire.framing import UNDECODABLE
from penstock.wire.messages import OLDEST_PROTOCOL, PROTOCOL, Answer, Ask, Push, Refused, Tell

HIGHEST_POSITION = 1 << 60  # SQLite's integers end at 2^63; no journal gets here


class _Head(msgspec.Struct, frozen=True, array_like=True):
    protocol: int
    number: int
    seen: int


_heads = msgspec.msgpack.Decoder(_Head)
_asks = msgspec.msgpack.Decoder(Ask)
_encoder = msgspec.msgpack.Encoder()


class Unanswerable(ProtocolError):
    """Bytes that are not a request."""


class Refusable(ProtocolError):
    """A request that is refused for its form; it can be told so."""

    def __init__(self, protocol: int, number: int, refusal: Refused) -> None:
        self.protocol, self.number, self.refusal = protocol, number, refusal
        super().__init__(refusal.reason)


def decode_ask(frame: bytes) -> Ask:
    try:
        head = _heads.decode(frame)
    except UNDECODABLE as error:
        raise Unanswerable(f"these bytes are not a request: {error}; dropped") from error
    if not (0 < head.number < HIGHEST_POSITION and 0 <= head.seen < HIGHEST_POSITION):
        raise Unanswerable("numbers out of range; dropped")
    if not OLDEST_PROTOCOL <= head.protocol <= PROTOCOL:
        reason = (
            f"a request of protocol {head.protocol}, but this dispatcher serves {OLDEST_PROTOCOL} to {PROTOCOL}; "
            f"upgrade the older side"
        )
        raise Refusable(PROTOCOL, head.number, Refused(reason=reason, kind="ProtocolError"))
    try:
        return _asks.decode(frame)
    except UNDECODABLE as error:
        reason = f"this request cannot be read: {error}; upgrade the older side"
        raise Refusable(head.protocol, head.number, Refused(reason=reason, kind="ProtocolError")) from error


def encode_tell(protocol: int, number: int, position: int, body: Answer | Push, proof: bytes = b"") -> bytes:
    return _encoder.encode(Tell(protocol, number, position, body, proof))
