"""Kubernetes' Horizontal Pod Autoscaler, by its documentation: a yardstick.

Assumes that a worker that is used to 80 % is a worker that is needed: it sees neither trainers nor what workers wait
for.

    desired = ceil(workers x used / 80 %)           every 15 s; unchanged while used / 80 % is within 1 +- 0.1
    growing     at once, by 100 % or 4 workers in 15 s, whichever is more
    shrinking   to the highest number desired in the last 300 s

The numbers are its defaults (kubernetes.io, "Horizontal Pod Autoscaling", autoscaling/v2); 80 % is what Cachew set it
to (section 6.1).
"""

from __future__ import annotations

import math

import msgspec
from msgspec.structs import replace

from penstock.policies.scaling.records import Measured, ScalingLimits, WorkerTarget

TARGET_USE = 0.8
TOLERANCE = 0.1
PERIOD_S = 15.0
STABILIZATION_S = 300.0
MOST_GROWTH = 2.0
MOST_MORE = 4


class UtilizationMemory(msgspec.Struct, frozen=True, kw_only=True):
    target: int = 0
    """0: nothing decided yet."""
    looked_at: float = -math.inf
    desired: tuple[tuple[float, int], ...] = ()
    """(when, how many) of the last 300 s."""


def begin() -> UtilizationMemory:
    return UtilizationMemory()


def decide(
    memory: UtilizationMemory, measured: Measured, limits: ScalingLimits, now: float
) -> tuple[UtilizationMemory, WorkerTarget]:
    """
    >>> def used(share, workers):
    ...     return Measured(seconds=15, workers=workers, pace=None, worker_per_s=None, processor=share)
    >>> memory, target = decide(begin(), used(1.0, 4), ScalingLimits(), 0.0)
    >>> target
    WorkerTarget(workers=5, reason='4 workers use 100% of a processor each, 80% is wanted')
    >>> memory, target = decide(memory, used(0.86, 5), ScalingLimits(), 15.0)
    >>> target.workers  # within the tolerance
    5
    >>> for now in (30.0, 330.0):
    ...     memory, target = decide(memory, used(0.3, 5), ScalingLimits(), now)
    ...     print(target.workers)
    5
    2
    """
    workers = math.ceil(measured.workers)
    held = memory.target or limits.clip(workers)
    if not workers or now - memory.looked_at < PERIOD_S:
        return replace(memory, target=held), WorkerTarget(limits.clip(held), "between two looks")
    ratio = measured.processor / TARGET_USE
    desired = workers if abs(ratio - 1) <= TOLERANCE else math.ceil(workers * ratio - 1e-9)
    recent = (*((at, n) for at, n in memory.desired if now - at < STABILIZATION_S), (now, desired))
    if desired < held:
        desired = min(held, max(n for _, n in recent))
    else:
        desired = min(desired, max(math.floor(held * MOST_GROWTH), held + MOST_MORE))
    target = limits.clip(desired)
    why = f"{workers} workers use {measured.processor:.0%} of a processor each, {TARGET_USE:.0%} is wanted"
    return UtilizationMemory(target=target, looked_at=now, desired=recent), WorkerTarget(target, why)
