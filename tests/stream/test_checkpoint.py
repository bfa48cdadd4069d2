"""What a consumer has received, saved, read back and merged."""

from __future__ import annotations

import json
from time import process_time
from timeit import repeat
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.core.errors import StateMismatchError
from penstock.core.ids import AttemptId
from penstock.stream.checkpoint import (
    Checkpoint,
    ConsumerState,
    Progress,
    begin_at,
    mixes_from,
    read_states,
    resume_from,
)
from penstock.wire.jobs import Cut, FeedSpec, Leftover, Named, Position, Ranges, Regroup, Resume, Stride
from penstock.wire.received import received
from tests.stream.records import GRANTED

DEALT = FeedSpec(kind="dealt", number=0, of=2)


def cut(ordinal: int = 3, index: int = 7, named: tuple[int, ...] = (3,), since: int = 0) -> Cut:
    return Cut([0, ["@", 0, 0, ordinal, index]], since, (Named(0, 0, named),), 2)


def position(number: int = 0, round_: int = 10, at: Cut | None = None, **more: Any) -> Position:
    return Position(number, round_, cut() if at is None else at, **more)


def progress(*positions: Position, done: tuple[tuple[int, int], ...] = (), step: int = 20, **more: Any) -> Progress:
    ranges = (Ranges(0, 0, done),) if done else ()
    return Progress(step=step, streams=positions, done=ranges, **more)


def state(given: Progress, **more: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "attempt": AttemptId("a1"),
        "splits": "d",
        "width": 0,
        "order": "relaxed",
        "uneven": "drop",
        **more,
    }
    return ConsumerState(progress=given, **fields).plain()


def checkpoint(*states: dict[str, Any], consumer: int = 0, consumers: int | None = None) -> Checkpoint:
    given: Any = states[0] if len(states) == 1 else list(states)
    return read_states(given, consumer=consumer, consumers=len(states) if consumers is None else consumers)


def resume(*states: dict[str, Any], consumers: int | None = None, feeds: dict[int, FeedSpec] = {}) -> Resume:  # noqa: B006
    consumers = len(states) if consumers is None else consumers
    return resume_from(checkpoint(*states, consumers=consumers), epoch=3, consumers=consumers, feeds=feeds)


def ranks(*given: Progress, **more: Any) -> list[dict[str, Any]]:
    return [state(each, consumer=c, consumers=len(given), **more) for c, each in enumerate(given)]


# Saving and reading back


def test_a_state_survives_json() -> None:
    tail = Position(2, 1, feed=FeedSpec(kind="tail", leftovers=(Leftover(0, cut(), GRANTED),)))
    trailed = position(1, 4, trail=(Stride(4, 2), Stride(0, pass_=1)), trail_lost=True)
    whole = progress(
        position(ended=True, leftover=True),
        trailed,
        tail,
        done=((0, 3), (5, 6)),
        next=1,
        weights=(0.5, 2.0),
        mixes=((0, ((4, (0.5, 2.0)),)),),
    )
    saved = state(whole)
    assert ConsumerState.read(json.loads(json.dumps(saved))).progress == whole
    assert saved == json.loads(json.dumps(saved))


def test_a_samplers_state_is_its_own_affair() -> None:
    kept = object()
    assert state(progress(), sampler=kept)["sampler"] is kept
    assert "sampler" not in state(progress())


def test_a_state_is_small_and_cheap() -> None:
    given = progress(*(position(number, 1000 + number) for number in range(8)), done=((0, 900), (910, 950)))
    saved = state(given)
    assert len(json.dumps(saved["progress"]["streams"])) / 8 <= 300
    assert saved["progress"]["streams"][0] == [0, 1000, [[0, ["@", 0, 0, 3, 7]], 0, [[0, 0, [3]]], 2]], (
        "no default at an end"
    )
    assert "order" not in saved
    spent_s = min(repeat(lambda: state(given), number=20, repeat=5, timer=process_time)) / 20
    assert spent_s < 0.001  # 0.1 ms, whatever else the machine does


