"""Where entries lie: a folder of this host, or anything that fsspec writes to.

An entry's name is its prefix's folder and its own, `ab12…/cd34….entry`. It is written beside under another name and
renamed: a reader sees all of it or nothing. A process that was killed leaves a file of that other name, which whoever
comes next removes.

A reader of a file holds a shared lock on it, and what is evicted is first locked for oneself alone: nothing goes that
is being read, and nobody waits for that.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from penstock.caching.entries import Bytes, OpenEntry
from penstock.caching.memory import memory_for
from penstock.caching.names import private_folder
from penstock.core.errors import InvalidArgumentError

HOST = socket.gethostname()
WRITE_BYTES = 1 << 20  # in one call: large pieces cost a third less than those of single frames
MOST_PIECES = 512  # of a call, which takes 1,024


class PartialEntry(Protocol):
    """A file that is being written."""

    def write(self, content: Bytes | bytes) -> None: ...

    def publish(self) -> None: ...

    def abandon(self) -> None: ...


class EntryFiles(Protocol):
    """The files of one location. Each call may take as long as storage takes, and raise what it raises."""

    local: bool

    def open(self, name: str) -> OpenEntry | None:
        """Return an entry; None: it is not there. `DamagedEntryError`: it is not one."""

    def create(self, name: str) -> PartialEntry: ...

    def remove(self, name: str, *, though_read: bool = False) -> bool:
        """Remove an entry; False: somebody reads it."""

    def names(self, prefix: str | None = None) -> Iterator[tuple[str, int]]:
        """Yield name and size of all entries, or of those of one prefix."""

    def free_bytes(self) -> int | None:
        """Return how much more could be written; None: nobody knows."""


class FolderFiles:
    """A folder of a local or mounted file system."""

    local = True

    def __init__(self, folder: Path) -> None:
        self.folder = private_folder(folder)
        self._remove_what_was_killed()

    def _remove_what_was_killed(self) -> None:
        for path in self.folder.glob("*/.*.partial"):
            _, host, pid, *_ = path.name.rsplit("~", 3) if path.name.count("~") >= 3 else ("", "", "0", "")
            if host == HOST and not os.path.exists(f"/proc/{pid}"):
                path.unlink(missing_ok=True)

    def open(self, name: str) -> OpenEntry | None:
        try:
            descriptor = os.open(self.folder / name, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            nbytes = os.fstat(descriptor).st_size

            def read_at(offset: int, count: int) -> Bytes:
                content = memory_for(count)
                done = 0
                while done < count and (got := os.preadv(descriptor, [content[done:].data], offset + done)):
                    done += got
                return content[:done]

            def will_read(offset: int, count: int) -> None:
                with suppress(OSError):  # a file system that takes no advice
                    os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_WILLNEED)

            return OpenEntry.of(nbytes, read_at, lambda: os.close(descriptor), will_read)
        except BaseException:
            os.close(descriptor)
            raise

    def create(self, name: str) -> PartialEntry:
        return _PartialFile(self.folder / name)

    def remove(self, name: str, *, though_read: bool = False) -> bool:
        path = self.folder / name
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return True
        try:
            if not though_read:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
        return True

    def names(self, prefix: str | None = None) -> Iterator[tuple[str, int]]:
        for path in self.folder.glob(f"{prefix or '*'}/*.entry"):
            with suppress(FileNotFoundError):
                yield f"{path.parent.name}/{path.name}", path.stat().st_size

    def free_bytes(self) -> int | None:
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize


class _PartialFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(exist_ok=True, mode=0o700)
        self._written = path.with_name(f".{path.stem}~{HOST}~{os.getpid()}~{secrets.token_hex(3)}.partial")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor: int | None = os.open(self._written, flags, 0o600)
        self._gathered: list[memoryview] = []
        self._gathered_bytes = 0

    def write(self, content: Bytes | bytes) -> None:
        self._gathered.append(_memory(content))
        self._gathered_bytes += len(content)
        if self._gathered_bytes >= WRITE_BYTES or len(self._gathered) == MOST_PIECES:
            self._write_gathered()

    def _write_gathered(self) -> None:
        assert self._descriptor is not None
        left, self._gathered, self._gathered_bytes = self._gathered, [], 0
        while left:
            written = os.writev(self._descriptor, left)
            while left and written >= len(left[0]):
                written -= len(left.pop(0))
            if written:
                left[0] = left[0][written:]

    def publish(self) -> None:
        self._write_gathered()
        self._close()
        self._written.rename(self._path)

    def abandon(self) -> None:
        self._close()
        self._written.unlink(missing_ok=True)

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


class UrlFiles:
    """Objects below a URL, by fsspec. An object is there when all of it is: stores publish whole objects only."""

    local = False

    def __init__(self, url: str) -> None:
        import fsspec

        try:
            self._fs, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise InvalidArgumentError(f"autocache(location={url!r}): {error}") from error
        self._root = str(root).rstrip("/")

    def open(self, name: str) -> OpenEntry | None:
        path = f"{self._root}/{name}"
        try:
            nbytes = int(self._fs.info(path)["size"])
        except FileNotFoundError:
            return None

        def read_at(offset: int, count: int) -> Bytes:
            content: bytes = self._fs.cat_file(path, start=offset, end=offset + count)
            return np.frombuffer(bytearray(content), np.uint8)

        return OpenEntry.of(nbytes, read_at, lambda: None)

    def create(self, name: str) -> PartialEntry:
        return _PartialObject(self._fs, f"{self._root}/{name}")

    def remove(self, name: str, *, though_read: bool = False) -> bool:
        with suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._root}/{name}")
        return True

    def names(self, prefix: str | None = None) -> Iterator[tuple[str, int]]:
        folder = self._root if prefix is None else f"{self._root}/{prefix}"
        self._fs.invalidate_cache()
        try:
            found = self._fs.find(folder, detail=True)
        except FileNotFoundError:
            return
        for path, about in found.items():
            if path.endswith(".entry"):
                yield "/".join(path.split("/")[-2:]), int(about["size"])

    def free_bytes(self) -> int | None:
        return None


class _PartialObject:
    """Gathered in memory and sent as one object."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self._path = fs, path
        self._pieces: list[bytes] = []

    def write(self, content: Bytes | bytes) -> None:
        self._pieces.append(bytes(_memory(content)))

    def publish(self) -> None:
        self._fs.makedirs(self._path.rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(self._path, b"".join(self._pieces))

    def abandon(self) -> None:
        self._pieces.clear()


def _memory(content: Bytes | bytes) -> memoryview:
    return memoryview(content) if isinstance(content, bytes) else content.data


def files_at(location: str, scope_name: str) -> EntryFiles:
    """Return the files of one scope at a location."""
    scheme, separator, rest = location.partition("://")
    if separator and scheme not in ("file", "local"):
        return UrlFiles(f"{location.rstrip('/')}/{scope_name}")
    return FolderFiles(Path(rest if separator else location).expanduser().absolute() / scope_name)
