"""Where a sampler stands: drawing on from a place gives what followed it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.samplers.drawing import Drawing, Feed, SamplerPlace

ROWS = 5


class Lazy:
    """Begins an epoch when its first index is drawn, as generators do."""

    def __init__(self) -> None:
        self._epoch, self._given, self._resumed = 0, 0, False

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if not self._resumed:
            self._given = 0
        self._resumed = False
        while self._given < ROWS:
            self._given += 1
            yield (self._given - 1 + self._epoch) % ROWS

    def state_dict(self) -> dict[str, int]:
        return {"given": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._given, self._resumed = state["given"], True


def drawing(sampler: Lazy, epoch: int, at: SamplerPlace | None = None) -> Drawing:
    return Drawing(Feed(sampler=sampler, ahead=2), epoch=epoch, grouping=None, count=ROWS, at=at)


def rest(drawn: Drawing) -> list[tuple[int, ...]]:
    return list(iter(drawn.draw, None))


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("drawn", range(ROWS + 1))
def test_a_place_of_a_sampler_with_a_lazy_iter_is_followed_by_the_same(epoch: int, drawn: int) -> None:
    sampler = Lazy()
    for before in range(epoch):
        rest(drawing(sampler, before))
    reading = drawing(sampler, epoch)
    for _ in range(drawn):
        reading.draw()
    place = SamplerPlace.read(reading.place().plain())
    expected = rest(reading)
    assert len(expected) == ROWS - drawn
    again = drawing(Lazy(), epoch, place)
    assert SamplerPlace.read(again.place().plain()) == place, "nothing was drawn: it stands where it was put"
    assert rest(again) == expected