@pytest.mark.parametrize("damaged", [{}, {"attempt": 3}, {"progress": {"streams": [["1"]]}}])
def test_damaged_states_are_refused(damaged: dict[str, Any]) -> None:
    whole = state(progress(position())) if damaged else {}
    with pytest.raises(StateMismatchError, match="damaged"):
        ConsumerState.read({**whole, **damaged})


def test_a_rank_has_its_own_state_back() -> None:
    states = ranks(progress(position(0, 4)), progress(position(0, 5)))
    own = checkpoint(*states, consumer=1).own
    assert own is not None and own.consumer == 1 and own.progress.streams[0].round == 5
    assert [one.consumer for one in checkpoint(*reversed(states)).states] == [0, 1]
    alone = checkpoint(states[1], consumer=1, consumers=2)
    assert alone.own is not None and alone.first.consumers == 2


def test_another_ranks_state_is_refused() -> None:
    saved = state(progress(position()), consumer=0, consumers=4)
    with pytest.raises(StateMismatchError, match="state of consumer 0, and this is consumer 3"):
        checkpoint(saved, consumer=3, consumers=4)


def test_a_state_made_for_all_is_everybodys_own() -> None:
    saved = state(progress(position()), consumer=None, consumers=2, order="deterministic")
    own = checkpoint(saved, consumer=1, consumers=2).own
    assert own is not None and own.consumer == 1
    assert checkpoint(saved, consumers=3).own is None


@pytest.mark.parametrize(
    ("difference", "says"),
    [({"attempt": "a2"}, "attempts"), ({"consumers": 3}, "numbers of consumers"), ({"splits": "e"}, "split lists")],
)
def test_states_of_different_jobs_do_not_belong_together(difference: dict[str, Any], says: str) -> None:
    one, other = ranks(progress(), progress())
    with pytest.raises(StateMismatchError, match=f"states of different {says}"):
        checkpoint(one, {**other, **difference})


def test_states_of_different_steps_do_not_belong_together() -> None:
    with pytest.raises(StateMismatchError, match=r"different steps \(20 and 21\)"):
        checkpoint(*ranks(progress(step=20), progress(step=21)))
    checkpoint(*ranks(progress(step=20), progress(step=21), uneven="allow"))


def test_two_states_of_one_rank_are_refused() -> None:
    one, other = ranks(progress(), progress())
    for second in ({**other, "consumer": 0}, {**other, "consumer": None}):
        with pytest.raises(StateMismatchError, match="two states of one rank"):
            checkpoint(one, second)


def test_missing_ranks_are_named() -> None:
    states = [state(progress(position()), consumer=c, consumers=4) for c in (0, 2)]
    with pytest.raises(StateMismatchError, match="those of consumers 1, 3 are missing"):
        checkpoint(*states, consumers=4)
    with pytest.raises(StateMismatchError, match="those of consumer 1 are missing"):
        checkpoint(*(state(progress(), consumer=c, consumers=3) for c in (0, 2)))
    many = [state(progress(), consumer=c, consumers=12) for c in (0, 1)]
    with pytest.raises(StateMismatchError, match=r"consumers 2, 3, 4, 5, 6, 7, 8, 9, \.\.\. are missing"):
        checkpoint(*many)
    ten = [state(progress(), consumer=c, consumers=10) for c in (0, 1)]
    with pytest.raises(StateMismatchError, match="6, 7, 8, 9 are missing"):
        checkpoint(*ten)


def test_one_of_several_relaxed_states_does_not_do_for_another_number() -> None:
    saved = state(progress(position()), consumer=0, consumers=4)
    with pytest.raises(StateMismatchError, match="list of the states of all 4"):
        checkpoint(saved, consumers=2)
    for alike in ({"order": "deterministic"}, {"coordinated": True}, {"consumers": 1}):
        assert checkpoint({**saved, **alike}, consumers=2).own is None


