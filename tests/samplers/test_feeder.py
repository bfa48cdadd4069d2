"""What is drawn of a sampler is kept until it is received, and dealt to streams in turn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from penstock.samplers.drawing import Drawing, Feed, KeptUnits, SamplerPlace
from penstock.samplers.feeder import Feeder

AHEAD = 4


def drawing(count: int = 10, at: SamplerPlace | None = None) -> Drawing:
    return Drawing(Feed(range(count)), epoch=0, grouping=None, count=count, at=at)


def reader(number: int, *, cut_round: int = 0, is_open: bool = True, ended: bool = False) -> Any:
    standing = SimpleNamespace(cut_round=cut_round, ended=ended)
    return SimpleNamespace(
        stream=f"s{number}", number=number, opening=1, is_open=is_open, standing=standing, head=standing
    )


def test_a_kept_unit_is_known_with_where_the_sampler_stood_until_it_is_forgotten() -> None:
    kept = KeptUnits(drawing(3))
    while not kept.ended:
        kept.draw()
    assert (kept.first, kept.next, kept.unit(2)) == (0, 3, (2,))
    assert [kept.place(number).units for number in range(5)] == [0, 1, 2, 3, 3]
    kept.forget(2)
    assert (kept.first, kept.unit(2), kept.place(2).items) == (2, (2,), 2)
    kept.forget(9)
    assert (kept.first, kept.next) == (3, 3)


def test_what_was_drawn_goes_on_where_the_sampler_stood() -> None:
    kept = KeptUnits(drawing())
    kept.draw()
    kept.draw()
    again = KeptUnits(drawing(at=kept.place(1)))
    again.draw()
    assert (again.first, again.unit(1)) == (1, (1,))


def test_units_are_dealt_to_open_streams_in_turn_and_the_end_is_told_once() -> None:
    feeder = Feeder(drawing(6), ahead=AHEAD, consumer=0, consumers=1)
    feeder.deal_to(2)
    first = feeder.refill(0, [reader(0), reader(1), reader(1, is_open=False)])
    assert [(told.stream, told.first, told.units) for told in first] == [
        ("s0", 0, ((0,), (2,))),
        ("s1", 0, ((1,), (3,))),
    ]
    assert feeder.refill(0, [reader(0), reader(1)]) == []  # there is no room
    rest = feeder.refill(4, [reader(0, cut_round=2), reader(1, cut_round=2)])
    assert [(told.first, told.units, told.ended) for told in rest] == [(2, ((4,),), True), (2, ((5,),), True)]
    assert feeder.refill(5, [reader(0, cut_round=2), reader(1, cut_round=2)]) == []


def test_a_stream_that_is_opened_anew_gets_all_from_its_cut_on() -> None:
    feeder = Feeder(drawing(), ahead=AHEAD, consumer=0, consumers=1)
    feeder.deal_to(2)
    behind = [reader(0, cut_round=1), reader(1)]
    feeder.refill(3, behind)  # stream 1 stands inside a frame: its cut needs unit 1 again
    assert feeder.opened(behind[1]).units[:2] == ((1,), (3,))
    assert feeder.opened(behind[0]).units[0] == (2,)
