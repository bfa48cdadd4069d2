"""Reading splits of record files: what TFRecord, text and JSON lines share.

A format is a `Scanner`: it goes through one file in blocks and says for each record where it ended, and which were bad.
`RecordReader` does the rest for all of them: files one after the other (remote ones opened ahead), `want` elements at
a time, positions, and what becomes of bad records. Rules:

- a hint is `file number << 48 | offset in the file's (unpacked) bytes`, so that one int finds a place in many files;
- every record has an index, bad ones too, and the rest of a file that cannot be read on is one bad record;
- what came before a bad record is delivered before the error is raised.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, Protocol, TypeAlias, cast

import msgspec
import numpy as np

from penstock.core.element import Element
from penstock.core.errors import CorruptRecordError, DataError, FileChangedError
from penstock.graph.readers import RecordFile
from penstock.sources.base import FileRange, OnBad, Records, Split, SplitPosition
from penstock.sources.compression import compression_of, open_decompressed
from penstock.sources.storage import check_unchanged, is_remote, open_file

Offsets: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

OFFSET_BITS = 48
FILES_AHEAD = 4  # remote files of one split whose first requests are under way beside the one being read
MORE_BYTES = 1 << 20  # how much more is asked for when a record reaches beyond a range of a remote file
NO_OFFSETS: Offsets = np.empty(0, np.int64)


class Block(msgspec.Struct):
    """Consecutive records of one file. `ends[i]` is the offset just after element i."""

    elements: Sequence[Element]
    ends: Offsets
    bad: list[tuple[int, DataError]] = []
    """(which record of this block, why), ascending."""
    numbers: Sequence[int] | None = None
    """Which record of this block each element is; None where there are no bad ones among them."""

    @property
    def count(self) -> int:
        return len(self.elements) + len(self.bad)


class Scanner(Protocol):
    """Goes through one file. The constructor opens it (and waits for nothing); a block may be empty of elements."""

    def next_block(self) -> Block | None:
        """Return the next records, None at the end. A `CorruptRecordError` gives up the rest of the file."""
        ...

    def close(self) -> None: ...


OpenScanner: TypeAlias = Callable[[FileRange, int | None], Scanner]
"""Open a file of a split at an offset that was a record's end; None: at the beginning of the file or range."""


class RecordReader:
    def __init__(self, split: Split, at: SplitPosition, open_scanner: OpenScanner, on_bad: OnBad | None) -> None:
        self._files, self._open_scanner, self._on_bad = split.files, open_scanner, on_bad
        self._scanners: deque[Scanner] = deque()  # of the file being read and of those opened ahead
        self._first_offset: int | None = None
        self._file = 0
        if at.offset is not None:
            self._file, self._first_offset = at.offset >> OFFSET_BITS, at.offset & ((1 << OFFSET_BITS) - 1)
        self._opened = self._file
        self._index = 0 if at.offset is None else at.index  # of the first record of the next block
        self._pass_over = at.index  # records below this index were delivered, or reported, in an earlier life
        self._expected = at.index
        self._elements: Sequence[Element] = ()
        self._ends = NO_OFFSETS
        self._indices: Sequence[int] = range(0)
        self._bad: deque[tuple[int, DataError]] = deque()
        self._cursor = 0
        self._failure: DataError | None = None
        self._open_ahead()

    def read(self, want: int) -> Records:
        while self._cursor == len(self._elements):
            self._report_bad(before=None)
            if self._failure is not None:
                raise self._failure
            if not self._advance():
                return Records(())
        start, stop = self._cursor, min(self._cursor + want, len(self._elements))
        self._cursor = stop
        indices = self._indices[start:stop]
        self._report_bad(before=indices[-1])
        gap = indices[0] != self._expected or indices[-1] - indices[0] != stop - start - 1
        self._expected = indices[-1] + 1
        offsets = (self._ends[start:stop] + (self._file << OFFSET_BITS)).tolist()
        return Records(self._elements[start:stop], offsets, indices if gap else None)

    def close(self) -> None:
        while self._scanners:
            self._scanners.popleft().close()
        self._file = self._opened = len(self._files)
        self._elements, self._cursor = (), 0

    def _open_ahead(self) -> None:
        """Open the file to be read, and the remote ones after it: their latency passes beside the work on this one."""
        while self._opened < len(self._files) and len(self._scanners) <= FILES_AHEAD:
            piece = self._files[self._opened]
            if self._scanners and not is_remote(piece.path):
                return
            self._scanners.append(self._open_scanner(piece, self._first_offset))
            self._first_offset = None
            self._opened += 1

    def _advance(self) -> bool:
        """Take the next block; False at the end of the split."""
        if self._file == len(self._files):
            return False
        self._open_ahead()
        try:
            block = self._scanners[0].next_block()
        except CorruptRecordError as error:
            self._take(Block((), NO_OFFSETS, [(0, error)]))
            self._next_file()
            return True
        if block is None:
            self._next_file()
        else:
            self._take(block)
        return True

    def _next_file(self) -> None:
        self._scanners.popleft().close()
        self._file += 1

    def _take(self, block: Block) -> None:
        first = self._index
        self._index += block.count
        self._elements, self._ends, self._cursor = block.elements, block.ends, 0
        if block.numbers is None:
            self._indices = range(first, first + len(block.elements))
        else:
            self._indices = [first + number for number in block.numbers]
        self._bad = deque((first + number, error) for number, error in block.bad)
        if first < self._pass_over:
            self._drop_passed()
        if self._bad and self._on_bad is None:
            index, self._failure = self._bad.popleft()
            self._keep(slice(None, _position_of(self._indices, index)))

    def _drop_passed(self) -> None:
        self._keep(slice(_position_of(self._indices, self._pass_over), None))
        while self._bad and self._bad[0][0] < self._pass_over:
            self._bad.popleft()

    def _keep(self, part: slice) -> None:
        self._elements, self._ends, self._indices = self._elements[part], self._ends[part], self._indices[part]

    def _report_bad(self, before: int | None) -> None:
        while self._bad and self._on_bad is not None and (before is None or self._bad[0][0] < before):
            index, error = self._bad.popleft()
            self._on_bad(error, index)


