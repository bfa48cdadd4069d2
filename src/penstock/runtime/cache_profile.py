"""What modes are seen to take: windows over the chunks that pass the last point of a source.

Results come in order, so that the chunks which pass a point one after the other say how fast all of the pipeline is, in
the mode they were made in. A window is a run of chunks of one mode, without what comes first: threads have to be found,
buffers to be filled. All figures are differences between its ends, when stages have as much under way at one as at
the other, and are by element that passed. Elements that were read together pass together: a window ends before a chunk
that was waited for, with all that came in one go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import msgspec

from penstock.policies.caching import PipelineProfile, PointProfile
from penstock.runtime.keeping import CachePoint
from penstock.runtime.stats import StageMeter

WARM_UP_S = 0.2  # before the first window of a pipeline
WARM_AGAIN_S = 0.05  # before all others: functions have been called, and files opened
SHORTEST_S = 0.05  # a window's, else it says nothing
LOOK_EVERY_S = 0.1  # whether threads came or went
PROFILE_S = 1.0  # of a mode, before its figures are worth a decision
PROFILE_ELEMENTS = 100
LONG_S = 1.2  # after which fewer are enough: choosing may take 3 % of two minutes
FEW_ELEMENTS = 16

COMPUTING = 0
"""The mode in which nothing is kept. Elements that are got at a point have its number as their mode, those that are put
its negative."""


class StageSums(msgspec.Struct):
    """What one stage did in windows of one mode."""

    busy_s: float = 0.0
    cpu_s: float = 0.0
    nbytes: float = 0.0


class ModeSums(msgspec.Struct):
    """All windows of one mode together."""

    elements: int = 0
    seconds: float = 0.0
    wait_s: float = 0.0
    busy_s: float = 0.0
    """Of the reader, as the one before: how long it waited for elements, and how long it worked on them."""
    stages: list[StageSums] = []

    @property
    def is_enough(self) -> bool:
        """Whether that is enough to decide on."""
        if self.seconds >= LONG_S and self.elements >= FEW_ELEMENTS:
            return True
        return self.seconds >= PROFILE_S and self.elements >= PROFILE_ELEMENTS

    @property
    def seen_s(self) -> float:
        return self.seconds / max(1, self.elements)


class _Look(msgspec.Struct, frozen=True):
    at_s: float
    elements: int
    reader: tuple[float, float]
    stages: tuple[tuple[float, float, float], ...]
    threads: tuple[int, ...]


class ModeWindows:
    """One run's. `passed` and `end` come from the one thread that pulls the point; `add` takes what a window gave."""

    def __init__(
        self,
        meters: Sequence[StageMeter],
        reader_times: Callable[[], tuple[float, float]],
        add: Callable[[int, ModeSums], None],
        *,
        warm: bool,
    ) -> None:
        """`warm`: whether another run of the pipeline has ended in this process."""
        self._meters = meters
        self._reader_times = reader_times
        self._add = add
        self._mode: int | None = None
        self._elements = 0
        self._first: _Look | None = None
        self._last: _Look | None = None
        """Where the window may end, if the next chunk is waited for."""
        self._ends_at = 0.0
        """When it does in any case."""
        self._begins_at = self._look_at = 0.0
        self._warm_up_s = WARM_AGAIN_S if warm else WARM_UP_S

    def passed(self, mode: int, count: int) -> None:
        """Some elements of a mode came through."""
        now = perf_counter()
        self._elements += count
        if mode != self._mode:
            self.end(now)
            self._mode, self._begins_at = mode, now + self._warm_up_s
        elif self._first is None:
            if now >= self._begins_at:
                self._first, self._look_at = self._look(now), now + LOOK_EVERY_S
        elif self._last is not None:
            each_s = (self._last.at_s - self._first.at_s) / max(1, self._last.elements - self._first.elements)
            if now - self._last.at_s >= each_s / 2 or now >= self._ends_at:
                self._count(self._last)
            else:
                self._last = self._look(now)
        elif now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            if tuple(meter.threads for meter in self._meters) != self._first.threads:
                self.end(now)
            elif now - self._first.at_s >= PROFILE_S / 2:
                self._last, self._ends_at = self._look(now), now + PROFILE_S / 2

    def end(self, now: float | None = None) -> None:
        """A pass ended, or a window: what comes next is another."""
        if self._first is not None:
            self._count(self._look(perf_counter() if now is None else now))
        self._mode = self._first = self._last = None

    def _count(self, last: _Look) -> None:
        first, mode, self._last = self._first, self._mode, None
        if first is None or mode is None or last.threads != first.threads:
            return
        if last.at_s - first.at_s < SHORTEST_S or last.elements == first.elements:
            return
        wait_s, busy_s = (there - was for there, was in zip(last.reader, first.reader))
        stages = [
            StageSums(*(max(0.0, there - was) for there, was in zip(*each))) for each in zip(last.stages, first.stages)
        ]
        elements = last.elements - first.elements
        self._add(mode, ModeSums(elements, last.at_s - first.at_s, wait_s, busy_s, stages))
        self._first, self._warm_up_s = last, WARM_AGAIN_S

    def _look(self, now: float) -> _Look:
        return _Look(
            now,
            self._elements,
            self._reader_times(),
            tuple((meter.busy_s + meter.work_s, meter.cpu_s, meter.nbytes) for meter in self._meters),
            tuple(meter.threads for meter in self._meters),
        )


