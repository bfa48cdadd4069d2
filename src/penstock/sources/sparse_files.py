"""A file of which some parts are in memory, each at the place it has in the file.

Arrow reads columns of it as from memory: no call of ours for each of thousands of columns, and no copy. The memory is
anonymous and as long as the file; only pages that were filled take any. Files of one table have their columns at about
the same places. So what was filled stays until something else is read, in this file or, once it is closed, in the next
one: the system clears each page that it gives anew, and that takes three times as long as to fill it.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.core.errors import DataError, TruncatedFileError
from penstock.sources import io_threads
from penstock.sources.readahead import WAIT_S
from penstock.sources.storage import Options, check_unchanged, gone, is_remote, open_random

NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
REQUEST_BYTES = 8 << 20  # a longer part of a remote file comes by several requests side by side
MEMORIES_KEPT = 2  # of files that are closed: a table's and a tier's
SPARE = 4  # a memory has room for a file that is a quarter longer


class SparseMemory:
    """Room for a file, and which pages of it were filled."""

    def __init__(self, size: int) -> None:
        pages = -(-max(1, size) // mmap.PAGESIZE)
        self.pages = mmap.mmap(-1, pages * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
        self._filled = np.zeros(pages, np.bool_)
        self._idle = np.zeros(pages, np.bool_)

    def __len__(self) -> int:
        return len(self.pages)

    def prepare(self, reads: Iterable[tuple[int, int]]) -> None:
        """Make room for parts: of what nobody needs any more, all else is given back."""
        wanted = np.zeros(len(self._filled), np.bool_)
        for start, stop in reads:
            wanted[start // mmap.PAGESIZE : -(-stop // mmap.PAGESIZE)] = True
        surplus = self._idle & ~wanted
        for first, last in np.flatnonzero(np.diff(surplus, prepend=False, append=False)).reshape(-1, 2).tolist():
            self.pages.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)
        self._filled = self._filled & ~surplus | wanted
        self._idle[:] = False

    def done(self, reads: Iterable[tuple[int, int]]) -> None:
        """Say that parts are needed no more; others may share their first and last pages."""
        for start, stop in reads:
            self._idle[-(-start // mmap.PAGESIZE) : stop // mmap.PAGESIZE] = True

    def all_done(self) -> None:
        """Say that nothing of it is needed any more."""
        self._idle |= self._filled

    @property
    def filled_bytes(self) -> int:
        """What it takes."""
        return int(np.count_nonzero(self._filled)) * mmap.PAGESIZE


class SparseMemories:
    """Memory of files that are closed, for those that are opened next; for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[SparseMemory] = []

    def take(self, size: int) -> SparseMemory:
        """Return room for a file: the smallest that there is, or a new one."""
        with self._lock:
            fitting = [memory for memory in self._kept if len(memory) >= size]
            if fitting:
                found = min(fitting, key=len)
                self._kept.remove(found)
                return found
        return SparseMemory(size + size // SPARE)

    def give(self, memory: SparseMemory) -> None:
        """Take back what a file was in; nothing of it is needed any more."""
        memory.all_done()
        with self._lock:
            self._kept.append(memory)
            del self._kept[:-MEMORIES_KEPT]


class SparseFile:
    """`fill` reads parts; `source` is what Arrow reads from."""

    def __init__(
        self, path: str, size: int, options: Options = (), *, etag: str = "", memories: SparseMemories | None = None
    ) -> None:
        """`memories` is where its memory comes from, and goes when it is closed; None: it has its own."""
        self._path, self._size, self._options, self._etag = path, size, options, etag
        self._memories = memories or SparseMemories()
        self._descriptor: int | None = None
        if not is_remote(path):
            check_unchanged(path, path, size)
            try:
                self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError as error:
                raise gone(path) from error
            except OSError as error:
                raise DataError(path, error.strerror or str(error)) from error
        self._memory: SparseMemory | None = self._memories.take(size)

    def source(self) -> Any:
        return pa.BufferReader(pa.py_buffer(self._open_memory.pages).slice(0, self._size))

    @property
    def _open_memory(self) -> SparseMemory:
        assert self._memory is not None, f"{self._path} was closed"
        return self._memory

    def fill(self, reads: Sequence[tuple[int, int]]) -> None:
        """Read parts of the file into their places."""
        self._open_memory.prepare(reads)
        view = memoryview(self._open_memory.pages)
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
        """Say that parts are no longer needed."""
        self._open_memory.done(reads)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        if self._memory is not None:
            self._memories.give(self._memory)
            self._memory = None
