"""CSV files with a header line, by pyarrow's streaming reader.

Column types are those pyarrow finds in the first block of a file: int, float, bool, else str. Dates and times stay the
text they are, so that every cell is a plain Python value. An empty cell is None in a column of numbers and "" in one of
text; a column that is empty throughout the first block is text, with None where it is empty. A position is a row
number: quoted cells may hold line ends, so a place inside a file cannot be found but by reading up to it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.core.errors import CorruptRecordError, DataError, InvalidArgumentError
from penstock.graph.readers import ReadCsv
from penstock.sources.base import FileRange, OnBad, Reader, Split, SplitPosition
from penstock.sources.columns import Converter
from penstock.sources.listing import FileSplits, group_small_files, list_files, step_for
from penstock.sources.record_files import NO_OFFSETS, Block, BlockFile, Offsets, RecordReader, locate_record
from penstock.sources.storage import is_remote

BLOCK_BYTES = 512 << 10  # pyarrow reads 32 blocks ahead, whatever one asks for: 16 MB an open file
MAX_BLOCK_BYTES = 256 << 20  # reached in steps, for files with rows longer than a block
ROWS_AT_ONCE = 4096  # turned into dicts at a time
FIRST_ROW = 2  # the number pyarrow gives the row after the header; it does not count empty lines
SHOWN = 80  # characters of a bad row in its error
PLAIN_TYPES = (pa.int64(), pa.float64(), pa.bool_(), pa.string())


class CsvSource(FileSplits):
    """Splits are files (small ones share a split); elements are dicts of Python values."""

    def __init__(self, node: ReadCsv) -> None:
        if len(node.delimiter) != 1:
            raise InvalidArgumentError(f"delimiter={node.delimiter!r} must be one character")
        self._node = node
        self.remote = any(map(is_remote, node.paths))
        self.on_bad: OnBad | None = None

    def locate(self, split: Split, before: int | None, after: int) -> tuple[str, int | None]:
        return locate_record(split, before, after)[0], None  # a hint counts rows

    def list_splits(self) -> Sequence[Split]:
        files = list_files(self._node.paths, self._node.storage_options)
        return group_small_files(files, step_for(files, remote=self.remote))

    def open(self, split: Split, at: SplitPosition) -> Reader:
        return RecordReader(split, at, partial(CsvScanner, self._node), self.on_bad)


class CsvScanner:
    """Reads one file. Rows are numbered from 0, those that do not fit the header too; an offset is a row number."""

    def __init__(self, node: ReadCsv, piece: FileRange, at: int | None) -> None:
        self._node, self._piece = node, piece
        self._file = _SharedFile(BlockFile(node, piece))
        self._next = at or 0  # the row to deliver next; those before it are passed over
        self._block_bytes = BLOCK_BYTES
        self._types: dict[str, Any] = {}
        self._was_empty: list[str] = []  # columns without a value in the first block
        self._bad: deque[tuple[int, DataError]] = deque()
        self._blocks: Iterator[Block] | None = None

    def close(self) -> None:
        self._blocks = None
        self._file.close()

    def next_block(self) -> Block | None:
        while True:
            if self._blocks is None:
                self._blocks = self._read()
            try:
                return next(self._blocks, None)
            except pa.ArrowInvalid as error:
                if self._file.failure is not None:
                    raise self._file.failure from None
                if "Empty CSV file" in str(error):
                    return None  # no rows, or not even a header: not an error of a shard
                if "straddl" not in str(error) or self._block_bytes >= MAX_BLOCK_BYTES:
                    raise CorruptRecordError(self._piece.path, str(error)) from None
                self._block_bytes *= 8  # a row longer than a block: start over with larger ones, up to this row
                self._blocks = None
                self._reopen_file()

    def _reopen_file(self) -> None:
        self._file.close()
        self._file = _SharedFile(BlockFile(self._node, self._piece))

    def _read(self) -> Iterator[Block]:
        reader = self._open_typed()
        converter = Converter(reader.schema, None, rows=True)
        row = 0  # of the file, good or bad, to be numbered next
        for batch, cut_off in self._batches(reader):
            rows = self._number(row, batch.num_rows)
            row = int(rows[-1]) + 1
            if cut_off:
                rows = self._without_last(rows)
            for start in range(int(np.searchsorted(rows, self._next)), len(rows), ROWS_AT_ONCE):
                some = rows[start : start + ROWS_AT_ONCE]
                cut = converter.rows(self._with_nulls(batch.slice(start, len(some))))
                yield self._block(cut(0, len(some)), some)
        if self._bad:
            yield self._block([], NO_OFFSETS)
        if self._file.failure is not None:
            raise self._file.failure

    def _batches(self, reader: Any) -> Iterator[tuple[pa.RecordBatch, bool]]:
        """Yield what can be read, and whether corrupt compressed data cut its last row off; then raise, if need be."""
        held: pa.RecordBatch | None = None
        failure: pa.ArrowInvalid | None = None
        try:
            for batch in reader:
                if held is not None:
                    yield held, False
                held = batch if batch.num_rows else held
        except pa.ArrowInvalid as error:
            failure = error
        if held is not None:
            yield held, self._file.failure is not None
        if failure is not None:
            raise failure

    def _number(self, row: int, count: int) -> Offsets:
        """Return the numbers of the next good rows: consecutive but for the bad ones among them."""
        numbers = np.arange(row, row + count, dtype=np.int64)
        for bad, _ in self._bad:
            if bad >= row:
                numbers[numbers >= bad] += 1
        return numbers

    def _without_last(self, rows: Offsets) -> Offsets:
        if self._bad and self._bad[-1][0] > rows[-1]:
            self._bad.pop()
            return rows
        return rows[:-1]

    def _block(self, elements: list[Any], rows: Offsets) -> Block:
        """Return a block of these rows and of the bad ones before the last of them (all, if there are none)."""
        while self._bad and self._bad[0][0] < self._next:
            self._bad.popleft()
        first, bad = self._next, []
        while self._bad and (not elements or self._bad[0][0] < rows[-1]):
            number, error = self._bad.popleft()
            bad.append((number - first, error))
        block = Block(elements, rows + 1, bad, (rows - first).tolist() if bad else None)
        self._next += block.count
        return block

    def _open_typed(self) -> Any:
        """Open the file with types that become plain Python values."""
        if self._types:
            return self._open_stream()
        reader = self._open_stream()
        names = reader.schema.names
        if len(set(names)) < len(names):
            raise DataError(self._piece.path, f"two columns have the same name; the header is {', '.join(names)}")
        self._types = {field.name: field.type if field.type in PLAIN_TYPES else pa.string() for field in reader.schema}
        self._was_empty = [field.name for field in reader.schema if field.type == pa.null()]
        if all(field.type in PLAIN_TYPES for field in reader.schema):
            return reader
        self._reopen_file()
        return self._open_stream()

    def _open_stream(self) -> Any:
        import pyarrow.csv

        self._bad = deque()  # of its own: a reader given up may still call back
        columns = list(self._node.columns) if self._node.columns is not None else None
        read = pyarrow.csv.ReadOptions(block_size=self._block_bytes, use_threads=False)
        parse = pyarrow.csv.ParseOptions(
            delimiter=self._node.delimiter,
            newlines_in_values=True,
            invalid_row_handler=partial(self._note_bad, self._bad),
        )
        convert = pyarrow.csv.ConvertOptions(include_columns=columns, column_types=self._types)
        try:
            return pyarrow.csv.open_csv(self._file, read, parse, convert)
        except KeyError as error:  # a column asked for is not there
            raise DataError(self._piece.path, str(error).strip("\"'"), remedy="see columns=") from None

    def _note_bad(self, bad: deque[tuple[int, DataError]], row: Any) -> str:
        what = f"row {row.number} has {row.actual_columns} cells, not {row.expected_columns}: {row.text[:SHOWN]!r}"
        bad.append((row.number - FIRST_ROW, CorruptRecordError(self._piece.path, what)))
        return "skip"

    def _with_nulls(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Put None where a column that had no value in the first block has none."""
        if not self._was_empty:
            return batch
        import pyarrow.compute
        import pyarrow.csv

        nulls = pa.array(pyarrow.csv.ConvertOptions().null_values)
        for name in self._was_empty:
            column = batch.column(name)
            empty = pyarrow.compute.is_in(column, value_set=nulls)
            filled = pyarrow.compute.if_else(empty, pa.scalar(None, pa.string()), column)
            batch = batch.set_column(batch.schema.get_field_index(name), name, filled)
        return batch


class _SharedFile:
    """The file as pyarrow's reading thread sees it: that thread may be at it when we close, and runs far ahead.

    Corrupt compressed data is the end of the file there, and raised here when all before it was delivered.
    """

    def __init__(self, file: BlockFile) -> None:
        self._file, self._lock = file, threading.Lock()
        self.closed = False
        self.failure: CorruptRecordError | None = None

    def readable(self) -> bool:
        return True

    def read(self, size: int) -> bytes:
        with self._lock:
            if self.closed or self.failure is not None:
                return b""
            try:
                return self._file.read(size)
            except CorruptRecordError as error:
                self.failure = error
                return b""

    def close(self) -> None:
        with self._lock:
            self.closed = True
            self._file.close()
