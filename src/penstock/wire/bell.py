"""A bell between threads."""

from __future__ import annotations

import contextlib
import os
import threading


class Bell:
    """Wakes a poll from any thread. The descriptor is closed once, and never written afterwards."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._open = True

    def ring(self) -> None:
        with self._lock:
            if self._open:
                os.eventfd_write(self.descriptor, 1)

    def quiet(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._open:
                os.eventfd_read(self.descriptor)

    def close(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                os.close(self.descriptor)
