"""Asks and tells as bytes. The version is looked at before anything else is: what is too old or too new is refused.

The body of an ask is encoded once, however often it is sent.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from penstock.core import errors
from penstock.core.errors import PenstockError, ProtocolError, RefusedError
from penstock.wire.decoding import decode_message
from penstock.wire.messages import OLDEST_PROTOCOL, PROTOCOL, Answer, Ask, Push, Refused, Request, Tell

_Body = TypeVar("_Body")


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
