from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from penstock.core.ids import JobName, RunnerId, WorkerId
from penstock.processes.supervised_runners import SupervisedRunner
from penstock.wire.figures import LINE_BYTES, RunnerFigures, StageFigures, lines_of
from penstock.worker.figures import Counts, Figures


class FakeStream:
    def __init__(self) -> None:
        self.counts = Counts(running=True)


class FakeRun:
    def __init__(self) -> None:
        self.closed = False
        self.stages = [
            SimpleNamespace(
                node=node, name="map(f)", elements=0, busy_s=0.0, cpu_s=0.0, wait_s=0.0, bytes=0, threads=2, padding=()
            )
            for node in (1, 2)
        ]

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
    assert seen.stages[0] == StageFigures(1, "map(f)", 4, 32, 1.0, 0.0, 0.0, 8, 16, threads=2)
    assert seen.stages[1] == StageFigures(2, "map(f)", threads=2), "another with the same label"
    assert replace(figures.look([stream]), at_s=seen.at_s) == seen, "nothing has happened"
    first.work(4)
    first.closed = True
    brief = FakeRun()  # begins and ends between two looks
    figures.watch(FakePump(busy_s=0.5), brief)  # type: ignore[arg-type]
    brief.work(8)
    brief.closed = True
    stream.counts = stream.counts._replace(running=False)
    later = figures.look([stream])
    assert (later.streams, later.rounds, later.busy_s) == (0, 2, 2.0)
    assert later.stages[0] == StageFigures(1, "map(f)", 16, 128, 4.0, 0.0, 0.0, 32, 64)
    assert figures.look([]).rounds == 2, "what a forgotten stream gave was given"
    assert figures.look([]).stages[0].elements == 16


@pytest.mark.parametrize("stages", [0, 3, 500])
def test_no_line_is_torn_and_no_stage_left_out(stages: int) -> None:
    made = tuple(StageFigures(n, f"stage {n}", n, n, 0.5) for n in range(stages))
    lines = list(lines_of(RunnerFigures(rounds=7, stages=made)))
    assert all(len(line) <= LINE_BYTES and "\n" not in line for line in lines)
    agents = SupervisedRunner(runner=RunnerId("r"), worker=WorkerId("w"), job=JobName("j"), started_s=0.0)
    for line in lines:
        agents.reported(msgspec.json.decode(line, type=RunnerFigures))
    assert (agents.figures.rounds, agents.figures.stages) == (7, made)
