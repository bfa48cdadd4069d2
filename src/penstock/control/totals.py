"""Sums over what is gone: processes and readers of a job end, and what they did stays counted. Kept in memory only.

What lives counts from zero when it begins, and says so again with every beat. So the last word of each is all that is
needed: while it lives it stands with the agent or the lease, and here from then on.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from penstock.control.records import Agent, Record
from penstock.core.conversion import Conversion
from penstock.core.ids import RunnerId
from penstock.wire.figures import RunnerFigures, StageFigures
from penstock.wire.jobs import Slot
from penstock.wire.messages import Beat

runner_figures = Conversion(RunnerFigures)
"""What a runner counted, as its agent told it; `msgspec.ValidationError` where it is nothing of the kind."""


class JobTotals(Record, frozen=True):
    """What was done for a job by processes that are gone, and read by consumers that are."""

    runners: RunnerFigures = RunnerFigures()
    readers: dict[Slot, tuple[Beat, ...]] = {}
    """By seat: the last word of the reader that left last, which may come back, and the sum of all before it."""

    def with_runner(self, figures: RunnerFigures) -> JobTotals:
        return replace(self, runners=sum_runners([self.runners, idle(figures)]))

    def with_reader(self, slot: Slot, beat: Beat) -> JobTotals:
        before = tuple(each for each in self.readers.get(slot, ()) if each.client != beat.client)
        kept = (beat, sum_beats(before)) if before else (beat,)
        return replace(self, readers={**self.readers, slot: kept})


def samples_of(agent: Agent, runner: RunnerId) -> tuple[RunnerFigures, ...]:
    """Return what an agent said of a process lately, oldest first."""
    found = []
    for told in agent.told:
        if runner in told:
            try:
                found.append(runner_figures(told[runner]))
            except msgspec.ValidationError:
                continue  # of another release
    return tuple(found)


def idle(figures: RunnerFigures) -> RunnerFigures:
    """Return the figures of one that is gone: it uses nothing any more."""
    stages = tuple(replace(stage, threads=0) for stage in figures.stages)
    return replace(figures, streams=0, rss_bytes=0, cores=0.0, stages=stages)


def sum_runners(figures: Iterable[RunnerFigures]) -> RunnerFigures:
    """
    >>> one = RunnerFigures(rounds=2, stages=(StageFigures(1, "map", 20),))
    >>> other = RunnerFigures(rounds=3, stages=(StageFigures(2, "map", 5), StageFigures(1, "map", 30)))
    >>> both = sum_runners([one, other])
    >>> both.rounds, [(stage.node, stage.elements) for stage in both.stages]
    (5, [(1, 50), (2, 5)])
    """
    total, stages = RunnerFigures(), dict[tuple[int, str], StageFigures]()
    for each in figures:
        total = replace(
            total,
            streams=total.streams + each.streams,
            rounds=total.rounds + each.rounds,
            nbytes=total.nbytes + each.nbytes,
            runs=total.runs + each.runs,
            busy_s=total.busy_s + each.busy_s,
            credit_wait_s=total.credit_wait_s + each.credit_wait_s,
            cpu_s=total.cpu_s + each.cpu_s,
        )
        for stage in each.stages:
            key = (stage.node, stage.name)
            stages[key] = _sum_stages(stages[key], stage) if key in stages else stage
    return replace(total, stages=tuple(stages[key] for key in sorted(stages, key=lambda key: key[0])))


def _sum_stages(one: StageFigures, other: StageFigures) -> StageFigures:
    return StageFigures(
        one.node,
        one.name,
        one.elements + other.elements,
        one.nbytes + other.nbytes,
        one.busy_s + other.busy_s,
        one.cpu_s + other.cpu_s,
        one.wait_s + other.wait_s,
        one.values + other.values,
        one.padding + other.padding,
        one.threads + other.threads,
    )


def sum_beats(beats: Iterable[Beat]) -> Beat:
    """Return the sum of what readers of one seat have taken, as the last of them would say it."""
    first, *others = beats
    for beat in others:
        first = replace(
            beat,
            batches=first.batches + beat.batches,
            nbytes=first.nbytes + beat.nbytes,
            wait_s=first.wait_s + beat.wait_s,
            run_s=first.run_s + beat.run_s,
            skipped=first.skipped + beat.skipped,
            shared=first.shared + beat.shared,
        )
    return first
