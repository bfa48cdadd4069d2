"""Ctrl-C and signal handlers come at any place: nothing hangs, nothing is lost, no thread is left behind."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
import penstock.api.iteration
import penstock.runtime.iterator
import penstock.sources.background

PLACES = (os.path.dirname(penstock.runtime.__file__), penstock.api.iteration.__file__, threading.__file__)
READ = 4
LEAVE_S = 10.0


def briefly(x: int) -> int:
    time.sleep(0.0005)
    return x


def within_a_threads_start(frame: FrameType | None) -> bool:
    """The standard library's own: an interrupt there may keep the thread from starting, and nobody can mend it."""
    while frame is not None:
        if frame.f_code is threading.Thread.start.__code__:
            return True
        frame = frame.f_back
    return False


class SignalAt:
    """Acts at the n-th place of the reader's thread at which the interpreter looks for signals.

    Those are the entry of a function and the return from one written in C: exactly the events of a profile function.
    """

    def __init__(self, number: int, act: Callable[[], None], places: tuple[str, ...] = PLACES) -> None:
        self._left, self._act, self._places = number, act, places
        self.came = False

    def __enter__(self) -> SignalAt:
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, _: Any) -> None:
        if self.came or event not in ("call", "c_return") or not frame.f_code.co_filename.startswith(self._places):
            return
        if within_a_threads_start(frame):
            return
        self._left -= 1
        if self._left < 0:
            self.came = True
            self._act()


def interrupt() -> None:
    raise KeyboardInterrupt


def threads_made_since(before: set[threading.Thread]) -> set[threading.Thread]:
    """Return those that are still there after a while."""
    deadline = time.monotonic() + LEAVE_S
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.001)
    return left


@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("threads", [1, 2])
def test_an_interrupt_anywhere_neither_hangs_nor_loses_an_element(threads: int) -> None:
    ds = ps.range(1000).map(briefly, threads=threads)
    before = set(threading.enumerate())
    came, place = True, 0
    while came:
        taken = 0
        iterator = ds.iterator(threads=2)
        with SignalAt(place, interrupt) as signal:
            try:
                for _ in iterator:
                    taken += 1
                    if taken == READ:
                        break
                iterator.close()
            except KeyboardInterrupt:
                pass
        iterator.close()
        state = iterator.state_dict()
        with ds.iterator(threads=1) as again:
            again.load_state_dict(state)
            assert next(again) == taken, f"interrupted at place {place}"
        assert not threads_made_since(before), f"interrupted at place {place}"
        came, place = signal.came, place + 1
    assert place > 50


@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_signal_handler_may_close_what_it_interrupts(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.runtime.iterator, "CLOSE_WAIT_S", 0.005)  # for threads that wait for this very one
    ds = ps.range(1000).map(briefly, threads=threads).prefetch(2)
    before = set(threading.enumerate())
    came, place = True, 0
    while came:
        iterator = ds.iterator(threads=2)
        read = []
        with SignalAt(place, iterator.close) as signal:
            for x in iterator:
                read.append(x)
                if len(read) == READ:
                    break
            iterator.close()
        assert read == list(range(len(read)))
        assert not threads_made_since(before), f"closed at place {place}"
        came, place = signal.came, place + 1
    assert place > 50


@pytest.mark.timeout(240)
def test_an_interrupt_anywhere_in_reading_columns_does_not_hang(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": range(2000)}), tmp_path / "t.parquet", row_group_size=500)
    ds = ps.read_parquet(str(tmp_path / "t.parquet"), batch=100)
    before = set(threading.enumerate())
    came, place = True, 0
    while came:
        iterator = ds.iterator(threads=1)
        with SignalAt(place, interrupt, (*PLACES, penstock.sources.background.__file__)) as signal:
            try:
                for _ in zip(range(READ), iterator):
                    pass
                iterator.close()
            except KeyboardInterrupt:
                pass
        iterator.close()
        assert not threads_made_since(before), f"interrupted at place {place}"
        came, place = signal.came, place + 1
    assert place > 50
