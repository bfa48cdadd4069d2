"""One stream as its reader sees it: incarnations, gaps, what was taken. Nothing here has a socket."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.ids import RunnerId
from penstock.stream.position import Standing
from penstock.stream.reading import LONGEST_DELAY_S, PATIENT_FAILURES, StreamReader
from penstock.wire.jobs import Position
from tests.stream.records import TAIL, cut_at, done, ended, failed, rounds, standing, stream_view

WINDOW = 1000


def reader_at(round_: int = 0, **more: Any) -> StreamReader:
    """A reader, not yet opened."""
    return StreamReader(stream_view(), standing(round_), **more)


def opened(round_: int = 0, **more: Any) -> StreamReader:
    reader = reader_at(round_, **more)
    reader.open(1, WINDOW, now=0.0)
    return reader


def take(reader: StreamReader, count: int | None = None) -> int:
    frame = reader.begin(now=1.0)
    return reader.took(frame, frame.header.count if count is None else frame.at + count)


# Opening


def test_a_stream_is_opened_where_the_view_says() -> None:
    reader = reader_at(4)
    assert reader.wants_opening(0.0) and not reader.is_open
    assert reader.open(7, WINDOW, now=0.0) == WINDOW
    assert (reader.runner, reader.opening, reader.due, reader.head.cut_round) == (RunnerId("r0"), 7, 4, 4)
    assert not reader.wants_opening(0.0), "a binding is tried once"


@pytest.mark.parametrize("more", [{"runner": None}, {"address": ""}, {"lost": True}])
def test_a_stream_without_a_place_is_not_opened(more: dict[str, Any]) -> None:
    reader = StreamReader(stream_view(**more), standing())
    assert not reader.wants_opening(0.0)


def test_only_a_newer_binding_is_opened() -> None:
    reader = opened()
    for binding, wants in ((0, False), (1, False), (2, True)):
        reader.show(stream_view(binding=binding))
        assert reader.wants_opening(0.0) == wants
    assert StreamReader(stream_view(binding=0), standing()).wants_opening(0.0), "the first binding is number 0"


def test_one_that_is_not_opened_yet_may_still_have_to_be() -> None:
    """Where its runner is, or when it may be tried again, is known a little later."""
    assert StreamReader(stream_view(address=""), standing()).may_be_opened
    assert not StreamReader(stream_view(runner=None), standing()).may_be_opened
    assert not opened().may_be_opened


def test_what_has_ended_or_is_complete_is_not_opened() -> None:
    over = StreamReader(stream_view(), standing(4, ended=True))
    assert not over.wants_opening(0.0)
    for last in (ended(0), failed(0)):
        reader = opened()
        reader.receive(last, None, 0.0)
        reader.show(stream_view(binding=2))
        assert not reader.wants_opening(0.0)


def test_a_binding_is_given_up_once() -> None:
    reader = opened()
    assert reader.give_up(0.0) == 1 and not reader.is_open
    assert reader.give_up(0.0) is None
    assert not reader.wants_opening(0.0)
    reader.show(stream_view(binding=2))
    assert reader.wants_opening(0.0)
    reader.open(2, WINDOW, 0.0)
    assert reader.give_up(0.0) == 2


def test_openings_that_fail_again_and_again_are_delayed_more_and_more() -> None:
    reader, delays = opened(), []
    for binding in range(2, 10):
        reader.give_up(100.0)
        reader.show(stream_view(binding=binding))
        delays.append(next(k for k in range(100) if reader.wants_opening(100.0 + k / 10)) / 10)
        reader.open(binding, WINDOW, 100.0)
    assert delays == [0.0] * PATIENT_FAILURES + [0.2, 0.4, 0.8, 1.6, LONGEST_DELAY_S, LONGEST_DELAY_S]


def test_a_frame_that_arrives_makes_one_patient_again() -> None:
    reader = opened()
    for binding in range(2, 2 + PATIENT_FAILURES):
        reader.give_up(0.0)
        reader.show(stream_view(binding=binding))
        reader.open(binding, WINDOW, 0.0)
    reader.receive(rounds(0, binding=binding, opening=binding), None, 0.0)
    for later in range(binding + 1, binding + 1 + PATIENT_FAILURES):
        reader.give_up(0.0)
        reader.show(stream_view(binding=later))
        assert reader.wants_opening(0.0)
        reader.open(later, WINDOW, 0.0)


def test_an_ended_stream_is_asked_for_once_a_binding() -> None:
    reader = reader_at()
    assert reader.ask_again() and not reader.ask_again()
    assert not reader.wants_opening(0.0), "this binding is over"
    reader.show(stream_view(binding=2))
    assert reader.ask_again()


# Receiving


def test_frames_are_taken_in_order_only() -> None:
    reader = opened()
    found = [reader.receive(rounds(seq), seq, 0.0) for seq in (0, 0, 3, 1, 2)]
    assert found == ["taken", "gap", "gap", "gap", "taken"]
    assert (reader.due, reader.head.cut, reader.head.cut_round) == (4, cut_at(4), 4)
    assert [frame.payload for frame in reader.frames] == [0, 2]
    assert reader.queued_bytes == 600


def test_what_an_older_incarnation_sends_is_stale() -> None:
    reader = opened()
    assert reader.receive(rounds(0, opening=0), None, 0.0) == "stale"
    assert reader.receive(rounds(0, binding=0), None, 0.0) == "stale"
    reader.close()
    assert reader.receive(rounds(0), None, 0.0) == "stale"


def test_nothing_is_taken_after_the_end() -> None:
    for last in (ended(2), failed(2)):
        reader = opened()
        reader.receive(rounds(0), None, 0.0)
        assert reader.receive(last, None, 0.0) == "taken" and reader.complete
        assert reader.receive(rounds(2), None, 0.0) == "stale"


def test_an_end_counts_only_behind_the_last_round() -> None:
    reader = opened()
    assert reader.receive(ended(2), None, 0.0) == "gap"
    assert reader.receive(failed(1), None, 0.0) == "gap"
    reader.receive(rounds(0), None, 0.0)
    assert reader.receive(ended(2), None, 0.0) == "taken"
    assert reader.complete and reader.ready and not reader.exhausted


def test_a_new_opening_begins_after_what_has_arrived() -> None:
    reader = opened()
    reader.receive(rounds(0, nbytes=300), None, 0.0)
    reader.close()
    assert (reader.due, reader.head.cut_round, reader.head.cut, reader.standing.round) == (2, 2, cut_at(2), 0)
    assert reader.open(2, WINDOW, 0.0) == WINDOW - 300
    reader.begin(now=0.0)
    assert reader.credit.granted == WINDOW


def test_a_state_inside_a_frame_is_opened_at_its_own_cut() -> None:
    reader = StreamReader(stream_view(), Standing(0, 7, cut_at(4), 4))
    assert (reader.due, reader.head.cut_round, reader.head.cut, reader.next_round) == (7, 4, cut_at(4), 7)


# A stream that trainers share


def test_rounds_that_are_gone_are_skipped_and_counted() -> None:
    reader = opened(4, shared=True)
    assert reader.receive(rounds(7, skipped=3), None, 0.0) == "taken"
    assert (reader.skipped, reader.due, reader.next_round, reader.frames[0].left) == (3, 9, 7, 2)
    take(reader)
    assert (reader.standing.round, reader.standing.cut_here, reader.elements) == (9, cut_at(9), 2)


def test_a_gap_that_nobody_explains_is_a_loss() -> None:
    for header in (rounds(7, skipped=2), rounds(5), rounds(2), rounds(0, 4), ended(5), ended(3)):
        assert opened(4, shared=True).receive(header, None, 0.0) == "gap"


def test_a_frame_may_begin_before_what_is_due() -> None:
    reader = opened(4, shared=True)
    assert reader.receive(rounds(2, 3), None, 0.0) == "taken"
    assert (reader.frames[0].at, reader.frames[0].left, reader.next_round, reader.skipped) == (2, 1, 4, 0)
    assert take(reader) == 1 and reader.standing.round == 5


def test_rounds_that_a_trainer_had_in_another_life_are_not_given_again() -> None:
    reader = opened(0, shared=True, fresh=True)
    reader.receive(rounds(2, 3, skipped=2, had=1), None, 0.0)
    assert (reader.next_round, reader.frames[0].left) == (3, 2)
    reader = opened(3, shared=True)
    reader.receive(rounds(2, 4, had=3), None, 0.0)
    assert (reader.next_round, reader.frames[0].left) == (5, 1)


def test_to_a_fresh_trainer_nothing_was_skipped() -> None:
    reader = reader_at(0, shared=True, fresh=True)
    reader.open(1, WINDOW, 0.0)
    assert reader.fresh
    reader.receive(rounds(5, skipped=5), None, 0.0)
    assert not reader.fresh and reader.skipped == 0
    reader.receive(rounds(9, skipped=2), None, 0.0)
    assert reader.skipped == 2


def test_a_rank_remembers_what_it_skipped() -> None:
    reader = StreamReader(stream_view(), standing(2).noting(trail=False, gaps=True), shared=True, fresh=True)
    reader.open(1, WINDOW, 0.0)
    reader.receive(rounds(5, skipped=3), None, 0.0)
    reader.receive(rounds(8, 3, skipped=1, had=1), None, 0.0)
    reader.receive(ended(14, skipped=3), None, 0.0)
    assert reader.head.gaps == ((2, 5), (7, 9), (11, 14))
    assert reader.standing.gaps == (), "it has taken nothing yet"
    reader.took(reader.begin(0.0), 2)
    assert reader.standing.gaps == ((2, 5),)
    reader.take_back()
    assert reader.head.gaps == ((2, 5),)


def test_rounds_inside_of_a_frame_may_be_skipped() -> None:
    reader = StreamReader(stream_view(), standing(2).noting(trail=False, gaps=True), shared=True)
    reader.open(1, WINDOW, 0.0)
    reader.receive(rounds(1, 7, holes=((3, 5), (6, 8))), None, 0.0)
    frame = reader.begin(0.0)
    assert (reader.next_round, frame.left) == (2, 1)
    assert reader.took(frame, 2) == 1
    assert (reader.next_round, frame.left, reader.standing.round, reader.standing.gaps) == (5, 1, 5, ((3, 5),))
    reader.took(frame, 5)
    assert not reader.frames and reader.standing.cut_here == cut_at(8)
    assert reader.standing.gaps == ((3, 5), (6, 8))


def test_an_end_may_skip_the_rest() -> None:
    reader = opened(4, shared=True)
    assert reader.receive(ended(6, skipped=2), None, 0.0) == "taken"
    assert (reader.skipped, reader.due) == (2, 6)
    reader.took_end()
    assert (reader.standing.round, reader.standing.ended) == (6, True)


def test_a_failure_is_told_at_the_round_that_is_due() -> None:
    reader = opened(4, shared=True)
    assert reader.receive(failed(3), None, 0.0) == "gap"
    assert reader.receive(failed(4), None, 0.0) == "taken"


# Taking


def test_credit_returns_at_a_frames_first_round_and_only_then() -> None:
    reader = opened()
    reader.receive(rounds(0, 3), None, 0.0)
    assert (reader.credit.granted, reader.queued_bytes) == (WINDOW, 300)
    for _ in range(3):
        take(reader, 1)
        assert (reader.credit.granted, reader.queued_bytes) == (WINDOW + 300, 0)
    assert (reader.elements, reader.standing.round, reader.standing.cut_round) == (3, 3, 3)
    assert not reader.frames and not reader.ready


def test_the_end_is_reached_when_the_last_round_is_taken() -> None:
    reader = opened()
    reader.receive(rounds(0), None, 0.0)
    reader.receive(ended(2, leftover=True, cut=cut_at(2, 8), done=done(1)), None, 0.0)
    take(reader)
    assert reader.ready and not reader.exhausted
    assert reader.took_end().done == done(1)
    assert reader.exhausted and not reader.ready
    assert (reader.standing.ended, reader.standing.leftover, reader.standing.cut_here) == (True, True, cut_at(2, 8))


def test_a_stream_given_up_for_good_is_exhausted_when_what_arrived_is_taken() -> None:
    reader = opened()
    reader.receive(rounds(0), None, 0.0)
    reader.show(stream_view(lost=True))
    assert not reader.exhausted
    take(reader)
    assert reader.exhausted


def test_what_was_not_taken_can_be_given_back() -> None:
    reader = opened()
    reader.receive(rounds(0, 3), None, 0.0)
    reader.receive(rounds(3), None, 0.0)
    reader.receive(ended(5), None, 0.0)
    take(reader, 1)
    reader.take_back()
    assert (reader.due, reader.head.cut, reader.head.cut_round) == (1, cut_at(0, since=1), 1)
    assert (len(reader.frames), reader.queued_bytes, reader.complete, reader.is_open) == (0, 0, False, False)
    assert reader.wants_opening(0.0), "the same binding serves again"


def test_others_may_have_read_all_of_it() -> None:
    reader = reader_at(0, shared=True, fresh=True)
    reader.pass_by()
    assert reader.exhausted and reader.told_end and not reader.standing.leftover


def test_waiting_is_told_in_words() -> None:
    reader = reader_at()
    assert reader.describe(0.0) == "stream 0 is being opened on worker w0"
    reader.open(1, WINDOW, 2.0)
    assert reader.describe(5.0) == "stream 0 on worker w0 gave nothing for 3 s"
    reader.receive(rounds(0), None, 4.0)
    assert reader.describe(5.0).endswith("for 1 s")
    reader.show(stream_view(runner=None))
    assert reader.describe(5.0) == "stream 0 is bound to no worker"
    tail = StreamReader(stream_view(feed=TAIL), Standing.at(Position(0, ended=True)))
    assert tail.is_tail and tail.describe(0.0) == "tail has ended"
