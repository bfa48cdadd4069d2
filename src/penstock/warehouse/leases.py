"""Leases on versions of a table: while a session holds one, what its version needs is not removed.

A lease is a file beside the table that says which version and until when. Whoever holds it renews it; a lease whose
holder was killed runs out by itself.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self
from uuid import uuid4

import msgspec

from penstock.warehouse.features import publish

LEASES = "leases"
LEASE_S = 600.0


class LeaseRecord(msgspec.Struct, frozen=True):
    """Which version is held, and until when, in seconds since 1970."""

    version: int
    until_s: float
    onward: bool = False
    """Whether all that is committed after the version is held too."""


class SnapshotLease:
    """Holds a version of a table: `with table.lease(version): ...`. It is renewed until it is released."""

    def __init__(self, folder: Path, version: int, lease_s: float = LEASE_S, *, onward: bool = False) -> None:
        """`onward`: what comes after the version is held too, for who follows the table."""
        self.version = version
        self._onward = onward
        self._lock = threading.Lock()
        self._path = folder / LEASES / f"{uuid4().hex}.json"
        self._lease_s = lease_s
        self._released = threading.Event()
        self._renew()
        self._thread = threading.Thread(target=self._keep, name="penstock-lease", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        with self._lock:
            record = LeaseRecord(self.version, time.time() + self._lease_s, self._onward)
            publish(self._path, msgspec.json.encode(record))

    def move(self, version: int) -> None:
        """Hold another version instead."""
        self.version = version
        self._renew()

    def _keep(self) -> None:
        while not self._released.wait(self._lease_s / 3):
            self._renew()

    def release(self) -> None:
        """Let the version go."""
        self._released.set()
        self._thread.join()
        self._path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


def leases_held(folder: Path, now_s: float) -> list[LeaseRecord]:
    """Return what is held; leases that have run out are removed."""
    held: list[LeaseRecord] = []
    for path in (folder / LEASES).glob("[0-9a-f]*.json"):
        try:
            record = msgspec.json.decode(path.read_bytes(), type=LeaseRecord)
        except FileNotFoundError:
            continue
        if record.until_s >= now_s:
            held.append(record)
        else:
            path.unlink(missing_ok=True)
    return held
