"""A header and its buffers as messages of one frame each.

libzmq promises that the parts of a message arrive together. When a connection is lost while they are being taken it may
break that promise, with an assertion that ends the process. So no message has parts: what is small goes in one frame,

    0xc1 (no msgpack begins with it) | length of the header, count and sizes of the buffers: u32 each | header | buffers

each buffer at a multiple of 16 bytes, so that arrays over the received copy are aligned. A large buffer follows as a
message of its own, as it lies in memory: its size is given as `FOLLOWS`, and what it belongs to waits for it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.errors import CodecError

MARK = 0xC1
FOLLOWS = (1 << 32) - 1
FOLLOW_FROM_BYTES = 64 << 10  # a zero-copy frame costs about what copying this much does
ONE_FRAME_BYTES = 256 << 10  # and so does a message of its own
_ALIGN = 16


class ReceivedBuffer:
    """A buffer that came in such a frame: writable, and nobody else's."""

    __slots__ = ("buffer",)

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer


def pack(header: bytes, buffers: Sequence[Any]) -> tuple[bytes, list[Any]]:
    """Return the frame, and the buffers that follow it, each in a message of its own."""
    if not buffers:
        return header, []
    views = [memoryview(buffer) for buffer in buffers]
    together = sum(view.nbytes for view in views) < ONE_FRAME_BYTES
    inside = [together or view.nbytes < FOLLOW_FROM_BYTES for view in views]
    sizes = [view.nbytes if here else FOLLOWS for view, here in zip(views, inside)]
    out = [bytes((MARK,)), struct.pack(f"<{2 + len(sizes)}I", len(header), len(sizes), *sizes), header]
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
