"""How much of a stream may be on its way."""

from __future__ import annotations

from penstock.stream.reading import NEAR_BYTES, NEAR_FRAMES, PACE_S, RESTATE_PART, CreditLine

WINDOW = 1000


def opened(window: int = WINDOW, *, queued_bytes: int = 0) -> CreditLine:
    line = CreditLine()
    line.open(window, queued_bytes=queued_bytes)
    return line


def test_credit_returns_when_the_trainer_takes_and_not_before() -> None:
    line = opened()
    assert line.granted == WINDOW
    line.take(300, now=0.0)
    assert (line.granted, line.taken_bytes) == (WINDOW + 300, 300)


def test_a_new_opening_counts_from_nothing_and_leaves_room_for_what_waits() -> None:
    line = opened()
    line.take(700, now=0.0)
    assert line.open(WINDOW, queued_bytes=300) == WINDOW - 300
    line.take(300, now=0.0)
    assert (line.granted, line.taken_bytes) == (WINDOW, 1000)


def test_credit_never_falls_below_nothing() -> None:
    line = opened(queued_bytes=1500)
    assert line.granted == 0
    line.take(400, now=0.0)
    assert line.granted == 0
    line.take(400, now=0.0)
    assert line.granted == 300


def test_credit_is_said_when_an_eighth_of_what_is_ahead_was_taken() -> None:
    line = opened()
    line.take(WINDOW // RESTATE_PART - 1, now=0.0)
    assert not line.is_due
    line.take(1, now=0.0)
    assert line.is_due and line.grant() == WINDOW + WINDOW // RESTATE_PART
    assert not line.is_due


def test_a_line_is_quiet_until_credit_is_sent() -> None:
    line = opened()
    assert line.was_quiet()
    line.grant()
    assert not line.was_quiet() and line.was_quiet()


def test_a_fast_trainer_has_a_few_frames_ahead_and_a_slow_one_the_window() -> None:
    frame, window = 10_000_000, 500_000_000
    line = opened(window)

    def take(now: float) -> int:
        """Take a frame at this time; return how much may be on its way after it."""
        line.take(frame, now=now)
        return line.grant() - line.taken_bytes

    ahead = [take(100.0 + 0.001 * k) for k in range(100)]
    assert ahead[0] == window, "a pace is measured over a while"
    assert min(ahead) == ahead[-1] == NEAR_FRAMES * frame, "what was granted is not taken back, it is used up"
    assert take(110.0) == window


def test_a_pace_is_measured_since_the_last_time_it_was() -> None:
    frame, window = 1 << 20, 100 << 20
    line = opened(window)
    line.take(frame, now=50.0)
    for _ in range(30):
        line.take(frame, now=50.0 + PACE_S / 2)
    assert line.granted == window + 31 * frame, "too short a time to say"
    line.take(frame, now=50.0 + PACE_S)
    assert line.granted == window, "31 MB in 20 ms is fast: nothing more is granted until what is ahead is near"
    line.take(frame, now=50.0 + 3 * PACE_S)
    assert line.granted == window + 33 * frame


def test_small_frames_have_more_of_them_ahead_but_never_more_than_the_window() -> None:
    def ahead_of(window: int) -> int:
        line = opened(window)
        for k in range(400):
            line.take(1 << 20, now=9.0 + 0.0005 * k)
        return line.granted - line.taken_bytes

    assert ahead_of(100 << 20) == NEAR_BYTES
    assert ahead_of(8 << 20) == 8 << 20
