"""Threads that are made when needed, kept for reuse, and never hold up the end of the process.

`_ready` is only waited on and notified; the lock is entered as such, for the reason that
`sources.interruptible_waits` gives.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic

IDLE_S = 5.0  # an idle thread ends after this: a closed pipeline leaves nothing behind


class ThreadPool:
    """Runs callables on daemon threads; a callable that never returns blocks neither `close` nor the exit."""

    def __init__(self, name: str = "penstock") -> None:
        self._name = name
        self._lock = threading.RLock()
        self._ready = threading.Condition(self._lock)
        self._tasks: deque[Callable[[], None]] = deque()
        self._idle = 0
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._made = 0

    def submit(self, task: Callable[[], None]) -> None:
        """Run `task` soon on some thread. Tasks handle their own exceptions."""
        with self._lock:
            if self._closed:
                return
            self._tasks.append(task)
            if self._idle >= len(self._tasks):
                self._ready.notify()
                return
            self._made += 1
            thread = threading.Thread(target=self._run, name=f"{self._name}-{self._made}", daemon=True)
            self._threads.add(thread)
        thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
                while not self._tasks:
                    if self._closed or not self._ready.wait(IDLE_S):
                        if self._tasks:
                            break
                        self._idle -= 1
                        self._threads.discard(threading.current_thread())
                        return
                self._idle -= 1
                task = self._tasks.popleft()
            task()
            del task  # it may hold a pipeline alive

    def close(self, wait_s: float = 1.0) -> list[str]:
        """End idle threads, wait a moment for busy ones, return the names of those still in a task."""
        with self._lock:
            self._closed = True
            self._tasks.clear()
            self._ready.notify_all()
            threads = [thread for thread in self._threads if thread is not threading.current_thread()]
        deadline = monotonic() + wait_s
        for thread in threads:
            if thread.is_alive():  # else an interrupt kept it from starting
                thread.join(max(0.0, deadline - monotonic()))
        return [thread.name for thread in threads if thread.is_alive()]
