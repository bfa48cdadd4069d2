"""A streaming reader of tar archives: ustar, pax and GNU long names.

Python's `tarfile` makes an object of twenty fields per member; here a member costs a few microseconds. Links and
devices have no bytes of their own and are passed over; sparse members are refused.
"""

from __future__ import annotations

import io
from typing import Any, BinaryIO, NamedTuple, cast
from zlib import adler32

from penstock.core.errors import CorruptRecordError, TruncatedFileError

BLOCK = 512
BUFFER_BYTES = 64 << 10
SKIP_BYTES = 1 << 20
_REGULAR = frozenset(b"0\x007")
_ADLER_BASE = 65521


class Member(NamedTuple):
    """A regular file of the archive. `offset` is that of its first header, the extended ones included."""

    name: str
    size: int
    offset: int


class TarStream:
    """Reads `file` forward; `offset` says where in the archive its position is."""

    def __init__(self, file: BinaryIO, path: str, offset: int = 0) -> None:
        # A buffered reader of C serves headers from its buffer, and big members past it without a second copy.
        buffered = file if isinstance(file, io.BufferedReader) else io.BufferedReader(cast(Any, file), BUFFER_BYTES)
        self._read, self._path = buffered.read, path
        self._at = offset
        self._size = 0  # bytes of the member last returned that were not read yet
        self._padding = 0  # zeros behind them, up to the next header

    @property
    def offset(self) -> int:
        """Where the next header begins."""
        return self._at + self._size + self._padding

    def next_member(self) -> Member | None:
        """Return the next regular file, None at the end; what was not read of the one before is passed over."""
        if self._size:
            self._skip_data()
        first = -1  # where the headers that belong together begin
        name: str | None = None
        size: int | None = None
        while True:
            header = self._header()
            if header is None:
                if first >= 0:
                    raise TruncatedFileError(self._path, "the archive ends inside a member's headers", offset=first)
                return None
            offset = self._at - BLOCK
            kind = header[156]
            self._size = self._number(header[124:136], offset)
            self._padding = -self._size % BLOCK
            first = offset if first < 0 else first
            if kind in _REGULAR:
                if size is not None:
                    self._size, self._padding = size, -size % BLOCK
                found = name or _name(header)
                if not found.endswith("/"):  # so old archives write a folder
                    return Member(found, self._size, first)
            elif kind == 0x78:  # x: pax headers of the next member
                records = _pax_records(self.read_data(), self._path, offset)
                if any(key.startswith("GNU.sparse") for key in records):
                    raise CorruptRecordError(self._path, "sparse members are not read", offset=offset)
                name = records.get("path", name)
                size = int(records["size"]) if "size" in records else size
                continue
            elif kind == 0x4C:  # L: GNU's long name of the next member
                name = _text(self.read_data())
                continue
            elif kind in (0x4B, 0x67):  # K: a link's long target, g: pax headers for all members
                self._skip_data()
                continue
            elif kind == 0x53:  # S
                raise CorruptRecordError(self._path, "sparse members are not read", offset=offset)
            elif kind in b"123456":  # links, devices and folders have no data, whatever their size says
                self._size = self._padding = 0
            self._skip_data()
            first, name, size = -1, None, None

    def read_data(self) -> bytes:
        """Return the bytes of the member last returned."""
        data = self._read(self._size)
        if len(data) < self._size:
            raise self._cut_short(len(data))
        self._at += self._size
        self._size = 0
        return data

    def _skip_data(self) -> None:
        left = self._size
        while left:
            passed = len(self._read(min(left, SKIP_BYTES)))
            if not passed:
                raise self._cut_short(self._size - left)
            left -= passed
        self._at += self._size
        self._size = 0

    def _cut_short(self, found: int) -> TruncatedFileError:
        return TruncatedFileError(self._path, f"a member of {self._size} bytes ends after {found}", offset=self._at)

    def _header(self) -> bytes | None:
        """Return the next header block, None at the end of the archive."""
        block = self._read(self._padding + BLOCK)
        self._at += self._padding
        header = block[self._padding :] if self._padding else block
        self._padding = 0
        if len(header) < BLOCK:
            if header.strip(b"\0"):
                raise TruncatedFileError(self._path, "the archive ends inside a header", offset=self._at)
            if not self._at:
                raise TruncatedFileError(self._path, "an empty file is not a tar archive", offset=0)
            return None
        if not header[0] and not header.strip(b"\0"):
            return None  # a block of zeros is the end
        if not _checksum_holds(header):
            what = "the header's checksum is wrong: this is not a tar archive, or it is damaged"
            raise CorruptRecordError(self._path, what, offset=self._at)
        self._at += BLOCK
        return header

    def _number(self, field: bytes, offset: int) -> int:
        if field[0] & 0x80:  # base 256, for sizes of 8 GB and more
            return int.from_bytes(field[1:], "big")
        try:
            return int(field.strip(b"\0 ") or b"0", 8)
        except ValueError:
            raise CorruptRecordError(self._path, f"the size {field!r} is not a number", offset=offset) from None


def _checksum_holds(header: bytes) -> bool:
    """Compare the sum of a header's bytes, its checksum field read as spaces, with the stored one.

    The low half of Adler-32 is one more than that sum modulo 65521, at a fiftieth of the cost of adding in Python.
    """
    try:
        stored = int(header[148:156].strip(b"\0 "), 8)
    except ValueError:
        return False
    total = (adler32(header[156:], adler32(header[:148])) & 0xFFFF) - 1 + 8 * 0x20
    if total % _ADLER_BASE == stored % _ADLER_BASE:
        return True
    signed = sum(byte - 256 if byte > 127 else byte for byte in header[:148] + header[156:]) + 8 * 0x20
    return signed == stored  # so some old systems added


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _name(header: bytes) -> str:
    name = _text(header[:100])
    if header[345] and header[257:263] == b"ustar\0":  # GNU's own format keeps other things there
        return f"{_text(header[345:500])}/{name}"
    return name


def _pax_records(data: bytes, path: str, offset: int) -> dict[str, str]:
    """
    >>> _pax_records(b"12 path=abc\\n", "x.tar", 0)
    {'path': 'abc'}
    """
    records: dict[str, str] = {}
    at = 0
    while at < len(data) and data[at]:
        digits, _, _ = data[at : at + 20].partition(b" ")
        length = int(digits) if digits.isdigit() else 0
        key, found, value = data[at + len(digits) + 1 : at + length - 1].partition(b"=")
        if not found:
            raise CorruptRecordError(path, "a pax header that cannot be read", offset=offset)
        records[key.decode("utf-8", "surrogateescape")] = value.decode("utf-8", "surrogateescape")
        at += length
    return records
