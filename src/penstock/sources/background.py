"""Making things ahead, a bounded number of them: on one thread, or several side by side in order.

The thread ends with its iterator, at `close`, or when the `Background` is forgotten: it never refers to it, and closing
an iterator that waits for something far away goes through `abort`.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from penstock.sources.interruptible_waits import Wakeup

T = TypeVar("T")
Made = TypeVar("Made")

WAIT_S = 5.0  # how long a wait lasts before it looks again; not a deadline: storage may take as long as it takes
CLOSE_WAIT_S = 10.0


def made_ahead(make: Callable[[T], Made], items: Iterable[T], *, at_once: int) -> Iterator[Made]:
    """Yield what is made of each item, in order, while the next ones are being made; raises in an item's place."""
    due = iter(items)
    under_way: deque[Future[Made]] = deque()
    with ThreadPoolExecutor(at_once, thread_name_prefix="penstock-making") as threads:
        try:
            while True:
                while len(under_way) < at_once and (item := next(due, None)) is not None:
                    under_way.append(threads.submit(make, item))
                if not under_way:
                    return
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()


class Background(Generic[T]):
    """`next()` gives what an iterator on its own thread makes, and raises what that raised, in its place."""

    def __init__(self, items: Iterator[T], *, depth: int, abort: Callable[[], None], name: str) -> None:
        self._shared: _Shared[T] = _Shared(depth, abort)
        self._thread = threading.Thread(target=_produce, args=(self._shared, items), name=name, daemon=True)
        self._thread.start()
        self._forgotten = weakref.finalize(self, self._shared.stop)

    def next(self) -> T | None:
        """Return the next one, waiting for it; None at the end."""
        return self._shared.take()

    def close(self) -> None:
        """Stop making more; returns when the thread has ended, or is stuck in what it cannot be called back from."""
        self._forgotten()
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_WAIT_S)


class _Shared(Generic[T]):
    """The maker waits for room, and the reader to be woken: see `sources.interruptible_waits`."""

    def __init__(self, depth: int, abort: Callable[[], None]) -> None:
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)
        self._reader = Wakeup()
        self._depth, self._abort = depth, abort
        self._made: deque[T] = deque()
        self._error: BaseException | None = None
        self._ended = self._stopped = False

    def take(self) -> T | None:
        while True:
            with self._lock:
                if self._made:
                    self._room.notify()
                    return self._made.popleft()
                if self._error is not None:
                    raise self._error
                if self._ended or self._stopped:
                    return None
            self._reader.wait(WAIT_S)

    def put(self, item: T) -> bool:
        """Add one when there is room; False if nobody wants more."""
        with self._lock:
            while len(self._made) >= self._depth and not self._stopped:
                self._room.wait(WAIT_S)
            if not self._stopped:
                self._made.append(item)
                self._reader.wake()
            return not self._stopped

    def end(self, error: BaseException | None) -> None:
        with self._lock:
            self._ended, self._error = True, error
            self._reader.wake()

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            self._made.clear()
            self._reader.wake()
            self._room.notify()
        self._abort()


def _produce(shared: _Shared[T], items: Iterator[T]) -> None:
    error: BaseException | None = None
    try:
        for item in items:
            if not shared.put(item):
                break
            del item  # it belongs to the reader now: this thread must not keep its memory while it waits
    except BaseException as raised:  # the reader raises it in its own thread
        error = raised
    finally:
        close = getattr(items, "close", None)
        if close is not None:
            close()
        shared.end(error)
