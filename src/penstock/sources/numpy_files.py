"""Numpy files: rows of `.npy` arrays, or windows over flat files of values (tokens).

Elements are indexed over all files in the order of the listing. With `window=n, stride=s`, element k of a file is its
values k·s to k·s + n; a window never reaches into the next file, and values at the end of a file that fill no window
are left out. Local files are memory-mapped; elements are copies, in memory of their own, and in the machine's byte
order. Remote ones are read forward by a split's reader and by ranges, several at a time, where indices are fetched.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cached_property, lru_cache, partial
from typing import Any, BinaryIO

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.lib.stride_tricks import sliding_window_view

from penstock.core.element import Array, Element
from penstock.core.errors import (
    CorruptRecordError,
    DataError,
    FileChangedError,
    InvalidArgumentError,
    TruncatedFileError,
)
from penstock.graph.readers import ReadNumpy
from penstock.sources import io_threads
from penstock.sources.base import Reader, Records, Split, SplitPosition
from penstock.sources.listing import ArrayHeader, FileInfo, FileListing, list_files
from penstock.sources.memory import IndexReader, index_splits
from penstock.sources.readahead import WAIT_S
from penstock.sources.stamps import file_stamp
from penstock.sources.storage import Options, check_unchanged, gone, is_remote, open_file, open_random

OPEN_MAPS = 128  # each holds a file descriptor, of which a process often has 1,024
HEADER_BYTES = 64 << 10  # the longest header numpy writes without asking
GAP_BYTES = 256 << 10  # remote rows closer than this are read by one request
REQUEST_BYTES = 8 << 20
ALLOWED = "read_numpy reads .npy files, and raw files of values if dtype= names their type"


class ArrayFile(msgspec.Struct, frozen=True):
    """The elements of one file: `count` of `shape`, each `step_bytes` after the one before, from `offset` on."""

    path: str
    size: int
    etag: str
    dtype: np.dtype[Any]
    offset: int
    array_shape: tuple[int, ...]
    fortran_order: bool
    shape: tuple[int, ...]
    count: int
    stride: int  # values (with a window) or rows from one element to the next

    @property
    def element_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def step_bytes(self) -> int:
        return self.element_bytes // (self.shape[0] if self.windows else 1) * self.stride

    @property
    def windows(self) -> bool:
        return len(self.shape) == len(self.array_shape)

    def cut(self, values: Array) -> Array:
        """Return the elements that whole rows or values consist of, as views."""
        return sliding_window_view(values, self.shape[0])[:: self.stride] if self.windows else values

    def cut_bytes(self, content: bytes) -> Array:
        values = np.frombuffer(content, self.dtype)
        return self.cut(values if self.windows else values.reshape(-1, *self.shape))


class NumpySource:
    def __init__(self, node: ReadNumpy) -> None:
        if node.stride is not None and node.window is None:
            raise InvalidArgumentError(f"stride={node.stride} needs window=, the number of values in an element")
        self._node = node
        self._raw_dtype = _dtype_of(node.dtype)
        self._options = node.storage_options
        self.remote = any(map(is_remote, node.paths))
        self._map = lru_cache(maxsize=OPEN_MAPS)(_map_elements)

    def files(self) -> Sequence[FileInfo]:
        """Return the files whose elements the indices count: they are part of the source's identity."""
        return self._files

    @cached_property
    def _files(self) -> list[FileInfo]:
        return list_files(self._node.paths, self._options, extensions=(".npy",) if self._raw_dtype is None else None)

    def file_listing(self) -> FileListing:
        return replace(FileListing.of(self._files), headers=self._headers)

    def use_file_listing(self, listing: FileListing) -> None:
        assert listing.headers is not None
        self._files = [listing.info(index) for index in range(len(listing))]
        self._headers = listing.headers

    @cached_property
    def _headers(self) -> Sequence[ArrayHeader]:
        describe = [partial(self._describe, file) for file in self._files]
        return io_threads.run_all(describe, deadline_s=WAIT_S) if self.remote else [call() for call in describe]

    @cached_property
    def _tables(self) -> list[ArrayFile]:
        tables = [self._table(file, header) for file, header in zip(self._files, self._headers)]
        for table in tables:
            if (table.dtype, table.shape) != (tables[0].dtype, tables[0].shape):
                raise DataError(
                    table.path,
                    f"elements of {table.dtype} {table.shape}, but those of {tables[0].path} are of "
                    f"{tables[0].dtype} {tables[0].shape}",
                )
        return tables

    @cached_property
    def _starts(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Index of each file's first element; the last one is the number of elements."""
        return np.cumsum([0, *(table.count for table in self._tables)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def path_of(self, index: int) -> str:
        return self._tables[int(np.searchsorted(self._starts, index, side="right")) - 1].path

    def splits(self) -> Sequence[Split]:
        return index_splits(len(self), at_least=16)

    def stamps(self, indices: Sequence[int]) -> list[str | None]:
        """Return what tells each element from what it was: its file as it is now, and its place in it."""
        files = np.searchsorted(self._starts, np.asarray(indices, np.int64), side="right") - 1
        of_file = {int(n): file_stamp(self._tables[int(n)].path, self._options) for n in np.unique(files)}
        return [
            None if of_file[n] is None else f"{self._tables[n].path}\n{int(index) - int(self._starts[n])}\n{of_file[n]}"
            for n, index in zip(files.tolist(), indices)
        ]

    def open(self, split: Split, at: SplitPosition) -> Reader:
        if not self.remote:
            return IndexReader(self.fetch, split, at)
        return _ForwardReader(self._tables, self._starts, self._options, split.start + at.index, split.stop)

    def fetch(self, indices: Sequence[int]) -> Sequence[Element]:
        if isinstance(indices, range):
            wanted = np.arange(indices.start, indices.stop, indices.step)
        else:
            wanted = np.asarray(indices, np.int64)
        if not len(wanted):
            return []
        table_of = np.searchsorted(self._starts, wanted, side="right") - 1
        if (table_of == table_of[0]).all():
            return list(self._elements(table_of[0], wanted))
        first = self._tables[table_of[0]]
        found = np.empty((len(wanted), *first.shape), first.dtype.newbyteorder("="))
        for number in np.unique(table_of).tolist():
            here = table_of == number
            found[here] = self._elements(number, wanted[here])
        return list(found)

    def _elements(self, number: int, indices: Array) -> Array:
        """Return elements of one file as one array of its own."""
        table, places = self._tables[number], indices - self._starts[number]
        if self.remote:
            return _native(_fetch_ranges(table, places, self._options))
        # Before it is read: what was cut off a file since it was mapped would kill the process.
        check_unchanged(table.path, table.path, table.size)
        mapped = self._map(table)
        if (np.diff(places) == 1).all():
            return _native(mapped[places[0] : places[-1] + 1], copy=True)
        return _native(mapped[places])

    def _describe(self, file: FileInfo) -> ArrayHeader:
        if not file.path.lower().endswith(".npy"):
            if self._raw_dtype is None or file.path.lower().endswith(".npz"):
                raise InvalidArgumentError(f"{file.path}: {ALLOWED}")
            count, rest = divmod(file.size, self._raw_dtype.itemsize)
            if rest:
                what = f"{file.size} bytes are no whole number of {self._raw_dtype} values"
                raise TruncatedFileError(file.path, what, offset=file.size - rest)
            return ArrayHeader(self._raw_dtype, 0, (count,), False)
        with open_random(file.path, file.size, self._options, etag=file.etag) as opened:
            head = opened.read(min(HEADER_BYTES, file.size))
        header = _parse_header(file.path, head)
        dtype, shape = header.dtype, header.shape
        if self._raw_dtype is not None and self._raw_dtype != dtype:
            raise DataError(file.path, f"holds {dtype}, not dtype={str(self._raw_dtype)!r}")
        needed = header.offset + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if file.size < needed:
            what = f"the header tells of {needed} bytes ({dtype} {shape}), the file has {file.size}"
            raise TruncatedFileError(file.path, what, offset=file.size)
        return header

    def _table(self, file: FileInfo, header: ArrayHeader) -> ArrayFile:
        dtype, offset, shape, fortran_order = header.dtype, header.offset, header.shape, header.fortran_order
        window = self._node.window
        if not shape:
            raise DataError(file.path, "a single value, not an array of rows")
        if fortran_order and len(shape) > 1 and self.remote:
            raise DataError(file.path, "stored column by column", remedy="save it again in C order to read it remotely")
        if window is None:
            return ArrayFile(
                file.path, file.size, file.etag, dtype, offset, shape, fortran_order, shape[1:], shape[0], 1
            )
        if len(shape) > 1:
            raise DataError(file.path, f"an array of shape {shape}; window= is for flat files of values")
        stride = self._node.stride or window
        count = max(0, (shape[0] - window) // stride + 1)
        return ArrayFile(file.path, file.size, file.etag, dtype, offset, shape, fortran_order, (window,), count, stride)


def _native(elements: Array, *, copy: bool = False) -> Array:
    """Return elements in the machine's byte order."""
    return elements.astype(elements.dtype.newbyteorder("="), copy=copy)


def _dtype_of(name: str | None) -> np.dtype[Any] | None:
    try:
        return None if name is None else np.dtype(name)
    except TypeError as error:
        raise InvalidArgumentError(f"dtype={name!r}: {error}") from None


def _parse_header(path: str, head: bytes) -> ArrayHeader:
    stream = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran_order, dtype = read(stream)
    except Exception as error:  # a broken header makes numpy's parser raise nearly anything
        raise CorruptRecordError(path, f"not a .npy file, or its header is broken: {error}", offset=0) from None
    if dtype.hasobject:
        raise DataError(path, "holds Python objects, which are never unpickled", remedy="save it with a plain dtype")
    return ArrayHeader(dtype, stream.tell(), shape, fortran_order)


def _map_elements(table: ArrayFile) -> Array:
    """Return a local file's elements as views of its memory map."""
    if not table.count * table.element_bytes:
        return np.empty((table.count, *table.shape), table.dtype)  # what is empty cannot be mapped
    order: Any = "F" if table.fortran_order else "C"
    try:
        mapped = np.memmap(table.path, table.dtype, "r", table.offset, table.array_shape, order)
    except FileNotFoundError as error:
        raise gone(table.path) from error
    except ValueError as error:  # it is shorter than its array
        raise FileChangedError(table.path, listed=table.size) from error
    return table.cut(np.asarray(mapped))


def _fetch_ranges(table: ArrayFile, places: Array, options: Options) -> Array:
    """Read elements of a remote file: those near each other by one request, all requests side by side."""
    distinct, back = np.unique(places, return_inverse=True)
    starts = table.offset + distinct * table.step_bytes
    far = np.flatnonzero(np.diff(starts) > GAP_BYTES + table.element_bytes) + 1
    groups = [part for near in np.split(np.arange(len(starts)), far) for part in _within_limit(starts, near)]
    reads = [
        partial(_read_range, table, options, int(starts[group[0]]), int(starts[group[-1]]) + table.element_bytes)
        for group in groups
    ]
    found = np.empty((len(distinct), *table.shape), table.dtype)
    for group, content in zip(groups, io_threads.run_all(reads, deadline_s=WAIT_S)):
        base = int(starts[group[0]])
        for number in group.tolist():
            at = int(starts[number]) - base
            part = np.frombuffer(content, table.dtype, table.element_bytes // table.dtype.itemsize, at)
            found[number] = part.reshape(table.shape)
    return found[back]


def _within_limit(starts: Array, near: Array) -> list[Array]:
    """Cut a run of elements into requests of at most `REQUEST_BYTES`."""
    request = (starts[near] - starts[near[0]]) // REQUEST_BYTES
    return np.split(near, np.flatnonzero(np.diff(request)) + 1)


def _read_range(table: ArrayFile, options: Options, start: int, stop: int) -> bytes:
    with open_random(table.path, table.size, options, etag=table.etag) as file:
        file.seek(start)
        return file.read(stop - start)


class _ForwardReader:
    """Reads a range of indices of remote files forward, with requests under way ahead of it."""

    def __init__(self, tables: Sequence[ArrayFile], starts: Array, options: Options, first: int, stop: int) -> None:
        self._tables, self._starts, self._options = tables, starts, options
        self._next, self._stop = first, stop
        self._file: BinaryIO | None = None
        self._rest = b""  # the bytes before the file's position that overlapping windows still need
        if first < stop:
            self._open(self._table_at(first))

    def _table_at(self, index: int) -> int:
        return int(np.searchsorted(self._starts, index, side="right")) - 1

    def _open(self, number: int) -> None:
        self._release()
        self._number = number
        table = self._tables[number]
        place = self._next - int(self._starts[number])
        count = min(self._stop, int(self._starts[number + 1])) - int(self._starts[number])
        end = table.offset + (count - 1) * table.step_bytes + table.element_bytes
        begin = table.offset + place * table.step_bytes
        self._file = open_file(table.path, table.size, self._options, etag=table.etag, start=begin, stop=end)

    def read(self, want: int) -> Records:
        if self._next >= self._stop:
            return Records(())
        if self._table_at(self._next) != self._number:
            self._open(self._table_at(self._next))
        table = self._tables[self._number]
        count = min(want, self._stop - self._next, int(self._starts[self._number + 1]) - self._next)
        step = count * table.step_bytes
        content = self._rest + self._read(step - table.step_bytes + table.element_bytes - len(self._rest), table)
        self._rest = content[step:]
        if step > len(content):
            self._skip(step - len(content))
        self._next += count
        return Records(list(_native(table.cut_bytes(content), copy=True)))

    def _read(self, size: int, table: ArrayFile) -> bytes:
        assert self._file is not None
        content = self._file.read(size)
        if len(content) < size:
            found = self._file.tell()
            raise FileChangedError(table.path, listed=table.size, found=found, offset=found)
        return content

    def _skip(self, size: int) -> None:
        assert self._file is not None
        self._file.seek(size, io.SEEK_CUR)

    def _release(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._rest = None, b""

    def close(self) -> None:
        self._next = self._stop
        self._release()