def test_one_relaxed_state_alone_cannot_start_a_new_attempt() -> None:
    with pytest.raises(StateMismatchError, match="states of all 2 ranks are needed"):
        resume(state(progress(position()), consumer=0, consumers=2), consumers=2)


# Merging


def test_one_state_stands_for_all_where_consumers_are_alike() -> None:
    saved = state(progress(position(round_=5)), consumer=0, consumers=2, order="deterministic")
    found = resume(saved, consumers=2)
    assert (found.epoch, found.consumers) == (3, 2)
    assert (found.streams[0].marks, found.streams[0].round) == ((5, 5), 5)
    assert resume({**saved, "consumer": None}, consumers=2) == found
    for_all = state(progress(position(round_=5)), consumer=None, consumers=2)
    assert resume(for_all, consumers=2).streams[0].marks == (5, 5)


def test_merging_takes_the_lowest_round_and_keeps_everybodys_marks() -> None:
    trail = (Stride(2), Stride(3, 2, 2))
    ahead = progress(position(0, 12, cut(ordinal=6, named=(6, 9)), trail=trail), done=((0, 6),))
    behind = progress(position(0, 9, cut(ordinal=3, named=(3,))), done=((0, 3),))
    found = resume(*ranks(ahead, behind), feeds={0: GRANTED})
    (stream,) = found.streams
    assert (stream.round, stream.marks, stream.feed) == (9, (12, 9), GRANTED)
    # What the one ahead is through with, the one behind still needs, in the order of the stream.
    assert stream.cut.named == (Named(0, 0, (3, 5, 6, 9)),)
    assert stream.cut.engine == behind.streams[0].cut.engine
    assert found.done == (Ranges(0, 0, ((0, 3),)),)


def test_splits_of_several_passes_stay_apart() -> None:
    ahead = Position(0, 12, Cut([9], named=(Named(0, 1, (0, 1)),)), trail=(Stride(8),))
    behind = Position(0, 9, Cut([3], named=(Named(0, 0, (3,)),)))
    (stream,) = resume(*ranks(progress(ahead), progress(behind))).streams
    assert stream.cut.named == (Named(0, 0, (3, 8)), Named(0, 1, (0, 1)))


def test_a_list_that_had_ended_for_the_rank_ahead_has_ended() -> None:
    """As of the first of two sources that are read one after the other."""
    ahead = Position(0, 12, Cut([9], named=(Named(0, 0, (), ended=True), Named(1, 0, (5,)))), trail=(Stride(8),))
    behind = Position(0, 9, Cut([3], named=(Named(0, 0, (3,)),)))
    (stream,) = resume(*ranks(progress(ahead), progress(behind))).streams
    assert stream.cut.named == (Named(0, 0, (3, 8), ended=True), Named(1, 0, (5,)))


def test_a_split_that_one_rank_is_not_through_with_is_named_though_the_lowest_is() -> None:
    """Rank 0 had seen the end of the stream when it was loaded before, and rank 1 had not: their cuts are one place."""
    over = progress(position(0, 9, cut(ordinal=3, named=()), trail=(Stride(2, 2),)), done=((0, 4),))
    going = progress(position(0, 9, cut(ordinal=3, named=(3,)), trail=(Stride(2),)), done=((0, 3),))
    for states in (ranks(over, going), ranks(going, over)):
        found = resume(*states)
        assert found.streams[0].cut.named == (Named(0, 0, (3,)),)
        assert found.done == (Ranges(0, 0, ((0, 3),)),)


def test_a_split_is_named_in_the_streams_order_where_only_a_rank_ahead_still_names_it() -> None:
    """Rank 1 is inside a frame that began before the cut at which rank 0 stands."""
    behind = progress(position(0, 9, cut(ordinal=6, named=(6,))), done=((0, 4),))
    ahead = progress(position(0, 10, cut(ordinal=3, named=(3, 6, 8), since=4)), done=((0, 3),))
    (stream,) = resume(*ranks(behind, ahead)).streams
    assert (stream.round, stream.cut.named) == (9, (Named(0, 0, (3, 6, 8)),))


