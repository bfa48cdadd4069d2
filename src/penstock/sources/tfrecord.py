"""TFRecord files: length (8 bytes), its checksum (4), the record, its checksum (4), and so on.

Checksums are CRC-32C, rotated and offset ("masked"). The length's is always verified: without it nothing after a
flipped bit could be trusted, and a wrong length would swallow good records. `verify=False` leaves out the records' own.
"""

from __future__ import annotations

import gzip
import os
import struct
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import IO, Literal, Self, cast

import google_crc32c
import numpy as np

from penstock.core.errors import CorruptRecordError, DataError, TruncatedFileError
from penstock.graph.readers import ReadTFRecord
from penstock.sources.base import FileRange, OnBad, Reader, Split, SplitPosition
from penstock.sources.listing import FileSplits, group_small_files, list_files, step_for
from penstock.sources.record_files import Block, BlockFile, RecordReader, locate_record
from penstock.sources.storage import is_remote

BLOCK_BYTES = 1 << 20  # larger blocks fall out of the second-level cache before their records are cut out
HEADER = struct.Struct("<QI")
FOOTER = struct.Struct("<I")
FRAME_BYTES = HEADER.size + FOOTER.size
KNOWN_HEADERS = 1 << 16  # headers verified before; lengths repeat, and a dict is faster than a checksum
PIECE_BYTES = 64 << 20  # a length nobody can check (packed file) must not make one huge request for memory

crc32c: Callable[[bytes], int] = google_crc32c.value


def masked_crc(content: bytes) -> int:
    """
    >>> hex(masked_crc(bytes(8)))
    '0x7980329'
    """
    crc = crc32c(content)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


class TFRecordSource(FileSplits):
    """Splits are files (small ones share a split); elements are the records' bytes."""

    def __init__(self, node: ReadTFRecord) -> None:
        self._node = node
        self.remote = any(map(is_remote, node.paths))
        self.on_bad: OnBad | None = None

    def locate(self, split: Split, before: int | None, after: int) -> tuple[str, int | None]:
        return locate_record(split, before, after)

    def list_splits(self) -> Sequence[Split]:
        files = list_files(self._node.paths, self._node.storage_options)
        return group_small_files(files, step_for(files, remote=self.remote))

    def open(self, split: Split, at: SplitPosition) -> Reader:
        return RecordReader(split, at, partial(TFRecordScanner, self._node), self.on_bad)


