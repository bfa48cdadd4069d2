"""Which streams a consumer takes from next."""

from __future__ import annotations

from typing import Any

from penstock.stream.reading import RUN_BYTES, ByArrival, Choice, InTurns, StreamReader
from penstock.wire.jobs import FeedSpec
from tests.stream.records import ended, failed, rounds, standing, stream_view


def reader(number: int = 0, *, at: int = 0, kind: Any = "granted", is_over: bool = False, **more: Any) -> StreamReader:
    view = stream_view(number, feed=FeedSpec(kind=kind), **more)
    made = StreamReader(view, standing(at, number, ended=is_over))
    made.open(1, 1 << 30, now=0.0)
    return made


def give(to: StreamReader, count: int = 1, *, nbytes: int = 300) -> StreamReader:
    assert to.receive(rounds(to.due, count, number=to.number, nbytes=nbytes), None, 0.0) == "taken"
    return to


def numbers(chosen: Choice | None) -> tuple[list[int], int] | None:
    """Which streams were chosen, and how many rounds of each; none of a stream that has nothing left but its end."""
    if isinstance(chosen, StreamReader):
        return [chosen.number], 0
    return None if chosen is None else ([lane.number for lane in chosen.lanes], chosen.rounds)


def by_arrival(order: ByArrival, *readers: StreamReader) -> int | None:
    chosen = numbers(order.choose(readers))
    return None if chosen is None else chosen[0][0]


# By arrival


def test_what_arrived_first_is_taken_first() -> None:
    one, other = reader(0), reader(1)
    order = ByArrival()
    for each in (other, one, other):
        order.arrived(each)
    assert [by_arrival(order, one, other) for _ in range(4)] == [1, 0, 1, None]


def test_all_rounds_of_a_frame_are_taken_together() -> None:
    one = give(reader(), 5)
    order = ByArrival()
    order.arrived(one)
    assert numbers(order.choose([one])) == ([0], 5)
    one.took(one.begin(0.0), 2)
    order.arrived(one)
    assert numbers(order.choose([one])) == ([0], 3)
    one.took(one.begin(0.0), 5)
    order.arrived(one)
    assert order.choose([one]) is one, "its end, or a failure"


def test_frames_of_a_stream_are_taken_one_by_one() -> None:
    one = give(give(reader(), 5), 2)
    order = ByArrival()
    order.arrived(one)
    assert numbers(order.choose([one])) == ([0], 5)


def test_the_tail_waits_until_this_consumer_has_the_ends_of_all_other_streams() -> None:
    """A consumer that comes back with an older state reads streams that have long ended for the others."""
    order = ByArrival()
    over, other, one, tail = reader(0, is_over=True), reader(1), reader(2), reader(3, kind="tail")
    for each in (tail, other, tail, one):
        order.arrived(each)
    readers = (over, other, one, tail)
    assert [by_arrival(order, *readers) for _ in range(3)] == [1, 2, None]
    all_over = (over, reader(1, is_over=True), reader(2, is_over=True), tail)
    assert [by_arrival(order, *all_over) for _ in range(3)] == [3, 3, None]


def test_a_stream_that_was_given_up_holds_nothing_back() -> None:
    order = ByArrival()
    lost, tail = reader(0, lost=True), reader(1, kind="tail")
    order.arrived(tail)
    assert by_arrival(order, lost, tail) == 1


def test_a_state_says_which_stream_the_next_element_comes_from() -> None:
    order = ByArrival(next_stream=1)
    one, other = reader(0), reader(1)
    order.arrived(one)
    assert by_arrival(order, one, other) is None and order.next_stream == 1
    order.arrived(other)
    assert [by_arrival(order, one, other) for _ in range(3)] == [1, 0, None]
    assert order.next_stream is None


def test_a_known_next_stream_that_is_over_is_not_waited_for() -> None:
    order = ByArrival(next_stream=1)
    one, over = reader(0), reader(1, is_over=True)
    assert by_arrival(order, one, over) is None and order.next_stream == 1, "nothing has come at all"
    order.arrived(one)
    assert by_arrival(order, one, over) == 0
    assert order.next_stream is None


