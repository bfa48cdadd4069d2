"""A pipeline cut where `graph.cutting` allows it: the same elements, batches, numbers and states at every cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.api.cut_ways import CutWay, CutWays
from penstock.api.epochs import Loaded
from penstock.api.loader import make_loader
from penstock.api.states import SavedState
from penstock.graph.cutting import cuts_of
from penstock.passes.shuffles import merge_shuffles, move_shuffles
from penstock.submission.options import check_options

ROWS = 83


def decoded(row: int, rng: np.random.Generator) -> dict[str, Any]:
    return {"id": int(row), "noise": float(rng.random()), "long": np.arange(row % 5)}


def augmented(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**row, "drawn": int(rng.integers(1 << 40))}


def fixed(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "long"}


def kept(row: dict[str, Any], rng: np.random.Generator) -> bool:
    return bool(rng.random() < 0.7)


def crop(batch: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**batch, "crop": int(rng.integers(1 << 40))}


PIPELINES: dict[str, Any] = {
    "batches": lambda: ps.range(ROWS).shuffle(16, seed=3).map(decoded).map(augmented).map(fixed).batch(4).map(crop),
    "dropped": lambda: ps.range(ROWS).map(decoded).map(fixed).shuffle(16, seed=3).batch(4, drop_last=True),
    "padded": lambda: ps.range(ROWS).map(decoded).filter(kept).map(augmented).padded_batch(4).map(crop),
    "ragged": lambda: ps.range(ROWS).map(decoded).map(augmented).ragged_batch(4),
    "rows": lambda: ps.range(ROWS).shuffle(16, seed=3).map(decoded).map(augmented).map(fixed),
    "masked": lambda: ps.range(ROWS).map(decoded).map(fixed).batch(4, mask="whole"),
}
ORDERS: dict[str, dict[str, Any]] = {
    "streams": {"order": "deterministic", "sharding": ps.Sharding(streams=3)},
    "relaxed": {},
}


def plain(output: Any) -> Any:
    if isinstance(output, dict):
        return tuple((name, plain(value)) for name, value in sorted(output.items()))
    if isinstance(output, ps.Ragged):
        return (output.values.tolist(), output.offsets.tolist())
    if isinstance(output, (list, tuple)):
        return tuple(map(plain, output))
    return output.tolist() if isinstance(output, (np.ndarray, np.generic)) else output


@pytest.fixture(scope="module")
def service() -> Iterator[ps.LocalService]:
    with ps.LocalService(workers=2) as found:
        yield found


class Cutting:
    """Reads one pipeline through a service at any of its cuts."""

    def __init__(self, dataset: ps.Dataset, service: ps.LocalService, **options: Any) -> None:
        checked = check_options(seed=7, **options)

        def source(dataset: ps.Dataset, options: Any) -> Any:
            return make_loader(dataset, service, options)._sources[0]

        self.cuts = cuts_of(move_shuffles(merge_shuffles(dataset._plan.node)))
        self._ways = CutWays(dataset, checked, source, "")

    def open(self, cut: int, state: Any = None, epoch: int = 0) -> Any:
        """Return the epoch at a cut, where a state of another cut was taken."""
        way = self._ways.way(CutWay(cut=self.cuts.legal[cut], place="both"))
        loaded = None
        if state is not None:
            place = way.place_of([SavedState.read(state)], False)
            loaded = Loaded(epoch=epoch, seed=7, state={}, place=place, changed=True)
        return way.open(epoch, 7, loaded, None)

    def read(self, cut: int, epoch: int = 0) -> list[Any]:
        opened = self.open(cut, epoch=epoch)
        try:
            return [plain(output) for output in opened.elements]
        finally:
            opened.close()

    def close(self) -> None:
        self._ways.close()


@pytest.fixture
def cutting(service: ps.LocalService) -> Iterator[Any]:
    made: list[Cutting] = []

    def make(pipeline: str, order: str) -> Cutting:
        made.append(Cutting(PIPELINES[pipeline](), service, **ORDERS[order]))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_elements_batches_and_numbers_are_the_same_at_every_legal_cut(cutting, pipeline):
    cut = cutting(pipeline, "streams")
    assert len(cut.cuts.legal) >= 3
    whole = [cut.read(0, epoch) for epoch in range(2)]
    assert whole[0] != whole[1] and len(whole[0]) > 10
    for number in range(1, len(cut.cuts.legal)):
        assert [cut.read(number, epoch) for epoch in range(2)] == whole, cut.cuts.names[number]


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_an_epoch_goes_on_at_another_cut_where_it_stands(cutting, pipeline):
    """From cut to cut after every few outputs, in the middle of splits and blocks."""
    cut = cutting(pipeline, "streams")
    whole, count = cut.read(0), len(cut.cuts.legal)
    read: list[Any] = []
    state, at, ended = None, 0, False
    while not ended:
        opened = cut.open(at % count, state)
        try:
            for _ in range(3 + at % 2):
                output = next(opened.elements, None)
                if output is None:
                    ended = True
                    break
                read.append(plain(output))
            state = opened.note_state()()
        finally:
            opened.close()
        at += 1
    assert read == whole
    assert at > count


def test_in_relaxed_order_nothing_is_lost_or_doubled_when_the_cut_moves(cutting):
    cut = cutting("rows", "relaxed")
    whole, read = sorted(cut.read(0)), []
    state: Any = None
    for at in range(2 * len(cut.cuts.legal)):
        opened = cut.open(at % len(cut.cuts.legal), state)
        read += [plain(next(opened.elements)) for _ in range(5)]
        state = opened.note_state()()
        opened.close()
    opened = cut.open(1, state)
    read += [plain(output) for output in opened.elements]
    opened.close()
    assert sorted(read) == whole
