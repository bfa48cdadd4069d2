"""Doing something once per process although several threads ask for it.

Built on `Future`, a promise, and on `dict.setdefault`, which is atomic: the first to put its promise in place does the
work, the others wait for that promise. Promises are kept by process id, because a forked child inherits the promises
of threads that it does not have.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


def once(promises: dict[int, Future[Any]], make: Callable[[], T]) -> T:
    """Return what `make` returned at the first call in this process. After a failure the next call tries again."""
    mine: Future[T] = Future()
    first = promises.setdefault(os.getpid(), mine)
    if first is not mine:
        return first.result()  # type: ignore[no-any-return]
    try:
        made = make()
    except BaseException as error:
        del promises[os.getpid()]
        mine.set_exception(error)
        raise
    mine.set_result(made)
    return made


@contextmanager
def one_at_a_time(turns: dict[int, Future[None]]) -> Iterator[None]:
    """Let one thread in; the others wait. Not reentrant."""
    mine: Future[None] = Future()
    while (before := turns.setdefault(os.getpid(), mine)) is not mine:
        before.result()
    try:
        yield
    finally:
        del turns[os.getpid()]
        mine.set_result(None)
