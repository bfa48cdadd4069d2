"""One stream as a client reads it: incarnations, gaps, credit. Nothing here has a socket."""

from __future__ import annotations

from typing import Any

from penstock.client.board import Bell, Board
from penstock.client.reading import NEAR_FRAMES, StreamReading
from penstock.client.state import StreamMark
from penstock.core.ids import AttemptId, JobName, RunnerId, StreamId, WorkerId
from penstock.wire.frames import Rounds, StreamEnded
from penstock.wire.jobs import Cut, Feed, JobView, StreamView

WINDOW = 1000


def view(binding: int = 1, **more: Any) -> StreamView:
    fields: dict[str, Any] = {"runner": RunnerId("r"), "worker": WorkerId("w1"), "address": "tcp://h:1||", **more}
    return StreamView(stream=StreamId("a.0"), number=0, binding=binding, feed=Feed(kind="granted"), share=1, **fields)


def opened(mark: StreamMark | None = None) -> StreamReading:
    reading = StreamReading(view(), StreamMark(0) if mark is None else mark)
    reading.opened(object(), 5, WINDOW)
    return reading


def rounds(seq: int, count: int = 2, nbytes: int = 300, binding: int = 1, opening: int = 5) -> Rounds:
    return Rounds(
        stream=StreamId("a.0"),
        binding=binding,
        opening=opening,
        seq=seq,
        count=count,
        cut=Cut(engine=[seq + count]),
        nbytes=nbytes,
        layout=b"",
    )


def test_frames_are_taken_in_order_only() -> None:
    reading = opened()
    assert reading.receive(rounds(0), ()) == "taken"
    assert reading.receive(rounds(0), ()) == "gap"  # the same again
    assert reading.receive(rounds(3), ()) == "gap"
    assert reading.receive(rounds(2), ()) == "taken"
    assert (reading.due, reading.cut.engine, reading.cut_round) == (4, [4], 4)


def test_what_an_older_incarnation_sends_is_refused() -> None:
    reading = opened()
    assert reading.receive(rounds(0, opening=4), ()) == "stale"
    assert reading.receive(rounds(0, binding=0), ()) == "stale"
    reading.closed()
    assert reading.receive(rounds(0), ()) == "stale"


def test_a_new_opening_begins_after_what_has_arrived() -> None:
    reading = opened()
    reading.receive(rounds(0, nbytes=300), ())
    reading.closed()
    assert (reading.due, reading.cut_round, reading.mark.round) == (2, 2, 0)
    assert reading.opened(object(), 6, WINDOW) == WINDOW - 300
    reading.begin_frame()
    assert reading.credit == WINDOW


def test_credit_returns_when_the_trainer_takes_and_not_before() -> None:
    reading = opened()
    assert reading.credit == WINDOW
    reading.receive(rounds(0), ())
    assert reading.credit == WINDOW and reading.queued_bytes == 300
    reading.begin_frame()
    assert reading.credit == WINDOW + 300 and reading.queued_bytes == 0 and reading.credit_owed == 300


def test_a_fast_trainer_has_a_few_frames_ahead_and_a_slow_one_the_window() -> None:
    reading = StreamReading(view(), StreamMark(0))
    frame, window = 10_000_000, 500_000_000
    granted = reading.opened(object(), 5, window)

    def take(seq: int, now: float) -> int:
        """Take a frame at this time; return how much may be on its way after it."""
        reading.receive(rounds(seq, count=1, nbytes=frame), ())
        reading.begin_frame()
        reading.follow_pace(now)
        reading.queue.popleft()
        assert reading.credit >= reading.sent_credit
        reading.sent_credit = reading.credit
        return reading.credit - reading.taken_bytes

    ahead = [take(seq, 100.0 + 0.001 * seq) for seq in range(100)]
    assert min(ahead) == ahead[-1] == NEAR_FRAMES * frame  # what was granted is not taken back, it is used up
    assert reading.credit > granted
    assert take(100, 110.0) == window


def test_credit_never_falls_below_nothing() -> None:
    reading = opened()
    for seq in range(0, 10, 2):
        reading.receive(rounds(seq, nbytes=400), ())
    reading.closed()
    assert reading.opened(object(), 6, WINDOW) == 0


def test_an_end_counts_only_behind_the_last_round() -> None:
    reading = opened()
    end = StreamEnded(stream=StreamId("a.0"), binding=1, opening=5, seq=2, cut=Cut())
    assert reading.receive_end(end) == "gap"
    reading.receive(rounds(0), ())
    assert reading.receive_end(end) == "taken"
    assert reading.complete and reading.ready and not reading.exhausted


def test_a_state_inside_a_frame_is_opened_at_its_own_cut() -> None:
    mark = StreamMark(0, round=7, cut=Cut(engine=[4]), cut_round=4)
    reading = StreamReading(view(), mark)
    assert (reading.due, reading.cut_round, reading.cut.since) == (7, 4, 0)


def job_view(version: int, attempt: str = "a") -> JobView:
    return JobView(job=JobName("j"), attempt=AttemptId(attempt), epoch=0, version=version, streams=())


def test_only_newer_views_of_the_attempt_are_taken_over() -> None:
    board = Board()
    board.replace_view(job_view(5))
    assert board.take_view() is None
    board.put_view(job_view(4))
    board.put_view(job_view(9, attempt="other"))
    assert board.take_view() is None
    board.put_view(job_view(6))
    taken = board.take_view()
    assert taken is not None and taken.version == 6 and board.take_view() is None
    board.bell.close()


def test_a_closed_bell_stays_silent() -> None:
    bell = Bell()
    bell.ring()
    bell.quiet()
    bell.close()
    bell.close()
    bell.ring()
    bell.quiet()
