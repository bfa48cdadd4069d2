"""Whole files as elements, and what every source of one element per file shares.

Such a source is indexable: element i is file i of the listing. Its splits are ranges of indices; another machine
with the same node makes the same listing, so a range says enough.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from functools import cached_property, partial
from typing import ClassVar, Self

from penstock.core.element import Element
from penstock.core.errors import DataError, FileChangedError, StorageUnavailableError
from penstock.graph.readers import FileSource, ReadFiles
from penstock.sources import io_threads
from penstock.sources.base import OnBad, Records, Split, SplitPosition
from penstock.sources.cutting import cut_neighbours, split_step
from penstock.sources.listing import FileInfo, FileListing, list_files
from penstock.sources.readahead import WAIT_S, WINDOW_BYTES
from penstock.sources.stamps import file_stamp
from penstock.sources.storage import Options, gone, is_remote, open_random

FILES_IN_FLIGHT = 32
AHEAD_BYTES = 16 << 20  # asked for ahead of what was read, by each open split


class FileTable:
    """The listing of a source, and how its files are read."""

    def __init__(self, listing: FileListing, storage_options: Options) -> None:
        self.listing = listing
        self.paths, self.sizes = listing.paths, listing.sizes
        self._options = storage_options
        self._all_local = not any(map(is_remote, self.paths))

    def __len__(self) -> int:
        return len(self.paths)

    def relative(self, index: int) -> str:
        return self.listing.relative(index)

    def read(self, index: int) -> bytes:
        path, size = self.paths[index], int(self.sizes[index])
        if self._all_local or not is_remote(path):
            return read_local(path, size)
        with open_random(path, size, self._options, etag=self.listing.etag(index)) as file:
            return b"".join(iter(partial(file.read, WINDOW_BYTES), b""))


def read_local(path: str, size: int) -> bytes:
    """Return a local file's bytes in three system calls."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            content = os.read(descriptor, size + 1)  # one more, to see a file that has grown
            while len(content) < size and (more := os.read(descriptor, size - len(content))):
                content += more  # Linux reads at most 2 GB a call
            if len(content) != size:
                raise FileChangedError(path, listed=size, found=os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)
    except FileNotFoundError as error:
        raise gone(path) from error
    except OSError as error:
        raise DataError(path, f"cannot be read: {error.strerror or error}") from error
    return content


class FilePerElementSource:
    """Base of the sources of one element per file: say how an element is made of a file's bytes."""

    EXTENSIONS: ClassVar[tuple[str, ...] | None] = None

    def __init__(self, node: FileSource) -> None:
        self.node = node
        self.remote = any(map(is_remote, node.paths))
        self.on_bad: OnBad | None = None

    def make_element(self, index: int, content: bytes) -> Element:
        raise NotImplementedError

    @cached_property
    def table(self) -> FileTable:
        options = self.node.storage_options
        return FileTable(FileListing.of(list_files(self.node.paths, options, extensions=self.EXTENSIONS)), options)

    def file_listing(self) -> FileListing:
        return self.table.listing

    def use_file_listing(self, listing: FileListing) -> None:
        self.table = FileTable(listing, self.node.storage_options)

    @cached_property
    def _splits(self) -> tuple[Split, ...]:
        sizes = self.table.sizes.tolist()
        step = split_step(sum(sizes), len(sizes), remote=self.remote)
        return tuple(Split(start=start, stop=stop) for start, stop in cut_neighbours(sizes, self.table.paths, step))

    def files(self) -> Sequence[FileInfo]:
        """Return the listing: it is part of the source's identity, and the splits do not repeat it."""
        return [self.table.listing.info(index) for index in range(len(self.table))]

    def __len__(self) -> int:
        return len(self.table)

    def path_of(self, index: int) -> str:
        return self.table.paths[index]

    def splits(self) -> Sequence[Split]:
        return self._splits

    def stamps(self, indices: Sequence[int]) -> list[str | None]:
        """Return what tells each element from what it was: its file as it is now, and what else it is made of."""
        paths, options = self.table.paths, self.node.storage_options
        found: list[str | None] = []
        for index in map(int, indices):
            stamp = file_stamp(paths[index], options)
            found.append(None if stamp is None else f"{paths[index]}\n{self.about(index)}\n{stamp}")
        return found

    def about(self, index: int) -> str:
        """Return what an element says that does not stand in its file."""
        return self.table.relative(index)

    def open(self, split: Split, at: SplitPosition) -> FilePerElementReader:
        return FilePerElementReader(self, split, at)

    def fetch(self, indices: Sequence[int]) -> Sequence[Element]:
        """Return the elements at `indices`. With `on_bad` set, files that cannot be read are left out of the answer."""
        elements: list[Element] = []
        contents = Contents(self.table, indices, ahead=self.remote)
        try:
            for index, content in contents:
                try:
                    elements.append(self.make_element(index, content()))
                except DataError as error:
                    if self.on_bad is None:
                        raise
                    self.on_bad(error, index)
        finally:
            contents.close()
        return elements


