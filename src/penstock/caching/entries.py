"""An entry: elements that a prefix of a pipeline made, as one file.

    magic | frames, one behind the other | footer | checksum and length of the footer, magic

A frame is a run of elements (`wire.runs`) with the sizes of its buffers before it, put together in one piece of memory:
what a reader gets are arrays over that piece, writable and aligned. The footer says where frames are, what their bytes
add up to, and which elements are in them: by their index in a split, or, in a pack, by 16 bytes that stand for each.

Nothing is synced: a file whose bytes never reached the disk is one whose checksums are wrong, and is computed again.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias
from zlib import crc32

import msgspec
import numpy as np

from penstock.core.element import Element
from penstock.core.errors import CodecError
from penstock.wire.runs import decode_run, encode_run

MAGIC = b"PSTKENT1"
ALIGNMENT = 64
ID_BYTES = 16  # what stands for an element in a pack
_TAIL = struct.Struct("<II8s")
_HEAD = struct.Struct("<II")  # bytes of the layout, number of buffers
_ROW_WORDS = 128

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
ReadAt: TypeAlias = Callable[[int, int], Bytes]
"""(offset, number of bytes) → those bytes in memory that may be written to; fewer at the end of the file."""
WillRead: TypeAlias = Callable[[int, int], None]
"""(offset, number of bytes): these will be asked for soon."""


class DamagedEntryError(Exception):
    """The bytes of an entry are not what was written."""


class EntryFooter(msgspec.Struct, frozen=True, array_like=True):
    """What an entry says of itself. Numbers by frame or element are arrays, as their bytes."""

    label: str
    """The operators that made it, for people."""
    prefix: str
    """The name of the folder it lies in: of one prefix."""
    compute_s: float
    """How long making its elements took, over all threads."""
    made_at_s: float
    offsets: bytes
    """int64, by frame."""
    sizes: bytes
    """int64, by frame."""
    sums: bytes
    """uint32, by frame."""
    counts: bytes
    """int64, by frame: its elements."""
    indices: bytes = b""
    """int64, by element: its index in the split."""
    ids: bytes = b""
    """16 bytes by element of a pack."""


def checksum(content: Bytes) -> int:
    """Return a sum over bytes that a flipped bit, a cut or a swap of parts changes.

    Words are added by rows and by columns of a table, and those sums go through crc32: eight times as fast as crc32
    over all bytes, and without the GIL.

    >>> data = np.arange(5000, dtype=np.uint8)
    >>> before = checksum(data)
    >>> data[4097] ^= 4
    >>> checksum(data) != before
    True
    """
    whole = len(content) // (8 * _ROW_WORDS) * (8 * _ROW_WORDS)
    words = content[:whole].view(np.uint64).reshape(-1, _ROW_WORDS)
    found = crc32(words.sum(axis=1).data, len(content) & 0xFFFFFFFF)
    return crc32(content[whole:].data, crc32(words.sum(axis=0).data, found))


def encode_frame(elements: Sequence[Element]) -> Bytes:
    """Return a frame of elements: a copy, so that they may be written to afterwards."""
    layout, buffers = encode_run(elements)
    sizes = [len(memoryview(buffer).cast("B")) for buffer in buffers]
    head = _HEAD.pack(len(layout), len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes) + layout
    starts: list[int] = []
    end = _aligned(len(head))
    for size in sizes:
        starts.append(end)
        end = _aligned(end + size)
    frame = np.empty(end, np.uint8)
    frame[: len(head)] = np.frombuffer(head, np.uint8)
    frame[len(head) : _aligned(len(head))] = 0
    for buffer, start, size in zip(buffers, starts, sizes):
        frame[start : start + size] = np.frombuffer(memoryview(buffer).cast("B"), np.uint8)
        frame[start + size : _aligned(start + size)] = 0
    return frame


def decode_frame(frame: Bytes) -> list[Element]:
    """Return the elements of a frame, as views of it."""
    try:
        layout_bytes, count = _HEAD.unpack_from(frame.data, 0)
        sizes = struct.unpack_from(f"<{count}Q", frame.data, _HEAD.size)
        at = _HEAD.size + 8 * count
        layout = frame[at : at + layout_bytes].tobytes()
        at = _aligned(at + layout_bytes)
        buffers = []
        for size in sizes:
            buffers.append(frame[at : at + size].data)
            at = _aligned(at + size)
    except struct.error as error:
        raise DamagedEntryError(str(error)) from error
    return decode_run(layout, buffers)


def _aligned(size: int) -> int:
    return size + -size % ALIGNMENT


class FrameTable:
    """The frames of an entry that is being written, and the footer that follows from them."""

    def __init__(self) -> None:
        self.nbytes = _aligned(len(MAGIC))
        self._frames: list[tuple[int, int, int, int]] = []
        self._indices: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        self._ids: list[bytes] = []

    @property
    def elements(self) -> int:
        return sum(count for *_, count in self._frames)

    @staticmethod
    def beginning() -> bytes:
        return MAGIC.ljust(_aligned(len(MAGIC)), b"\0")

    def add(self, frame: Bytes, count: int, *, indices: Any = None, ids: Sequence[bytes] = ()) -> None:
        self._frames.append((self.nbytes, len(frame), checksum(frame), count))
        self.nbytes += len(frame)
        if indices is not None:
            self._indices.append(np.asarray(indices, np.int64))
        self._ids.extend(ids)

    def end(self, *, label: str, prefix: str, compute_s: float, made_at_s: float) -> bytes:
        """Return what follows the frames."""
        columns = np.array(self._frames, np.int64).reshape(-1, 4)
        footer = msgspec.msgpack.encode(
            EntryFooter(
                label=label,
                prefix=prefix,
                compute_s=compute_s,
                made_at_s=made_at_s,
                offsets=columns[:, 0].tobytes(),
                sizes=columns[:, 1].tobytes(),
                sums=columns[:, 2].astype(np.uint32).tobytes(),
                counts=columns[:, 3].tobytes(),
                indices=np.concatenate(self._indices).tobytes() if self._indices else b"",
                ids=b"".join(self._ids),
            )
        )
        return footer + _TAIL.pack(crc32(footer), len(footer), MAGIC)


def _told(offset: int, count: int) -> None:
    """Storage for which that makes no difference."""


class OpenEntry(msgspec.Struct, frozen=True):
    """A published entry. Its frames are read one by one, or neighbours together."""

    footer: EntryFooter
    nbytes: int
    read_at: ReadAt
    close: Callable[[], None]
    offsets: np.ndarray[Any, np.dtype[np.int64]]
    sizes: np.ndarray[Any, np.dtype[np.int64]]
    sums: np.ndarray[Any, np.dtype[np.uint32]]
    counts: np.ndarray[Any, np.dtype[np.int64]]
    indices: np.ndarray[Any, np.dtype[np.int64]]
    will_read: WillRead

    @staticmethod
    def of(nbytes: int, read_at: ReadAt, close: Callable[[], None], will_read: WillRead = _told) -> OpenEntry:
        """Read the footer; raise `DamagedEntryError` if it is not one."""
        if nbytes < _TAIL.size + len(MAGIC):
            raise DamagedEntryError(f"{nbytes} bytes are no entry")
        last = min(nbytes, 64 << 10)
        end = read_at(nbytes - last, last)
        if len(end) != last:
            raise DamagedEntryError("it is cut short")
        found, length, magic = _TAIL.unpack(end[-_TAIL.size :].tobytes())
        if magic != MAGIC or length > nbytes - _TAIL.size:
            raise DamagedEntryError("its end is not that of an entry")
        if length + _TAIL.size > last:
            end = read_at(nbytes - length - _TAIL.size, length + _TAIL.size)
        content = end[len(end) - _TAIL.size - length : len(end) - _TAIL.size].tobytes()
        if crc32(content) != found:
            raise DamagedEntryError("its footer is damaged")
        try:
            footer = _footers.decode(content)
        except msgspec.DecodeError as error:
            raise DamagedEntryError(f"its footer is of another kind: {error}") from error
        by_frame = [np.frombuffer(each, np.int64) for each in (footer.offsets, footer.sizes, footer.counts)]
        offsets, sizes, counts = by_frame
        sums, indices = np.frombuffer(footer.sums, np.uint32), np.frombuffer(footer.indices, np.int64)
        return OpenEntry(footer, nbytes, read_at, close, offsets, sizes, sums, counts, indices, will_read)

    def window(self, first: int, nbytes: int) -> int:
        """Return before which frame to stop, to read so many bytes in one go; one frame at least."""
        ends = np.cumsum(self.sizes[first:])
        return first + max(1, int(np.searchsorted(ends, nbytes, side="right"))) if len(ends) else first

    def frames(self, first: int, stop: int) -> list[list[Element]]:
        """Return the elements of neighbouring frames, read in one go."""
        found = []
        for number, frame in enumerate(self.raw_frames(first, stop), first):
            elements = decode_frame(frame)
            if len(elements) != self.counts[number]:
                raise DamagedEntryError(f"frame {number} has {len(elements)} elements, not {self.counts[number]}")
            found.append(elements)
        return found

    def raw_frames(self, first: int, stop: int) -> list[Bytes]:
        """Return neighbouring frames as they were written, read in one go."""
        start = int(self.offsets[first])
        size = int(self.offsets[stop - 1] + self.sizes[stop - 1]) - start
        content = self.read_at(start, size)
        if len(content) != size:
            raise DamagedEntryError("it is cut short")
        found = []
        for number in range(first, stop):
            at = int(self.offsets[number]) - start
            frame = content[at : at + int(self.sizes[number])]
            if checksum(frame) != self.sums[number]:
                raise DamagedEntryError(f"frame {number} has other bytes than were written")
            found.append(frame)
        return found

    def check(self) -> None:
        """Read all of it; raise `DamagedEntryError` if something is wrong with it."""
        for number in range(len(self.offsets)):
            try:
                self.frames(number, number + 1)
            except CodecError:
                continue  # a class that is not imported here: the bytes are as they were written


_footers = msgspec.msgpack.Decoder(EntryFooter)
