"""Messages from bytes that anybody may have sent.

msgspec raises its own error for most of what is no message, but Python's for text that is no Unicode and for lists in
lists in lists. Whoever decodes in a thread that others depend on has to know all three.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from penstock.core.errors import ProtocolError

UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_Message = TypeVar("_Message")


def decode_message(decoder: msgspec.msgpack.Decoder[_Message], frame: bytes | memoryview) -> _Message:
    """Return the message in a frame; raise `ProtocolError` for anything else.

    >>> decode_message(msgspec.msgpack.Decoder(str), b"\\xa1a")
    'a'
    """
    try:
        return decoder.decode(frame)
    except UNDECODABLE as error:
        raise ProtocolError(f"these bytes are not a message: {error}; dropped") from error
