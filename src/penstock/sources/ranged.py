"""A remote file of which the parts that will be read are known beforehand.

`ask` starts the requests for them, `read` waits for what was asked and fetches anything else on the spot. One of these
is read by Arrow, whose threads take turns: what makes it fast is that all parts are under way before the first is read.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import Any

from penstock.core.errors import StorageUnavailableError
from penstock.sources import io_threads
from penstock.sources.readahead import WAIT_S
from penstock.sources.storage import Options, open_random

HOLE_BYTES = 512 << 10  # transferring this much takes less time than one more request
AHEAD_BYTES = 32 << 20  # asked for beyond what is read: 50 ms at 600 MB/s
REQUEST_BYTES = 8 << 20  # larger parts are fetched in several requests side by side


class ReadAbortedError(Exception):
    """The file was closed by another thread while this one waited."""


class RangedFile(io.RawIOBase):
    def __init__(self, path: str, size: int, options: Options, aborted: Future[None], *, etag: str = "") -> None:
        self._path, self._size, self._options, self._aborted, self._etag = path, size, options, aborted, etag
        self._at = 0
        self._starts: list[int] = []
        self._asked: dict[int, tuple[int, Future[bytes]]] = {}

    def ask(self, ranges: Iterable[tuple[int, int]]) -> list[int]:
        """Start fetching byte ranges; returns what `forget` takes."""
        asked: list[int] = []
        for start, stop in _joined(ranges):
            for begin in range(start, stop, REQUEST_BYTES):
                if begin not in self._asked:
                    end = min(begin + REQUEST_BYTES, stop)
                    self._asked[begin] = (end, self._submit(begin, end))
                    asked.append(begin)
        self._starts = sorted(self._asked)
        return asked

    def ask_ahead(self, position: int) -> None:
        """Start fetching a window from a position on, and free what lies before it: for reading on and on."""
        self.forget([start for start in self._starts if self._asked[start][0] <= position])
        begin = position
        while (start := self._covering(begin)) is not None:
            begin = self._asked[start][0]
        missing = min(self._size, position + AHEAD_BYTES) - begin
        if missing > 0:  # in whole requests, or every step would ask for a little
            self.ask([(begin, min(self._size, begin - (-missing // REQUEST_BYTES) * REQUEST_BYTES))])

    def forget(self, asked: Iterable[int]) -> None:
        """Free what was fetched, and take back requests that have not begun."""
        for start in asked:
            self._asked.pop(start)[1].cancel()
        self._starts = sorted(self._asked)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def size(self) -> int:
        return self._size

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence] + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        stop = self._size if size is None or size < 0 else min(self._at + size, self._size)
        parts: list[bytes | memoryview] = []
        while self._at < stop:
            parts.append(self._part(stop))
            self._at += len(parts[-1])
        return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        block = self.read(len(target))
        target[: len(block)] = block
        return len(block)

    def close(self) -> None:
        if not self.closed:
            self.forget(list(self._asked))
        super().close()

    def _part(self, stop: int) -> bytes | memoryview:
        """Return at least one byte from the position on."""
        start = self._covering(self._at)
        if start is not None:
            end, future = self._asked[start]
            return memoryview(self._wait_for(future))[self._at - start : min(stop, end) - start]
        following = next((start for start in self._starts if start > self._at), stop)
        return self._wait_for(self._submit(self._at, min(stop, following)))

    def _covering(self, position: int) -> int | None:
        """Return the start of a part that was asked for and holds a position."""
        place = bisect_right(self._starts, position)
        start = self._starts[place - 1] if place else None
        return start if start is not None and position < self._asked[start][0] else None

    def _submit(self, start: int, stop: int) -> Future[bytes]:
        return io_threads.submit(partial(self._fetch, start, stop))

    def _fetch(self, start: int, stop: int) -> bytes:
        with open_random(self._path, self._size, self._options, etag=self._etag) as file:
            file.seek(start)
            return file.read(stop - start)

    def _wait_for(self, future: Future[bytes]) -> bytes:
        pair: tuple[Future[Any], ...] = (future, self._aborted)
        done, _ = wait(pair, timeout=WAIT_S, return_when=FIRST_COMPLETED)
        if self._aborted in done:
            raise ReadAbortedError(self._path)
        if not done:
            raise StorageUnavailableError(self._path, f"a range of bytes did not come within {WAIT_S:.0f} s")
        return future.result()


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges in order, those with a small hole between them joined.

    >>> _joined([(5_000_000, 5_000_010), (0, 10), (20, 30)])
    [(0, 30), (5000000, 5000010)]
    """
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and start - joined[-1][1] <= HOLE_BYTES:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined
