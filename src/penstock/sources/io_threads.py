"""The threads that wait for remote storage.

One pool for the process, because what has to be bounded is the number of requests, not of files. Threads are daemons
and leave when they had nothing to do for a while: nothing has to be shut down, and nothing is left behind after the
last file was closed. They were chosen over one asyncio thread because fsspec's interface blocks; obstore's calls
release the GIL while they wait.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future, InvalidStateError
from typing import Any, TypeVar

T = TypeVar("T")

MAX_REQUESTS = 32  # 8 files opened ahead with 4 blocks each; S3 asks for some tens of connections per machine
IDLE_S = 1.0  # longer than the pause between two batches of requests, shorter than anybody's patience


class _Pool:
    def __init__(self) -> None:
        self._lock = threading.RLock()  # entered as such: `sources.interruptible_waits` says why
        self._changed = threading.Condition(self._lock)
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._threads = 0
        self._idle = 0

    def submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            self._jobs.append((future, call))
            if self._idle >= len(self._jobs):
                self._changed.notify()
            elif self._threads < MAX_REQUESTS:
                self._threads += 1
                threading.Thread(target=self._work, name="penstock-io", daemon=True).start()
        return future

    def _work(self) -> None:
        while (job := self._take()) is not None:
            future, call = job
            if not future.set_running_or_notify_cancel():
                continue
            _settle(future, call)
            del job, future, call  # an idle thread must not keep the last block alive

    def _take(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._lock:
            self._idle += 1
            try:
                if not self._jobs:
                    self._changed.wait(IDLE_S)
                if self._jobs:
                    return self._jobs.popleft()
                self._threads -= 1
                return None
            finally:
                self._idle -= 1


def _settle(future: Future[T], call: Callable[[], T]) -> None:
    try:
        try:
            result = call()
        except BaseException as error:  # whoever waits for the result gets it
            future.set_exception(error)
        else:
            future.set_result(result)
    except InvalidStateError:
        return  # abandoned meanwhile


_pool = _Pool()


def _after_fork() -> None:
    global _pool
    _pool = _Pool()  # a forked child has none of its parent's threads


os.register_at_fork(after_in_child=_after_fork)


def submit(call: Callable[[], T]) -> Future[T]:
    """Start a call that waits for storage."""
    return _pool.submit(call)


def abandon(future: Future[Any]) -> None:
    """Take a call back. One that has begun goes on by itself; who waits for it gets a `CancelledError` at once."""
    if future.cancel():
        return
    try:
        future.set_exception(CancelledError())
    except InvalidStateError:
        return  # it is done


def run_all(calls: Iterable[Callable[[], T]], *, deadline_s: float) -> list[T]:
    """Run calls side by side and return their results in order; the first failure, in order, is raised."""
    futures = [submit(call) for call in calls]
    try:
        return [future.result(deadline_s) for future in futures]
    finally:
        for future in futures:
            abandon(future)