def test_at_equal_rounds_the_one_that_has_not_ended_counts() -> None:
    over, going = position(0, 9, ended=True, leftover=True), position(0, 9, cut(index=1))
    (stream,) = resume(*ranks(progress(over), progress(going))).streams
    assert (stream.ended, stream.leftover, stream.cut.engine) == (False, True, cut(index=1).engine)
    (stream,) = resume(*ranks(progress(over), progress(over))).streams
    assert stream.ended


def test_only_what_all_are_through_with_is_done() -> None:
    one = Progress(step=20, done=(Ranges(0, 0, ((0, 5),)), Ranges(0, 1, ((0, 2),))))
    other = Progress(step=20, done=(Ranges(0, 0, ((3, 9),)), Ranges(0, 2, ((0, 2),))))
    third = Progress(step=20, done=(Ranges(0, 0, ((4, 9),)),))
    assert resume(*ranks(one, other)).done == (Ranges(0, 0, ((3, 5),)),)
    assert resume(*ranks(one, other, third)).done == (Ranges(0, 0, ((4, 5),)),)
    assert resume(*ranks(one, Progress(step=20, done=(Ranges(0, 0, ((7, 9),)),)))).done == ()


def test_a_stream_one_rank_had_not_seen_stands_at_its_beginning() -> None:
    (stream,) = resume(*ranks(progress(position(0, 4)), progress())).streams
    assert (stream.round, stream.marks, stream.cut.engine, stream.cut.share) == (0, (4, 0), None, 2)
    assert stream.cut.named == (Named(0, 0, (3,)),)


def test_ranks_too_far_apart_are_refused() -> None:
    far = position(0, 900, trail=(Stride(80),), trail_lost=True)
    with pytest.raises(StateMismatchError, match="too far apart in stream 0"):
        resume(*ranks(progress(far, done=((0, 81),)), progress(position(0, 9), done=((0, 3),))))
    resume(*ranks(progress(far, done=((0, 81),)), progress(position(0, 9), done=((0, 81),))))
    resume(*ranks(progress(replace(far, trail_lost=False)), progress(position(0, 9), done=((0, 3),))))


@pytest.mark.parametrize("round_, ended", [(1, False), (0, True)])
def test_a_stream_from_before_its_end_is_refused_where_what_it_left_over_was_read(round_: int, ended: bool) -> None:
    """Which splits came after is in no state: they would be granted in another order, and leave something else over."""
    left = Leftover(0, cut(named=(5,)), GRANTED)
    tail = Position(2, round_, Cut(), ended=ended, feed=FeedSpec(kind="tail", leftovers=(left,)))
    other = progress(position(1, 9, ended=True), tail, step=10)
    with pytest.raises(StateMismatchError, match=r"before stream 0 had ended.*load the states that were"):
        resume(*ranks(progress(position(0, 4), step=4), other, uneven="allow"))
    resume(*ranks(progress(position(0, 9, ended=True, leftover=True)), other, uneven="allow"))
    idle = progress(position(1, 9, ended=True), replace(tail, round=0, ended=False), step=9)
    resume(*ranks(progress(position(0, 4), step=4), idle, uneven="allow"))
    dealt = replace(tail, feed=FeedSpec(kind="tail", leftovers=(Leftover(0, cut(), DEALT),)))
    resume(*ranks(progress(position(0, 4), step=4), progress(dealt, step=10), uneven="allow"))


def test_with_uneven_allow_the_highest_position_counts_and_all_that_is_done() -> None:
    trailed = position(0, 9, trail=(Stride(2),), trail_lost=True)
    states = ranks(
        progress(position(0, 5), done=((0, 4),)),
        progress(trailed, position(1, 2), done=((4, 8),), step=7),
        uneven="allow",
    )
    found = resume(*states)
    assert found.streams == (position(0, 9), position(1, 2))
    assert found.done == (Ranges(0, 0, ((0, 8),)),)
    over = ranks(progress(position(0, 9, ended=True, leftover=True)), progress(position(0, 9)), uneven="allow")
    assert resume(*over).streams[0].ended
    assert resume(*states, consumers=3).streams[0].round == 9, "its rounds are of one output each, whoever has them"


