"""Just enough of Arrow's IPC format to find record batches without reading them.

pyarrow tells neither where the batches of a file lie nor how many rows one has before it is read. Both stand in small
flatbuffers: the footer of a file, and the header of every message. Of a flatbuffer's table only the fields that are
asked for are looked at.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import msgspec

FILE_MAGIC = b"ARROW1"
FEATHER_1_MAGIC = b"FEA1"
FOOTER_TAIL = 4 + len(FILE_MAGIC)  # its length, and the magic again
_CONTINUATION = 0xFFFFFFFF
_MOST_HEADER_BYTES = 256 << 20  # nothing sensible has more: a length beyond it is garbage

DICTIONARY_BATCH, RECORD_BATCH = 2, 3


class MalformedMessageError(Exception):
    """Bytes that are no IPC message or footer."""


class MessageSpan(msgspec.Struct, frozen=True):
    """Where a message lies: its header (with the length in front) and its body."""

    offset: int
    header_bytes: int
    body_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.header_bytes + self.body_bytes


class Header(msgspec.Struct, frozen=True):
    kind: int
    rows: int
    body_bytes: int


def footer_blocks(footer: bytes) -> tuple[list[MessageSpan], list[MessageSpan]]:
    """Return the dictionary and the record batches that the footer of a file lists."""
    try:
        table = _Table.root(footer)
        return _blocks(table, 2), _blocks(table, 3)
    except struct.error as error:
        raise MalformedMessageError(f"the footer is damaged: {error}") from None


def parse_header(header: bytes) -> Header:
    """Read a message's header, the length in front of it included."""
    try:
        start = 8 if struct.unpack_from("<I", header)[0] == _CONTINUATION else 4
        message = _Table.root(header[start:])
        kind = message.scalar(1, "<B")
        inner = message.table(2)
        rows = inner.scalar(0, "<q") if kind == RECORD_BATCH and inner is not None else 0
        body_bytes = message.scalar(3, "<q")
    except struct.error as error:
        raise MalformedMessageError(f"the header of a message is damaged: {error}") from None
    if rows < 0 or body_bytes < 0:
        raise MalformedMessageError(f"the header of a message is damaged: {rows} rows, {body_bytes} bytes")
    return Header(kind, rows, body_bytes)


def scan_messages(read_at: Callable[[int, int], bytes], offset: int, size: int) -> Iterator[tuple[MessageSpan, Header]]:
    """Go from header to header; bodies are passed over."""
    while offset + 4 <= size:
        prefix = read_at(offset, 8)
        first = int.from_bytes(prefix[:4], "little")
        prefix_bytes = 8 if first == _CONTINUATION else 4
        length = int.from_bytes(prefix[4:8], "little") if prefix_bytes == 8 else first
        if length == 0:
            return
        if length > _MOST_HEADER_BYTES or offset + prefix_bytes + length > size:
            raise MalformedMessageError(f"a message at byte {offset} claims a header of {length} bytes")
        header = parse_header(read_at(offset, prefix_bytes + length))
        block = MessageSpan(offset, prefix_bytes + length, header.body_bytes)
        if block.end > size:
            raise MalformedMessageError(f"the message at byte {offset} ends at {block.end}, the file at {size}")
        yield block, header
        offset = block.end


class _Table:
    """A flatbuffer's table: fields by number, found through its vtable."""

    def __init__(self, buffer: bytes, position: int) -> None:
        self._buffer, self._position = buffer, position
        self._fields = position - self._unpack("<i", position)
        self._fields_bytes = self._unpack("<H", self._fields)

    @classmethod
    def root(cls, buffer: bytes) -> _Table:
        return cls(buffer, struct.unpack_from("<I", buffer)[0])

    def scalar(self, field: int, form: str) -> int:
        place = self._place(field)
        return self._unpack(form, place) if place else 0

    def table(self, field: int) -> _Table | None:
        place = self._place(field)
        return _Table(self._buffer, place + self._unpack("<I", place)) if place else None

    def vector(self, field: int, form: str) -> list[tuple[int, ...]]:
        """Return the structs of a vector."""
        place = self._place(field)
        if not place:
            return []
        start = place + self._unpack("<I", place)
        count, width = self._unpack("<I", start), struct.calcsize(form)
        if count * width > len(self._buffer):
            raise struct.error(f"a list of {count} entries")
        return [struct.unpack_from(form, self._buffer, start + 4 + number * width) for number in range(count)]

    def _place(self, field: int) -> int:
        entry = 4 + 2 * field
        offset = self._unpack("<H", self._fields + entry) if entry < self._fields_bytes else 0
        return self._position + offset if offset else 0

    def _unpack(self, form: str, position: int) -> int:
        if position < 0:
            raise struct.error(f"a reference to {position}")
        value: int = struct.unpack_from(form, self._buffer, position)[0]
        return value


def _blocks(table: _Table, field: int) -> list[MessageSpan]:
    return [MessageSpan(offset, header, body) for offset, header, body in table.vector(field, "<qi4xq")]
