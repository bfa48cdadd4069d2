"""What a consumer has received, saved, read back and merged."""

from __future__ import annotations

import json
from collections import deque
from timeit import timeit
from typing import Any

import msgspec
import pytest

from penstock.client.merge import read_states, resume_from
from penstock.client.ranges import RangeSet
from penstock.client.state import TRAIL, EpochState, Phase, Progress, StreamMark
from penstock.core.errors import StateMismatchError
from penstock.core.ids import AttemptId
from penstock.wire.jobs import Cut, Feed, Leftover, Named, Regroup
from penstock.wire.received import received

GRANTED = Feed(kind="granted")


def cut(ordinal: int = 3, index: int = 7, named: tuple[int, ...] = (3,), since: int = 0) -> Cut:
    return Cut([0, ["@", 0, 0, ordinal, index]], since, (Named(0, 0, named),), 2)


def mark(number: int = 0, round_: int = 10, at: Cut | None = None, **more: Any) -> StreamMark:
    return StreamMark(number, round_, cut() if at is None else at, round_, **more)


def progress(*marks: StreamMark, done: list[tuple[int, int]] = [], step: int = 20) -> Progress:  # noqa: B006
    return Progress({m.number: m for m in marks}, {(0, 0): RangeSet(done)}, step)


def state(
    given: Progress,
    *,
    consumer: int | None = 0,
    consumers: int = 1,
    order: str = "relaxed",
    phase: Phase = "reading",
    **more: Any,
) -> dict[str, Any]:
    return EpochState(
        epoch=3,
        seed=7,
        attempt=AttemptId("a1"),
        consumers=consumers,
        consumer=consumer,
        phase=phase,
        splits="d",
        streams=0,
        order=order,
        uneven=more.pop("uneven", "drop"),
        pipeline=[],
        progress=given,
    ).plain()


def test_a_state_survives_json() -> None:
    tail = StreamMark(2, 1, feed=Feed(kind="tail", leftovers=(Leftover(0, cut(), GRANTED),)))
    trailed = mark(1, 4, trail=deque([(0, 0, 4), (0, 0, 5), (0, 1, 0)], TRAIL), trail_lost=True)
    saved = state(progress(mark(ended=True, leftover=True), trailed, tail, done=[(0, 3), (5, 6)]))
    read = EpochState.read(json.loads(json.dumps(saved)))
    assert read.plain() == saved == json.loads(json.dumps(saved))
    streams = read.progress.streams
    assert streams[0].ended and streams[0].leftover and streams[0].cut == cut()
    assert streams[1].trail == trailed.trail and streams[1].trail_lost
    assert streams[2].feed == tail.feed and streams[2].cut == Cut(since=1)


def test_a_state_is_small_and_cheap() -> None:
    given = progress(*(mark(number, 1000 + number) for number in range(8)), done=[(0, 900), (910, 950)])
    saved = state(given)
    assert len(json.dumps(saved["streams"])) / 8 <= 300
    assert timeit(lambda: state(given), number=200) / 200 < 0.001  # 0.1 ms on an idle machine


def test_inside_a_frame_the_cut_counts_the_rounds_since() -> None:
    inside = StreamMark(0, round=14, cut=cut(since=2), cut_round=10)
    assert inside.cut_here().since == 6
    inside.reach(cut(index=50))
    assert inside.cut_here() == cut(index=50)


def test_damaged_states_are_refused_by_name() -> None:
    with pytest.raises(StateMismatchError, match="'attempt'"):
        EpochState.read({"epoch": 1, "seed": 2})
    with pytest.raises(StateMismatchError, match="damaged"):
        EpochState.read({**state(progress(mark())), "streams": [[1]]})


def test_another_ranks_state_is_refused() -> None:
    saved = state(progress(mark()), consumer=0, consumers=4)
    with pytest.raises(StateMismatchError, match="state of consumer 0, and this is consumer 3"):
        read_states(saved, consumer=3, consumers=4)


