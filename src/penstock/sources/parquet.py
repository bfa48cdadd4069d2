"""Parquet files. A split is whole row groups of one or several files; `FileRange.start` and `stop` are rows of a file.

Splits depend on the files alone, never on columns or predicate: a pass may push those down, and an element's identity
must not change by it. Files and row groups that the predicate cannot be true for are passed over when a split is read.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Self

import pyarrow as pa

from penstock.core.errors import CorruptRecordError, FileChangedError, InvalidArgumentError, PenstockError
from penstock.graph.readers import ReadParquet
from penstock.sources.background import made_ahead
from penstock.sources.base import FileRange, OnBad, Reader, Split, SplitPosition
from penstock.sources.columnar import BadChunk, RowChunk, chunk_rows, column_types, count_elements, open_reader
from penstock.sources.cutting import split_step
from penstock.sources.hive import integer_keys, partition_values
from penstock.sources.listing import FileInfo, FileSplits, list_files
from penstock.sources.parquet_groups import (
    RowGroup,
    byte_ranges,
    bytes_per_row,
    leaf_columns,
    matching_groups,
    read_together,
    row_groups,
    units_at_once,
)
from penstock.sources.predicates import Bounds, may_be_true
from penstock.sources.projection import Projection, check_same_columns, group_ranges, project, side_by_side
from penstock.sources.ranged import AHEAD_BYTES, RangedFile
from penstock.sources.storage import check_unchanged, is_remote

EXTENSIONS = (".parquet", ".parq", ".pq")
FOOTER_BYTES = 64 << 10  # what pyarrow asks for first
WHOLE_FILE_BYTES = 1 << 20  # a remote file below this comes in one request, footer and all
FILES_AHEAD = 16  # remote files of a split whose footers, or all if small, are under way beside the one being read
FOOTERS_KEPT = 16  # splits of one file come after each other, and a wide table's footer takes long to parse


class ParquetSource(FileSplits):
    def __init__(self, node: ReadParquet) -> None:
        self._node = node
        self.remote = any(map(is_remote, node.paths))
        self.on_bad: OnBad | None = None
        self._footers = _Footers()
        if node.columns is not None and len(set(node.columns)) != len(node.columns):
            raise InvalidArgumentError(f"columns={node.columns!r} names a column twice")

    def list_splits(self) -> Sequence[Split]:
        files = list_files(self._node.paths, self._node.storage_options, extensions=EXTENSIONS)
        integers = integer_keys([file.path for file in files])
        footers = side_by_side(self._summary, files)
        self._check_schemas(files, [schema for schema, _ in footers], integers)
        step = split_step(sum(file.size for file in files), len(files), remote=self.remote, columnar=True)
        ranges = [piece for file, (_, groups) in zip(files, footers) for piece in _ranges(file, groups, step.nbytes)]
        return group_ranges(ranges, step, note=json.dumps(integers) if integers else "")

    def count(self) -> int | None:
        return count_elements(
            self._node, [sum(piece.stop - piece.start for piece in split.files) for split in self.splits()]
        )

    def schema(self) -> dict[str, str]:
        """The columns of the first file, which are those of all."""
        files = list_files(self._node.paths, self._node.storage_options, extensions=EXTENSIONS)
        constants = _constants(files[0].path, integer_keys([file.path for file in files]))
        return column_types(self._node, project(self._node, files[0].path, self._summary(files[0])[0], constants))

    def open(self, split: Split, at: SplitPosition) -> Reader:
        work = _SplitWork(self._node, self._footers, split, whole_groups=self.on_bad is not None)
        return open_reader(self._node, work.chunks, at, self.on_bad)

    def _summary(self, file: FileInfo) -> tuple[pa.Schema, list[tuple[int, int]]]:
        """Return a file's schema and the (rows, bytes before compression) of its row groups."""
        with _ParquetFile(self._node, FileRange(file.path, file.size, file.etag), self._footers, Future()) as opened:
            metadata = opened.metadata
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        return metadata.schema.to_arrow_schema(), [(group.num_rows, group.total_byte_size) for group in groups]

    def _check_schemas(self, files: Sequence[FileInfo], schemas: Sequence[pa.Schema], integers: Sequence[str]) -> None:
        """Fail when the splits are listed, not in the middle of an epoch."""
        checked: list[tuple[FileInfo, pa.Schema, Projection]] = []
        for file, schema in zip(files, schemas):
            if checked and schema.equals(checked[0][1]):
                continue
            checked.append((file, schema, project(self._node, file.path, schema, _constants(file.path, integers))))
            check_same_columns(file.path, checked[-1][2], checked[0][0].path, checked[0][2])


def _ranges(file: FileInfo, groups: Sequence[tuple[int, int]], most: int) -> Iterator[tuple[FileRange, float]]:
    """Yield ranges of neighbouring row groups of up to `most` bytes, with their bytes as stored."""
    stored = file.size / max(1, sum(size for _, size in groups))  # footers tell sizes before compression only
    start = stop = 0
    size = 0.0
    for rows, group_size in groups:
        if stop > start and size + group_size * stored > most:
            yield FileRange(file.path, file.size, file.etag, start, stop), size
            start, size = stop, 0.0
        stop += rows
        size += group_size * stored
    if stop > start:
        yield FileRange(file.path, file.size, file.etag, start, stop), size