def locate_record(split: Split, before: int | None, after: int) -> tuple[str, int | None]:
    """Return the file a record lies in and the byte it begins at, from the hints before and after it."""
    piece = split.files[after >> OFFSET_BITS]
    if before is not None and before >> OFFSET_BITS == after >> OFFSET_BITS:
        return piece.path, before & ((1 << OFFSET_BITS) - 1)
    return piece.path, None if before is None else 0


def _position_of(indices: Sequence[int], index: int) -> int:
    """Return how many of the ascending `indices` are below `index`."""
    return int(np.searchsorted(np.asarray(indices), index))


class BlockFile:
    """A file, unpacked if need be, read in big blocks from an offset.

    Bytes that came before corrupt compressed data are returned before the error is raised, so that which records can
    be read does not depend on where reading began. Of a remote file only what lies before `until` is read ahead.
    """

    def __init__(self, node: RecordFile, piece: FileRange, start: int = 0, until: int | None = None) -> None:
        self._node, self._piece = node, piece
        self.path = piece.path
        self.packed = compression_of(piece.path, node.compression) != "none"
        self._until = piece.size if until is None or not is_remote(piece.path) else min(until, piece.size)
        self._skip = start if self.packed else 0
        self._failure: CorruptRecordError | None = None
        self._file = self._raw = cast(BinaryIO, io.BytesIO())
        try:
            self._open(0 if self.packed else start)
        except FileChangedError as error:
            self._failure = error  # told when it is read, as all that is wrong with a file

    def _open(self, start: int) -> None:
        piece = self._piece
        self._raw = open_file(
            piece.path, piece.size, self._node.storage_options, etag=piece.etag, start=start, stop=self._until
        )
        self._file = open_decompressed(self._raw, self.path, self._node.compression)

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes: fewer at `until`, before corrupt data and at the end, none behind the end."""
        if self._failure is not None:
            raise self._failure
        if self._skip:
            self._file.seek(self._skip)  # here and not in the constructor: it waits
            self._skip = 0
        parts: list[bytes] = []
        try:
            while size and (part := self._read_once(size, go_on=not parts)):
                parts.append(part)
                size -= len(part)
        except CorruptRecordError as error:
            self._failure = self._cause_of(error)
            if not parts:
                raise self._failure from None
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read_once(self, size: int, *, go_on: bool) -> bytes:
        read1: Callable[[int], bytes] = self._file.read1  # type: ignore[attr-defined]
        room = (
            size if self.packed else min(size, self._until - self._raw.tell())
        )  # what a file has grown by is not read
        part = read1(room) if room > 0 else b""
        if not part and self._until >= self._piece.size:
            self.check_unchanged()
        if part or not go_on or self._until >= self._piece.size:
            return part
        self._file.close()
        start, self._until = self._until, min(self._until + MORE_BYTES, self._piece.size)
        self._open(start)
        return self._read_once(size, go_on=True)

    def _cause_of(self, error: CorruptRecordError) -> CorruptRecordError:
        """Return what is wrong with the file itself, if its packed bytes make no sense because it was changed."""
        try:
            self.check_unchanged()
        except FileChangedError as changed:
            return changed
        return error

    def check_unchanged(self) -> None:
        """Raise `FileChangedError` if the file is not the one that was listed; at its end that is looked at anyway."""
        if self._failure is None:
            check_unchanged(self._raw, self.path, self._piece.size, offset=self._raw.tell())

    def close(self) -> None:
        self._file.close()
