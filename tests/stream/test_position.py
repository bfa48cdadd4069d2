"""Where a trainer stands in a stream, between frames and inside them."""

from __future__ import annotations

from penstock.stream.position import TRAIL, Standing, splits_of, strides_of
from penstock.wire.jobs import Cut, Named, Position, Stride
from tests.stream.records import TAIL, cut_at, done, rounds, standing


def test_a_position_is_the_same_after_a_way_through_a_standing() -> None:
    trail = (Stride(4, 3, 2), Stride(1, pass_=1))
    whole = Position(3, 7, cut_at(7, 5), trail, True, True, True, TAIL)
    assert Standing.at(whole).position == whole
    plain = Position(3, 7, cut_at(7, 5))
    assert Standing.at(plain).position == plain and Standing.at(plain).trail is None


def test_inside_a_frame_the_cut_counts_the_rounds_since_and_names_what_they_are_made_of() -> None:
    before = Standing.at(Position(0, 4, Cut([4], 2, (Named(0, 0, (3,)),))))
    header = rounds(4, 3, cut=cut_at(7, 9), done=done(3, 6))
    inside = before.taken(header, 2, 2)
    assert (inside.round, inside.cut_round) == (6, 4)
    assert inside.cut_here == Cut([4], 4, (Named(0, 0, (3, 6, 9)),))
    assert inside.position.cut == inside.cut_here
    assert before.cut_here == before.cut, "what was noted down stays true"
    header = rounds(4, 3, cut=Cut([7], named=(Named(0, 0, (), ended=True), Named(1, 0, (2,)))), done=done(3))
    ended = before.taken(header, 2, 2).cut_here.named
    assert ended == (Named(0, 0, (3,), ended=True), Named(1, 0, (2,))), "it lies before the end of the list"


def test_a_frame_without_splits_of_its_own_needs_those_of_the_cut_before_it() -> None:
    inside = Standing.at(Position(0, 4, cut_at(4, 3))).taken(rounds(4, 3), 1, 1)
    assert inside.cut_here == cut_at(4, 3, since=1)


def test_at_the_last_round_of_a_frame_its_cut_is_reached() -> None:
    header = rounds(4, 3, cut=cut_at(7, 9), done=done(3, 6))
    after = standing(4).taken(header, 1, 1).taken(header, 3, 2)
    assert (after.round, after.cut_round, after.cut_here, after.opened) == (7, 7, cut_at(7, 9), ())


def test_the_engine_has_made_what_lies_before_the_cut_less_what_it_repeats() -> None:
    there = Standing.at(Position(0, 9, Cut([5], 4)))
    assert there.made_until == 5
    assert there.taken(rounds(9, 4), 2, 2).made_until == 5


def test_a_trail_remembers_splits_behind_it_and_says_when_it_forgot_some() -> None:
    trailing = standing().noting(trail=True, gaps=False)
    assert (trailing.trail, trailing.gaps) == ((), None) and trailing.noting(trail=True, gaps=False) == trailing
    assert standing().reached(cut_at(1), done(1)).trail is None
    full = trailing.reached(cut_at(1), done(*range(TRAIL)))
    assert full.trail == tuple((0, 0, o) for o in range(TRAIL)) and not full.trail_lost
    more = full.reached(cut_at(2), done(100))
    assert more.trail == (*((0, 0, o) for o in range(1, TRAIL)), (0, 0, 100)) and more.trail_lost
    assert more.reached(cut_at(3), ()).trail_lost


def test_a_standing_moves_forward_only() -> None:
    there = standing(5)
    assert there.moved(5) is there and there.moved(4) is there
    assert there.moved(8).round == 8 and there.moved(8).cut_here == cut_at(5, since=3)


def test_an_end_says_whether_something_is_left_over() -> None:
    over = standing(5).at_end(leftover=True)
    assert (over.ended, over.leftover) == (True, True)
    assert not standing(5).at_end(leftover=False).leftover


def test_strides_say_the_same_as_the_splits_they_are_made_of() -> None:
    splits = [(0, 0, 5), (0, 0, 4), (0, 0, 5), (0, 0, 6), (0, 0, 8), (1, 0, 9), (1, 0, 10), (1, 1, 11), (1, 1, 14)]
    runs = strides_of(splits)
    assert list(splits_of(runs)) == splits
    assert runs == [
        Stride(5),
        Stride(4, 3, 1),
        Stride(8),
        Stride(9, 2, 1, source=1),
        Stride(11, 2, 3, pass_=1, source=1),
    ]
    assert strides_of([(0, 0, 3), (0, 0, 3)]) == [Stride(3), Stride(3)]