def _constants(path: str, integers: Sequence[str]) -> dict[str, Any]:
    values = partition_values(path, integers)
    return {key: pa.scalar(value, pa.int64() if key in integers else pa.string()) for key, value in values.items()}


class _SplitWork:
    """Makes the chunks of one split; runs on the reader's thread."""

    def __init__(self, node: ReadParquet, footers: _Footers, split: Split, *, whole_groups: bool) -> None:
        self._node, self._footers, self._split = node, footers, split
        self._integers: list[str] = json.loads(split.note) if split.note else []
        # Where bad groups are passed over, a group counts as bad before any of it is delivered: what is left out must
        # not depend on where reading began.
        self._whole_groups = whole_groups

    def chunks(self, begin: int, aborted: Future[None]) -> Iterator[RowChunk | BadChunk]:
        """Yield what there is from the row `begin` of the split on."""
        due: deque[tuple[FileRange, int]] = deque()
        base = 0
        for piece in self._split.files:
            if base + piece.stop - piece.start > begin and self._may_match(piece):
                due.append((piece, base))
            base += piece.stop - piece.start
        opened: deque[_ParquetFile] = deque()
        try:
            while due:
                ahead = FILES_AHEAD if is_remote(due[0][0].path) else 0
                while len(opened) < min(len(due), ahead + 1):
                    opened.append(_ParquetFile(self._node, due[len(opened)][0], self._footers, aborted))
                piece, base = due.popleft()
                with opened.popleft() as file:
                    yield from self._file_chunks(file, piece, base, max(0, begin - base))
        finally:
            for file in opened:
                file.close()

    def _may_match(self, piece: FileRange) -> bool:
        """Return whether a file can have a row that the predicate is true for, by its folders alone."""
        if self._node.predicate is None:
            return True
        rows = piece.stop - piece.start
        known = _constant_bounds(_constants(piece.path, self._integers), rows)
        return may_be_true(self._node.predicate, lambda name: known.get(name, Bounds(rows=rows)))

    def _file_chunks(self, file: _ParquetFile, piece: FileRange, base: int, skip: int) -> Iterator[RowChunk | BadChunk]:
        """Yield the chunks of a file's range, without its first `skip` rows; the range's first row is row `base`."""
        try:
            metadata = file.metadata
            projection = project(
                self._node, piece.path, metadata.schema.to_arrow_schema(), _constants(piece.path, self._integers)
            )
        except CorruptRecordError as error:
            yield BadChunk(error, base + skip)
            return
        start = piece.start + skip
        known = _constant_bounds(projection.constants, piece.stop - piece.start)
        groups = row_groups(metadata, start, piece.stop)
        groups = matching_groups(metadata, groups, self._node.predicate, known)
        if not groups:
            return
        leaves = leaf_columns(metadata, projection.read)
        rows = chunk_rows(bytes_per_row(metadata, groups[0].number, leaves), self._node.batch)
        # Rows take longer to make into dicts, under the GIL, than to decode: more at once would only fill the caches.
        at_once = 1 if self._node.batch is None else units_at_once(groups, rows)
        if self._whole_groups:
            units, rows = [[group] for group in groups], max(group.rows for group in groups)
        else:
            units = list(read_together(groups, rows))
        for unit, batches in file.decoded(units, leaves, projection.read, rows, at_once=at_once):
            row = unit[0].first_row
            try:
                for batch in batches:
                    chunk = RowChunk(projection.complete(batch), piece.path, base + row - piece.start, row)
                    row += len(chunk)
                    if row > start:
                        chunk = chunk.slice(max(0, start - chunk.file_row), len(chunk))
                        kept = chunk.keep(self._node.predicate, projection.names)
                        if kept is not None:
                            yield kept
            except CorruptRecordError as error:
                yield BadChunk(error, base + max(row, start) - piece.start)
        try:
            file.check_unchanged()
        except FileChangedError as error:
            yield BadChunk(error, base + piece.stop - piece.start)


def _constant_bounds(constants: dict[str, Any] | Any, rows: int) -> dict[str, Bounds]:
    bounds: dict[str, Bounds] = {}
    for name, scalar in constants.items():
        value = scalar.as_py()
        bounds[name] = Bounds(rows=rows, nulls=rows if value is None else 0, low=value, high=value)
    return bounds


