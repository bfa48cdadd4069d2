"""Storage that may hang: what is asked of it is asked by threads that somebody waits for, but not for ever.

A call into a file system that does not answer cannot be ended. Its thread is left to it, and is a daemon, so that no
process waits for it at its end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

IDLE_S = 10.0  # after which a thread without work ends
MOST_THREADS = 8

Found = TypeVar("Found")


class StorageStalledError(Exception):
    """Storage did not answer in time."""


class PendingCall(Generic[Found]):
    """What a call will give."""

    def __init__(self, call: Callable[[], Found]) -> None:
        self._call = call
        self._done = threading.Event()
        self._value: Found
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:
            self._error = error
        finally:
            del self._call
            self._done.set()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_s: float) -> Found:
        """Return what the call gave, or raise what it raised; `StorageStalledError`: it has not come back."""
        if not self._done.wait(timeout_s):
            raise StorageStalledError(f"no answer within {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        return self._value


class PatientThreads:
    """Threads that make calls, started as they are needed; one that hangs is replaced."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._waiting: SimpleQueue[PendingCall[object]] = SimpleQueue()
        self._idle = self._running = 0

    def submit(self, call: Callable[[], Found]) -> PendingCall[Found]:
        pending = PendingCall(call)
        self._waiting.put(pending)  # type: ignore[arg-type]
        with self._lock:
            if self._idle < self._waiting.qsize() and self._running < MOST_THREADS:
                self._running += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return pending

    def _work(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            try:
                pending = self._waiting.get(timeout=IDLE_S)
            except Empty:
                with self._lock:
                    self._idle -= 1
                    if not self._waiting.empty():
                        continue  # it came just now, and nobody else was started for it
                    self._running -= 1
                return
            with self._lock:
                self._idle -= 1
            pending.run()
            del pending
