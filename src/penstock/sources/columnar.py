"""Reading splits of columnar files: what Parquet and Arrow share.

A format makes `RowChunk`s, some thousands of rows at a time and filtered by the predicate, on a thread of its own
(decoding needs no GIL); the reader turns them into rows or batches. Rules:

- a row's index is its place among all rows of the split, whatever a predicate leaves out;
- batches are full (`batch` rows that the predicate is true for) except the last of a split, across chunks and files;
- where a batch cannot be found by counting rows, its hint is the index of the row after it;
- a chunk that could not be read stands in its place among the others as a `BadChunk`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
from msgspec.structs import replace

from penstock.core.element import Array, Element, slice_batch
from penstock.core.errors import CorruptRecordError, DataError
from penstock.graph.expressions import Expression
from penstock.graph.readers import ColumnarSource
from penstock.sources.background import Background
from penstock.sources.base import OnBad, Reader, Records, SplitPosition
from penstock.sources.columns import MASK_SUFFIX, Converter, NullFoundError
from penstock.sources.predicates import row_mask
from penstock.sources.projection import Projection
from penstock.sources.rows import CutRows

CHUNK_ROWS = 128 << 10  # enough that calls cost nothing beside the decoding; 8-byte columns of it fit in a cache
CHUNK_BYTES = 16 << 20  # rows with images in them come in smaller chunks
CHUNKS_AHEAD = 2
ROWS_PER_BLOCK = 1024  # dicts are made in blocks that fit in a cache; asking for single rows does not cost more


class RowChunk(msgspec.Struct, frozen=True):
    """Consecutive rows of one file, without those the predicate is not true for."""

    batch: pa.RecordBatch
    path: str
    first: int
    """The index in the split of the first row, whether it is still there or not."""
    file_row: int
    """The same row's number in its file, for messages."""
    indices: Array | None = None
    """The index of every row in the split, where some rows are not there any more."""
    where: str = ""
    """What `file_row` is counted in, if not the file."""

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    def index(self, row: int) -> int:
        return self.first + row if self.indices is None else int(self.indices[row])

    def slice(self, start: int, stop: int) -> RowChunk:
        batch = self.batch.slice(start, stop - start)
        if self.indices is not None:
            return replace(self, batch=batch, indices=self.indices[start:stop])
        return replace(self, batch=batch, first=self.first + start, file_row=self.file_row + start)

    def keep(self, predicate: Expression | None, names: Sequence[str]) -> RowChunk | None:
        """Return the columns `names` of the rows that the predicate is true for; None if there are none."""
        kept = self.batch.select(names)
        if predicate is None:
            return replace(self, batch=kept)
        mask = row_mask(predicate, self.batch.column).fill_null(False)
        count = mask.true_count
        if count == len(self):
            return replace(self, batch=kept)
        if not count:
            return None
        indices = np.flatnonzero(mask.to_numpy(zero_copy_only=False)) + self.first
        return replace(self, batch=kept.filter(mask), indices=indices)


class BadChunk(msgspec.Struct, frozen=True):
    """Rows that could not be read, from the row `first` of the split on."""

    error: DataError
    first: int