class _ParquetFile:
    """One file, open. For a remote one the constructor has asked for the footer and waits for nothing."""

    def __init__(self, node: ReadParquet, piece: FileRange, footers: _Footers, aborted: Future[None]) -> None:
        self._piece, self._footers = piece, footers
        self._file: Any = None
        self._metadata = footers.get(piece)
        self._remote = is_remote(piece.path)
        self._source: Any = piece.path
        self._ranged: RangedFile | None = None
        if self._remote:
            self._ranged = RangedFile(piece.path, piece.size, node.storage_options, aborted, etag=piece.etag)
            self._source = pa.PythonFile(self._ranged, mode="r")
            if piece.size <= WHOLE_FILE_BYTES:
                self._ranged.ask([(0, piece.size)])
            elif self._metadata is None:
                self._ranged.ask([(max(0, piece.size - FOOTER_BYTES), piece.size)])

    @property
    def metadata(self) -> Any:
        self._open()
        return self._metadata

    def fetched(self, units: Sequence[list[RowGroup]], leaves: Sequence[int]) -> Iterator[list[RowGroup]]:
        """Yield units to be read; of a remote file, the same columns of the next ones are on their way meanwhile."""
        if self._ranged is None or self._piece.size <= WHOLE_FILE_BYTES:
            yield from units
            return
        asked: deque[tuple[list[int], int]] = deque()
        due = iter([byte_ranges(self._metadata, unit, leaves) for unit in units])
        for unit in units:
            while (len(asked) < 2 or sum(size for _, size in asked) < AHEAD_BYTES) and (ranges := next(due, None)):
                asked.append((self._ranged.ask(ranges), sum(stop - start for start, stop in ranges)))
            yield unit
            self._ranged.forget(asked.popleft()[0])

    def decoded(
        self, units: Sequence[list[RowGroup]], leaves: Sequence[int], columns: Sequence[str], rows: int, *, at_once: int
    ) -> Iterator[tuple[list[RowGroup], Iterator[pa.RecordBatch]]]:
        """Yield units, each with its batches, which may raise; those of a local file are made side by side."""
        if self._remote or min(at_once, len(units)) < 2:
            for unit in self.fetched(units, leaves):
                yield unit, self._batches(self._file, unit, columns, rows)
            return
        idle = [self._file]
        opened: list[Any] = []

        def decode(unit: list[RowGroup]) -> tuple[list[RowGroup], Iterator[pa.RecordBatch]]:
            try:
                file = idle.pop()
            except IndexError:  # one for each thread: a reader is not said to be safe for several
                file = self._new_file()
                opened.append(file)
            batches = list(_kept_error(self._batches(file, unit, columns, rows)))
            idle.append(file)
            return unit, _raised_error(batches)

        try:
            yield from made_ahead(decode, units, at_once=at_once)
        finally:
            for file in opened:
                file.close(force=True)

    def _batches(
        self, file: Any, unit: Sequence[RowGroup], columns: Sequence[str], rows: int
    ) -> Iterator[pa.RecordBatch]:
        numbers = [group.number for group in unit]
        try:
            yield from file.iter_batches(rows, row_groups=numbers, columns=list(columns), use_threads=True)
        except PenstockError:
            raise
        except (pa.ArrowException, OSError) as error:
            self.check_unchanged()
            which = f"row group {numbers[0]}" if len(unit) == 1 else f"row groups {numbers[0]} to {numbers[-1]}"
            last = unit[-1].first_row + unit[-1].rows - 1
            what = f"{which} (rows {unit[0].first_row} to {last}) cannot be read: {error}"
            raise CorruptRecordError(self._piece.path, what) from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close(force=True)
        if self._ranged is not None:
            self._ranged.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        if self._file is not None:
            return
        self.check_unchanged()
        self._file = self._new_file()
        self._metadata = self._file.metadata
        self._footers.keep(self._piece, self._metadata)

    def _new_file(self) -> Any:
        import pyarrow.parquet as pq

        try:
            # Without pre_buffer: it keeps the bytes of all row groups to the end, and was not faster.
            return pq.ParquetFile(self._source, metadata=self._metadata, page_checksum_verification=True)
        except PenstockError:
            raise
        except (pa.ArrowException, OSError) as error:
            what = f"not a whole Parquet file: {error}"
            raise CorruptRecordError(self._piece.path, what, offset=self._piece.size) from error

    def check_unchanged(self) -> None:
        if not self._remote:
            check_unchanged(self._piece.path, self._piece.path, self._piece.size)


def _kept_error(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch | PenstockError]:
    """Let an error stand in its place among the batches: those before it are good."""
    try:
        yield from batches
    except PenstockError as error:
        yield error


def _raised_error(batches: list[pa.RecordBatch | PenstockError]) -> Iterator[pa.RecordBatch]:
    while batches:
        made = batches.pop(0)  # it belongs to whoever takes it: nothing here may keep its memory
        if isinstance(made, PenstockError):
            raise made
        yield made
        del made


class _Footers:
    """The last footers, parsed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int, str], Any] = OrderedDict()

    def get(self, piece: FileRange) -> Any:
        with self._lock:
            return self._kept.get((piece.path, piece.size, piece.etag))

    def keep(self, piece: FileRange, metadata: Any) -> None:
        with self._lock:
            self._kept[piece.path, piece.size, piece.etag] = metadata
            self._kept.move_to_end((piece.path, piece.size, piece.etag))
            while len(self._kept) > FOOTERS_KEPT:
                self._kept.popitem(last=False)
