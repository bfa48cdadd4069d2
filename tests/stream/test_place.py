"""What was received after any part of what is served."""

from __future__ import annotations

import pytest

from penstock.core.intervals import Intervals
from penstock.stream.checkpoint import Place, Progress
from penstock.stream.position import Arrived, Lane, Serving, splits_in, with_done
from penstock.wire.jobs import Ranges
from tests.stream.records import cut_at, done, rounds, standing


def serving_of(*starts: int, count: int = 3) -> Serving:
    """Lanes of frames that begin at round 10, of which the first `start` rounds were taken before."""
    lanes = []
    for number, start in enumerate(starts):
        header = rounds(10, count, number=number, done=done(number, 5 + number))
        lanes.append(Lane(number, Arrived(header, None, start), start))
    return Serving(tuple(lanes), count - max(starts))


def place_before(*starts: int) -> Place:
    standings = {number: standing(10 + start, number) for number, start in enumerate(starts)}
    return Place(4, standings, {(0, 0): Intervals([(0, 1)])}, None, None, {})


@pytest.mark.parametrize("before", range(7))
@pytest.mark.parametrize("taken", range(7))
def test_a_place_inside_a_serving_counts_what_each_lane_gave(before: int, taken: int) -> None:
    if before > taken:
        return
    serving = serving_of(0, 0)
    reached = place_before(0, 0).after(serving, before).after(serving, taken, before=before)
    given = [(taken + 1) // 2, taken // 2]
    assert reached.step == 4 + taken
    assert [reached.standings[n].round for n in range(2)] == [10 + each for each in given]
    assert reached.next == (taken % 2 if taken < 6 else None)
    whole = [n for n in range(2) if given[n] == 3]
    assert [reached.standings[n].cut == cut_at(13) for n in range(2)] == [n in whole for n in range(2)]
    expected = Intervals([(0, 1), *((o, o + 1) for n in whole for o in (n, 5 + n))])
    assert list(reached.done[0, 0].ranges()) == list(expected.ranges())


def test_a_lane_may_begin_inside_its_frame() -> None:
    reached = place_before(1).after(serving_of(1), 2)
    assert (reached.standings[0].round, reached.standings[0].cut_here) == (13, cut_at(13))


def test_a_place_before_a_frame_names_the_splits_that_come_next() -> None:
    """An operator in the middle of the next element gets it again: also of a stream that was granted other splits."""
    serving = serving_of(0)
    here = place_before(0).after(serving, 0)
    assert (here.next, here.standings[0].round) == (0, 10)
    assert set(splits_in(done(0, 5))) <= set(splits_in(here.standings[0].cut_here.named))
    assert here.standings[0].cut_here.since == cut_at(10).since
    assert here.after(serving, 3).standings[0].cut_here == cut_at(13)


def test_what_is_done_grows_and_what_was_noted_stays() -> None:
    before = {(0, 0): Intervals([(0, 2)])}
    after = with_done(before, (*done(2, 7), *done(3, pass_=1)))
    assert {key: list(found.ranges()) for key, found in after.items()} == {(0, 0): [(0, 3), (7, 8)], (0, 1): [(3, 4)]}
    assert list(before[0, 0].ranges()) == [(0, 2)]


def test_a_place_is_made_a_progress_of_with_streams_in_order() -> None:
    weights = (1.0, 3.0)
    place = Place(
        4,
        {1: standing(3, 1), 0: standing(5, 0)},
        {(0, 1): Intervals([(2, 4)]), (0, 0): Intervals([(0, 1)]), (1, 0): Intervals()},
        1,
        weights,
        {1: ((3, weights),), 0: ((0, weights),)},
    )
    assert place.progress() == Progress(
        step=4,
        streams=(standing(5, 0).position, standing(3, 1).position),
        done=(Ranges(0, 0, ((0, 1),)), Ranges(0, 1, ((2, 4),))),
        next=1,
        weights=weights,
        mixes=((0, ((0, weights),)), (1, ((3, weights),))),
    )
