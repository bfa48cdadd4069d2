"""The journal: what the dispatcher has decided, on disk before anybody is told.

Rules. A *position* counts the events ever journaled. A row holds the events of one group commit as opaque bytes, with
the positions before and after them; each row begins where the one before ended. A snapshot stands for all rows up to
its position, which are deleted in the same transaction: so a restart reads one snapshot and a bounded number of rows.

A last row with a wrong checksum is dropped like a torn write; any other damage is a `JournalCorruptError`. A write that
fails leaves memory and disk in doubt: call `reopen()` and `load()`, and decide again on what is there.
"""

from __future__ import annotations

import secrets
import sqlite3
from pathlib import Path

import msgspec

from penstock.dispatcher.database import Connect, Database, DirectoryLock, checksum, connect

SNAPSHOT_EVENTS = 50_000
SNAPSHOT_BYTES = 64 << 20
MEMORY_SNAPSHOT_BYTES = 64 << 10  # without a directory rows are memory; no less than a snapshot, which costs as much

_TABLES = (
    "CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL, checksum INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE rows (position INTEGER PRIMARY KEY, previous INTEGER NOT NULL, events BLOB NOT NULL, "
    "checksum INTEGER NOT NULL)",
    "CREATE TABLE snapshots (position INTEGER PRIMARY KEY, state BLOB NOT NULL, checksum INTEGER NOT NULL)",
)


class Recovered(msgspec.Struct, frozen=True, kw_only=True):
    """What the journal holds: the state to begin with (None: the empty one), and the rows to apply after it."""

    snapshot: bytes | None
    rows: tuple[bytes, ...]
    torn: bool
    """Whether an end was dropped: half a write, or a last row that is not what was written."""


class Journal:
    """The event log of one dispatcher in a directory of its own (None: in memory, for as long as the process lives)."""

    def __init__(
        self, directory: Path | None, *, connect: Connect = connect, snapshot_events: int = SNAPSHOT_EVENTS
    ) -> None:
        self.directory, self._snapshot_events = directory, snapshot_events
        self.position = 0
        self._snapshot_position = self._snapshot_bytes = self._bytes_since_snapshot = 0
        self._lock: DirectoryLock | None = None
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = DirectoryLock(directory)
        try:
            path = None if directory is None else directory / "journal.db"
            self._database = Database(path, _TABLES, connect=connect)
            try:
                self.identity = self._identity()
            except BaseException:
                self._database.close()
                raise
        except BaseException:
            if self._lock is not None:
                self._lock.close()
            raise

    def _identity(self) -> str:
        """Return the service's own name, drawn once: positions of two services cannot be compared."""
        found = self.recall("identity")
        if found is None:
            found = secrets.token_hex(8)
            self.remember("identity", found)
        return found

    def load(self) -> Recovered:
        """Read everything; the position is then that of the last whole row."""
        snapshot = None
        position = 0
        for at, state, stored in self._database.read("SELECT position, state, checksum FROM snapshots"):
            if snapshot is not None:
                raise self._database.corrupt(at, "more than one snapshot")
            if not isinstance(state, bytes) or checksum(state, "snapshot", at) != stored:
                raise self._database.corrupt(at, "the snapshot is not what was written")
            snapshot, position = state, at
        self._snapshot_position, self._snapshot_bytes = position, len(snapshot or b"")
        rows = self._database.read("SELECT position, previous, events, checksum FROM rows ORDER BY position")
        payloads: list[bytes] = []
        torn = self._database.torn
        for number, (at, previous, events, stored) in enumerate(rows):
            whole = isinstance(events, bytes) and isinstance(previous, int)
            if not whole or checksum(events, "row", previous, at) != stored:
                if number < len(rows) - 1:
                    raise self._database.corrupt(at, "a row is not what was written, and rows follow it")
                self._write("DELETE FROM rows WHERE position = ?", at)
                torn = True
                break
            if previous != position or at <= previous:
                raise self._database.corrupt(at, f"a row follows {previous}, but the one before ends at {position}")
            position = at
            payloads.append(events)
        self.position = position
        self._bytes_since_snapshot = sum(map(len, payloads))
        return Recovered(snapshot=snapshot, rows=tuple(payloads), torn=torn)

    def append(self, events: bytes, *, to: int) -> None:
        """Write the events that lead to position `to`, and return once they are on disk."""
        assert to > self.position, f"a row to {to} cannot follow position {self.position}"
        stored = checksum(events, "row", self.position, to)
        self._write("INSERT INTO rows VALUES (?, ?, ?, ?)", to, self.position, events, stored)
        self.position = to
        self._bytes_since_snapshot += len(events)

    @property
    def snapshot_is_due(self) -> bool:
        most_bytes = SNAPSHOT_BYTES
        if self.directory is None:
            most_bytes = max(MEMORY_SNAPSHOT_BYTES, self._snapshot_bytes)
        events = self.position - self._snapshot_position
        return events >= self._snapshot_events or self._bytes_since_snapshot >= most_bytes

    def snapshot(self, state: bytes) -> None:
        """Replace everything up to the present position by the state it led to."""
        at = self.position
        self._write("BEGIN IMMEDIATE")
        self._write("DELETE FROM snapshots")
        self._write("DELETE FROM rows WHERE position <= ?", at)
        self._write("INSERT INTO snapshots VALUES (?, ?, ?)", at, state, checksum(state, "snapshot", at))
        self._write("COMMIT")
        self._snapshot_position, self._snapshot_bytes, self._bytes_since_snapshot = at, len(state), 0

    def remember(self, key: str, value: str) -> None:
        """Keep something about the service beside its events, such as the port it had."""
        self._write("INSERT OR REPLACE INTO about VALUES (?, ?, ?)", key, value, checksum(value.encode(), "about", key))

    def recall(self, key: str) -> str | None:
        for value, stored in self._database.read("SELECT value, checksum FROM about WHERE key = ?", (key,)):
            if checksum(str(value).encode(), "about", key) != stored:
                raise self._database.corrupt(None, f"what was remembered as {key!r} is not what was written")
            return str(value)
        return None

    def reopen(self) -> None:
        self._database.reopen()

    def close(self) -> None:
        self._database.close()
        if self._lock is not None:
            self._lock.close()

    def _write(self, sql: str, *parameters: int | str | bytes) -> None:
        try:
            self._database.connection.execute(sql, parameters)
        except sqlite3.Error as error:
            raise self._database.write_failed(error) from error
