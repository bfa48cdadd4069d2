"""Cachew's policy (ATC 2022, section 4.3), as the paper has it: a yardstick.

Assumes that batch time alone tells enough: it needs to know nothing of workers, and finds a number by trying.

    start with one; a report is the mean over 100 batches of each client
    add one while      batch time < batch time before x (1 - 3 %);    else go back to the number before: converged
    every ten reports  batch time > that at convergence x (1 + 3 %)   add one, and go on as above
                       queue > that at convergence x (1 + 40 %)       remove one while batch time worsens by < 3 %
    after a change     150 batches are not looked at

What the paper leaves open: the figures of convergence are those of the number that is kept, as last reported; at a
look after ten reports the mean of the ten counts.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec.structs import replace

from penstock.policies.scaling.records import Measured, ScalingLimits, WorkerTarget

REPORT_BATCHES = 100
PAUSE_BATCHES = 150
LOOK_REPORTS = 10
THRESHOLD = 0.03
QUEUE_GREW = 0.4


class Report(msgspec.Struct, frozen=True):
    """What clients say after 100 batches."""

    batch_s: float
    queue: float


class CachewMemory(msgspec.Struct, frozen=True, kw_only=True):
    threshold: float = THRESHOLD
    phase: Literal["adding", "removing", "converged"] = "adding"
    target: int = 1
    before: Report | None = None
    """That of the number of workers before the last change."""
    converged: Report | None = None
    pause: float = 0.0
    """Batches that are still to be passed over."""
    batches: float = 0.0
    """Those of the report that is being made."""
    batch_s: float = 0.0
    queue: float = 0.0
    reports: tuple[Report, ...] = ()
    """Since the last look at a converged number."""


def begin(threshold: float = THRESHOLD) -> CachewMemory:
    return CachewMemory(threshold=threshold)


def decide(
    memory: CachewMemory, measured: Measured, limits: ScalingLimits, now: float
) -> tuple[CachewMemory, WorkerTarget]:
    """
    >>> from penstock.policies.scaling.records import ReaderPace
    >>> def run(workers):  # a trainer that takes 30 batches a second, workers that make 10 each
    ...     batch_s = max(1 / 30, 1 / (10 * workers))
    ...     pace = ReaderPace(batches=150, step_s=1 / 30, wait_s=batch_s - 1 / 30)
    ...     return Measured(seconds=150 * batch_s, workers=workers, pace=pace, worker_per_s=10.0)
    >>> memory, workers, path = begin(), 1, []
    >>> for now in range(20):
    ...     memory, target = decide(memory, run(workers), ScalingLimits(), now)
    ...     if target.workers != workers:
    ...         workers = target.workers
    ...         path.append(workers)
    >>> path
    [2, 3, 4, 3]
    """
    if measured.pace is None:
        return memory, WorkerTarget(0, "nobody reads")
    memory, report = _report(memory, measured)
    if report is None:
        return memory, WorkerTarget(limits.clip(memory.target), memory.phase)
    if memory.phase == "converged":
        memory = replace(memory, reports=(*memory.reports, report))
        if len(memory.reports) < LOOK_REPORTS:
            return memory, WorkerTarget(limits.clip(memory.target), "converged")
        return _look_again(replace(memory, reports=()), memory.reports, limits)
    if memory.before is None:
        return _change(memory, memory.target + 1, report, limits, "one more, to see whether it helps")
    change = report.batch_s / memory.before.batch_s - 1
    told = f"batch time {memory.before.batch_s:.3g} s -> {report.batch_s:.3g} s ({change:+.1%})"
    if memory.phase == "adding":
        if change < -memory.threshold:
            return _change(memory, memory.target + 1, report, limits, told)
        return _converge(memory, memory.target - 1, memory.before, limits, told)
    if change < memory.threshold and memory.target > limits.least:
        return _change(memory, memory.target - 1, report, limits, told)
    if change < memory.threshold:
        return _converge(memory, memory.target, report, limits, told)
    return _converge(memory, memory.target + 1, memory.before, limits, told)


def _report(memory: CachewMemory, measured: Measured) -> tuple[CachewMemory, Report | None]:
    """Gather batches; give a report when there are 100 of each client."""
    assert measured.pace is not None
    batches = measured.pace.batches / measured.pace.ranks
    passed = min(batches, memory.pause)
    memory, batches = replace(memory, pause=memory.pause - passed), batches - passed
    if batches <= 0:
        return memory, None
    total = memory.batches + batches
    batch_s = (memory.batches * memory.batch_s + batches * measured.batch_s) / total
    queue = (memory.batches * memory.queue + batches * measured.queue) / total
    if total < REPORT_BATCHES:
        return replace(memory, batches=total, batch_s=batch_s, queue=queue), None
    return replace(memory, batches=0.0, batch_s=0.0, queue=0.0), Report(batch_s, queue)


def _look_again(
    memory: CachewMemory, reports: tuple[Report, ...], limits: ScalingLimits
) -> tuple[CachewMemory, WorkerTarget]:
    assert memory.converged is not None
    batch_s = sum(report.batch_s for report in reports) / len(reports)
    queue = sum(report.queue for report in reports) / len(reports)
    now = Report(batch_s, queue)
    if batch_s > memory.converged.batch_s * (1 + memory.threshold):
        told = f"batch time {memory.converged.batch_s:.3g} s -> {batch_s:.3g} s since convergence"
        return _change(replace(memory, phase="adding"), memory.target + 1, now, limits, told)
    if queue > memory.converged.queue * (1 + QUEUE_GREW) and memory.target > limits.least:
        told = f"queue {memory.converged.queue:.3g} -> {queue:.3g} since convergence"
        return _change(replace(memory, phase="removing"), memory.target - 1, now, limits, told)
    return memory, WorkerTarget(limits.clip(memory.target), "converged")


def _change(
    memory: CachewMemory, target: int, report: Report, limits: ScalingLimits, why: str
) -> tuple[CachewMemory, WorkerTarget]:
    if limits.clip(target) != target:
        return _converge(memory, limits.clip(target), report, limits, f"{why}; {target} are not allowed")
    return replace(memory, target=target, before=report, pause=PAUSE_BATCHES), WorkerTarget(target, why)


def _converge(
    memory: CachewMemory, target: int, report: Report, limits: ScalingLimits, why: str
) -> tuple[CachewMemory, WorkerTarget]:
    pause = PAUSE_BATCHES if target != memory.target else 0
    memory = replace(memory, phase="converged", target=target, before=None, converged=report, pause=pause, reports=())
    return memory, WorkerTarget(limits.clip(target), f"converged: {why}")
