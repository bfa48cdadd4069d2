"""What windows over passing chunks say, by a clock that the test turns."""

from __future__ import annotations

import pytest

from penstock.runtime import cache_profile
from penstock.runtime.cache_profile import ModeSums, ModeWindows, add_sums

GOT = 1


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(cache_profile, "perf_counter", lambda: now[0])
    return now


def seen_in(clock, epochs: int, bursts: list[tuple[float, list[int]]]) -> ModeSums:
    """Return the sums of epochs in which chunks come after some seconds, cut into some, a millisecond apart."""
    found: list[ModeSums] = []
    for _ in range(epochs):
        windows = ModeWindows([], lambda: (0.0, 0.0), lambda _, sums: found.append(sums), warm=True)
        for seconds, chunks in bursts:
            clock[0] += seconds
            for count in chunks:
                windows.passed(GOT, count)
                clock[0] += 0.001
        windows.end()
    total = ModeSums()
    for each in found:
        total = add_sums(total, each)
    return total


def test_elements_that_are_read_together_are_counted_together(clock):
    """57 elements are read in a second, and pass in two chunks, of which only the first was waited for."""
    seen = seen_in(clock, 4, [(0.1, [3]), (0.06, [4]), (1.0, [25, 32])])
    assert seen.elements == 4 * 57 and seen.seen_s == pytest.approx(1.0 / 57, rel=0.02)
    seen = seen_in(clock, 1, [(0.1, [3]), (0.06, [4]), *[(1.0, [25, 32])] * 5])
    assert seen.elements == 5 * 57 and seen.seen_s == pytest.approx(1.0 / 57, rel=0.02)


def test_what_comes_steadily_is_counted_though_nothing_is_waited_for(clock):
    seen = seen_in(clock, 1, [(0.1, [1]), (0.06, [1]), *[(0.009, [2])] * 300])
    assert seen.elements >= 550 and seen.seen_s == pytest.approx(0.005, rel=0.02)


def test_what_comes_in_one_go_says_nothing(clock):
    assert seen_in(clock, 4, [(0.1, [10]), (0.06, [10, 10])]).elements == 0
