"""A cache in files: one folder per pipeline above it, published whole.

`elements` holds, one after the other, a length-prefixed header and its buffers (see `wire.elements`); `index.npy` where
each begins. They are written into a folder of their own and renamed when the pass is complete: readers see all or
nothing, and a killed writer leaves a folder that the next one removes.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO

import numpy as np

from penstock.core.element import Element
from penstock.core.errors import CannotWriteError, CorruptRecordError
from penstock.core.private_files import make_private, open_private
from penstock.wire.elements import flatten, unflatten

_PREFIX = struct.Struct("<IH")  # bytes of the header, number of buffers
_SIZE = struct.Struct("<Q")


class FileStore:
    def __init__(self, root: str, fingerprint: str) -> None:
        self._folder = Path(root) / fingerprint
        self._partial = Path(root) / f"{fingerprint}.{os.getpid()}.partial"
        self._file: IO[bytes] | None = None
        self._starts: list[int] = []
        self._index: np.ndarray[tuple[int], np.dtype[np.uint64]] | None = None
        self._reader: BinaryIO | None = None

    @property
    def complete(self) -> bool:
        return self._folder.is_dir()

    def begin(self) -> bool:
        if self._file is not None or self.complete:
            return False
        shutil.rmtree(self._partial, ignore_errors=True)
        with self._writing():
            self._partial.mkdir(parents=True)
            self._file = open_private(self._partial / "elements", "wb")
        self._starts = []
        return True

    def add(self, elements: Sequence[Element]) -> bool:
        file = self._file
        assert file is not None
        with self._writing():
            for element in elements:
                self._starts.append(file.tell())
                header, buffers = flatten(element)
                file.write(_PREFIX.pack(len(header), len(buffers)))
                file.write(header)
                for buffer in buffers:
                    file.write(_SIZE.pack(len(buffer)))
                    file.write(buffer)
        return True

    def finish(self) -> None:
        assert self._file is not None
        with self._writing():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
            with open_private(self._partial / "index.npy", "wb") as index:
                np.save(index, np.array(self._starts, np.uint64))
        try:
            self._partial.rename(self._folder)
        except OSError:  # another process was first with the same content
            shutil.rmtree(self._partial, ignore_errors=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.abandon()
            remedy = "make room there, or give cache() another path"
            raise CannotWriteError("cache()", str(self._partial), error, remedy) from error

    def abandon(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # what is still to be written finds no room either
                self._file.close()
            self._file = None
        shutil.rmtree(self._partial, ignore_errors=True)

    def read(self, start: int, want: int) -> list[Element]:
        if self._index is None or self._reader is None:
            for name in ("index.npy", "elements"):
                make_private(self._folder / name)
            self._index = np.load(self._folder / "index.npy", mmap_mode="r")
            self._reader = (self._folder / "elements").open("rb")
        stop = min(start + want, len(self._index))
        if start >= stop:
            return []
        self._reader.seek(int(self._index[start]))
        return [self._read_one(self._reader) for _ in range(start, stop)]

    def _read_one(self, file: BinaryIO) -> Element:
        at = file.tell()
        prefix = self._exactly(file, _PREFIX.size, at)
        header_size, buffer_count = _PREFIX.unpack(prefix)
        header = self._exactly(file, header_size, at)
        sizes_and_buffers = []
        for _ in range(buffer_count):
            (size,) = _SIZE.unpack(self._exactly(file, _SIZE.size, at))
            sizes_and_buffers.append(self._exactly(file, size, at))
        return unflatten(header, sizes_and_buffers, stand_ins=True)

    def _exactly(self, file: BinaryIO, count: int, at: int) -> bytearray:
        data = bytearray(count)
        if file.readinto(data) != count:  # type: ignore[attr-defined]
            raise CorruptRecordError(
                str(self._folder / "elements"), "the cache is cut short", offset=at, remedy=f"remove {self._folder}"
            )
        return data
