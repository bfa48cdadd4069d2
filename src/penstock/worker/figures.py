"""What a runner has done so far, for its agent's heartbeat.

Figures only grow for as long as the process lives. Streams, pumps and runs come and go: what each has done since it was
last looked at is added. A run is held here until it has been looked at once after its end, so that one which begins
and ends between two looks counts too.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import NamedTuple, Protocol

from penstock.runtime.iterator import Run
from penstock.runtime.stats import StageStatistics
from penstock.wire.figures import RunnerFigures, StageFigures

LABEL_CHARACTERS = 80


class Counts(NamedTuple):
    """What a stream has done."""

    rounds: int = 0
    """Made."""
    nbytes: int = 0
    """Sent, to all readers together."""
    credit_wait_s: float = 0.0
    runs: int = 0
    running: bool = False


class Counted(Protocol):
    """A stream, whichever kind."""

    @property
    def counts(self) -> Counts: ...


class Busy(Protocol):
    """A pump, and how long it has pulled."""

    busy_s: float


class Figures:
    """Any thread may `watch`; one looks."""

    def __init__(self) -> None:
        self._watched: list[tuple[Busy, Run]] = []
        self._seen: weakref.WeakKeyDictionary[object, tuple[float, ...]] = weakref.WeakKeyDictionary()
        self._streams: tuple[float, ...] = (0, 0, 0.0, 0)
        """As `Counts` has them, of all streams together."""
        self._busy_s = 0.0
        self._stages: dict[tuple[int, str], tuple[float, ...]] = {}
        """By node and name: what `_figures_of` gives of each."""

    def watch(self, pump: Busy, run: Run) -> None:
        self._watched.append((pump, run))

    def look(self, streams: Iterable[Counted], *, refused: int = 0) -> RunnerFigures:
        """Return the figures as they are now."""
        running, threads = 0, Counter[tuple[int, str]]()
        for stream in streams:
            *counts, runs_now = stream.counts
            running += runs_now
            self._streams = _sum(self._streams, self._since(stream, *counts))
        for watched in list(self._watched):
            pump, run = watched
            ended = run.closed  # asked first: what happens between the two looks counts the next time
            self._busy_s += self._since(pump, pump.busy_s)[0]
            stages = run.statistics().stages
            self._add_stages(run, stages)
            if ended:
                self._watched.remove(watched)
            else:
                threads.update({_key_of(stage): stage.threads for stage in stages})
        rounds, nbytes, credit_wait_s, runs = self._streams
        return RunnerFigures(
            at_s=perf_counter(),
            streams=running,
            rounds=int(rounds),
            nbytes=int(nbytes),
            runs=int(runs),
            busy_s=round(self._busy_s, 3),
            credit_wait_s=round(credit_wait_s, 3),
            refused=refused,
            stages=tuple(_stage_figures(key, figures, threads[key]) for key, figures in self._stages.items()),
        )

    def _add_stages(self, run: Run, stages: Sequence[StageStatistics]) -> None:
        figures = [_figures_of(stage) for stage in stages]
        new = self._since(run, *(value for each in figures for value in each))
        for number, (stage, each) in enumerate(zip(stages, figures)):
            key, more = _key_of(stage), new[number * len(each) : (number + 1) * len(each)]
            self._stages[key] = _sum(self._stages.get(key, (0.0,) * len(each)), more)

    def _since(self, thing: object, *values: float) -> tuple[float, ...]:
        """Return how much each value of a thing has grown since the last look at it."""
        before = self._seen.get(thing, ())
        self._seen[thing] = values
        if len(before) != len(values):
            return values
        return tuple(max(0, value - old) for value, old in zip(values, before))


def _sum(had: tuple[float, ...], more: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(old + grown for old, grown in zip(had, more))


def _key_of(stage: StageStatistics) -> tuple[int, str]:
    return stage.node, stage.name[:LABEL_CHARACTERS]


def _figures_of(stage: StageStatistics) -> tuple[float, ...]:
    values, padding = (sum(getattr(bucket, name) for bucket in stage.padding) for name in ("values", "padding"))
    return stage.elements, stage.bytes, stage.busy_s, stage.cpu_s, stage.wait_s, values, padding


def _stage_figures(key: tuple[int, str], figures: tuple[float, ...], threads: int) -> StageFigures:
    elements, nbytes, busy_s, cpu_s, wait_s, values, padding = figures
    return StageFigures(
        *key,
        int(elements),
        int(nbytes),
        round(busy_s, 3),
        round(cpu_s, 3),
        round(wait_s, 3),
        int(values),
        int(padding),
        threads,
    )
