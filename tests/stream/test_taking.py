"""What a consumer takes: lanes, turns, the tail, shared streams, weights."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from penstock.core.errors import InvalidArgumentError
from penstock.core.ids import StreamId
from penstock.stream.checkpoint import Progress
from penstock.stream.reading import RUN_BYTES
from penstock.wire.frames import CloseStream, OpenStream
from penstock.wire.jobs import Position, Ranges
from tests.stream.reading_hands import Hands
from tests.stream.records import TAIL, cut_at, done, stream_view


def in_turn(count: int = 2, **more: Any) -> Hands:
    views = [stream_view(number) for number in range(count)]
    return Hands(*views, order="deterministic", streams=count, **more)


# By arrival


def test_frames_are_taken_as_they_came() -> None:
    hands = Hands(stream_view(0), stream_view(1))
    hands.give(2, 1)
    hands.give(1, 0)
    hands.give(1, 1)
    assert [hands.take() for _ in range(4)] == [[(1, 0), (1, 1)], [(0, 0)], [(1, 2)], []]
    assert hands.consumer.step == 4


def test_a_place_inside_a_frame_counts_what_was_taken() -> None:
    hands = Hands(stream_view())
    hands.give(4, done=done(3))
    assert hands.take(1) == [(0, 0)]
    hands.consumer.settle(3)
    hands.consumer.settle(3)
    assert hands.consumer.step == 3
    place = hands.consumer.place().progress()
    assert (place.streams[0].round, place.streams[0].cut.since, place.done) == (3, 3, ())
    hands.consumer.settle(4)
    place = hands.consumer.place().progress()
    assert (place.step, place.streams[0].cut, place.done) == (4, cut_at(4), (Ranges(0, 0, ((3, 4),)),))


def test_a_settled_place_and_one_noted_before_agree_at_every_element() -> None:
    hands = in_turn()
    hands.give(3, 0, done=done(0))
    hands.give(2, 1, done=done(1))
    before = hands.consumer.place()
    serving = hands.consumer.next(0.0)
    assert serving is not None and serving.size == 4
    for taken in range(5):
        noted = before.after(serving, taken).progress()
        hands.consumer.settle(taken)
        settled = hands.consumer.place().progress()
        assert (settled.step, settled.done) == (noted.step, noted.done)
        # The one that says what is next names the splits of that, too.
        assert [unnamed(each) for each in settled.streams] == [unnamed(each) for each in noted.streams]


def unnamed(position: Position) -> Position:
    return replace(position, cut=replace(position.cut, named=()))


def test_what_a_state_says_is_next_comes_first() -> None:
    hands = Hands(stream_view(0), stream_view(1), progress=Progress(next=1))
    hands.give(1, 0)
    assert hands.take() == [] and hands.consumer.place().next == 1
    hands.give(1, 1)
    assert hands.take_all() == [(1, 0), (0, 0)] and hands.consumer.place().next is None


def test_the_tail_waits_for_the_ends_of_the_others() -> None:
    hands = Hands(stream_view(0), stream_view(1, feed=TAIL))
    hands.give(1, 1)
    assert hands.take() == []
    hands.give(1, 0)
    hands.end(0)
    assert hands.take_all() == [(0, 0), (1, 0)]


def test_an_end_is_passed_on_the_way_to_the_next_frame() -> None:
    hands = Hands(stream_view(0), stream_view(1))
    hands.end(0)
    hands.give(1, 1)
    assert hands.take() == [(1, 0)]


def test_elements_made_for_others_are_counted() -> None:
    hands = Hands(stream_view(), sharing="wait")
    hands.give(2, shared=True)
    hands.give(3)
    hands.take_all()
    assert hands.consumer.made_for_others == 2


# In turns


def test_streams_take_turns_round_by_round() -> None:
    hands = in_turn(3)
    for number, count in enumerate((2, 3, 2)):
        hands.give(count, number)
    assert hands.take() == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    assert hands.take() == []
    hands.give(1, 0)
    assert hands.take() == [(0, 2), (1, 2)], "a part of a turn, as far as there is something"
    hands.give(2, 2)
    hands.give(1, 0)
    assert hands.take_all() == [(2, 2), (0, 3)]


def test_what_was_counted_stays_counted() -> None:
    """A reader that is closed while it waits has forgotten how much it had given of what it served last."""
    hands = Hands(stream_view())
    hands.give(3)
    assert hands.take(2) == [(0, 0), (0, 1)]
    assert hands.consumer.settle(0) == 0
    assert hands.consumer.step == 2 and hands.consumer.place().progress().step == 2


def test_a_serving_that_was_left_in_the_middle_goes_on_there() -> None:
    hands = in_turn()
    hands.give(2, 0)
    hands.give(2, 1)
    assert hands.take(1) == [(0, 0)]
    assert hands.take() == [(1, 0)]
    assert hands.take() == [(0, 1), (1, 1)]


def test_large_elements_are_not_held_together() -> None:
    hands = in_turn()
    hands.give(2, 0, nbytes=2 * RUN_BYTES)
    hands.give(2, 1, nbytes=2 * RUN_BYTES)
    assert hands.take() == [(0, 0)]
    assert hands.take_all() == [(1, 0), (0, 1), (1, 1)]


def test_an_ended_stream_leaves_the_turns() -> None:
    hands = in_turn()
    hands.give(1, 0)
    hands.end(0)
    hands.give(3, 1)
    assert hands.take_all() == [(0, 0), (1, 0), (1, 1), (1, 2)]


def test_turns_wait_for_all_streams_to_be_shown() -> None:
    hands = Hands(stream_view(0), order="deterministic", streams=2)
    hands.give(2, 0)
    assert hands.take() == []
    hands.follow(stream_view(0), stream_view(1))
    hands.give(2, 1)
    assert hands.take() == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_turns_go_on_where_a_state_left_them() -> None:
    held = Progress(streams=(Position(0, 3, cut_at(3)), Position(1, 2, cut_at(2))))
    hands = in_turn(progress=held)
    hands.give(1, 0)
    assert hands.take() == []
    hands.give(2, 1)
    assert hands.take_all() == [(1, 2), (0, 3), (1, 3)]


def test_the_tail_comes_last_in_turns() -> None:
    hands = Hands(stream_view(0), stream_view(1, feed=TAIL), order="deterministic", streams=1)
    hands.give(2, 1)
    hands.give(1, 0)
    assert hands.take_all() == [(0, 0)]
    hands.end(0)
    assert hands.take_all() == [(1, 0), (1, 1)]


# Shared streams


def shared(*views: Any, **more: Any) -> Hands:
    return Hands(*(views or (stream_view(),)), **{"sharing": "skip", **more})


def test_a_trainer_that_holds_nothing_says_so_once() -> None:
    hands = shared()
    found = hands.openings()[0]
    assert found.fresh
    hands.give(2, seq=4, skipped=4)
    hands.follow(stream_view(binding=2))
    again = hands.openings()[0]
    assert (again.round, again.fresh) == (6, False)
    assert hands.consumer.skipped == 0
    hands.give(1, seq=8, skipped=2)
    assert hands.consumer.skipped == 2
    assert hands.take_all() == [(0, 4), (0, 5), (0, 8)]


def test_a_reader_says_which_life_of_its_trainer_it_is_of() -> None:
    found = shared(life=2).openings()[0]
    assert found.fresh and found.life == 2
    held = Progress(streams=(Position(0, 3, cut_at(3)),))
    found = shared(life=2, progress=held).openings()[0]
    assert not found.fresh and found.life == 2 and found.round == 3


def test_one_that_shares_nothing_is_never_fresh() -> None:
    found = Hands(stream_view()).openings()[0]
    assert not found.fresh and found.gaps == ()


def test_a_rank_that_opens_again_says_what_it_skipped() -> None:
    hands = shared(consumers=2)
    assert hands.openings()[0].gaps == ()
    hands.give(2, seq=4, skipped=4)
    hands.give(2, seq=9, skipped=3)
    hands.follow(stream_view(binding=2))
    assert hands.openings()[0].gaps == ((0, 4), (6, 9))
    assert hands.take_all() == [(0, 4), (0, 5), (0, 9), (0, 10)]
    state = hands.consumer.place().progress()
    assert state.streams[0].gaps == ((0, 4), (6, 9))
    again = shared(consumers=2, progress=state).openings()[0]
    assert again.round == 11 and again.gaps == ((0, 4), (6, 9))
    alone = shared()
    alone.give(2, seq=4, skipped=4)
    alone.messages()
    alone.follow(stream_view(binding=2))
    assert alone.openings()[0].gaps == (), "there is no other rank that needs to know"


def test_a_rank_opens_an_ended_stream_in_a_new_binding_to_say_what_it_skipped() -> None:
    hands = shared(consumers=2)
    hands.give(2, seq=4, skipped=4)
    hands.end()
    hands.take_all()
    hands.messages()
    hands.follow(stream_view(binding=2))
    found = hands.openings()[0]
    assert (found.round, found.gaps) == (6, ((0, 4),))
    alone = shared()
    alone.give(2, seq=4, skipped=4)
    alone.end()
    alone.take_all()
    alone.messages()
    alone.follow(stream_view(binding=2))
    assert not alone.openings()


def test_a_trainer_that_is_opened_again_before_anything_came_holds_nothing_still() -> None:
    hands = shared()
    hands.follow(stream_view(binding=2))
    assert [message.fresh for message in hands.messages() if isinstance(message, OpenStream)] == [True, True]


def test_what_others_have_read_has_ended_for_one_that_comes_late() -> None:
    gone = stream_view(ended=True, runner=None)
    hands = shared(gone)
    assert hands.messages() == [] and hands.reader().exhausted
    for more in ({"sharing": "wait"}, {"consumers": 2}, {"progress": Progress(streams=(Position(0, 3),))}):
        hands = shared(gone, **more)
        assert [each.stream for each in hands.asked()] == ["a.0"] and not hands.reader().exhausted


def test_the_tail_of_a_shared_epoch_is_opened_last() -> None:
    hands = shared(stream_view(0), stream_view(1, feed=TAIL))
    assert [*hands.openings()] == [0]
    hands.end(0)
    hands.take()
    hands.consumer.look_after(0.1)
    assert [*hands.openings()] == [1]
    assert [*Hands(stream_view(0), stream_view(1, feed=TAIL)).openings()] == [0, 1]


# Weights

WEIGHTS = (1.0, 3.0)
OTHERS = (2.0, 2.0)


def test_weights_change_from_the_next_element_on_and_what_lies_beyond_it_is_made_again() -> None:
    hands = Hands(stream_view())
    hands.give(4)
    hands.take(3)
    hands.messages()
    hands.consumer.set_weights(WEIGHTS, reading=True, now=0.0)
    close, again = hands.messages()
    assert close == CloseStream(stream=StreamId("a.0"), opening=101)
    assert isinstance(again, OpenStream)
    assert (again.binding, again.round, again.cut_round, again.mixes) == (1, 3, 3, ((3, WEIGHTS),))
    assert hands.take() == [] and not hands.consumer.has_ready
    place = hands.consumer.place().progress()
    assert (place.weights, place.mixes) == (WEIGHTS, ((0, ((3, WEIGHTS),)),))


def test_one_consumer_keeps_the_changes_that_its_cut_does_not_contain() -> None:
    hands = Hands(stream_view())
    hands.consumer.set_weights(WEIGHTS, reading=True, now=0.0)
    hands.give(2)
    hands.take(1)
    hands.consumer.set_weights(OTHERS, reading=True, now=0.0)
    assert dict(hands.consumer.place().mixes) == {0: ((0, WEIGHTS), (1, OTHERS))}
    hands.give(2)
    hands.take()
    hands.consumer.set_weights(WEIGHTS, reading=True, now=0.0)
    assert dict(hands.consumer.place().mixes) == {0: ((3, WEIGHTS),)}


def test_several_consumers_keep_all_changes() -> None:
    hands = in_turn(1, consumers=2)
    hands.consumer.set_weights(WEIGHTS, reading=True, now=0.0)
    hands.give(2)
    hands.take()
    hands.consumer.set_weights(OTHERS, reading=True, now=0.0)
    assert dict(hands.consumer.place().mixes) == {0: ((0, WEIGHTS), (2, OTHERS))}


def test_an_ended_stream_is_not_made_again_for_other_weights() -> None:
    hands = Hands(stream_view(0), stream_view(1))
    hands.end(0)
    hands.take()
    hands.messages()
    hands.consumer.set_weights(WEIGHTS, reading=True, now=0.0)
    assert [*hands.openings()] == [1]
    assert [*hands.consumer.place().mixes] == [1]


def test_weights_between_epochs_count_from_where_streams_are_shown() -> None:
    hands = Hands(stream_view(0))
    hands.messages()
    hands.consumer.set_weights(WEIGHTS, reading=False, now=0.0)
    assert hands.messages() == [] and dict(hands.consumer.place().mixes) == {}
    hands.follow(stream_view(0), stream_view(1, first_round=4))
    assert hands.openings()[1].mixes == ((4, WEIGHTS),)


def test_weights_of_a_state_count_for_streams_it_does_not_have() -> None:
    held = Progress(weights=WEIGHTS, mixes=((0, ((1, OTHERS),)),))
    found = Hands(stream_view(0), stream_view(1), progress=held).openings()
    assert (found[0].mixes, found[1].mixes) == (((1, OTHERS),), ((0, WEIGHTS),))


def test_several_relaxed_consumers_cannot_change_weights_in_an_epoch() -> None:
    hands = Hands(stream_view(), consumers=2)
    with pytest.raises(InvalidArgumentError, match="Set weights between epochs"):
        hands.consumer.set_weights(WEIGHTS, reading=True, now=0.0)
    hands.consumer.set_weights(WEIGHTS, reading=False, now=0.0)


def test_a_consumer_that_missed_a_change_of_weights_is_told() -> None:
    hands = in_turn(1, consumers=2)
    hands.give(2, mixes=1)
    assert hands.take() == []
    assert isinstance(hands.consumer.failure, InvalidArgumentError)
    assert "another consumer of job 'j' changed the weights, and consumer 0 did not" in str(hands.consumer.failure)


def test_a_change_counts_as_known_from_its_round_on() -> None:
    held = Progress(streams=(Position(0, 4, cut_at(4)),), mixes=((0, ((4, WEIGHTS), (7, OTHERS))),))
    hands = in_turn(1, consumers=2, progress=held)
    hands.give(3, mixes=1)
    assert len(hands.take()) == 3 and hands.consumer.failure is None
    hands.give(1, mixes=2)
    assert len(hands.take()) == 1 and hands.consumer.failure is None
    hands.give(1, mixes=3)
    assert hands.take() == [] and hands.consumer.failure is not None


def test_one_consumer_alone_can_miss_nothing() -> None:
    hands = Hands(stream_view())
    hands.give(2, mixes=1)
    assert len(hands.take()) == 2