def test_states_of_different_steps_do_not_belong_together() -> None:
    states = [state(progress(mark(), step=20 + c), consumer=c, consumers=2) for c in range(2)]
    with pytest.raises(StateMismatchError, match="different steps"):
        read_states(states, consumer=0, consumers=2)


def test_missing_ranks_are_named() -> None:
    states = [state(progress(mark()), consumer=c, consumers=4) for c in (0, 2)]
    with pytest.raises(StateMismatchError, match="consumers 1, 3 are missing"):
        read_states(states, consumer=0, consumers=4)
    with pytest.raises(StateMismatchError, match="list of the states of all 4"):
        read_states(states[0], consumer=0, consumers=2)


def test_one_relaxed_state_alone_cannot_start_a_new_attempt() -> None:
    own = read_states(state(progress(mark()), consumer=1, consumers=2), consumer=1, consumers=2)
    assert own.own is not None
    with pytest.raises(StateMismatchError, match="states of all 2 ranks"):
        resume_from(own, consumers=2, feeds={})


def test_one_deterministic_state_stands_for_all() -> None:
    saved = state(progress(mark(round_=5)), consumer=1, consumers=2, order="deterministic")
    resume = resume_from(read_states(saved, consumer=1, consumers=2), consumers=2, feeds={})
    assert resume.streams[0].marks == (5, 5) and resume.streams[0].round == 5
    merged = {**saved, "consumer": None}
    assert resume_from(read_states(merged, consumer=0, consumers=2), consumers=2, feeds={}) == resume


def test_merging_takes_the_lowest_round_and_keeps_everybodys_marks() -> None:
    ahead = progress(mark(0, 12, cut(ordinal=6, named=(6, 9))), done=[(0, 6)])
    ahead.streams[0].trail = deque([(0, 0, 3), (0, 0, 5)], TRAIL)
    behind = progress(mark(0, 9, cut(ordinal=3, named=(3,))), done=[(0, 3)])
    states = [state(given, consumer=c, consumers=2) for c, given in enumerate((ahead, behind))]
    resume = resume_from(read_states(states, consumer=0, consumers=2), consumers=2, feeds={0: GRANTED})
    (stream,) = resume.streams
    assert (stream.round, stream.marks) == (9, (12, 9))
    # What the one ahead is through with, the one behind still needs, in the order of the stream.
    assert stream.cut.named == (Named(0, 0, (3, 5, 6, 9)),)
    assert stream.cut.engine == behind.streams[0].cut.engine
    assert [(r.source, r.pass_, r.ranges) for r in resume.done] == [(0, 0, ((0, 3),))]


def test_a_stream_one_rank_had_not_seen_stands_at_its_beginning() -> None:
    states = [state(progress(mark(0, 4)), consumer=0, consumers=2), state(progress(), consumer=1, consumers=2)]
    (stream,) = resume_from(read_states(states, consumer=0, consumers=2), consumers=2, feeds={}).streams
    assert (stream.round, stream.marks, stream.cut.engine) == (0, (4, 0), None)
    assert stream.cut.share == 2


def test_ranks_too_far_apart_are_refused() -> None:
    ahead = progress(mark(0, 900, trail=deque([(0, 0, 80)], TRAIL), trail_lost=True), done=[(0, 81)])
    behind = progress(mark(0, 9), done=[(0, 3)])
    states = [state(given, consumer=c, consumers=2) for c, given in enumerate((ahead, behind))]
    with pytest.raises(StateMismatchError, match="too far apart"):
        resume_from(read_states(states, consumer=0, consumers=2), consumers=2, feeds={})


def test_another_number_of_consumers_regroups_from_the_lowest_round() -> None:
    states = [
        state(progress(mark(0, round_, cut(since=since))), consumer=c, consumers=3)
        for c, (round_, since) in enumerate([(7, 1), (6, 0), (8, 2)])
    ]
    resume = resume_from(read_states(states, consumer=0, consumers=2), consumers=2, feeds={})
    (stream,) = resume.streams
    assert stream.cut.regroup == Regroup(3, (1, 0, 2)) and stream.cut.since == 0
    assert (stream.round, stream.marks, resume.consumers) == (0, (0, 0), 2)


