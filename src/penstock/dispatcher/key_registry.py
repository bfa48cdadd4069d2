"""Which keys a service knows, and whose they are.

The registry is one file that its owner alone reads and `penstock keys` changes; a dispatcher looks at it again and
again. It holds verifiers, never secrets. A record says from when on a key is of no use, so that a key and its successor
are valid together for a while. Beside the file there are the keys that a service was started with, and those that
agents make for their runners, each as long as its runner lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from penstock.core.errors import InvalidArgumentError
from penstock.wire.credentials import KnownKey, read_private, write_private
from penstock.wire.principals import Principal, Role

LOOK_EVERY_S = 0.5

_WHAT = "a registry of keys, as `penstock keys` writes it"


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is kept of a key. Times are seconds since 1970."""

    name: str
    role: Role
    verifier: str
    made: float
    revoked: float | None = None
    """When it ends, or ended; None: it has no end."""

    def __post_init__(self) -> None:
        Principal(self.role, self.name)

    @property
    def principal(self) -> Principal:
        return Principal(self.role, self.name)

    def valid(self, now: float) -> bool:
        return self.revoked is None or now < self.revoked


class KeyFile(msgspec.Struct, frozen=True, kw_only=True):
    keys: tuple[KeyRecord, ...] = ()

    @staticmethod
    def read(path: str | os.PathLike[str]) -> KeyFile:
        return read_private(path, KeyFile, _WHAT)


@contextlib.contextmanager
def changed_keys(path: Path) -> Iterator[list[KeyRecord]]:
    """Give the records to change, alone; they are written when the block ends without an exception."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path.with_name(path.name + ".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        records = list(KeyFile.read(path).keys) if path.exists() else []
        yield records
        write_private(path, KeyFile(keys=tuple(records)))
    finally:
        os.close(lock)


class KeyChanges(msgspec.Struct, frozen=True):
    """What became of the keys since the last look."""

    made: tuple[KnownKey, ...] = ()
    revoked: tuple[KnownKey, ...] = ()
    gone: frozenset[Principal] = frozenset()
    """Those who have no key any more."""

    def __bool__(self) -> bool:
        return bool(self.made or self.revoked)


class KeyRegistry:
    """Changed by the dispatcher's loop alone; any thread may ask."""

    def __init__(self, path: Path | None = None, known: Iterable[KnownKey] = ()) -> None:
        self._path = path
        self._known = {key.verifier: key.principal for key in known}
        self._records: tuple[KeyRecord, ...] = ()
        self._mark: tuple[int, int, int] | None = None
        self._looked_at = float("-inf")
        self._runners: dict[str, Principal] = {}
        self._key_of: dict[Principal, str] = {}
        self.problem = ""
        """Why the file could not be read; then what was read last counts."""
        self._valid = dict(self._known)
        self.look(0.0)
        if self.problem:
            raise InvalidArgumentError(self.problem)

    def principal_of(self, verifier: str) -> Principal | None:
        """Return who has the key of this verifier; None: nobody that is let in."""
        found = self._valid.get(verifier)
        return found if found is not None else self._runners.get(verifier)

    def valid(self, principal: Principal) -> bool:
        """Whether somebody has a key that is let in."""
        return principal in self._valid.values() or principal in self._key_of

    def expect(self, verifier: str, runner: Principal) -> None:
        """Let a runner in; the key that it had before is of no use any more, and another runner's is not for it."""
        if verifier not in self._runners:
            self.forget(runner)
            self._runners[verifier] = runner
            self._key_of[runner] = verifier

    def forget(self, runner: Principal) -> None:
        self._runners.pop(self._key_of.pop(runner, ""), None)

    def look(self, now: float) -> KeyChanges:
        """Look at the file, at most twice a second; return what has changed. `now` is any clock that goes forward."""
        if self._path is None or now - self._looked_at < LOOK_EVERY_S:
            return KeyChanges()
        self._looked_at = now
        self._read(self._path)
        today = time.time()
        before, valid = self._valid, dict(self._known)
        for record in self._records:
            if record.valid(today):
                valid[record.verifier] = record.principal
            else:
                valid.pop(record.verifier, None)
        if valid == before:
            return KeyChanges()
        self._valid = valid
        left = frozenset(valid.values())
        revoked = [KnownKey(key, who) for key, who in before.items() if valid.get(key) != who]
        return KeyChanges(
            made=tuple(KnownKey(key, who) for key, who in valid.items() if before.get(key) != who),
            revoked=tuple(revoked),
            gone=frozenset(key.principal for key in revoked) - left,
        )

    def _read(self, path: Path) -> None:
        try:
            status = path.stat()
            mark = (status.st_mtime_ns, status.st_ino, status.st_size)
            if mark == self._mark:
                return
            self._records, self._mark, self.problem = KeyFile.read(path).keys, mark, ""
        except FileNotFoundError:
            # Before the first key is made there is none. One that is taken away opens nothing and closes nothing.
            return
        except (OSError, InvalidArgumentError) as error:
            self.problem = str(error)
