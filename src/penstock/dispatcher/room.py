"""Whether the disk under a journal still has room, asked by whoever wants to know if the dispatcher is ready.

A write that fails says so too, but a quiet service writes nothing, and a small row may find room in the log where the
next pipeline does not. So room is taken for a moment: that counts quotas, which free space does not.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from penstock.core.private_files import open_private

ROOM_BYTES = 8 << 20  # a piece of a blob, in the log and in the file
LOOK_S = 1.0


class JournalRoom:
    """See the module. Any thread may ask; the disk is looked at once a second at most."""

    def __init__(self, directory: Path | None, *, clock: Callable[[], float]) -> None:
        self._directory, self._clock = directory, clock
        self._lock = threading.Lock()
        self._looked_at = float("-inf")
        self._lacking = ""

    def lacking(self) -> str:
        """Return what keeps the journal from growing; empty: nothing does."""
        if self._directory is None:
            return ""
        with self._lock:
            if self._clock() - self._looked_at >= LOOK_S:
                self._lacking = _try_room(self._directory)
                self._looked_at = self._clock()
            return self._lacking


def _try_room(directory: Path) -> str:
    path = directory / "room"
    try:
        with open_private(path, "wb") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, ROOM_BYTES)
            finally:
                path.unlink(missing_ok=True)
    except OSError as error:
        return f"the journal in {directory} has no room for {ROOM_BYTES >> 20} MB: {error.strerror}; make room there"
    return ""
