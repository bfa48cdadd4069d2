"""The window of rounds that trainers share."""

from __future__ import annotations

import pytest

from penstock.stream.window import Entry, Window
from tests.stream.records import cut_at


def window_of(*counts: int, first: int = 0) -> Window:
    window = Window(cut_at(first), first)
    for count in counts:
        window.add(Entry(window.end, count, cut_at(window.end + count), 10 * count))
    return window


def test_an_empty_window_knows_where_making_goes_on() -> None:
    window = window_of(first=7)
    assert (len(window), window.first, window.end, window.end_cut, window.nbytes) == (0, 7, 7, cut_at(7), 0)
    assert window.holding(7) is None and window.holding(6) is None


def test_the_end_stays_known_when_all_rounds_are_gone() -> None:
    window = window_of(2, 3)
    assert [window.evict().seq, window.evict().seq] == [0, 2]
    assert (len(window), window.first, window.end, window.end_cut, window.nbytes) == (0, 5, 5, cut_at(5), 0)


def test_every_round_is_found_in_its_entry_and_an_older_one_in_the_oldest() -> None:
    window = window_of(2, 3, 1, first=4)
    found = [window.holding(round_) for round_ in range(3, 11)]
    assert [None if entry is None else entry.seq for entry in found] == [4, 4, 4, 6, 6, 6, 9, None]
    window.evict()
    assert [entry.seq for round_ in (4, 5, 6) if (entry := window.holding(round_)) is not None] == [6, 6, 6]


def test_rounds_follow_each_other_without_a_gap() -> None:
    window = window_of(2)
    for seq in (1, 3):
        with pytest.raises(ValueError, match=f"round {seq} after 2"):
            window.add(Entry(seq, 1, cut_at(seq + 1), 10))


def test_bytes_are_those_of_what_is_held_and_of_what_was_added_to_it() -> None:
    window = window_of(2, 3)
    assert window.nbytes == 50
    window.grow(window.oldest, 7)
    assert (window.nbytes, window.oldest.nbytes) == (57, 27)
    window.evict()
    assert window.nbytes == 30


def test_an_entry_knows_for_whom_it_was_made() -> None:
    entry = Entry(3, 2, cut_at(5), 10, "payload", made_for=4)
    assert (entry.after, entry.payload, entry.made_for) == (5, "payload", 4)
