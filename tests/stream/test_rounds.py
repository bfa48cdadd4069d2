from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.runtime.contract import Chunk
from penstock.stream.rounds import RoundMaker, Taken
from penstock.wire.jobs import Cut, Regroup


@dataclass(frozen=True)
class CountMarks:
    """The state after an output is how many there were."""

    before: int

    def at(self, k: int) -> Any:
        return self.before + k

    def origin(self, k: int) -> None:
        return None


def outputs_from(start: int, stop: int, sizes: Sequence[int] = (3, 1, 4)) -> list[Chunk]:
    chunks: list[Chunk] = []
    at = start
    for size in itertools.cycle(sizes):
        if at >= stop:
            return chunks
        size = min(size, stop - at)
        chunks.append(Chunk(list(range(at, at + size)), CountMarks(at)))
        at += size
    return chunks


def all_rounds(maker: RoundMaker, chunks: Sequence[Chunk]) -> list[Taken]:
    taken = []
    for chunk in chunks:
        maker.add(chunk)
        if (rounds := maker.take()) is not None:
            taken.append(rounds)
    return taken


def test_rounds_deal_outputs_to_consumers_in_turn() -> None:
    taken = all_rounds(RoundMaker(width=3, cut=Cut(), next_round=0), outputs_from(0, 20))
    assert [output for rounds in taken for output in rounds.outputs] == list(range(18))
    for consumer in range(3):
        received = [output for rounds in taken for output in rounds.of(consumer)]
        assert received == list(range(consumer, 18, 3))
    assert [rounds.seq for rounds in taken] == list(
        itertools.accumulate((rounds.count for rounds in taken[:-1]), initial=0)
    )


def test_the_state_after_rounds_is_that_after_their_last_output() -> None:
    for rounds in all_rounds(RoundMaker(width=2, cut=Cut(), next_round=5), outputs_from(0, 17)):
        assert rounds.after.engine == (rounds.seq - 5 + rounds.count) * 2
        assert (rounds.after.since, rounds.after.regroup) == (0, None)


@pytest.mark.parametrize("since", [0, 1, 2, 5])
def test_rounds_since_the_cut_are_made_and_dropped(since: int) -> None:
    maker = RoundMaker(width=2, cut=Cut(engine=4, since=since), next_round=7)
    taken = all_rounds(maker, outputs_from(4, 30))
    received = [output for rounds in taken for output in rounds.outputs]
    assert received == list(range(4 + 2 * since, 30))
    assert taken[0].seq == 7


@pytest.mark.parametrize("since", [0, 1])
def test_without_a_whole_round_the_stream_stands_after_those_received(since: int) -> None:
    maker = RoundMaker(width=4, cut=Cut(engine=9, since=since), next_round=3)
    assert all_rounds(maker, outputs_from(9, 11 + 4 * since)) == []
    assert (maker.standing.engine, maker.standing.since, maker.incomplete) == (9 + 4 * since, 0, 2)