class TFRecordScanner:
    def __init__(self, node: ReadTFRecord, piece: FileRange, at: int | None) -> None:
        self._file = BlockFile(node, piece, at or 0)
        self._size, self._verify = piece.size, node.verify
        self._at = at or 0  # offset of the next record
        self._failure: CorruptRecordError | None = None
        self._known: dict[bytes, int] = {}

    def close(self) -> None:
        self._file.close()

    def next_block(self) -> Block | None:
        if self._failure is not None:
            raise self._failure
        block = self._file.read(BLOCK_BYTES)
        if not block:
            return None
        records, ends = self._cut(block)
        bad = self._mismatches(block, records, ends) if self._verify and records else []
        base, whole = self._at, ends[-1] if ends else 0
        self._at += whole
        offsets = np.array(ends, np.int64)
        offsets += base
        if whole < len(block):
            self._finish_last(block[whole:], records, bad)
            if len(records) > len(offsets):
                offsets = np.append(offsets, self._at)
        if not bad:
            return Block(records, offsets)
        wrong = {number for number, _ in bad}
        numbers = [number for number in range(len(records)) if number not in wrong]
        return Block([records[number] for number in numbers], offsets[numbers], bad, numbers)

    def _cut(self, block: bytes) -> tuple[list[bytes], list[int]]:
        """Cut a block into its whole records; `ends` are relative to the block."""
        records: list[bytes] = []
        ends: list[int] = []
        known = self._known
        start, size = 0, len(block)
        while start + FRAME_BYTES <= size:
            header = block[start : start + 12]
            length = known.get(header)
            if length is None:
                length = self._length(header, start)
                if length is None:
                    break
            begin = start + 12
            stop = begin + length
            start = stop + 4
            if start > size:
                break
            records.append(block[begin:stop])
            ends.append(start)
        return records, ends

    def _length(self, header: bytes, start: int) -> int | None:
        """Return the length a header gives; None, with the failure noted, if it does not match its checksum."""
        length, crc = HEADER.unpack(header)
        if masked_crc(header[:8]) != crc:
            what = "the checksum of a record's length does not match"
            self._failure = CorruptRecordError(
                self._file.path, what, offset=self._at + start, remedy="the rest of the file cannot be read"
            )
            return None
        if len(self._known) >= KNOWN_HEADERS:
            self._known.clear()
        self._known[header] = length
        return int(length)

    def _mismatches(self, block: bytes, records: list[bytes], ends: list[int]) -> list[tuple[int, DataError]]:
        """Compare all records of a block with their checksums at once."""
        crcs = np.fromiter(map(crc32c, records), np.uint32, len(records))
        masked = (crcs >> np.uint32(15) | crcs << np.uint32(17)) + np.uint32(0xA282EAD8)
        at = np.array(ends)[:, None] + np.arange(-4, 0)
        stored = np.frombuffer(block, np.uint8)[at].view("<u4")[:, 0]
        return [
            (number, self._mismatch(self._at + ends[number] - len(records[number]) - FRAME_BYTES))
            for number in np.flatnonzero(masked != stored).tolist()
        ]

    def _mismatch(self, offset: int) -> CorruptRecordError:
        return CorruptRecordError(self._file.path, "the record does not match its checksum", offset=offset)

    def _finish_last(self, part: bytes, records: list[bytes], bad: list[tuple[int, DataError]]) -> None:
        """Read the rest of the record that the end of a block cut in two."""
        if self._failure is not None:
            return None
        part += self._read(HEADER.size - len(part))
        if len(part) < HEADER.size:
            return self._truncated(f"{len(part)} of the {HEADER.size} bytes of a record's header")
        header = part[: HEADER.size]
        length = self._known.get(header)
        if length is None and (length := self._length(header, 0)) is None:
            return None
        frame = length + FRAME_BYTES
        if not self._file.packed and self._at + frame > self._size:
            return self._truncated(f"{self._size - self._at} of the {frame} bytes of a record")
        part += self._read(frame - len(part))
        if len(part) < frame:
            return self._truncated(f"{len(part)} of the {frame} bytes of a record")
        record = part[HEADER.size : -FOOTER.size]
        if self._verify and masked_crc(record) != FOOTER.unpack(part[-FOOTER.size :])[0]:
            bad.append((len(records), self._mismatch(self._at)))
        records.append(record)
        self._at += frame
        return None

    def _read(self, size: int) -> bytes:
        parts = []
        try:
            while size > 0 and (part := self._file.read(min(size, PIECE_BYTES))):
                parts.append(part)
                size -= len(part)
        except CorruptRecordError as error:
            self._failure = error
        return b"".join(parts)

    def _truncated(self, what: str) -> None:
        if self._failure is None:
            self._failure = TruncatedFileError(self._file.path, f"ends after {what}", offset=self._at)


class TFRecordWriter:
    """Writes records, gzip'ed if asked for, or if the path ends in `.gz`.

    with TFRecordWriter("train.tfrecord") as writer:
        writer.write(encode_example({"label": 7}))
    """

    def __init__(self, path: str | os.PathLike[str], compression: Literal["auto", "none", "gzip"] = "auto") -> None:
        if compression == "gzip" or (compression == "auto" and os.fspath(path).endswith(".gz")):
            self._file = cast(IO[bytes], gzip.open(path, "wb"))  # noqa: SIM115 - closed by close()
        else:
            self._file = open(path, "wb", buffering=BLOCK_BYTES)  # noqa: SIM115

    def write(self, record: bytes) -> None:
        length = struct.pack("<Q", len(record))
        self._file.write(b"".join((length, FOOTER.pack(masked_crc(length)), record, FOOTER.pack(masked_crc(record)))))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
