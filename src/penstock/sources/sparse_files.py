"""A file of which some parts are in memory, each at the place it has in the file.

Arrow reads columns of it as from memory: no call of ours for each of thousands of columns, and no copy. The memory is
anonymous and as long as the file; only pages that were filled take any.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from penstock.core.errors import DataError, TruncatedFileError
from penstock.sources import io_threads
from penstock.sources.readahead import WAIT_S
from penstock.sources.storage import Options, check_unchanged, gone, is_remote, open_random

NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
REQUEST_BYTES = 8 << 20  # a longer part of a remote file comes by several requests side by side


class SparseFile:
    """`fill` reads parts; `source` is what Arrow reads from."""

    def __init__(self, path: str, size: int, options: Options = (), *, etag: str = "") -> None:
        self._path, self._size, self._options, self._etag = path, size, options, etag
        self._memory = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
        self._descriptor: int | None = None
        if not is_remote(path):
            check_unchanged(path, path, size)
            try:
                self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError as error:
                raise gone(path) from error
            except OSError as error:
                raise DataError(path, error.strerror or str(error)) from error

    def source(self) -> Any:
        return pa.BufferReader(pa.py_buffer(self._memory))

    def fill(self, reads: Sequence[tuple[int, int]]) -> None:
        """Read parts of the file into their places."""
        view = memoryview(self._memory)
        if self._descriptor is not None:
            for start, stop in reads:
                self._fill_local(view, start, stop)
            return
        pieces = [
            (begin, min(begin + REQUEST_BYTES, stop))
            for start, stop in reads
            for begin in range(start, stop, REQUEST_BYTES)
        ]
        calls = [partial(self._fetch, start, stop) for start, stop in pieces]
        for (start, stop), content in zip(pieces, io_threads.run_all(calls, deadline_s=WAIT_S)):
            view[start:stop] = content

    def _fill_local(self, view: memoryview, start: int, stop: int) -> None:
        assert self._descriptor is not None
        while start < stop:
            count = os.preadv(self._descriptor, [view[start:stop]], start)
            if not count:
                raise TruncatedFileError(self._path, f"it ends at byte {start}, before byte {stop}", offset=start)
            start += count

    def _fetch(self, start: int, stop: int) -> bytes:
        with open_random(self._path, self._size, self._options, etag=self._etag) as file:
            file.seek(start)
            content = file.read(stop - start)
        if len(content) != stop - start:
            raise TruncatedFileError(self._path, f"it ends before byte {stop}", offset=start + len(content))
        return content

    def drop(self, reads: Sequence[tuple[int, int]]) -> None:
        """Give back the memory of parts that are no longer needed."""
        for start, stop in reads:
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages: others may share the first and the last
            last = stop // mmap.PAGESIZE * mmap.PAGESIZE
            if last > first:
                self._memory.madvise(mmap.MADV_DONTNEED, first, last - first)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