def test_a_stream_that_ended_with_nothing_left_over_needs_no_split() -> None:
    inside = replace(cut(named=()), regroup=Regroup(2, (3, 1)))
    saved = state(progress(position(0, 2, inside, ended=True), done=((0, 5),)))
    (stream,) = resume(saved, feeds={0: GRANTED}).streams
    assert stream.ended and stream.cut == Cut(share=2)
    assert resume(saved).streams[0].cut == Cut(share=2)
    assert resume(saved, feeds={0: DEALT}).streams[0].cut == inside
    with_rest = state(progress(position(0, 2, inside, ended=True, leftover=True)))
    assert resume(with_rest, feeds={0: GRANTED}).streams[0].cut == inside
    going = state(progress(position(0, 2, inside)))
    assert resume(going, feeds={0: GRANTED}).streams[0].cut == inside


def test_equal_checkpoints_have_equal_digests() -> None:
    saved = state(progress(position()))
    one, other = resume(saved), resume(json.loads(json.dumps(saved)))
    assert one.digest == other.digest != ""
    assert resume(state(progress(position(round_=11)))).digest != one.digest


def test_alike_consumers_have_one_digest_however_their_rounds_came_in_frames() -> None:
    mine, theirs = (
        state(progress(position(0, 7, cut(since=since))), consumer=0, consumers=2, order="deterministic")
        for since in (0, 2)
    )
    assert resume(mine, consumers=2).digest == resume(theirs, consumers=2).digest
    relaxed = [state(progress(position(0, 7, cut(since=since)))) for since in (0, 2)]
    assert resume(relaxed[0]).digest != resume(relaxed[1]).digest


# Another number of consumers


def test_another_number_of_consumers_regroups_from_the_lowest_round() -> None:
    states = ranks(*(progress(position(0, r, cut(since=since))) for r, since in [(7, 1), (6, 0), (8, 2)]))
    found = resume(*states, consumers=2)
    (stream,) = found.streams
    assert stream.cut.regroup == Regroup(3, (1, 0, 2)) and stream.cut.since == 0
    assert (stream.round, stream.marks, found.consumers) == (0, (0, 0), 2)


def test_rounds_since_the_cut_are_regrouped_too() -> None:
    saved = state(progress(position(0, 7, cut(since=3))), consumer=None, consumers=2, order="deterministic")
    (stream,) = resume(saved, consumers=1).streams
    assert stream.cut.regroup == Regroup(2, (3, 3)) and stream.cut.since == 0
    assert resume(saved, consumers=2).streams[0].cut.since == 3, "the same number goes on as it was"


def test_at_a_common_cut_nothing_is_regrouped() -> None:
    saved = state(progress(position(0, 7)), consumer=None, consumers=2, order="deterministic")
    assert resume(saved, consumers=1).streams[0].cut.regroup is None
    had_all = replace(cut(), regroup=Regroup(3, (2, 2, 2)))
    saved = state(progress(position(0, 7, had_all)), consumer=None, consumers=2, order="deterministic")
    assert resume(saved, consumers=1).streams[0].cut.regroup == Regroup(3, (2, 2, 2))


def test_the_number_may_change_again_inside_regrouped_rounds() -> None:
    """What each of three widths has received is said output by output."""
    inside = replace(cut(since=1), regroup=Regroup(2, (3, 1)))
    states = ranks(*(progress(position(0, round_, inside)) for round_ in (1, 2)))
    (stream,) = resume(*states, consumers=3).streams
    # Of outputs 0 to 8: 0, 1, 2 and 4 in the first rounds; of 3, 5, 6, 7, 8 the second width gave 3, 5 and 7.
    assert stream.cut.regroup == Regroup(8, (1, 1, 1, 1, 1, 1, 0, 1))
    assert (stream.cut.since, stream.marks) == (0, (0, 0, 0))