@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize("given", [(0, 0), (3, 1), (1, 3), (4, 4), (0, 6)])
def test_regrouped_rounds_hold_exactly_what_nobody_had(width: int, given: tuple[int, int]) -> None:
    received_before = {r * 2 + c for c in range(2) for r in range(given[c])}
    expected = [output for output in range(100) if output not in received_before]
    cut = Cut(engine=0, regroup=Regroup(2, given))
    taken = all_rounds(RoundMaker(width=width, cut=cut, next_round=11), outputs_from(0, 100))
    received = [output for rounds in taken for output in rounds.outputs]
    assert received == expected[: len(expected) // width * width]


@pytest.mark.parametrize("width", [1, 2, 3])
def test_every_cut_of_regrouped_rounds_goes_on_with_what_followed(width: int) -> None:
    cut = Cut(engine=0, regroup=Regroup(2, (5, 2)))
    whole = all_rounds(RoundMaker(width=width, cut=cut, next_round=0), outputs_from(0, 60))
    for stop, rounds in enumerate(whole, 1):
        after = rounds.after
        again = RoundMaker(
            width=width,
            cut=Cut(engine=after.engine, since=after.since, regroup=after.regroup),
            next_round=rounds.seq + rounds.count,
        )
        rest = all_rounds(again, outputs_from(after.engine, 60, sizes=(2, 5)))
        assert [o for taken in rest for o in taken.outputs] == [o for taken in whole[stop:] for o in taken.outputs]
    assert whole[-1].after.regroup is None


def test_a_round_that_ends_with_the_regrouped_stretch_has_a_state_of_its_own() -> None:
    maker = RoundMaker(width=2, cut=Cut(engine=0, regroup=Regroup(2, (2, 0))), next_round=0)
    (taken,) = all_rounds(maker, outputs_from(0, 4))
    assert (taken.outputs, taken.after) == ([1, 3], Cut(engine=4))


def test_rounds_received_inside_a_regrouped_stretch_leave_its_rest_to_be_dropped() -> None:
    start = Cut(engine=0, since=1, regroup=Regroup(2, (1, 2)))
    maker = RoundMaker(width=1, cut=start, next_round=1)
    assert all_rounds(maker, outputs_from(0, 4)) == [], "0, 1 and 3 were received before, and 2 since"
    assert maker.standing == start
    assert [rounds.outputs for rounds in all_rounds(maker, outputs_from(4, 6, sizes=(1,)))] == [[4], [5]]


@pytest.mark.parametrize(
    ("cut", "counted"), [(Cut(), 7), (Cut(since=2), 7), (Cut(engine=0, regroup=Regroup(2, (1, 2))), 4)]
)
def test_outputs_count_unless_they_came_in_rounds_of_another_width(cut: Cut, counted: int) -> None:
    maker = RoundMaker(width=2, cut=cut, next_round=0)
    all_rounds(maker, outputs_from(0, 7))
    assert (maker.counted, maker.to_drop) == (counted, 0)


def test_outputs_to_be_dropped_are_counted_down() -> None:
    maker = RoundMaker(width=2, cut=Cut(since=2), next_round=2)
    assert maker.to_drop == 4
    all_rounds(maker, outputs_from(0, 3))
    assert (maker.to_drop, maker.ready, maker.incomplete) == (1, 0, 0)


def test_no_more_rounds_are_taken_than_asked_for() -> None:
    maker = RoundMaker(width=2, cut=Cut(), next_round=0)
    for chunk in outputs_from(0, 9, sizes=(9,)):
        maker.add(chunk)
    taken = [maker.take(3), maker.take(3), maker.take(3)]
    assert [None if each is None else (each.seq, each.count, each.outputs) for each in taken] == [
        (0, 3, [0, 1, 2, 3, 4, 5]),
        (3, 1, [6, 7]),
        None,
    ]
    assert taken[0] is not None and taken[0].after == Cut(engine=6)
    assert taken[0].of(1) == [1, 3, 5] and taken[0].of(1, skip=1) == [3, 5] and not taken[0].repeated


def test_a_padded_last_round_repeats_its_own_outputs_and_is_not_made_twice() -> None:
    maker = RoundMaker(width=4, cut=Cut(), next_round=0)
    all_rounds(maker, outputs_from(0, 6))
    last = maker.take_rest(pad=True)
    assert last is not None
    assert (last.seq, last.count, last.outputs, last.repeated) == (1, 1, [4, 5, 4, 5], True)
    assert last.of(3) == [5] and (maker.incomplete, maker.next_round) == (0, 2)
    again = RoundMaker(width=4, cut=Cut(engine=last.after.engine, since=last.after.since), next_round=2)
    assert all_rounds(again, outputs_from(last.after.engine, 6)) == []
    assert again.take_rest(pad=True) is None
    assert again.next_round == 2


def test_an_incomplete_last_round_is_dropped_without_padding() -> None:
    maker = RoundMaker(width=4, cut=Cut(), next_round=0)
    all_rounds(maker, outputs_from(0, 6))
    assert maker.take_rest(pad=False) is None
    assert maker.next_round == 1
