"""Blobs on disk: graphs and split lists as clients sent them, never looked into.

They have a file of their own, so that checking the journal does not take longer the more they are. A blob counts as
there once all its pieces are and their hash is its name. A blob nothing refers to is dropped after a while: clients
send theirs before they open a job, and the time between is theirs.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Set
from pathlib import Path

import msgspec

from penstock.core.ids import BlobHash
from penstock.dispatcher.database import Connect, Database, checksum, connect
from penstock.wire.blobs import HASH_CHARACTERS, MAX_BLOB_BYTES, PIECE_BYTES, expected_piece_bytes
from penstock.wire.messages import Answer, BlobPiece, Done, GetBlob, PutBlob, Refused

UNUSED_AFTER_S = 600.0  # as long as a job without readers is kept

_TABLES = (
    "CREATE TABLE blobs (hash TEXT PRIMARY KEY, size INTEGER NOT NULL, whole INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE pieces (hash TEXT NOT NULL, start INTEGER NOT NULL, piece BLOB NOT NULL, checksum INTEGER NOT NULL, "
    "UNIQUE (hash, start))",
)


class _Blob(msgspec.Struct):
    size: int
    missing: set[int]
    """The offsets of the pieces that have not come yet."""
    whole: bool
    used_at: float
    shown: dict[str, set[int]] = {}
    """Which pieces each principal has sent, as long as not all: who sent all of them has the blob."""
    owners: set[str] = set()
    by: str = ""
    """Whose allowance it counts against: the first that sent a piece of it."""


class BlobStore:
    """Writes are pending until `commit()`; when that fails, call `reopen()`."""

    def __init__(self, directory: Path | None, *, connect: Connect = connect) -> None:
        path = None if directory is None else directory / "blobs.db"
        remedy = "move this file away: clients send their blobs again"
        self._database = Database(path, _TABLES, connect=connect, check=False, remedy=remedy)
        self._blobs: dict[BlobHash, _Blob] = {}
        self._begun = False
        self.whole: set[BlobHash] = set()
        try:
            self._load()
        except BaseException:
            self._database.close()
            raise

    def _load(self) -> None:
        self._blobs, self.whole, self._begun = {}, set(), False
        kept = self._database.read("SELECT hash, size, whole FROM blobs", types=(str, int, int))
        for name, size, whole in kept:
            if len(name) != HASH_CHARACTERS or not 0 <= size <= MAX_BLOB_BYTES or whole not in (0, 1):
                raise self._database.corrupt(None, f"no blob has the name {name!r} and {size} bytes")
            missing = set(range(0, max(size, 1), PIECE_BYTES))
            self._blobs[name] = _Blob(size=size, missing=missing, whole=bool(whole), used_at=float("-inf"))
            if whole:
                self.whole.add(name)
        for name, start in self._database.read("SELECT hash, start FROM pieces", types=(str, int)):
            blob = self._blobs.get(name)
            if blob is None or start not in blob.missing:
                raise self._database.corrupt(None, f"a piece at {start} belongs to no blob")
            blob.missing.discard(start)
        for name in self.whole:
            if self._blobs[name].missing:
                raise self._database.corrupt(None, f"pieces of blob {name} are missing")

    def put(self, request: PutBlob, *, by: str, now: float) -> Answer:
        """Take a piece. Who sends a piece that is there already shows that it has it, too."""
        name, start, size, piece = request.hash, request.offset, request.size, request.piece
        if size > MAX_BLOB_BYTES:
            return _invalid(f"a blob of {size:,} bytes is above the limit of {MAX_BLOB_BYTES:,}")
        if expected_piece_bytes(start, size) != len(piece):
            return _invalid(f"no piece of {len(piece)} bytes belongs at {start} of a blob of {size}")
        if len(name) != HASH_CHARACTERS:
            return _invalid(f"a blob's name has {HASH_CHARACTERS} characters, not {len(name)}")
        blob = self._blobs.get(name)
        if blob is not None and not blob.whole and blob.size != size:
            self._drop(name)  # somebody erred; what has the right hash will tell who
            blob = None
        if blob is None:
            self._write("INSERT INTO blobs VALUES (?, ?, 0)", name, size)
            blob = _Blob(size=size, missing=set(range(0, max(size, 1), PIECE_BYTES)), whole=False, used_at=now)
            blob.by = by
            self._blobs[name] = blob
        blob.used_at = now
        if blob.size != size:
            return _invalid(f"blob {name} has {blob.size} bytes, not {size}")
        if start in blob.missing:
            self._write("INSERT INTO pieces VALUES (?, ?, ?, ?)", name, start, piece, checksum(piece, name, start))
            blob.missing.discard(start)
        elif by not in blob.owners and not self._is_piece(name, start, piece):
            return _invalid(f"this is not the piece of blob {name} at {start}")
        if by not in blob.owners:
            shown = blob.shown.setdefault(by, set())
            shown.add(start)
            if len(shown) == len(range(0, max(size, 1), PIECE_BYTES)):
                blob.owners.add(by)
                del blob.shown[by]
        if not blob.missing and not blob.whole:
            if self._hash(name) != name:
                self._drop(name)
                return _invalid(f"the pieces of blob {name} do not have that hash; send it again")
            self._write("UPDATE blobs SET whole = 1 WHERE hash = ?", name)
            blob.whole = True
            self.whole.add(name)
        return Done()

    def get(self, request: GetBlob, *, now: float) -> Answer:
        blob = self._blobs.get(request.hash)
        if blob is None or not blob.whole:
            return _invalid(f"there is no blob {request.hash} here")
        if expected_piece_bytes(request.offset, blob.size) is None:
            return _invalid(f"no piece of blob {request.hash} starts at {request.offset}")
        blob.used_at = now
        sql = "SELECT piece, checksum FROM pieces WHERE hash = ? AND start = ?"
        for piece, stored in self._database.read(sql, (request.hash, request.offset)):
            if isinstance(piece, bytes) and checksum(piece, request.hash, request.offset) == stored:
                return BlobPiece(size=blob.size, piece=piece)
            # Whoever has it sends it again, once the next request that needs it names it as missing.
            self._drop(request.hash)
            return _invalid(
                f"blob {request.hash} was damaged on the dispatcher's disk; its client has to send it again"
            )
        return _invalid(f"no piece of blob {request.hash} starts at {request.offset}")

    def has(self, name: BlobHash, owner: str) -> bool:
        """Whether somebody has sent all of a blob since we started: it does not only know its name."""
        return name in self.whole and owner in self._blobs[name].owners

    def bytes_of(self, owner: str) -> int:
        """Return the size of all blobs that somebody was the first to send since we started."""
        return sum(blob.size for blob in self._blobs.values() if blob.by == owner)

    def _is_piece(self, name: BlobHash, start: int, piece: bytes) -> bool:
        sql = "SELECT piece FROM pieces WHERE hash = ? AND start = ?"
        return any(stored == piece for (stored,) in self._database.read(sql, (name, start)))

    def drop_unused(self, in_use: Set[BlobHash], *, now: float) -> int:
        """Drop what nothing refers to and nobody has touched for a while. The clock of untouched ones starts here."""
        unused = []
        for name, blob in self._blobs.items():
            if name in in_use or blob.used_at == float("-inf"):
                blob.used_at = now
            elif now - blob.used_at >= UNUSED_AFTER_S:
                unused.append(name)
        for name in unused:
            self._drop(name)
        return len(unused)

    def commit(self) -> None:
        if self._begun:
            self._execute("COMMIT")
            self._begun = False

    def reopen(self) -> None:
        self._database.reopen()
        self._load()

    def close(self) -> None:
        self._database.close()

    def _hash(self, name: BlobHash) -> str:
        digest = hashlib.blake2b(digest_size=20)
        for start in range(0, max(self._blobs[name].size, 1), PIECE_BYTES):
            sql = "SELECT piece FROM pieces WHERE hash = ? AND start = ?"
            for (piece,) in self._database.read(sql, (name, start), types=(bytes,)):
                digest.update(piece)
        return digest.hexdigest()

    def _drop(self, name: BlobHash) -> None:
        self._write("DELETE FROM pieces WHERE hash = ?", name)
        self._write("DELETE FROM blobs WHERE hash = ?", name)
        del self._blobs[name]
        self.whole.discard(name)

    def _write(self, sql: str, *parameters: int | str | bytes) -> None:
        if not self._begun:
            self._execute("BEGIN IMMEDIATE")
            self._begun = True
        self._execute(sql, *parameters)

    def _execute(self, sql: str, *parameters: int | str | bytes) -> None:
        try:
            self._database.connection.execute(sql, parameters)
        except sqlite3.Error as error:
            raise self._database.write_failed(error) from error


def _invalid(reason: str) -> Refused:
    return Refused(reason=reason, kind="RefusedError")