def test_coordinated_rounds_are_not_regrouped_twice() -> None:
    inside = replace(cut(since=1), regroup=Regroup(3, (1, 1, 1)))
    saved = state(progress(position(0, 1, inside)), consumers=2, coordinated=True)
    with pytest.raises(StateMismatchError, match="changed to 2; load it with 2 consumers"):
        resume(saved, consumers=1)
    at_the_cut = replace(cut(), regroup=Regroup(3, (1, 1, 1)))
    saved = state(progress(position(0, 1, at_the_cut)), consumers=2, coordinated=True)
    assert resume(saved, consumers=1).streams[0].cut == at_the_cut


def test_a_leftover_says_by_itself_what_was_received_after_its_cut() -> None:
    inside = replace(cut(since=1), regroup=Regroup(2, (3, 1)))
    tail = FeedSpec(kind="tail", leftovers=(Leftover(0, inside, GRANTED),))
    given = progress(position(0, 1, inside, ended=True, leftover=True), position(1, 1, Cut([4]), feed=tail))
    ended, last = resume(*ranks(*[given] * 4), consumers=3, feeds={0: GRANTED}).streams
    assert last.feed is not None
    for left in (ended.cut, last.feed.leftovers[0].cut):
        assert received(left, 3) == received(inside, 4) == [True] * 8


# Going on


def test_a_relaxed_consumer_goes_on_from_its_own_state() -> None:
    states = ranks(progress(position(0, 4)), progress(position(0, 5)))
    begins = begin_at(checkpoint(*states, consumer=1), consumers=2, done=(Ranges(0, 0, ((0, 1),)),))
    assert begins == progress(position(0, 5))


def test_one_that_was_not_there_begins_where_the_view_says() -> None:
    done = (Ranges(0, 0, ((0, 1),)),)
    given = progress(position(0, 4), weights=(1.0, 2.0))
    begins = begin_at(checkpoint(*ranks(given, given), consumer=2, consumers=3), consumers=3, done=done)
    assert begins == Progress(step=20, done=done, weights=(1.0, 2.0))


def test_several_that_are_alike_begin_where_the_view_says_and_one_alone_where_it_stood() -> None:
    saved = state(progress(position(0, 4)), consumer=0, consumers=2, order="deterministic")
    assert begin_at(checkpoint(saved, consumers=2), consumers=2, done=()) == Progress(step=20)
    alone = state(progress(position(0, 4)), order="deterministic")
    assert begin_at(checkpoint(alone), consumers=1, done=()) == progress(position(0, 4))


CHANGED = ((0, ((0, (1.0, 1.0)), (4, (1.0, 3.0)))),)


def test_changes_of_weights_go_on_for_the_same_number_of_consumers() -> None:
    saved = state(progress(position(0, 6), mixes=CHANGED))
    assert mixes_from(checkpoint(saved), consumers=1) == CHANGED
    assert begin_at(checkpoint(saved), consumers=1, done=()).mixes == CHANGED
    allowed = [state(progress(position(0, 3), mixes=CHANGED), consumer=c, consumers=2, uneven="allow") for c in (0, 1)]
    assert mixes_from(checkpoint(*allowed, consumers=3), consumers=3) == CHANGED


def test_for_another_number_the_last_weights_count_from_the_beginning() -> None:
    def mixes_at(round_: int, since: int, **more: Any) -> Any:
        saved = state(
            progress(position(0, round_, cut(since=since), **more), mixes=CHANGED), consumer=None, consumers=2
        )
        return mixes_from(checkpoint(saved, consumers=3), consumers=3)

    from_the_beginning = ((0, ((0, (1.0, 3.0)),)),)
    assert mixes_at(6, 2) == mixes_at(4, 0) == from_the_beginning
    with pytest.raises(StateMismatchError, match="just after the weights had changed"):
        mixes_at(5, 2)
    assert mixes_at(5, 2, ended=True) == from_the_beginning