class Contents:
    """Iterates over (index, call that returns the file's bytes), in order.

    With `ahead` the following files are in flight, within a number of files and of bytes, from the constructor on.
    """

    def __init__(self, table: FileTable, indices: Iterable[int], *, ahead: bool) -> None:
        self._table, self._ahead = table, ahead
        self._indices = iter(indices)
        self._lock = threading.Lock()  # against a close from another thread
        self._closed = False
        self._asked: deque[tuple[int, Future[bytes]]] = deque()
        self._awaited: Future[bytes] | None = None
        self._asked_bytes = 0
        with self._lock:
            self._ask()

    def _ask(self) -> None:
        while self._ahead and len(self._asked) < FILES_IN_FLIGHT and self._asked_bytes < AHEAD_BYTES:
            index = next(self._indices, None)
            if index is None:
                return
            self._asked.append((index, io_threads.submit(partial(self._table.read, index))))
            self._asked_bytes += int(self._table.sizes[index])

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[int, Callable[[], bytes]]:
        with self._lock:
            if self._closed or (self._ahead and not self._asked):
                raise StopIteration
            if not self._ahead:
                index = next(self._indices)
                return index, partial(self._table.read, index)
            index, self._awaited = self._asked.popleft()
            self._asked_bytes -= int(self._table.sizes[index])
            self._ask()
            return index, partial(self._wait, index, self._awaited)

    def _wait(self, index: int, future: Future[bytes]) -> bytes:
        path = self._table.paths[index]
        try:
            return future.result(WAIT_S)
        except TimeoutError:
            raise StorageUnavailableError(path, f"did not come within {WAIT_S:.0f} s") from None
        except CancelledError:
            raise ValueError(f"{path}: the reader was closed") from None

    def close(self) -> None:
        """Stop; a thread that waits for a file is woken."""
        with self._lock:
            self._closed = True
            for future in (self._awaited, *(future for _, future in self._asked)):
                if future is not None:
                    io_threads.abandon(future)
            self._asked.clear()


class FilePerElementReader:
    def __init__(self, source: FilePerElementSource, split: Split, at: SplitPosition) -> None:
        self._source, self._start = source, split.start
        indices = range(split.start + at.index, split.stop)
        self._contents = Contents(source.table, indices, ahead=source.remote)
        self._left_out = False
        self._failure: DataError | None = None

    def read(self, want: int) -> Records:
        if self._failure is not None:
            raise self._failure
        elements: list[Element] = []
        indices: list[int] = []
        while len(elements) < want and (following := next(self._contents, None)) is not None:
            index, content = following
            try:
                elements.append(self._source.make_element(index, content()))
                indices.append(index - self._start)
            except DataError as error:
                if self._source.on_bad is not None:
                    self._left_out = True
                    self._source.on_bad(error, index - self._start)
                    continue
                self._failure = error
                if not elements:  # what was read before it is good, and comes first
                    raise
                break
        return Records(elements, None, indices if self._left_out else None)

    def close(self) -> None:
        self._contents.close()


class RawFilesSource(FilePerElementSource):
    """`{path, data}` per file; the path is relative to the root of the listing."""

    def __init__(self, node: ReadFiles) -> None:
        super().__init__(node)

    def make_element(self, index: int, content: bytes) -> Element:
        return {"path": self.table.relative(index), "data": content}
