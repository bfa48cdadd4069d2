from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from penstock.wire.messages import RunnerFigures, StageFigures
from penstock.worker.figures import LINE_BYTES, Counts, Figures, line_of


class FakeStream:
    def __init__(self) -> None:
        self.counts = Counts(running=True)


class FakeRun:
    def __init__(self) -> None:
        self.closed = False
        self.stages = [SimpleNamespace(name="map(f)", elements=0, busy_s=0.0, bytes=0, padding=())]

    def statistics(self) -> Any:
        return SimpleNamespace(stages=self.stages)

    def work(self, elements: int) -> None:
        stage = self.stages[0]
        stage.elements, stage.busy_s, stage.bytes = (
            stage.elements + elements,
            stage.busy_s + elements / 4,
            stage.bytes + 8 * elements,
        )
        stage.padding = tuple(SimpleNamespace(values=stage.elements, padding=2 * stage.elements) for _ in range(2))


@dataclass(eq=False)
class FakePump:
    busy_s: float = 0.0


def test_figures_grow_while_streams_and_runs_come_and_go() -> None:
    figures, stream = Figures(), FakeStream()
    first, pump = FakeRun(), FakePump()
    figures.watch(pump, first)  # type: ignore[arg-type]
    first.work(4)
    pump.busy_s = 1.5
    stream.counts = Counts(rounds=2, nbytes=100, running=True)
    seen = figures.look([stream])
    assert (seen.streams, seen.rounds, seen.nbytes, seen.busy_s) == (1, 2, 100, 1.5)
    assert seen.stages == {"map(f)": StageFigures(4, 1.0, 32, 8, 16)}
    assert figures.look([stream]) == seen, "nothing has happened"
    first.work(4)
    first.closed = True
    brief = FakeRun()  # begins and ends between two looks
    figures.watch(FakePump(busy_s=0.5), brief)  # type: ignore[arg-type]
    brief.work(8)
    brief.closed = True
    stream.counts = stream.counts._replace(running=False)
    later = figures.look([stream])
    assert (later.streams, later.rounds, later.busy_s) == (0, 2, 2.0)
    assert later.stages["map(f)"] == StageFigures(16, 4.0, 128, 32, 64)
    assert figures.look([]).rounds == 2, "what a forgotten stream gave was given"
    assert figures.look([]).stages["map(f)"].elements == 16


@pytest.mark.parametrize(("stages", "kept"), [(3, 3), (500, 0)])
def test_a_line_is_never_torn(stages: int, kept: int) -> None:
    figures = RunnerFigures(rounds=7, stages={f"stage {n}": StageFigures(n, 0.5, n) for n in range(stages)})
    line = line_of(figures)
    assert len(line) <= LINE_BYTES and "\n" not in line
    read = msgspec.json.decode(line, type=RunnerFigures)
    assert (read.rounds, len(read.stages)) == (7, kept)
