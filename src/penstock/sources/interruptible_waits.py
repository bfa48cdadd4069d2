"""Waiting for other threads in the thread that Ctrl-C interrupts.

KeyboardInterrupt may come out of any call in the main thread. `with` on a lock is safe from it; on a `Condition` it
runs Python functions, and an interrupt in them leaves the lock held for ever. So whoever reads in the user's thread
looks under a lock, and waits for a `Wakeup` while holding nothing.
"""

from __future__ import annotations

import threading


class Wakeup:
    """Wakes one thread, now or when it next waits. Waking it twice is waking it once."""

    __slots__ = ("_asleep",)

    def __init__(self) -> None:
        self._asleep = threading.Lock()  # locked: nothing happened since the last wait

    def wake(self) -> None:
        try:
            self._asleep.release()
        except RuntimeError:
            return  # it was woken already

    def wait(self, timeout_s: float) -> None:
        self._asleep.acquire(timeout=timeout_s)
