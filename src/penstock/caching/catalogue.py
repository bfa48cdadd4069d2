"""What is known of the entries of a location: how large, what they save, when they were used. SQLite, one file.

It is not what decides whether an entry is there: its file is. What the catalogue says can be had again by listing the
location (`CacheFolder.rebuild`), so that it is written without waiting for the disk, and made anew when it is damaged.

Bytes are reserved before they are written: what is published and what is being written stay, together, within the
capacity. What must go for that is what saves least by the byte, of what saves less by the byte than what comes.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import time

import msgspec

from penstock.caching.evicting import KeptValue, choose_kept

BUSY_S = 3.0
RESERVED_FOR_S = 3600.0  # of a writer that has not been heard of since
ADVANTAGE = 1.1  # what comes must save so much more by the byte than what goes: else equals would push each other out

_TABLES = """
CREATE TABLE IF NOT EXISTS entries (
    name TEXT PRIMARY KEY, prefix TEXT NOT NULL, label TEXT NOT NULL, nbytes INTEGER NOT NULL,
    elements INTEGER NOT NULL, compute_s REAL NOT NULL, made_at_s REAL NOT NULL, used_at_s REAL NOT NULL,
    uses INTEGER NOT NULL DEFAULT 0, pinned INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS reserved (
    writer TEXT PRIMARY KEY, pid INTEGER NOT NULL, nbytes INTEGER NOT NULL, at_s REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class CatalogueEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry."""

    name: str
    prefix: str
    label: str
    nbytes: int
    elements: int
    compute_s: float
    made_at_s: float
    used_at_s: float
    uses: int = 0
    pinned: bool = False

    @property
    def saves_s_per_byte(self) -> float:
        """What a use of it saves, by the byte that it takes."""
        return self.compute_s / max(1, self.nbytes)


_COLUMNS = "name, prefix, label, nbytes, elements, compute_s, made_at_s, used_at_s, uses, pinned"


class Catalogue:
    """Any thread may use it, and any process of the host."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._open()

    def _open(self) -> None:
        try:
            self._database = self._connected()
        except sqlite3.DatabaseError:
            self._path.unlink(missing_ok=True)
            self._database = self._connected()

    def _connected(self) -> sqlite3.Connection:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.close(descriptor)
        database = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        database.execute("PRAGMA synchronous=OFF")
        database.executescript(_TABLES)
        return database

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")

    def close(self) -> None:
        with self._lock:
            self._database.close()

    # Room

    def reserve(
        self, writer: str, nbytes: int, *, capacity_bytes: int, saves_s_per_byte: float, evict: Callable[[str], bool]
    ) -> bool:
        """Reserve bytes for a writer, in place of what it had; False: there is no room that is worth it.

        `evict` removes an entry's file; False: it is being read.
        """
        with self._transaction() as database:
            now = time()
            for other, pid, at_s in database.execute("SELECT writer, pid, at_s FROM reserved").fetchall():
                if other != writer and (not _is_alive(pid) or at_s < now - RESERVED_FOR_S):
                    database.execute("DELETE FROM reserved WHERE writer = ?", (other,))
            (others,) = database.execute(
                "SELECT COALESCE(SUM(nbytes), 0) FROM reserved WHERE writer != ?", (writer,)
            ).fetchone()
            (used,) = database.execute("SELECT COALESCE(SUM(nbytes), 0) FROM entries").fetchone()
            over = used + others + nbytes - capacity_bytes
            if over > 0:
                over -= self._make_room(database, nbytes, over, saves_s_per_byte, evict)
            if over > 0:
                return False
            database.execute("INSERT OR REPLACE INTO reserved VALUES (?, ?, ?, ?)", (writer, os.getpid(), nbytes, now))
            return True

    def _make_room(
        self,
        database: sqlite3.Connection,
        nbytes: int,
        over: int,
        saves_s_per_byte: float,
        evict: Callable[[str], bool],
    ) -> int:
        """Evict what saves less than what comes; return how many bytes that were."""
        rows = database.execute("SELECT name, nbytes, compute_s FROM entries WHERE pinned = 0").fetchall()
        there = [KeptValue(name, nbytes, compute_s) for name, nbytes, compute_s in rows]
        asked = KeptValue("", nbytes, saves_s_per_byte * nbytes / ADVANTAGE)
        # What is there may keep its bytes but for those that are over, if what comes is to fit.
        room = sum(entry.nbytes for entry in there) + nbytes - over
        stay = choose_kept([*there, asked], room)
        if asked.name not in stay:
            return 0
        freed = 0
        for entry in there:
            if entry.name not in stay and evict(entry.name):
                database.execute("DELETE FROM entries WHERE name = ?", (entry.name,))
                freed += entry.nbytes
        return freed

    def release(self, writer: str) -> None:
        with self._transaction() as database:
            database.execute("DELETE FROM reserved WHERE writer = ?", (writer,))

    # Entries

    def add(self, entry: CatalogueEntry, writer: str | None = None) -> None:
        """Note an entry that is there now; what its writer had reserved is free."""
        with self._transaction() as database:
            if writer is not None:
                database.execute("DELETE FROM reserved WHERE writer = ?", (writer,))
            database.execute(
                f"INSERT OR REPLACE INTO entries ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(entry.name, entry.prefix, entry.label, entry.nbytes, entry.elements, entry.compute_s),
                    *(entry.made_at_s, entry.used_at_s, entry.uses, int(entry.pinned)),
                ),
            )

    def remove(self, name: str) -> None:
        with self._transaction() as database:
            database.execute("DELETE FROM entries WHERE name = ?", (name,))

    def used(self, names: list[str]) -> None:
        """Count uses of entries."""
        with self._transaction() as database:
            database.executemany(
                "UPDATE entries SET uses = uses + 1, used_at_s = ? WHERE name = ?", [(time(), name) for name in names]
            )

    def pin(self, prefix: str, pinned: bool) -> int:
        """Keep the entries whose prefix begins so from being evicted, or no longer; return how many there are."""
        with self._transaction() as database:
            found = database.execute("UPDATE entries SET pinned = ? WHERE prefix LIKE ? || '%'", (int(pinned), prefix))
            return found.rowcount

    def entries(self) -> list[CatalogueEntry]:
        with self._lock:
            rows = self._database.execute(f"SELECT {_COLUMNS} FROM entries ORDER BY prefix, name").fetchall()
        names = [column.strip() for column in _COLUMNS.split(",")]
        return [CatalogueEntry(**{**dict(zip(names, row)), "pinned": bool(row[-1])}) for row in rows]

    def used_bytes(self) -> int:
        with self._lock:
            (used,) = self._database.execute("SELECT COALESCE(SUM(nbytes), 0) FROM entries").fetchone()
            return int(used)

    def names(self) -> set[str]:
        with self._lock:
            return {name for (name,) in self._database.execute("SELECT name FROM entries")}

    # What else is remembered of a location

    def fact(self, name: str) -> str | None:
        with self._lock:
            found = self._database.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if found is None else str(found[0])

    def facts(self, beginning: str) -> list[tuple[str, str]]:
        """Return name and value of those whose names begin so."""
        with self._lock:
            return self._database.execute(
                "SELECT name, value FROM facts WHERE name LIKE ? || '%' ORDER BY name", (beginning,)
            ).fetchall()

    def remember(self, name: str, value: str) -> None:
        with self._transaction() as database:
            database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