def chunk_rows(bytes_per_row: float, batch: int | None) -> int:
    """Return how many rows to decode at a time: whole batches, if it can be."""
    rows = int(max(1, min(CHUNK_ROWS, CHUNK_BYTES // max(1.0, bytes_per_row))))
    if batch is None:
        return rows
    return max(1, rows // batch) * batch


def count_elements(node: ColumnarSource, rows_of_splits: Iterable[int]) -> int | None:
    """Return how many rows or batches there are; None: the predicate, or what turns out to be bad, decides."""
    if node.predicate is not None or node.on_error is not None:
        return None
    return sum(rows if node.batch is None else -(-rows // node.batch) for rows in rows_of_splits)


def column_types(node: ColumnarSource, projection: Projection) -> dict[str, str]:
    """Return the columns of the elements with the names of their types in Arrow."""
    types: dict[str, str] = {}
    for name in projection.names:
        types[name] = str(projection.types[name])
        if isinstance(node.nulls, str) and node.nulls == "mask" and not pa.types.is_struct(projection.types[name]):
            types[name + MASK_SUFFIX] = "bool"
    return types


MakeChunks: TypeAlias = Callable[[int, "Future[None]"], Iterator[RowChunk | BadChunk]]
"""Make the chunks of a split from a row on; the future is done when nobody wants them any more."""


def open_reader(node: ColumnarSource, make_chunks: MakeChunks, at: SplitPosition, on_bad: OnBad | None) -> Reader:
    aborted: Future[None] = Future()
    if node.batch is None:
        return RowReader(node, make_chunks(at.index, aborted), at, aborted, on_bad)
    hints = node.predicate is not None or on_bad is not None
    pass_over = 0
    if at.offset is not None:
        begin = at.offset
    elif hints:
        begin, pass_over = 0, at.index
    else:
        begin = at.index * node.batch
    chunks = make_chunks(begin, aborted)
    return BatchReader(node, chunks, at, aborted, on_bad, hints=hints, pass_over=pass_over)


class _ChunkReader:
    """What both readers share: the chunks, and elements from them with errors that name the file."""

    def __init__(
        self,
        node: ColumnarSource,
        chunks: Iterator[RowChunk | BadChunk],
        aborted: Future[None],
        on_bad: OnBad | None,
    ) -> None:
        self._node, self._on_bad = node, on_bad
        self._converter: Converter | None = None
        self._schema: pa.Schema | None = None
        self._names: list[str] = []
        self._failure: DataError | None = None
        self._chunks = Background(chunks, depth=CHUNKS_AHEAD, abort=lambda: _set(aborted), name="penstock-columns")

    def close(self) -> None:
        self._chunks.close()

    def _next_chunk(self) -> RowChunk | None:
        while self._failure is None and (made := self._chunks.next()) is not None:
            if isinstance(made, RowChunk):
                names = self._names = self._names or made.batch.schema.names  # files may have them in another order
                return made if made.batch.schema.names == names else replace(made, batch=made.batch.select(names))
            if self._on_bad is None:
                self._failure = made.error
                break
            self._on_bad(made.error, self._index_of(made))
        if self._failure is not None:
            raise self._failure  # and again, whoever asks again: what comes after it must not pass for the next rows
        return None

    def _index_of(self, bad: BadChunk) -> int:
        raise NotImplementedError

    def _converter_of(self, chunk: RowChunk) -> Converter:
        schema = chunk.batch.schema
        if self._converter is None or not schema.equals(self._schema):
            self._converter = Converter(schema, self._node.nulls, rows=self._node.batch is None)
            self._schema = schema
        return self._converter

    @contextmanager
    def _telling(self, chunk: RowChunk) -> Iterator[None]:
        """Let errors name the file and the row."""
        try:
            yield
        except NullFoundError as error:
            row = chunk.file_row + chunk.index(error.row) - chunk.first
            what = f"column {error.column!r} is null{error.inside} in row {row}{chunk.where}"
            remedy = (
                f"read it with nulls='mask' or a value, or leave it out: predicate=~col({error.column!r}).is_null()"
            )
            raise DataError(chunk.path, what, remedy=remedy) from None
        except (pa.ArrowException, UnicodeDecodeError) as error:
            first = chunk.file_row + chunk.index(0) - chunk.first
            what = f"among the {len(chunk)} rows from row {first}{chunk.where}: {error}"
            raise CorruptRecordError(chunk.path, what) from error


class RowReader(_ChunkReader):
    """Yields each row as a dict. The chunks begin at the row of the position."""

    def __init__(
        self,
        node: ColumnarSource,
        chunks: Iterator[RowChunk | BadChunk],
        at: SplitPosition,
        aborted: Future[None],
        on_bad: OnBad | None,
    ) -> None:
        super().__init__(node, chunks, aborted, on_bad)
        self._chunk: RowChunk | None = None
        self._cut: CutRows = _nothing
        self._row = 0  # of the chunk: rows before it were made into elements
        self._elements: list[Element] = []
        self._indices: Sequence[int] = range(0)
        self._cursor = 0
        self._expected = at.index

    def read(self, want: int) -> Records:
        if self._cursor == len(self._elements) and not self._make(want):
            return Records(())
        start, stop = self._cursor, min(self._cursor + want, len(self._elements))
        self._cursor = stop
        indices = self._indices[start:stop]
        gap = indices[0] != self._expected or indices[-1] - indices[0] != stop - start - 1
        self._expected = indices[-1] + 1
        whole = stop - start == len(self._elements)
        return Records(self._elements if whole else self._elements[start:stop], indices=indices if gap else None)

    def close(self) -> None:
        super().close()
        self._chunk, self._cut, self._elements, self._cursor = None, _nothing, [], 0

    def _index_of(self, bad: BadChunk) -> int:
        return bad.first

    def _make(self, want: int) -> bool:
        """Make the next elements, at least a block of them if there are; False at the end."""
        chunk = self._chunk
        if chunk is None or self._row == len(chunk):
            chunk = self._chunk = self._next_chunk()
            if chunk is None:
                return False
            self._row = 0
            with self._telling(chunk):
                self._cut = self._converter_of(chunk).rows(chunk.batch)
        start, stop = self._row, min(len(chunk), self._row + max(ROWS_PER_BLOCK, want))
        with self._telling(chunk):
            self._elements = self._cut(start, stop)
        if chunk.indices is None:
            self._indices = range(chunk.first + start, chunk.first + stop)
        else:
            self._indices = chunk.indices[start:stop].tolist()
        self._row, self._cursor = stop, 0
        return True


class BatchReader(_ChunkReader):
    """Yields dicts of columns. The chunks begin at the first row of the batch of the position."""

    def __init__(
        self,
        node: ColumnarSource,
        chunks: Iterator[RowChunk | BadChunk],
        at: SplitPosition,
        aborted: Future[None],
        on_bad: OnBad | None,
        *,
        hints: bool,
        pass_over: int = 0,
    ) -> None:
        assert node.batch is not None
        super().__init__(node, chunks, aborted, on_bad)
        self._size, self._hints, self._pass_over = node.batch, hints, pass_over
        self._number = at.index - pass_over  # of the next batch
        self._chunk: RowChunk | None = None
        self._leaves: Element = None
        self._ends: list[int] = []  # of the batches in `_leaves`: the index of the row after each
        self._cursor = 0

    def read(self, want: int) -> Records:
        while self._cursor == len(self._ends):
            if not self._make():
                return Records(())
        start, stop = self._cursor, min(self._cursor + want, len(self._ends))
        self._cursor = stop
        self._number += stop - start
        if len(self._ends) == 1:
            batches = [self._leaves]
        else:
            batches = [slice_batch(self._leaves, i * self._size, (i + 1) * self._size) for i in range(start, stop)]
        if stop == len(self._ends):
            self._leaves = None  # the batches are the reader's no more
        return Records(batches, offsets=self._ends[start:stop] if self._hints else None)

    def close(self) -> None:
        super().close()
        self._chunk, self._leaves, self._ends, self._cursor = None, None, [], 0

    def _index_of(self, bad: BadChunk) -> int:
        return self._number

    def _make(self) -> bool:
        """Make the batches that lie whole in a chunk, or one from several chunks; False at the end."""
        chunk = self._chunk if self._chunk is not None else self._next_chunk()
        if chunk is None:
            return False
        size, self._cursor = self._size, 0
        whole = len(chunk) // size
        if self._pass_over and whole:
            whole = min(whole, self._pass_over)
        if whole:
            part = self._split(chunk, whole * size)
            self._ends = [part.index((number + 1) * size - 1) + 1 for number in range(whole)]
            pieces = [part]
        else:
            pieces = self._gather(chunk)
            self._ends = [pieces[-1].index(len(pieces[-1]) - 1) + 1]
        if self._pass_over:
            self._pass_over -= len(self._ends)
            self._number += len(self._ends)
            self._ends = []
            return True
        self._leaves = self._convert(pieces[0]) if len(pieces) == 1 else self._convert_several(pieces)
        return True

    def _split(self, chunk: RowChunk, rows: int) -> RowChunk:
        """Return the first rows of a chunk and keep the rest for the next batch."""
        self._chunk = chunk.slice(rows, len(chunk)) if rows < len(chunk) else None
        return chunk.slice(0, rows)

    def _gather(self, chunk: RowChunk) -> list[RowChunk]:
        """Return pieces of chunks that make one batch, a short one at the end of the split."""
        self._chunk = None
        pieces, rows = [chunk], len(chunk)
        while rows < self._size and (following := self._next_chunk()) is not None:
            pieces.append(self._split(following, min(len(following), self._size - rows)))
            rows += len(pieces[-1])
        return pieces

    def _convert(self, chunk: RowChunk) -> Element:
        with self._telling(chunk):
            return self._converter_of(chunk).batch(chunk.batch)

    def _convert_several(self, pieces: list[RowChunk]) -> Element:
        schema = pieces[0].batch.schema
        for piece in pieces:
            if piece.batch.schema.types != schema.types:
                raise DataError(piece.path, f"its columns are not of the types they have in {pieces[0].path}")
        batches = [pa.RecordBatch.from_arrays(piece.batch.columns, schema=schema) for piece in pieces]
        table = pa.Table.from_batches(batches).unify_dictionaries().combine_chunks()
        joined = replace(pieces[0], batch=table.to_batches()[0], indices=np.arange(table.num_rows))
        try:
            return self._convert(joined)
        except DataError:
            for piece in pieces:  # which of them it is: the error has to name its file and row
                self._convert(piece)
            raise


def _nothing(start: int, stop: int) -> list[Element]:
    return []


def _set(aborted: Future[None]) -> None:
    if not aborted.done():
        aborted.set_result(None)
