"""Arrow IPC: files (Feather version 2 is one) and streams, told apart by how they begin.

A split is record batches of one or several files; `FileRange.start` and `stop` are numbers of record batches. A stream
has no footer that lists them: a local one is cut all the same, by going from header to header. Streams on remote
storage, and those with dictionaries (which may change between batches), are read from their beginning and not cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Self

import msgspec
import pyarrow as pa

from penstock.core.errors import CorruptRecordError, DataError, InvalidArgumentError, PenstockError
from penstock.graph.readers import ReadArrow
from penstock.sources.base import FileRange, OnBad, Reader, Split, SplitPosition
from penstock.sources.columnar import BadChunk, RowChunk, chunk_rows, column_types, open_reader
from penstock.sources.cutting import split_step
from penstock.sources.ipc_messages import (
    DICTIONARY_BATCH,
    FEATHER_1_MAGIC,
    FILE_MAGIC,
    FOOTER_TAIL,
    RECORD_BATCH,
    MalformedMessageError,
    MessageSpan,
    footer_blocks,
    parse_header,
    scan_messages,
)
from penstock.sources.listing import FileInfo, FileSplits, list_files
from penstock.sources.projection import Projection, check_same_columns, group_ranges, project, side_by_side
from penstock.sources.ranged import RangedFile
from penstock.sources.storage import check_unchanged, gone, is_remote

EXTENSIONS = (".arrow", ".arrows", ".feather", ".ipc")
ENDS_BYTES = 64 << 10  # of a remote file, to know what it is: magic, schema and footer lie there


class ArrowSource(FileSplits):
    def __init__(self, node: ReadArrow) -> None:
        self._node = node
        self.remote = any(map(is_remote, node.paths))
        self.on_bad: OnBad | None = None
        if node.columns is not None and len(set(node.columns)) != len(node.columns):
            raise InvalidArgumentError(f"columns={node.columns!r} names a column twice")

    def list_splits(self) -> Sequence[Split]:
        files = list_files(self._node.paths, self._node.storage_options, extensions=EXTENSIONS)
        found = side_by_side(self._summary, files)
        checked: list[tuple[FileInfo, pa.Schema, Projection]] = []
        for file, (schema, _) in zip(files, found):
            if checked and schema.equals(checked[0][1]):
                continue
            checked.append((file, schema, project(self._node, file.path, schema, {})))
            check_same_columns(file.path, checked[-1][2], checked[0][0].path, checked[0][2])
        step = split_step(sum(file.size for file in files), len(files), remote=self.remote, columnar=True)
        return group_ranges(
            [piece for file, (_, blocks) in zip(files, found) for piece in _ranges(file, blocks, step.nbytes)], step
        )

    def schema(self) -> dict[str, str]:
        """The columns of the first file, which are those of all."""
        first = list_files(self._node.paths, self._node.storage_options, extensions=EXTENSIONS)[0]
        return column_types(self._node, project(self._node, first.path, self._summary(first)[0], {}))

    def open(self, split: Split, at: SplitPosition) -> Reader:
        return open_reader(self._node, partial(_chunks, self._node, split), at, self.on_bad)

    def _summary(self, file: FileInfo) -> tuple[pa.Schema, list[MessageSpan] | None]:
        with _ArrowFile(self._node, FileRange(file.path, file.size, file.etag), Future()) as opened:
            layout = opened.layout
            return layout.schema, layout.blocks


def _ranges(file: FileInfo, blocks: list[MessageSpan] | None, most: int) -> Iterator[tuple[FileRange, float]]:
    """Yield ranges of neighbouring record batches of up to `most` bytes, with their bytes."""
    if blocks is None:
        yield FileRange(file.path, file.size, file.etag), file.size
        return
    start, size = 0, 0
    for number, block in enumerate(blocks):
        block_bytes = block.header_bytes + block.body_bytes
        if number > start and size + block_bytes > most:
            yield FileRange(file.path, file.size, file.etag, start, number), size
            start, size = number, 0
        size += block_bytes
    if blocks:
        yield FileRange(file.path, file.size, file.etag, start, len(blocks)), size


def _chunks(node: ReadArrow, split: Split, begin: int, aborted: Future[None]) -> Iterator[RowChunk | BadChunk]:
    """Yield what there is from the row `begin` of the split on."""
    row = 0
    for piece in split.files:
        try:
            with _ArrowFile(node, piece, aborted) as file:
                projection = project(node, piece.path, file.layout.schema, {})
                for part in file.parts(projection.read, skip=max(0, begin - row)):
                    if isinstance(part, CorruptRecordError):
                        yield BadChunk(part, max(row, begin))
                        continue
                    if part.batch is not None:
                        yield from _cut(node, projection, piece.path, part, row, begin)
                    row += part.rows
                file.check_unchanged()
        except CorruptRecordError as error:
            yield BadChunk(error, max(row, begin))


def _cut(node: ReadArrow, projection: Projection, path: str, part: _Part, row: int, begin: int) -> Iterator[RowChunk]:
    """Yield a record batch in chunks, without the rows before `begin`; its first row is row `row` of the split."""
    batch = part.batch
    rows = chunk_rows(batch.nbytes / max(1, batch.num_rows), node.batch)
    for start in range(max(0, begin - row), batch.num_rows, rows):
        chunk = RowChunk(batch.slice(start, rows), path, row + start, start, where=f" of record batch {part.number}")
        kept = chunk.keep(node.predicate, projection.names)
        if kept is not None:
            yield kept


class _Part(msgspec.Struct, frozen=True):
    """A record batch; None in place of one that was passed over."""

    number: int
    rows: int
    batch: Any


class _Layout(msgspec.Struct, frozen=True):
    schema: pa.Schema
    is_stream: bool
    blocks: list[MessageSpan] | None
    """The record batches; None if they have to be read one after the other from the beginning."""


class _ArrowFile:
    """One file, open. For a remote one the constructor waits for nothing."""

    def __init__(self, node: ReadArrow, piece: FileRange, aborted: Future[None]) -> None:
        self._piece = piece
        self._ranged: RangedFile | None = None
        self._layout: _Layout | None = None
        if is_remote(piece.path):
            self._ranged = RangedFile(piece.path, piece.size, node.storage_options, aborted, etag=piece.etag)
            self._ranged.ask([(0, min(piece.size, ENDS_BYTES)), (max(0, piece.size - ENDS_BYTES), piece.size)])
            self._file = pa.PythonFile(self._ranged, mode="r")
        else:
            self._file = _open_local(piece)

    @property
    def layout(self) -> _Layout:
        if self._layout is None:
            try:
                self._layout = self._find_layout()
            except PenstockError:
                raise
            except (pa.ArrowException, OSError, MalformedMessageError) as error:
                raise CorruptRecordError(self._piece.path, f"not a whole Arrow file or stream: {error}") from error
        return self._layout

    def parts(self, columns: Sequence[str], skip: int) -> Iterator[_Part | CorruptRecordError]:
        """Yield the record batches of the range; those within the first `skip` rows unread where possible."""
        blocks = self.layout.blocks
        wanted = [number for number, name in enumerate(self.layout.schema.names) if name in columns]
        options = pa.ipc.IpcReadOptions(included_fields=wanted)
        if blocks is None:
            yield from self._sequence(options)
            return
        reader = None if self.layout.is_stream else pa.ipc.open_file(self._file, options=options)
        for number in range(self._piece.start, len(blocks) if self._piece.stop < 0 else self._piece.stop):
            rows = 0
            try:
                rows = parse_header(self._read_at(blocks[number].offset, blocks[number].header_bytes)).rows
                if rows <= skip:
                    skip -= rows
                    yield _Part(number, rows, None)
                    continue
                skip = 0
                if self._ranged is not None:
                    self._ranged.ask_ahead(blocks[number].offset)
                batch = self._read_message(blocks[number]) if reader is None else reader.get_batch(number)
                batch.validate()
                yield _Part(number, rows, batch)
            except PenstockError:
                raise
            except (pa.ArrowException, OSError, MalformedMessageError) as error:
                self.check_unchanged(blocks[number].offset)
                yield self._bad(number, error, blocks[number].offset)
                yield _Part(number, rows, None)

    def _sequence(self, options: Any) -> Iterator[_Part | CorruptRecordError]:
        """Go through a stream; what cannot be read ends it, as nothing tells where the next batch begins."""
        if self._ranged is not None:
            self._ranged.ask_ahead(0)
        self._file.seek(0)
        number = 0
        try:
            for batch in pa.ipc.open_stream(self._file, options=options):
                batch.validate()
                yield _Part(number, batch.num_rows, batch)
                number += 1
                if self._ranged is not None:
                    self._ranged.ask_ahead(self._ranged.tell())
        except PenstockError:
            raise
        except (pa.ArrowException, OSError) as error:
            self.check_unchanged()
            yield self._bad(number, error, None)

    def check_unchanged(self, offset: int | None = None) -> None:
        if self._ranged is None:
            check_unchanged(self._piece.path, self._piece.path, self._piece.size, offset=offset)

    def _bad(self, number: int, error: Exception, offset: int | None) -> CorruptRecordError:
        bad = CorruptRecordError(self._piece.path, f"record batch {number} cannot be read: {error}", offset=offset)
        bad.__cause__ = error
        return bad

    def close(self) -> None:
        self._file.close()
        if self._ranged is not None:
            self._ranged.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find_layout(self) -> _Layout:
        size = self._piece.size
        magic = self._read_at(0, len(FILE_MAGIC))
        if magic == FILE_MAGIC:
            tail = self._read_at(size - FOOTER_TAIL, FOOTER_TAIL)
            if not tail.endswith(FILE_MAGIC):
                raise MalformedMessageError("it has no footer: cut short, or still being written")
            footer_bytes = int.from_bytes(tail[:4], "little")
            _, blocks = footer_blocks(self._read_at(size - FOOTER_TAIL - footer_bytes, footer_bytes))
            return _Layout(pa.ipc.open_file(self._file).schema, is_stream=False, blocks=blocks)
        if magic.startswith(FEATHER_1_MAGIC):
            remedy = "rewrite it with pyarrow.feather.write_feather"
            raise DataError(self._piece.path, "Feather version 1 is not read", remedy=remedy)
        self._file.seek(0)
        schema = pa.ipc.open_stream(self._file).schema
        if self._ranged is not None:
            return _Layout(schema, is_stream=True, blocks=None)
        found = list(scan_messages(self._read_at, 0, size))
        if any(header.kind == DICTIONARY_BATCH for _, header in found):
            return _Layout(schema, is_stream=True, blocks=None)
        return _Layout(schema, is_stream=True, blocks=[block for block, header in found if header.kind == RECORD_BATCH])

    def _read_message(self, block: MessageSpan) -> pa.RecordBatch:
        self._file.seek(block.offset)
        return pa.ipc.read_record_batch(pa.ipc.read_message(self._file), self.layout.schema)

    def _read_at(self, offset: int, size: int) -> bytes:
        if offset < 0:
            raise MalformedMessageError(f"it has {self._piece.size} bytes only")
        self._file.seek(offset)
        found: bytes = self._file.read(size)
        return found


def _open_local(piece: FileRange) -> Any:
    """Open a local file. Not as a memory map, which is no faster: where a file is cut short it kills the process."""
    try:
        file = pa.OSFile(piece.path, "rb")
    except FileNotFoundError as error:
        raise gone(piece.path) from error
    except (pa.ArrowException, OSError) as error:
        raise DataError(piece.path, str(error)) from error
    try:
        check_unchanged(piece.path, piece.path, piece.size)
    except DataError:
        file.close()
        raise
    return file