def test_what_was_given_up_is_not_chosen() -> None:
    order = ByArrival()
    order.arrived(reader())
    order.forget()
    assert by_arrival(order, reader()) is None


# In turns


def test_turns_begin_when_all_streams_are_there() -> None:
    one, other = give(reader(0)), give(reader(1))
    assert InTurns(2).choose([one]) is None
    assert InTurns(2).choose([one, reader(2, kind="tail")]) is None, "the tail is none of them"
    assert numbers(InTurns(2).choose([other, one])) == ([0, 1], 1)


def test_the_stream_with_the_lowest_round_is_next_and_of_several_the_lowest_number() -> None:
    behind, ahead = give(reader(1, at=3), 2), give(reader(0, at=4), 2)
    assert numbers(InTurns(2).choose([ahead, behind])) == ([1], 1)
    behind.took(behind.begin(0.0), 1)
    assert numbers(InTurns(2).choose([behind, ahead])) == ([0, 1], 1)


def test_nothing_is_taken_before_the_stream_whose_turn_it_is_has_something() -> None:
    waiting, there = reader(0), give(reader(1))
    assert InTurns(2).choose([waiting, there]) is None


def test_streams_at_the_same_round_are_served_together_for_as_many_turns_as_all_have() -> None:
    readers = [give(reader(0), 5), give(reader(1), 3), give(reader(2), 4)]
    assert numbers(InTurns(3).choose(readers)) == ([0, 1, 2], 3)


def test_a_turn_goes_as_far_as_there_is_something() -> None:
    readers = [give(reader(0), 5), give(reader(1), 3), reader(2)]
    assert numbers(InTurns(3).choose(readers)) == ([0, 1], 1), "a part of a turn is one round of each"
    assert numbers(InTurns(3).choose([give(reader(0), 5), reader(1), give(reader(2))])) == ([0], 1)


def test_a_stream_that_is_a_round_ahead_is_not_part_of_the_turn() -> None:
    readers = [give(reader(0), 5), give(reader(1), 3), give(reader(2, at=1), 4)]
    assert numbers(InTurns(3).choose(readers)) == ([0, 1], 1)


def test_a_serving_holds_no_more_bytes_than_a_run_may() -> None:
    half = RUN_BYTES // 2
    fits = [give(reader(0), 2, nbytes=half), give(reader(1), 2, nbytes=half)]
    assert numbers(InTurns(2).choose(fits)) == ([0, 1], 2)
    one_turn = [give(reader(0), 2, nbytes=half), give(reader(1), 2, nbytes=half + 2)]
    assert numbers(InTurns(2).choose(one_turn)) == ([0, 1], 1)
    large = [give(reader(0), 2, nbytes=2 * RUN_BYTES), give(reader(1), 2, nbytes=1)]
    assert numbers(InTurns(2).choose(large)) == ([0], 1)


def test_frames_of_many_small_elements_are_taken_by_whole_turns() -> None:
    readers = [give(reader(number), 1_000, nbytes=RUN_BYTES) for number in range(4)]
    assert numbers(InTurns(4).choose(readers)) == ([0, 1, 2, 3], 250)


def test_the_last_stream_is_read_frame_by_frame() -> None:
    readers = [reader(0, is_over=True), give(reader(1), 7)]
    assert numbers(InTurns(2).choose(readers)) == ([1], 7)


def test_an_end_has_its_turn_too() -> None:
    for last in (ended(0), failed(0)):
        ending, there = reader(0), give(reader(1))
        ending.receive(last, None, 0.0)
        assert InTurns(2).choose([ending, there]) is ending


def test_the_tail_comes_after_all_others() -> None:
    tail = give(reader(2, kind="tail"), 3)
    assert numbers(InTurns(2).choose([reader(0, is_over=True), reader(1), tail])) is None
    over = [reader(0, is_over=True), reader(1, is_over=True)]
    assert numbers(InTurns(2).choose([*over, tail])) == ([2], 3)
    assert InTurns(2).choose([*over, reader(2, kind="tail")]) is None
    assert InTurns(2).choose(over) is None


def test_turns_remember_nothing() -> None:
    order = InTurns(1)
    one = give(reader())
    order.arrived(one)
    order.forget()
    assert numbers(order.choose([one])) == ([0], 1) and order.next_stream is None