def add_sums(had: ModeSums, more: ModeSums) -> ModeSums:
    """Return two together; their stages are those of one pipeline."""
    stages = [
        StageSums(one.busy_s + other.busy_s, one.cpu_s + other.cpu_s, one.nbytes + other.nbytes)
        for one, other in zip(had.stages or [StageSums() for _ in more.stages], more.stages)
    ]
    return ModeSums(
        had.elements + more.elements,
        had.seconds + more.seconds,
        had.wait_s + more.wait_s,
        had.busy_s + more.busy_s,
        stages,
    )


def profile_of(
    sums: ModeSums, meters: Sequence[StageMeter], points: Sequence[CachePoint], *, reads_ahead: bool, parallel: int = 1
) -> PipelineProfile:
    """Return what computing takes, by element that passes the last point.

    `reads_ahead`: whether entries are read by another thread than the one that needs them. `parallel`: how many such
    runs go on side by side, which a worker's element takes so much less for.
    """
    count = max(1, sums.elements) * max(1, parallel)
    numbers = {meter: number for number, meter in enumerate(meters)}
    stage = {meter: sums.stages[number] for meter, number in numbers.items() if number < len(sums.stages)}
    known = [meter for meter in meters if meter in stage]
    source = stage[points[0].meters[0]]
    turning = sums.wait_s + sums.busy_s
    seen_s = sums.seconds / count

    def cpu_s(some: Sequence[StageMeter], *, gil: bool = False) -> float:
        return sum(stage[meter].cpu_s for meter in some if meter.holds_gil or not gil) / max(1, sums.elements)

    def chains_s(some: Sequence[StageMeter]) -> list[float]:
        """How long threads are busy, from the source on: stages without their own are pulled by those of the next."""
        found = [0.0]
        for meter in some:
            if meter.threads:
                found += [(found[-1] + stage[meter].busy_s) / meter.threads, 0.0]
            else:
                found[-1] += stage[meter].busy_s
        return [seconds / count for seconds in found]

    def point_profile(point: CachePoint) -> PointProfile:
        below = [meter for meter in point.meters if meter in stage]
        chains = chains_s([meter for meter in known if meter not in point.meters])
        own = point.meter
        return PointProfile(
            number=point.number,
            cpu_s=cpu_s(below),
            gil_s=cpu_s(below, gil=True),
            nbytes=0.0 if own is None or own not in stage else stage[own].nbytes / max(1, sums.elements),
            rest_stage_s=max(chains),
            after_read_s=None if reads_ahead else chains[0],
        )

    return PipelineProfile(
        cpu_s=cpu_s(known),
        gil_s=cpu_s(known, gil=True),
        stage_s=max(chains_s(known)),
        source_s=max(0.0, source.busy_s - source.cpu_s) / count,
        points=tuple(map(point_profile, points)),
        seen_s=seen_s,
        trainer_s=seen_s * sums.busy_s / turning if turning > 0 else 0.0,
    )