def test_rounds_since_the_cut_are_regrouped_too() -> None:
    saved = state(progress(mark(0, 7, cut(since=3))), consumer=None, consumers=2, order="deterministic")
    (stream,) = resume_from(read_states(saved, consumer=0, consumers=1), consumers=1, feeds={}).streams
    assert stream.cut.regroup == Regroup(2, (3, 3)) and stream.cut.since == 0


def test_the_number_may_change_again_inside_regrouped_rounds() -> None:
    """What each of three widths has received is said output by output."""
    inside = msgspec.structs.replace(cut(since=1), regroup=Regroup(2, (3, 1)))
    states = [state(progress(mark(0, round_, inside)), consumer=c, consumers=2) for c, round_ in enumerate((1, 2))]
    (stream,) = resume_from(read_states(states, consumer=0, consumers=3), consumers=3, feeds={}).streams
    # Of outputs 0 to 8: 0, 1, 2 and 4 in the first rounds; of 3, 5, 6, 7, 8 the second width gave 3, 5 and 7.
    assert stream.cut.regroup == Regroup(8, (1, 1, 1, 1, 1, 1, 0, 1))
    assert (stream.cut.since, stream.marks) == (0, (0, 0, 0))


def test_a_leftover_says_by_itself_what_was_received_after_its_cut() -> None:
    inside = msgspec.structs.replace(cut(since=1), regroup=Regroup(2, (3, 1)))
    tail = Feed(kind="tail", leftovers=(Leftover(0, inside, GRANTED),))
    saved = [
        state(progress(mark(0, 1, inside, ended=True, leftover=True), mark(1, 1, Cut([4]), feed=tail)), **each)
        for each in ({"consumer": c, "consumers": 4} for c in range(4))
    ]
    ended, last = resume_from(read_states(saved, consumer=0, consumers=3), consumers=3, feeds={0: GRANTED}).streams
    assert last.feed is not None
    for left in (ended.cut, last.feed.leftovers[0].cut):
        assert received(left, 3) == received(inside, 4) == [True] * 8


def test_a_stream_that_ended_with_nothing_left_over_needs_no_split() -> None:
    inside = msgspec.structs.replace(cut(named=()), regroup=Regroup(2, (3, 1)))
    saved = state(progress(mark(0, 2, inside, ended=True), done=[(0, 5)]))
    (stream,) = resume_from(read_states(saved, consumer=0, consumers=1), consumers=1, feeds={0: GRANTED}).streams
    assert stream.ended and stream.cut == Cut(share=2)


def test_at_a_common_cut_nothing_is_regrouped() -> None:
    saved = state(progress(mark(0, 7)), consumer=None, consumers=2, order="deterministic")
    (stream,) = resume_from(read_states(saved, consumer=0, consumers=1), consumers=1, feeds={}).streams
    assert stream.cut.regroup is None


def test_with_uneven_allow_the_highest_mark_counts_and_all_that_is_done() -> None:
    states = [
        state(progress(mark(0, 5), done=[(0, 4)]), consumer=0, consumers=2, uneven="allow"),
        state(progress(mark(0, 9), mark(1, 2), done=[(4, 8)]), consumer=1, consumers=2, uneven="allow"),
    ]
    resume = resume_from(read_states(states, consumer=0, consumers=2), consumers=2, feeds={})
    assert [(s.number, s.round) for s in resume.streams] == [(0, 9), (1, 2)]
    assert resume.done[0].ranges == ((0, 8),)


def test_equal_checkpoints_have_equal_digests() -> None:
    saved = state(progress(mark()))
    one = resume_from(read_states(saved, consumer=0, consumers=1), consumers=1, feeds={})
    other = resume_from(read_states(json.loads(json.dumps(saved)), consumer=0, consumers=1), consumers=1, feeds={})
    assert one.digest == other.digest != ""
