"""Remote files as file objects.

`ReadAheadFile` is read forward: its constructor already asks for the first blocks and never waits, and as blocks are
used up more are asked for, so that a request's latency is paid once and beside the work on the files before it. At
most `WINDOW_BYTES` are asked for ahead of what was read. `RandomAccessFile` asks for exactly what is read.

One thread reads; any thread may close, and a reader that waits is woken by it.
"""

from __future__ import annotations

import io
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any, TypeAlias

from penstock.core.errors import FileChangedError, StorageUnavailableError
from penstock.sources import io_threads

Fetch: TypeAlias = Callable[[int, int], Any]
"""Return bytes start to stop, as anything with a buffer; blocks, retries, and has its own deadline."""

BLOCK_BYTES = 8 << 20  # the latency is small beside the transfer; a shard of the usual size is one request
WINDOW_BYTES = 32 << 20  # for each open file; a shard of the usual size is in flight as a whole before it is read
WAIT_S = 180.0  # beyond the bound of all retries of one request: reached only when something is stuck


class _RemoteFile(io.BufferedIOBase):
    """What both kinds share: a position that seeks and tells, and reads that come back full."""

    def __init__(self, fetch: Fetch, path: str, size: int, start: int) -> None:
        self._fetch, self._path, self._size, self._at = fetch, path, size, start

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def size(self) -> int:
        return self._size

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"{self._path}: cannot seek to {base + offset}")
        self._at = base + offset
        return self._at

    def _check_length(self, block: memoryview, start: int, stop: int) -> memoryview:
        if len(block) != stop - start:
            found = start + len(block)
            raise FileChangedError(self._path, listed=self._size, found=found, offset=found)
        return block


class ReadAheadFile(_RemoteFile):
    def __init__(self, fetch: Fetch, path: str, size: int, start: int = 0, stop: int | None = None) -> None:
        """`stop` is where reading ends, `size` where the file does."""
        super().__init__(fetch, path, size, start)
        self._stop = size if stop is None else stop
        self._lock = threading.Lock()  # of the next three, against a close from another thread
        self._asked: deque[tuple[int, int, Future[Any]]] = deque()
        self._awaited: Future[Any] | None = None
        self._next = start  # the first byte nobody asked for yet
        self._block = memoryview(b"")
        self._block_start = start
        with self._lock:
            self._ask()

    def _ask(self) -> None:
        while self._next < self._stop and self._next < self._at + WINDOW_BYTES:
            stop = min(self._next + BLOCK_BYTES, self._stop)
            self._asked.append((self._next, stop, io_threads.submit(partial(self._fetch, self._next, stop))))
            self._next = stop

    def _forget(self) -> None:
        for _, _, future in self._asked:
            io_threads.abandon(future)
        self._asked.clear()

    def _here(self) -> memoryview:
        """Return what is at hand from the position on, waiting for a block if there is nothing; empty at the end."""
        skip = self._at - self._block_start
        if 0 <= skip < len(self._block):
            return self._block[skip:]
        if self._at >= self._stop:
            return memoryview(b"")
        start, stop, future = self._take()
        self._block = memoryview(b"")  # free the block before the next one is held
        self._block = self._wait_for(start, stop, future)
        self._block_start = start
        return self._block[self._at - start :]

    def _take(self) -> tuple[int, int, Future[Any]]:
        """Return the request that has the byte at the position; ask for it and what follows if there is none."""
        with self._lock:
            self._check_open()
            while self._asked and self._asked[0][1] <= self._at:  # a seek went past it
                io_threads.abandon(self._asked.popleft()[2])
            if not self._asked or self._at < self._asked[0][0]:
                self._forget()
                self._next = self._at
            self._ask()
            taken = self._asked.popleft()
            self._awaited = taken[2]
            return taken

    def _wait_for(self, start: int, stop: int, future: Future[Any]) -> memoryview:
        try:
            block = future.result(WAIT_S)
        except TimeoutError:
            what = f"bytes {start} to {stop} did not come within {WAIT_S:.0f} s"
            raise StorageUnavailableError(self._path, what) from None
        except CancelledError:
            self._check_open()
            raise
        finally:
            self._awaited = None
        return self._check_length(memoryview(block), start, stop)

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError(f"{self._path}: read of a closed file")

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        done = 0
        while done < len(target):
            part = self._here()[: len(target) - done]
            if not part:
                break
            target[done : done + len(part)] = part
            done += len(part)
            self._at += len(part)
        return done

    def read(self, size: int | None = -1) -> bytes:
        wanted = max(0, self._stop - self._at) if size is None or size < 0 else size
        parts: list[memoryview] = []
        while wanted and (part := self._here()[:wanted]):
            parts.append(part)
            wanted -= len(part)
            self._at += len(part)
        return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)

    def read1(self, size: int = -1) -> bytes:
        part = self._here()
        part = part if size < 0 else part[:size]
        self._at += len(part)
        return bytes(part)

    def close(self) -> None:
        with self._lock:
            super().close()
            self._forget()
            if self._awaited is not None:
                io_threads.abandon(self._awaited)


class RandomAccessFile(_RemoteFile):
    def __init__(self, fetch: Fetch, path: str, size: int) -> None:
        super().__init__(fetch, path, size, 0)

    def read(self, size: int | None = -1) -> bytes:
        stop = self._size if size is None or size < 0 else min(self._at + size, self._size)
        if stop <= self._at:
            return b""
        block = self._check_length(memoryview(self._fetch(self._at, stop)), self._at, stop)
        self._at = stop
        return bytes(block)

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        block = self.read(len(target))
        target[: len(block)] = block
        return len(block)

    def read1(self, size: int = -1) -> bytes:
        return self.read(size)
