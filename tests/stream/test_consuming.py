"""A consumer: from views to open streams, what it makes of what comes, and what it says."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.errors import SupersededError
from penstock.core.ids import JobName, RunnerId, StreamId
from penstock.stream.checkpoint import Progress
from penstock.stream.consuming import (
    CREDIT_EVERY_S,
    MOST_AHEAD_BYTES,
    SMALLEST_WINDOW_BYTES,
    WINDOWS_AHEAD,
)
from penstock.wire.frames import CloseStream, Credit, OpenStream
from penstock.wire.jobs import Cut, FeedSpec, Position
from penstock.wire.messages import EndStream, Rebind
from tests.stream.reading_hands import MEMORY_BYTES, Hands
from tests.stream.records import (
    FAILURE,
    GRANTED,
    TAIL,
    cut_at,
    done,
    failed,
    job_view,
    refused,
    rounds,
    stream_view,
)

WINDOW = MEMORY_BYTES // 2


def rebinds(hands: Hands) -> list[tuple[str, int]]:
    return [(each.stream, each.binding) for each in hands.asked() if isinstance(each, Rebind)]


# Opening by the view


def test_a_stream_is_opened_at_its_beginning_with_all_that_its_runner_needs() -> None:
    hands = Hands(stream_view(binding=3, share=2, start=Cut([7]), first_round=4), consumer=1, consumers=2)
    (tell,) = hands.told()
    assert (tell.runner, tell.address) == (RunnerId("r0"), "tcp://r0")
    assert tell.message == OpenStream(
        stream=StreamId("a.0"),
        binding=3,
        opening=101,
        consumer=1,
        replica=5,
        round=4,
        cut=Cut([7]),
        cut_round=4,
        feed=GRANTED,
        share=2,
        attempt=hands.consumer.view.attempt,
        epoch=2,
        runner=RunnerId("r0"),
        credit=WINDOW,
        trainer="t",
    )


def test_every_opening_has_a_number_of_its_own() -> None:
    hands = Hands(stream_view(0), stream_view(1))
    assert [message.opening for message in hands.openings().values()] == [101, 102]
    hands.follow(stream_view(0, binding=2), stream_view(1))
    assert hands.openings()[0].opening == 103


def test_a_merged_checkpoints_mark_says_where_a_consumer_begins() -> None:
    marked = stream_view(start=cut_at(4), first_round=4, marks=(9, 6))
    found = Hands(marked, consumer=1, consumers=2).openings()[0]
    assert (found.round, found.cut, found.cut_round) == (6, cut_at(4), 4)
    assert Hands(marked, consumer=2, consumers=3).openings()[0].round == 4, "it was not there then"


def test_a_consumer_goes_on_where_its_state_stands() -> None:
    held = Progress(step=9, streams=(Position(0, 7, cut_at(5, since=2)),))
    hands = Hands(stream_view(first_round=2), progress=held)
    found = hands.openings()[0]
    assert (found.round, found.cut, found.cut_round) == (7, cut_at(5, since=2), 7)
    assert hands.consumer.step == 9 and hands.consumer.place().progress() == held


def test_streams_of_a_state_that_the_view_has_not_shown_yet_stay_in_it() -> None:
    held = Progress(step=9, streams=(Position(0, 7, cut_at(7)), Position(1, 3, cut_at(3))))
    hands = Hands(stream_view(0), progress=held)
    assert hands.consumer.place().progress() == held
    hands.openings()
    hands.follow(stream_view(0), stream_view(1))
    assert hands.openings()[1].round == 3
    assert hands.consumer.place().progress() == held


def test_new_streams_are_opened_as_the_view_shows_them() -> None:
    hands = Hands()
    assert hands.messages() == []
    hands.follow(stream_view(0), stream_view(1, runner=None))
    assert [*hands.openings()] == [0]
    hands.follow(stream_view(0), stream_view(1))
    assert [*hands.openings()] == [1]


def test_only_what_changed_of_a_view_is_looked_at_where_that_is_known() -> None:
    hands = Hands(stream_view(0), stream_view(1))
    hands.messages()
    shown = job_view(stream_view(0, binding=2), stream_view(1, binding=2), stream_view(2), version=2)
    hands.consumer.follow(shown, 0.0, changed=shown.streams[1:])
    assert [*hands.openings()] == [1, 2] and hands.consumer.view.version == 2


def test_a_stream_whose_address_comes_later_is_opened_then() -> None:
    hands = Hands(stream_view(address=""))
    assert hands.messages() == []
    hands.follow(stream_view())
    assert [*hands.openings()] == [0]


def test_a_stream_of_another_consumer_is_left_alone() -> None:
    hands = Hands(stream_view(0, owner=0), stream_view(1, owner=1), consumer=1, consumers=2, uneven="allow")
    assert [*hands.openings()] == [1] and len(hands.consumer.readers) == 1


def test_a_stream_that_moved_is_closed_where_it_was_and_opened_where_it_is() -> None:
    hands = Hands(stream_view())
    hands.give(2)
    hands.messages()
    hands.follow(stream_view(binding=2, runner=RunnerId("r9"), address="tcp://r9"))
    close, reopen = hands.told()
    assert (close.runner, close.message) == (RunnerId("r0"), CloseStream(stream=StreamId("a.0"), opening=101))
    assert (reopen.runner, reopen.address) == (RunnerId("r9"), "tcp://r9") and isinstance(reopen.message, OpenStream)
    assert (reopen.message.binding, reopen.message.round, reopen.message.cut) == (2, 2, cut_at(2))


def test_memory_is_parted_among_the_streams_that_have_not_ended() -> None:
    def first_credit(streams: int, memory_bytes: int = MEMORY_BYTES, **more: Any) -> int:
        views = [stream_view(number) for number in range(streams)]
        return Hands(*views, memory_bytes=memory_bytes, **more).openings()[0].credit

    assert [first_credit(count) for count in (1, 2, 3, 4)] == [WINDOW, WINDOW, MEMORY_BYTES // 3, MEMORY_BYTES // 4]
    assert first_credit(100) == SMALLEST_WINDOW_BYTES
    over = Progress(streams=tuple(Position(number, 1, ended=True) for number in (1, 2)))
    assert first_credit(3, progress=over) == WINDOW


def test_a_trainer_that_shares_receives_a_part_of_the_window_ahead() -> None:
    def first_credit(streams: int, window_bytes: int, memory_bytes: int = 1 << 30) -> int:
        views = [stream_view(number) for number in range(streams)]
        hands = Hands(*views, memory_bytes=memory_bytes, shared_window_bytes=window_bytes, sharing="wait")
        return hands.openings()[0].credit

    assert first_credit(1, 8 << 20) == (8 << 20) // WINDOWS_AHEAD
    assert first_credit(2, 8 << 20) == (8 << 20) // WINDOWS_AHEAD // 2
    assert first_credit(1, 1 << 30) == MOST_AHEAD_BYTES
    assert first_credit(1, 0) == 1
    assert first_credit(1, 1 << 30, memory_bytes=3 << 20) == (3 << 20) // 2


# What goes wrong


def test_a_gap_closes_the_stream_and_asks_for_another_binding() -> None:
    hands = Hands(stream_view())
    hands.messages()
    hands.give(2, seq=1)
    close, rebind = hands.messages()
    assert close == CloseStream(stream=StreamId("a.0"), opening=101)
    assert rebind == Rebind(
        job=JobName("j"),
        attempt=hands.consumer.view.attempt,
        stream=StreamId("a.0"),
        binding=1,
        reason="round 1 came where 0 was due",
    )
    assert hands.consumer.reconnects == 1 and hands.take_all() == []
    hands.give(2, seq=1)
    assert hands.messages() == [], "what still comes is nobody's"


def test_a_new_binding_goes_on_after_what_arrived() -> None:
    hands = Hands(stream_view())
    hands.give(2)
    hands.give(2, seq=3)
    hands.messages()
    hands.follow(stream_view(binding=2))
    assert hands.openings()[0].round == 2
    hands.give(2)
    assert hands.take_all() == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_a_refusal_asks_for_another_binding() -> None:
    hands = Hands(stream_view())
    hands.messages()
    hands.hear(refused(opening=100))
    assert hands.messages() == [], "an older opening's"
    hands.hear(refused("full", opening=101))
    (rebind,) = hands.asked()
    assert isinstance(rebind, Rebind) and rebind.reason == "refused: full"
    assert hands.consumer.failure is None


def test_a_superseded_reader_cannot_go_on() -> None:
    hands = Hands(stream_view())
    hands.give(2)
    hands.hear(refused("a newer one", opening=101, superseded=True))
    assert isinstance(hands.consumer.failure, SupersededError)
    assert hands.take() == []


def test_what_another_runner_says_counts_for_nothing() -> None:
    hands = Hands(stream_view())
    hands.messages()
    for message in (rounds(0, opening=101), refused(opening=101), rounds(0, number=8)):
        hands.consumer.receive(message, None, RunnerId("r9"), 0.0)
    assert hands.messages() == [] and not hands.consumer.has_ready


def test_a_lost_connection_gives_up_what_was_open_over_it() -> None:
    runner = RunnerId("r0")
    hands = Hands(stream_view(0), stream_view(1), stream_view(2, runner=runner), stream_view(3, runner=runner))
    hands.give(2, 0)
    hands.end(3)
    hands.messages()
    assert all(hands.reader(number).runner == runner for number in (0, 2, 3))
    hands.consumer.lose(runner, "gone", 0.0)
    assert rebinds(hands) == [("a.0", 1), ("a.2", 1)], "all of stream 3 has arrived; nothing is sent over it"
    assert [hands.reader(number).is_open for number in range(4)] == [False, True, False, False]
    hands.consumer.lose(runner, "gone", 0.0)
    assert hands.messages() == []
    assert hands.take() == [(0, 0), (0, 1)]


def test_a_lost_connection_says_why_and_sends_nothing_over_it() -> None:
    hands = Hands(stream_view())
    hands.messages()
    hands.consumer.lose(RunnerId("r0"), "gone", 0.0)
    (rebind,) = hands.messages()
    assert isinstance(rebind, Rebind) and rebind.reason == "gone" and hands.consumer.reconnects == 1


def test_a_stream_that_keeps_failing_is_opened_later_by_looking_after_it() -> None:
    hands = Hands(stream_view())
    for binding in (2, 3, 4):
        hands.consumer.lose(RunnerId("r0"), "gone", 0.0)
        hands.messages()
        hands.follow(stream_view(binding=binding))
    assert hands.messages() == []
    hands.consumer.look_after(0.1)
    assert hands.messages() == []
    hands.consumer.look_after(0.3)
    assert hands.openings()[0].binding == 4


def test_a_failure_is_met_when_the_rounds_before_it_are_taken() -> None:
    hands = Hands(stream_view())
    hands.give(2)
    hands.hear(failed(2, opening=101))
    assert hands.take() == [(0, 0), (0, 1)] and hands.consumer.failure is None
    assert hands.take() == [] and hands.consumer.failure == FAILURE


# Credit


def test_credit_is_sent_when_enough_was_taken() -> None:
    hands = Hands(stream_view())
    hands.give(1, nbytes=WINDOW // 8 - 1)
    hands.give(1, nbytes=1)
    hands.messages()
    hands.take()
    assert hands.messages() == []
    hands.take()
    expected = Credit(stream=StreamId("a.0"), opening=101, credit=WINDOW + WINDOW // 8)
    assert hands.messages() == [expected]


def test_credit_is_said_again_now_and_then_to_those_who_were_told_nothing() -> None:
    hands = Hands(stream_view(0), stream_view(1), stream_view(2))
    window = MEMORY_BYTES // 3
    hands.give(1, 0, nbytes=window)
    hands.take()
    hands.consumer.lose(RunnerId("r2"), "gone", 0.0)
    hands.messages()
    hands.consumer.look_after(CREDIT_EVERY_S - 0.01)
    assert hands.messages() == []
    hands.consumer.look_after(CREDIT_EVERY_S)
    assert hands.messages() == [Credit(stream=StreamId("a.1"), opening=102, credit=window)]
    hands.consumer.look_after(2 * CREDIT_EVERY_S - 0.01)
    assert hands.messages() == []
    hands.consumer.look_after(2 * CREDIT_EVERY_S)
    assert [(each.stream, each.credit) for each in hands.messages() if isinstance(each, Credit)] == [
        ("a.0", 2 * window)
    ]


def test_a_trainer_that_shares_says_what_it_has_taken() -> None:
    hands = Hands(stream_view(), sharing="wait", shared_window_bytes=8 << 20)
    for _ in range(2):
        hands.give(3, nbytes=1 << 20)
    hands.messages()
    hands.take()
    hands.take()
    credits = [each for each in hands.messages() if isinstance(each, Credit)]
    assert [each.round for each in credits] == [0, 3], "a frame is credited at its first round"


# Ends


def test_an_end_is_told_when_the_last_round_was_taken() -> None:
    hands = Hands(stream_view(), consumer=1, consumers=2)
    hands.give(2)
    hands.end(cut=cut_at(2, 8), leftover=True, done=done(4))
    hands.messages()
    hands.take()
    assert hands.messages() == []
    hands.take()
    told, close = hands.messages()
    assert told == EndStream(
        job=JobName("j"),
        attempt=hands.consumer.view.attempt,
        stream=StreamId("a.0"),
        consumer=1,
        rounds=2,
        leftover=cut_at(2, 8),
    )
    assert close == CloseStream(stream=StreamId("a.0"), opening=101)
    assert hands.consumer.place().progress().done[0].ranges == ((4, 5),)


def test_an_end_without_a_rest_says_so() -> None:
    hands = Hands(stream_view())
    hands.end()
    hands.take()
    (told,) = hands.asked()
    assert isinstance(told, EndStream) and told.leftover is None and told.rounds == 0


def test_an_end_is_told_again_to_a_dispatcher_that_does_not_know_it() -> None:
    held = Progress(streams=(Position(0, 7, cut_at(7), ended=True),))
    hands = Hands(stream_view(), progress=held)
    (told,) = hands.messages()
    assert isinstance(told, EndStream) and told.rounds == 7
    hands.follow(stream_view())
    assert hands.messages() == [], "once is enough"
    assert Hands(stream_view(ended=True), progress=held).messages() == []


def test_an_epoch_is_over_when_the_view_says_so_and_all_was_taken() -> None:
    hands = Hands(stream_view())
    hands.give(1)
    hands.end()
    hands.follow(stream_view(ended=True), finished=True)
    assert not hands.consumer.at_end
    hands.take_all()
    assert hands.consumer.at_end
    hands.follow(stream_view(ended=True))
    assert not hands.consumer.at_end, "others still read"


def test_an_end_that_others_have_told_needs_its_rounds_once_more() -> None:
    """A consumer that came back with an older state is behind the others: the stream is bound to nobody any more."""
    held = Progress(streams=(Position(0, 2, cut_at(2)),))
    hands = Hands(stream_view(binding=4, ended=True, runner=None), progress=held)
    assert rebinds(hands) == [("a.0", 4)]
    hands.follow(stream_view(binding=4, ended=True, runner=None))
    assert rebinds(hands) == []
    hands.follow(stream_view(binding=5, ended=True))
    assert hands.openings()[0].round == 2


def test_what_is_complete_is_not_asked_for_again() -> None:
    hands = Hands(stream_view())
    hands.give(1)
    hands.end()
    hands.messages()
    hands.follow(stream_view(ended=True, runner=None))
    assert hands.messages() == []


# Attempts that begin at a checkpoint


def test_streams_that_ended_for_this_consumer_go_on_in_an_attempt_where_they_have_not() -> None:
    held = Progress(streams=(Position(0, 7, cut_at(7), ended=True, leftover=True),))
    hands = Hands(stream_view(), progress=held, resumed=True)
    assert hands.openings()[0].round == 7
    hands = Hands(stream_view(ended=True, runner=None), progress=held, resumed=True)
    assert hands.messages() == [] and hands.reader().standing.ended


def test_a_stream_that_had_ended_before_the_checkpoint_is_not_read() -> None:
    hands = Hands(stream_view(ended=True, runner=None), resumed=True)
    assert hands.messages() == []
    assert (hands.reader().standing.ended, hands.reader().standing.leftover) == (True, True)
    assert rebinds(Hands(stream_view(ended=True, runner=None))) == [("a.0", 1)], "else it may be needed again"


def test_another_attempt_goes_on_from_what_was_taken() -> None:
    hands = Hands(stream_view(0), stream_view(1))
    hands.give(2)
    hands.give(4)
    assert len(hands.take()) == 2 and len(hands.take(3)) == 3
    hands.end(1)
    hands.messages()
    hands.consumer.restart(job_view(stream_view(0), stream_view(1), attempt="b"), 0.0)
    assert not hands.consumer.has_ready and hands.consumer.serving is None
    opened = hands.openings()
    assert [opened[number].attempt for number in (0, 1)] == ["b", "b"]
    assert (opened[0].round, opened[0].cut, opened[0].cut_round, opened[0].opening) == (5, cut_at(2), 2, 103)
    assert opened[1].round == 0 and hands.consumer.step == 5
    assert hands.take() == []
    hands.give(1)
    assert hands.take() == [(0, 5)]


def test_an_end_does_not_hold_in_another_attempt_where_others_go_on() -> None:
    hands = Hands(stream_view(0), stream_view(1))
    for number in (0, 1):
        hands.end(number)
    hands.take_all()
    hands.messages()
    hands.consumer.restart(job_view(stream_view(0), stream_view(1, ended=True), attempt="b"), 0.0)
    assert [*hands.openings()] == [0]


def test_the_tail_carries_its_feed_in_the_state_and_other_feeds_follow_from_the_job() -> None:
    tail = FeedSpec(kind="tail", number=1)
    hands = Hands(stream_view(0), stream_view(1, feed=tail))
    assert [each.feed for each in hands.consumer.place().progress().streams] == [None, tail]


def test_trails_are_kept_of_granted_streams_that_several_consumers_read_as_they_come() -> None:
    def trail(feed: FeedSpec = GRANTED, progress: Progress = Progress(), **job: Any) -> Any:  # noqa: B008
        return Hands(stream_view(feed=feed), progress=progress, **job).reader().standing.trail

    assert trail(consumers=2) == () and trail() is None and trail(TAIL, consumers=2) is None
    assert trail(consumers=2, order="deterministic", streams=1) is None
    assert trail(progress=Progress(streams=(Position(0, 3, cut_at(3)),)), consumers=2) == ()


# Words


def test_what_is_waited_for_is_told_in_words() -> None:
    hands = Hands()
    assert hands.consumer.waiting_for(0.0) == ["streams"]
    hands.follow(stream_view(), waiting_for="a worker")
    assert hands.consumer.waiting_for(3.0) == ["a worker", "stream 0 on worker w0 gave nothing for 3 s"]
    hands.end()
    hands.take()
    hands.follow(stream_view(ended=True))
    assert hands.consumer.waiting_for(3.0) == ["the epoch's end, which the other consumers have not reached"]


def test_many_streams_that_are_waited_for_are_one_sentence() -> None:
    hands = Hands(*(stream_view(number) for number in range(12)))
    assert hands.consumer.waiting_for(3.0) == [
        "12 streams give nothing; stream 0 on worker w0 gave nothing for 3 s, the longest"
    ]
    hands = Hands(*(stream_view(number, runner=None) for number in range(12)))
    assert hands.consumer.waiting_for(3.0) == ["12 streams are bound to no worker"]


@pytest.mark.parametrize("forget", [True, False])
def test_bytes_that_arrived_are_held_until_taken_or_forgotten(forget: bool) -> None:
    hands = Hands(stream_view(0), stream_view(1))
    hands.give(2, 0, nbytes=30)
    hands.give(2, 1, nbytes=5)
    assert [hands.reader(number).queued_bytes for number in (0, 1)] == [30, 5] and hands.consumer.has_ready
    if forget:
        hands.consumer.forget()
    else:
        hands.take_all()
    assert [hands.reader(number).queued_bytes for number in (0, 1)] == [0, 0] and not hands.consumer.has_ready
    assert hands.take() == [] and hands.consumer.serving is None
