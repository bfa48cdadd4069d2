"""A header and small buffers as one frame.

libzmq promises that the parts of a message arrive together. When a connection is lost while they are being taken it may
break that promise, with an assertion that ends the process. A frame of its own for each buffer is worth that risk only
where it saves a copy that counts. So what is small goes as one frame:

    0xc1 (no msgpack begins with it) | length of the header, count and sizes of the buffers: u32 each | header | buffers

each buffer at a multiple of 16 bytes, so that arrays over the received copy are aligned.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.errors import CodecError

MARK = 0xC1
_ALIGN = 16


class Part:
    """A buffer that came in such a frame: writable, and nobody else's."""

    __slots__ = ("buffer",)

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer


def pack(header: bytes, buffers: Sequence[Any]) -> bytes:
    """Return the frame."""
    views = [_bytes_of(memoryview(buffer)) for buffer in buffers]
    sizes = [view.nbytes for view in views]
    out = [bytes((MARK,)), struct.pack(f"<{2 + len(sizes)}I", len(header), len(sizes), *sizes), header]
    at = sum(map(len, out))
    for view in views:
        out.append(bytes(-at % _ALIGN))
        out.append(view)  # type: ignore[arg-type]
        at += -at % _ALIGN + view.nbytes
    return b"".join(out)


def _bytes_of(view: memoryview) -> memoryview:
    return view.cast("B") if view.nbytes else memoryview(b"")  # what is empty in some dimension cannot be cast


def unpack(frame: memoryview) -> tuple[memoryview, list[Part]]:
    """Return the header and the buffers; a frame that was not packed is all header.

    >>> header, parts = unpack(memoryview(pack(b"header", [b"abc", b""])))
    >>> bytes(header), [bytes(part.buffer) for part in parts]
    (b'header', [b'abc', b''])
    """
    if not frame.nbytes or frame[0] != MARK:
        return frame, []
    try:
        length, count = struct.unpack_from("<2I", frame, 1)
        sizes = struct.unpack_from(f"<{count}I", frame, 9)
    except struct.error as error:
        raise CodecError(f"a torn frame: {error}") from None
    start = 9 + 4 * count
    # One copy of everything: the received frame is neither aligned nor, while ZeroMQ holds it, ours alone.
    own = np.empty(frame.nbytes + _ALIGN, np.uint8)
    shift = -own.ctypes.data % _ALIGN
    own[shift : shift + frame.nbytes] = np.frombuffer(frame, np.uint8)
    whole = memoryview(own[shift : shift + frame.nbytes])  # type: ignore[arg-type]
    at, parts = start + length, []
    for size in sizes:
        at += -at % _ALIGN
        parts.append(Part(whole[at : at + size]))
        at += size
    if at > frame.nbytes:
        raise CodecError(f"a frame of {frame.nbytes} bytes says it has {at}")
    return frame[start : start + length], parts
