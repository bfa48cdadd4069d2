"""Memory that is used again: when the last view is gone, and not before."""

from __future__ import annotations

import threading

import numpy as np

from penstock.sources.recycled import IDLE_BLOCKS, LARGE_BYTES, RecycledMemory

COUNT = LARGE_BYTES // 8


def place(array):
    return array.ctypes.data


def test_memory_is_used_again_when_the_last_view_is_gone():
    memory = RecycledMemory()
    first = memory.empty(COUNT, np.int64)
    where, view = place(first), first[10:20].reshape(2, 5)
    del first
    assert place(memory.empty(COUNT, np.int64)) != where, "a view is still held"
    del view
    assert place(memory.empty(COUNT + COUNT // 10, np.float64)) == where


def test_what_is_small_does_not_hold_what_is_large():
    memory = RecycledMemory()
    large = memory.empty(8 * COUNT, np.int64)
    where = place(large)
    del large
    assert place(memory.empty(COUNT, np.int64)) != where


def test_no_more_than_a_few_blocks_lie_idle():
    memory = RecycledMemory()
    held = [memory.empty(COUNT << step, np.int8) for step in range(3, 3 + IDLE_BLOCKS + 4)]
    assert len(memory._blocks) == len(held)
    held.clear()
    kept = memory.empty(COUNT << 9, np.int8)
    assert len(memory._blocks) == 1
    assert len(kept) == COUNT << 9


def test_threads_that_ask_at_once_are_given_different_memory():
    memory, wrong = RecycledMemory(), []

    def work(number: int) -> None:
        for _ in range(50):
            own = memory.joined([np.full(COUNT, number), np.full(3, number)], np.int64)
            if not (own == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_nothing_joined_is_empty():
    assert len(RecycledMemory().joined([], np.int64)) == 0
