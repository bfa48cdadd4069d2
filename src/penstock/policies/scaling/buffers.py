"""DPP's master (ISCA 2022, section III-B): batches in the workers' buffers at the highest use of workers. A yardstick.

Assumes that a worker has a buffer, which is empty exactly while the trainer takes all that is made, and that the
scarcest of processor, memory and network is what limits a worker.

    use     = max(processor, memory, network)
    empty   launch a tenth more, at least one
    filled  drain what use leaves over: workers x (1 - use / the highest use seen), if that is a whole worker

The paper says what is looked at and the goal (buffers above zero, highest use), and no numbers: the step, and a look
every 30 s, are ours.
"""

from __future__ import annotations

import math

import msgspec
from msgspec.structs import replace

from penstock.policies.scaling.records import Measured, ScalingLimits, WorkerTarget

EMPTY = 0.5  # batches a worker: fewer, and some workers have none
STEP = 0.1
PERIOD_S = 30.0


class BuffersMemory(msgspec.Struct, frozen=True, kw_only=True):
    target: int = 0
    """0: nothing decided yet."""
    looked_at: float = -math.inf
    highest_use: float = 0.0
    """Seen while buffers were empty."""


def begin() -> BuffersMemory:
    return BuffersMemory()


def decide(
    memory: BuffersMemory, measured: Measured, limits: ScalingLimits, now: float
) -> tuple[BuffersMemory, WorkerTarget]:
    """
    >>> def look(memory, now, workers, buffered, use):
    ...     seen = Measured(seconds=30, workers=workers, pace=None, worker_per_s=None, buffered=buffered, network=use)
    ...     return decide(memory, seen, ScalingLimits(), now)
    >>> memory, target = look(begin(), 0.0, 20, 0.0, 0.9)
    >>> target
    WorkerTarget(workers=22, reason='buffers are empty at 90% use')
    >>> memory, target = look(memory, 30.0, 22, 3.0, 0.45)
    >>> target
    WorkerTarget(workers=11, reason='buffers hold 3.0 batches at 45% use, 90% is possible')
    """
    workers = math.ceil(measured.workers)
    held = memory.target or limits.clip(workers)
    if not workers or now - memory.looked_at < PERIOD_S:
        return replace(memory, target=held), WorkerTarget(limits.clip(held), "between two looks")
    use = max(measured.processor, measured.memory, measured.network)
    memory = replace(memory, looked_at=now)
    if measured.buffered < EMPTY:
        memory = replace(memory, highest_use=max(use, memory.highest_use))
        wanted, why = workers + max(1, math.floor(STEP * workers)), f"buffers are empty at {use:.0%} use"
    else:
        spare = workers * (1 - use / memory.highest_use) if memory.highest_use else 0.0
        wanted = workers - math.floor(max(spare, 0.0) + 1e-9)
        why = f"buffers hold {measured.buffered:.1f} batches at {use:.0%} use, {memory.highest_use:.0%} is possible"
    target = limits.clip(wanted)
    return replace(memory, target=target), WorkerTarget(target, why)
