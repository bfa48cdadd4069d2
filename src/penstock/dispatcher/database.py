"""Opens the dispatcher's SQLite files so that what was committed is there, or an error is.

Rules. A file appears under its name only with its whole schema in it, so an empty or shorter one is damage and not a
beginning. Every value has a checksum: SQLite notices most damage to its own structure, but not to our bytes. Nothing is
opened for writing before the log has been looked at: closing a connection cleans the evidence away.

Write-ahead logging needs memory that all processes see, which network mounts do not have; there the rollback journal is
used. Locking is exclusive everywhere: one dispatcher is the only reader, and saves a lock and a shared file a commit.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from penstock.core.errors import JournalCorruptError, JournalError, JournalLockedError, JournalWriteError
from penstock.core.private_files import create_private, make_private, open_private
from penstock.dispatcher.wal import check_log

# File systems on which other hosts may write behind our back, or whose shared memory and locks are not the kernel's.
NETWORK_FILE_SYSTEMS = frozenset(
    (
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "9p", "afs", "ceph", "glusterfs", "lustre", "gpfs"),
        *("beegfs", "orangefs", "pvfs2", "virtiofs", "vboxsf"),
    )
)
CACHE_KB = 256  # what was written is read at a restart only; SQLite's own 2 MB fill up with it epoch by epoch
UNREADABLE = (sqlite3.Error, UnicodeDecodeError, OverflowError, MemoryError)
"""What reading a damaged file may raise: text that is none and sizes beyond all measure come from Python itself."""
_CORRUPT_CODES = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_SCHEMA)


class QueryResult(Protocol):
    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...


class Connection(Protocol):
    """As much of `sqlite3.Connection` as is used, so that tests can stand between and fail a write."""

    def execute(self, sql: str, parameters: Sequence[Any] = ..., /) -> QueryResult: ...

    def close(self) -> None: ...


Connect = Callable[[str], Connection]


def connect(path: str) -> Connection:
    connection: Connection = sqlite3.connect(path, isolation_level=None, timeout=5.0)  # transactions are begun by us
    return connection


class Database:
    """One SQLite file (path None: in memory), open and checked."""

    def __init__(
        self,
        path: Path | None,
        tables: Sequence[str],
        *,
        connect: Connect = connect,
        check: bool = True,
        remedy: str = "",
    ) -> None:
        self.path, self.name = path, ":memory:" if path is None else str(path)
        self._connect, self._tables, self._check, self._remedy = connect, tuple(tables), check, remedy
        self.torn = False
        """Whether the log ended in something half-written, which was dropped."""
        self.uses_log = path is not None and not on_network(path)
        self.connection = self._open()

    def _open(self) -> Connection:
        if self.path is None:
            memory = self._connect(":memory:")
            for table in self._tables:
                memory.execute(table)
            return memory
        if not self.path.exists():
            self._create(self.path)
        elif self.path.stat().st_size == 0:
            raise self.corrupt(None, "the file is empty")
        for suffix in ("", "-wal", "-journal"):  # those that SQLite makes have the mode of the file itself
            make_private(f"{self.path}{suffix}")
        if self._check:
            self.torn = check_log(Path(f"{self.path}-wal"))
        connection: Connection | None = None
        try:
            connection = self._connect(str(self.path))
            mode = "WAL" if self.uses_log else "TRUNCATE"
            for pragma in (
                *("locking_mode=EXCLUSIVE", f"journal_mode={mode}", "synchronous=FULL", "temp_store=MEMORY"),
                f"cache_size=-{CACHE_KB}",
            ):
                connection.execute(f"PRAGMA {pragma}").fetchall()
            found = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid").fetchall()
            if [tuple(row) for row in found] != [(table,) for table in self._tables]:
                raise self.corrupt(None, "its tables are not those of a journal of this version")
            if self._check:
                verdict = connection.execute("PRAGMA quick_check(1)").fetchall()
                if verdict != [("ok",)]:
                    raise self.corrupt(None, " ".join(str(line) for row in verdict for line in row))
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, UNREADABLE):
                raise self.read_failed(error) from error
            raise
        return connection

    def _create(self, path: Path) -> None:
        for suffix in ("-wal", "-journal"):
            if Path(f"{path}{suffix}").exists():
                raise self.corrupt(None, f"the file is missing, but its log {path.name}{suffix} is there")
        draft = path.with_name(f"{path.name}.new")
        draft.unlink(missing_ok=True)
        create_private(draft)
        connection = self._connect(str(draft))
        try:
            for sql in ("PRAGMA synchronous=FULL", "BEGIN", *self._tables, "COMMIT"):
                connection.execute(sql)
        except sqlite3.Error as error:
            raise JournalError(f"{path} cannot be made: {error}; make room, or choose another directory") from error
        finally:
            connection.close()
        os.replace(draft, path)
        sync_directory(path.parent)

    def reopen(self) -> None:
        """Forget what this process believes to be in the file, after a write that failed."""
        if self.path is None:
            try:
                self.connection.execute("ROLLBACK")
            except sqlite3.Error:
                pass  # nothing was begun, or SQLite has rolled back by itself
            return
        self.close()
        self.connection = self._open()

    def read(self, sql: str, parameters: Sequence[Any] = (), *, types: tuple[type, ...] = ()) -> list[Any]:
        """Return all rows. With `types`, a value of another type is damage: SQLite stores any in any column."""
        try:
            rows = self.connection.execute(sql, parameters).fetchall()
        except UNREADABLE as error:
            raise self.read_failed(error) from error
        for row in rows:
            if types and tuple(map(type, row)) != types:
                raise self.corrupt(None, "a value is not of the type that was written")
        return rows

    def close(self) -> None:
        try:
            self.connection.close()
        except sqlite3.Error:
            pass  # a full disk: what was committed is in the log, and is found there

    def corrupt(self, position: int | None, what: str) -> JournalCorruptError:
        return JournalCorruptError(self.name, position, what, self._remedy)

    def write_failed(self, error: Exception) -> JournalError:
        """Return what a failed write says: that there is no room, say, or that the file is damaged."""
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return self.corrupt(None, str(error))
        return JournalWriteError(self.name, str(error))

    def read_failed(self, error: Exception) -> JournalError:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
        if code in _CORRUPT_CODES:
            return self.corrupt(None, str(error))
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return JournalLockedError(self.name, "another process")
        return JournalError(f"{self.name} cannot be read: {error}; see to its disk and permissions, then start again")


def checksum(payload: bytes, *about: int | str) -> int:
    """Return the checksum of a value and of the place it is stored at, so that values cannot change places."""
    place = b"".join(struct.pack(">q", part) if isinstance(part, int) else part.encode() for part in about)
    return zlib.crc32(payload, zlib.crc32(place))


def sync_directory(path: Path) -> None:
    """Make a rename in this directory survive a loss of power."""
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def on_network(path: Path, mounts: Iterable[str] | None = None) -> bool:
    """Return whether a path lies on a mount that other hosts may share.

    >>> mounts = ["/dev/sda / ext4 rw 0 0", "server:/home /home nfs4 rw 0 0"]
    >>> on_network(Path("/home/me/journal"), mounts), on_network(Path("/homes/me"), mounts)
    (True, False)
    """
    if mounts is None:
        try:
            mounts = Path("/proc/self/mounts").read_text().splitlines()
        except OSError:
            return True  # not Linux, or no /proc: take the mode that is safe anywhere
    target = path.absolute().resolve()
    longest, kind = -1, ""
    for line in mounts:
        fields = line.split()
        if len(fields) < 3:
            continue
        point = Path(fields[1].encode().decode("unicode_escape"))
        if len(point.parts) >= longest and target.is_relative_to(point):  # of two on one point the later one shows
            longest, kind = len(point.parts), fields[2]
    return kind in NETWORK_FILE_SYSTEMS or kind == "fuse" or kind.startswith("fuse.")


class DirectoryLock:
    """Keeps a second dispatcher from the same directory. The kernel lets go of it when the process ends."""

    def __init__(self, directory: Path) -> None:
        self._file = open_private(directory / "lock", "a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self._file.close()
            if not isinstance(error, BlockingIOError):
                raise JournalError(f"{directory} cannot be locked: {error}; choose another file system") from error
            raise JournalLockedError(str(directory), holder) from None
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
