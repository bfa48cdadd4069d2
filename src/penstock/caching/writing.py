"""The writer: a thread of its own with a bounded number of bytes, so that nothing waits for a disk.

What makes elements offers frames. A frame that there is no room for ends its entry: the split is left whole, for a
later epoch. The first frame of an entry is taken only while the writer is at most half full: one entry that is written
to its end is worth more than two that are not.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from penstock.caching.entries import Bytes

LIMIT_BYTES = 64 << 20
GATHER_BYTES, GATHER_S = 2 << 20, 0.05  # what is written in one go: a thread that wakes for every frame costs as much
STALLED_S = 3.0  # one call into storage


class WriterThread:
    """Does what it is given, one after the other."""

    def __init__(self, name: str, on_error: Callable[[BaseException], None]) -> None:
        self._name = name
        self._on_error = on_error
        self._lock = threading.Condition()
        self._tasks: deque[tuple[Callable[[], None], int]] = deque()
        self._held = 0
        self._gathered = 0
        """Bytes that were taken since tasks were last begun."""
        self._at_once = False
        self._since: float | None = None
        """When the task at hand began."""
        self._thread: threading.Thread | None = None

    @property
    def held_bytes(self) -> int:
        return self._held

    @property
    def half_full(self) -> bool:
        return self._held > LIMIT_BYTES // 2

    @property
    def idle(self) -> bool:
        return not self._tasks and self._since is None

    def stalled(self) -> bool:
        """Say whether the task at hand takes longer than storage may."""
        since = self._since
        return since is not None and monotonic() - since > STALLED_S

    def offer(self, task: Callable[[], None], nbytes: int) -> bool:
        """Take a task that holds so many bytes; False: there is no room."""
        with self._lock:
            if self._held and self._held + nbytes > LIMIT_BYTES:
                return False
            self._gathered += nbytes
            self._take(task, nbytes, at_once=self._gathered >= GATHER_BYTES)
            return True

    def must(self, task: Callable[[], None]) -> None:
        """Take a task that holds nothing, such as the end of an entry, and do it at once."""
        with self._lock:
            self._take(task, 0, at_once=True)

    def _take(self, task: Callable[[], None], nbytes: int, *, at_once: bool) -> None:
        self._held += nbytes
        first = not self._tasks
        self._tasks.append((task, nbytes))
        self._at_once = self._at_once or at_once
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        elif first or at_once:
            self._lock.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was given is done; False: it was not in time."""
        with self._lock:
            self._at_once = True
            self._lock.notify_all()
            return self._lock.wait_for(lambda: not self._tasks and self._since is None, timeout_s)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._lock.wait_for(lambda: self._tasks, 5.0):
                    self._thread = None
                    return
                self._lock.wait_for(lambda: self._at_once, GATHER_S)
                self._at_once, self._gathered = False, 0
            while self._do_next():
                pass

    def _do_next(self) -> bool:
        """Do the first task; False: there is none."""
        with self._lock:
            if not self._tasks:
                return False
            task, nbytes = self._tasks.popleft()
            self._since = monotonic()
        try:
            task()
        except Exception as error:
            with suppress(Warning):  # made an error of by a filter: it is told to nobody here
                self._on_error(error)
        del task
        with self._lock:
            self._held -= nbytes
            self._since = None
            if not self._tasks:
                self._lock.notify_all()
        return True


class EntryWriting:
    """One entry on its way. `add` and `finish` are the maker's; the writer's thread does what they ask for.

    The maker may let go of it at any time (`abandon`), and so does storage that has no room for it.
    """

    def __init__(self, thread: WriterThread, sink: EntrySink) -> None:
        self._thread = thread
        self._sink = sink
        self.given_up = False
        self.elements = 0
        self.nbytes = 0

    def add(self, frame: Bytes, count: int, *, indices: Any = None, ids: Sequence[bytes] = ()) -> bool:
        """Take a frame; False: this entry will not be."""
        if self.given_up or self._sink.failed:
            return False
        if (not self.elements and self._thread.half_full) or not self._thread.offer(
            lambda: self._sink.write(frame, count, indices, ids), len(frame)
        ):
            self.abandon(followed=False)
            return False
        self.elements += count
        self.nbytes += len(frame)
        return True

    def finish(self, compute_s: float) -> None:
        """All elements were added: publish it."""
        if not self.given_up:
            self.given_up = True
            self._thread.must(lambda: self._sink.publish(compute_s))

    def abandon(self, *, followed: bool = True) -> None:
        if not self.given_up:
            self.given_up = True
            self._thread.must(lambda: self._sink.abandon(followed))


class EntrySink:
    """What the writer's thread does for one entry; `store` makes one."""

    failed = False

    def write(self, frame: Bytes, count: int, indices: Any, ids: Sequence[bytes]) -> None:
        raise NotImplementedError

    def publish(self, compute_s: float) -> None:
        raise NotImplementedError

    def abandon(self, followed: bool) -> None:
        raise NotImplementedError
