"""Lines: text and JSON lines.

A big uncompressed file is cut into byte ranges; a range owns the lines that start in it, so the reader of a range
begins after the first line end at or behind the byte before it, and reads its last line to the end. Lines end with
`\\n` or `\\r\\n`; the last one need not. A byte order mark at the beginning of a file is no part of its first line.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import msgspec
import numpy as np

from penstock.core.element import Element
from penstock.core.errors import CorruptRecordError, DataError
from penstock.graph.readers import ReadJsonl, ReadText, RecordFile
from penstock.sources.base import FileRange, OnBad, Reader, Split, SplitPosition
from penstock.sources.compression import compression_of
from penstock.sources.listing import FileInfo, FileSplits, group_small_files, list_files, step_for
from penstock.sources.record_files import Block, BlockFile, Offsets, RecordReader, locate_record
from penstock.sources.storage import is_remote

BLOCK_BYTES = 256 << 10  # a few thousand lines: as fast as more, and little work is ahead of what was asked for
LINE_BYTES = 4 << 10  # a range is read so far beyond its end at first, for its last line
SLACK_BYTES = 64 << 10  # a remote range is read ahead so far beyond its end: the last line seldom reaches further
SHOWN_BYTES = 80  # of a bad line, in the error
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_decode_json = msgspec.json.Decoder().decode


class ParseLines(Protocol):
    def __call__(self, path: str, chunk: bytes, start: int, ends: Offsets) -> Block:
        """Parse whole lines that begin at byte `start` of a file; `ends` are the offsets behind each."""
        ...


class LineSource(FileSplits):
    """Splits are byte ranges of big files, compressed files as a whole, and groups of small files."""

    def __init__(self, node: RecordFile, parse: ParseLines) -> None:
        self._node, self._parse = node, parse
        self.remote = any(map(is_remote, node.paths))
        self.on_bad: OnBad | None = None

    def locate(self, split: Split, before: int | None, after: int) -> tuple[str, int | None]:
        return locate_record(split, before, after)

    def list_splits(self) -> Sequence[Split]:
        splits: list[Split] = []
        whole: list[FileInfo] = []
        files = list_files(self._node.paths, self._node.storage_options)
        step = step_for(files, remote=self.remote)
        for file in files:
            if file.size <= step.nbytes or compression_of(file.path, self._node.compression) != "none":
                whole.append(file)
                continue
            splits += group_small_files(whole, step)
            whole = []
            splits += _byte_ranges(file, step.nbytes)
        return splits + group_small_files(whole, step)

    def open(self, split: Split, at: SplitPosition) -> Reader:
        return RecordReader(split, at, partial(LineScanner, self._node, self._parse), self.on_bad)


class TextSource(LineSource):
    def __init__(self, node: ReadText) -> None:
        super().__init__(node, parse_text)


class JsonlSource(LineSource):
    def __init__(self, node: ReadJsonl) -> None:
        super().__init__(node, parse_json)


def _byte_ranges(file: FileInfo, step: int) -> list[Split]:
    """Cut at multiples of the step, so that a file that grew is cut in the same places."""
    ranges = [
        FileRange(file.path, file.size, file.etag, start, min(start + step, file.size))
        for start in range(0, file.size, step)
    ]
    return [Split(files=(piece,)) for piece in ranges]


class LineScanner:
    def __init__(self, node: RecordFile, parse: ParseLines, piece: FileRange, at: int | None) -> None:
        self._parse = parse
        # The byte before a range says whether a line begins at its first.
        self._seek_line = at is None and piece.start > 0
        self._at = piece.start - 1 if self._seek_line else at or 0  # offset of the first byte in `_rest`
        self._stop = piece.stop
        until = None if piece.stop < 0 else piece.stop + SLACK_BYTES
        self._file = BlockFile(node, piece, self._at, until)
        self._rest = b""
        self._ended = at is not None and 0 <= piece.stop <= at

    def close(self) -> None:
        self._file.close()

    def next_block(self) -> Block | None:
        if self._ended or (self._seek_line and not self._skip_line()):
            self._file.check_unchanged()  # a range ends before the file does
            return None
        chunk = self._whole_lines()
        if not chunk:
            return None
        start = self._at
        ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + (start + 1)
        self._at += len(chunk)
        if chunk[-1:] != b"\n":
            ends = np.append(ends, self._at)
        if 0 <= self._stop <= self._at:
            self._ended = True  # the next line starts in the next range
            owned = 1 + int(np.searchsorted(ends, self._stop))  # lines start where the one before ends
            ends = ends[:owned]
            chunk = chunk[: int(ends[-1]) - start]
        if start == 0 and chunk.startswith(BYTE_ORDER_MARK):
            start, chunk = len(BYTE_ORDER_MARK), chunk[len(BYTE_ORDER_MARK) :]
        return self._parse(self._file.path, chunk, start, ends)

    def _skip_line(self) -> bool:
        """Move behind the next line end; False if no line starts in this range."""
        self._seek_line = False
        while self._at < self._stop and (block := self._file.read(self._room(self._at))):
            found = block.find(b"\n") + 1
            self._at += found or len(block)
            if found:
                self._rest = block[found:]
                break
        self._ended = self._at >= self._stop
        return not self._ended

    def _room(self, at: int) -> int:
        """Return how much to read at an offset: not much more than the range has."""
        return BLOCK_BYTES if self._stop < 0 else min(BLOCK_BYTES, max(self._stop - at, 0) + LINE_BYTES)

    def _whole_lines(self) -> bytes:
        """Return bytes up to a line end, at the end of the file whatever is left."""
        parts = [self._rest]
        room = self._room(self._at + len(self._rest))
        while block := self._file.read(room):
            room = BLOCK_BYTES
            whole = block.rfind(b"\n") + 1
            if whole:
                self._rest = block[whole:]
                parts.append(block[:whole])
                return b"".join(parts)
            parts.append(block)
        self._rest, self._ended = b"", True
        return b"".join(parts)


def parse_text(path: str, chunk: bytes, start: int, ends: Offsets) -> Block:
    try:
        text = chunk.decode()
    except UnicodeDecodeError:
        return _parse_each(path, chunk, start, ends, _decode_line)
    lines = text.split("\n")
    if len(lines) > len(ends):
        lines.pop()  # behind the last line end there is nothing
    if "\r" in text:
        lines = [line.removesuffix("\r") for line in lines]
    return Block(lines, ends)


def parse_json(path: str, chunk: bytes, start: int, ends: Offsets) -> Block:
    # One call a line: msgspec's decode_lines is a fifth faster, but takes any white space for a line end.
    lines = chunk.split(b"\n")
    if len(lines) > len(ends):
        lines.pop()
    try:
        return Block(list(map(_decode_json, lines)), ends)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # a bad line, or an empty one
        return _parse_each(path, chunk, start, ends, _decode_json_line)


class _Nothing(Exception):
    """The line holds no record."""


class _ParseLine(Protocol):
    def __call__(self, path: str, line: bytes, start: int) -> Element: ...


def _parse_each(path: str, chunk: bytes, start: int, ends: Offsets, parse: _ParseLine) -> Block:
    """Parse line by line, to find the bad ones."""
    elements: list[Element] = []
    kept: list[int] = []
    numbers: list[int] = []
    bad: list[tuple[int, DataError]] = []
    for line, end in zip(chunk.split(b"\n"), ends.tolist()):
        number = len(elements) + len(bad)
        try:
            elements.append(parse(path, line, start))
        except DataError as error:
            bad.append((number, error))
        except _Nothing:
            pass  # an empty line has no number
        else:
            kept.append(end)
            numbers.append(number)
        start = end
    return Block(elements, np.array(kept, np.int64), bad, numbers)


def _decode_line(path: str, line: bytes, start: int) -> str:
    try:
        return line.decode().removesuffix("\r")
    except UnicodeDecodeError as error:
        raise CorruptRecordError(
            path, f"not UTF-8: {error.reason}, in {_shown(line)}", offset=start + error.start
        ) from None


def _decode_json_line(path: str, line: bytes, start: int) -> Element:
    if not line.strip():
        raise _Nothing
    try:
        return _decode_json(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptRecordError(path, f"not JSON: {error}, in {_shown(line)}", offset=start) from None
    except RecursionError:
        what = f"JSON that is nested too deep to be read, in {_shown(line)}"
        raise CorruptRecordError(path, what, offset=start) from None


def _shown(line: bytes) -> str:
    more = "..." if len(line) > SHOWN_BYTES else ""
    return f"the line {line[:SHOWN_BYTES]!r}{more}"
