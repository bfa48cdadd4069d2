"""Ask for demand ÷ rate at once, see whether the trainer still waits, and then leave it alone. The default.

Assumes that a trainer's step and a worker's rate can be measured whatever the number of workers is, which credit
makes true: a worker that is not held back by credit shows what it can do, a trainer that waits shows how long it
would not. What cannot be known beforehand is how workers disturb each other (storage, network, memory): that is learned
as a curve, one point for each number of workers that was tried (`worker_curve`).

    goal    = min(demand, the curve's ceiling)
    target  = the smallest n with made(n) >= goal / 1.03     or, with prices, the n where a batch costs least

A number at which the trainer was seen to wait is not asked for again, nor more than one that was seen to be enough: so
the search only narrows. A number is judged by two windows that agree, or by the fastest of four that do not: what
disturbs a window makes it slower. One worker too many, or a tenth of them, is left where it is.

A number that was found good is *settled*, and left when what it loses adds up to more than a change is worth:

    lost    += seconds x (1 - held / needed), or 1 - needed / held, by each window's own figures; half at most
    lost     = 0 where a window finds the held number as good as what it asks for

A host that is busy for some seconds makes trainers and workers slower, and never faster. So a trainer that has become
faster is followed at once, a slower one when LOST_S are lost, and slower workers when it is twice as much. Then the
search goes on from what still holds: of a trainer that changes its speed the whole curve, since that is the workers';
of workers that make less, nothing. An hour after a ceiling was found it is looked at again.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from penstock.policies.scaling.records import WORTHWHILE, Measured, Rent, ScalingLimits, WorkerTarget
from penstock.policies.scaling.worker_curve import MOVED, WorkerCurve, differ, is_lower, made_in

LOOK = 2  # windows that must agree before a number of workers is judged
AT_LAST = 4  # windows after which it is judged although they do not
SEVERAL = 3  # windows on end that a settled number must have been wrong in before it is left
LOST_S = 5.0  # of the job's work: a host that is twice as slow for six seconds loses three
FOLLOWS = 8  # the demand that a settled number rests on is an average over about so many windows in which it was good
MOST_LOST = 0.5  # in a second: what is slower by more than half is rather the host, and is not followed any sooner
LOOK_AGAIN_S = 3600.0  # a ceiling may have gone away, and cannot be seen from below
TOLERATED = 2.5 * WORTHWHILE  # a decision allows for some waiting already, and noise is added to it
SPARE = 0.97  # workers that are busy for more of their time have nothing to give back


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """What a run leaves to the next of the same pipeline, trainer and kind of worker."""

    workers: int
    demand_per_s: float
    worker_per_s: float


class ModelMemory(msgspec.Struct, frozen=True, kw_only=True):
    held: int = 0
    """The decision in force; 0: none yet."""
    reason: str = ""
    workers: float = -1.0
    """Those of the windows in `recent`."""
    recent: tuple[Measured, ...] = ()
    """The last ones with that number, oldest first."""
    demand_per_s: float = 0.0
    """What the decision rests on; so for the rate, which is 0 where it is not known."""
    worker_per_s: float = 0.0
    curve: WorkerCurve = WorkerCurve()
    settled: bool = False
    """Whether the decision was seen to be as good as any, with the workers that could be had."""
    doubts: int = 0
    """Windows on end in which it was not."""
    lost_s: float = 0.0
    """What was lost in them."""


def begin(learned: Learned | None = None) -> ModelMemory:
    """Return the memory of a new job; what an earlier run learned is where it starts.

    >>> begin(Learned(workers=6, demand_per_s=60.0, worker_per_s=10.4)).held
    6
    """
    if learned is None:
        return ModelMemory()
    return ModelMemory(
        held=learned.workers,
        reason="as many as the last run of this pipeline and trainer came to",
        demand_per_s=learned.demand_per_s,
        worker_per_s=learned.worker_per_s,
    )


def with_workers(memory: ModelMemory, workers: float) -> ModelMemory:
    """Return the memory for windows that are counted since there are so many: none of them has to be passed over.

    >>> with_workers(begin(), 4.0).workers
    4.0
    """
    return _among(memory, workers)


def with_rate(memory: ModelMemory, worker_per_s: float) -> ModelMemory:
    """Return the memory for workers that make so much from now on: the same trainer, and nothing tried yet.

    >>> asked = with_rate(ModelMemory(held=8, demand_per_s=80.0, worker_per_s=10.0), 40.0)
    >>> asked.held, asked.reason
    (2, 'the trainer takes 80.0/s, a worker makes 40.0/s by what is kept now')
    """
    if not memory.demand_per_s or not worker_per_s:
        return ModelMemory(held=memory.held, reason=memory.reason)
    demand_per_s = memory.demand_per_s
    return ModelMemory(
        held=max(1, math.ceil(demand_per_s / (1 + WORTHWHILE) / worker_per_s)),
        reason=f"the trainer takes {demand_per_s:.1f}/s, a worker makes {worker_per_s:.1f}/s by what is kept now",
        demand_per_s=demand_per_s,
        worker_per_s=worker_per_s,
    )


def learned_by(memory: ModelMemory) -> Learned | None:
    """Return what the next run should know. None: nothing was found out that can be relied on."""
    if not memory.settled or memory.workers != memory.held or not memory.worker_per_s:
        return None
    return Learned(workers=memory.held, demand_per_s=memory.demand_per_s, worker_per_s=memory.worker_per_s)


def decide(
    memory: ModelMemory, measured: Measured, limits: ScalingLimits, now: float
) -> tuple[ModelMemory, WorkerTarget]:
    """
    >>> from penstock.policies.scaling.records import ReaderPace
    >>> pace = ReaderPace(batches=40, step_s=0.025, wait_s=0.075)
    >>> one = Measured(seconds=4, workers=1, pace=pace, worker_per_s=10.0)
    >>> memory, limits = begin(), ScalingLimits()
    >>> for now in range(4):
    ...     memory, target = decide(memory, one, limits, now)
    >>> target
    WorkerTarget(workers=4, reason='the trainer takes 40.0/s, a worker makes 10.0/s')
    """
    if measured.pace is None:
        return replace(memory, recent=()), WorkerTarget(0, "nobody reads")
    if not measured.workers:
        return memory, WorkerTarget(limits.clip(memory.held or 1), memory.reason or "start with the least")
    if measured.workers != memory.workers:  # the window in which workers came or went shows neither number
        memory = _among(memory, measured.workers)
        return memory, _held(memory, limits, "measuring")
    if measured.worker_per_s == 0.0:  # something holds all of them up, and more of them would be held up too
        return memory, _held(memory, limits, "measuring")
    memory = replace(memory, recent=(*memory.recent[1 - AT_LAST :], measured))
    moved, weighed = "", memory.settled
    if weighed:
        memory, figures = _weigh(memory, measured, limits, now)
    else:
        figures = _agreed(memory.recent, limits, memory.demand_per_s)
    if figures is None:
        return memory, _held(memory, limits, "measuring")
    if memory.held:
        memory, moved = _forget_what_moved(memory, figures, limits, now)
    memory = _learn(memory, figures, limits, now)
    wanted, why = _choose(memory, figures, limits)
    if wanted > figures.workers and not figures.filled:
        return memory, WorkerTarget(
            limits.clip(memory.held or math.ceil(figures.workers)), "a worker's threads still grow"
        )
    wanted = limits.clip(wanted)
    slower = not memory.curve.has_ceiling and _is_slower(memory, figures)
    if not weighed and slower and wanted < memory.held == figures.workers:
        memory = replace(memory, settled=True)  # it may be the host; what is lost by waiting is added up from here on
        return memory, _held(memory, limits, why)
    return _settle(memory, figures, wanted, moved or why, limits)


def _among(memory: ModelMemory, workers: float) -> ModelMemory:
    return replace(memory, workers=workers, recent=(), doubts=0, lost_s=0.0)


def _held(memory: ModelMemory, limits: ScalingLimits, reason: str) -> WorkerTarget:
    """Return the decision in force, or what is there before the first one."""
    return WorkerTarget(limits.clip(memory.held or math.ceil(memory.workers)), memory.reason or reason)


def _agreed(windows: Sequence[Measured], limits: ScalingLimits, demand_per_s: float) -> Measured | None:
    """Return what the last windows say, if it is the same, and none was faster; at last what the fastest of them says.

    Slower are the window after workers left, who had begun things, and those in which the host is busy: then the
    trainer is slower too than it was with the number of workers before.
    """
    if len(windows) < LOOK:
        return None
    fewest = min(window.taken_per_s * window.seconds for window in windows)
    same = max(MOVED, 2 / max(fewest, 1.0))  # a window has a whole number of batches, but not of steps
    speeds = [(window.demand_per_s, made_in(window, limits)) for window in windows]
    fastest = [max(of_all) for of_all in zip(*speeds)]
    busy = is_lower(min(demand for demand, _ in speeds[-LOOK:]), demand_per_s, same)
    if not busy and not any(is_lower(one, most, same) for last in speeds[-LOOK:] for one, most in zip(last, fastest)):
        return _average(windows[-LOOK:])
    if len(windows) < AT_LAST:
        return None
    return max(zip(speeds, windows), key=lambda each: math.prod(each[0]))[1]


def _average(windows: Sequence[Measured]) -> Measured:
    """Return several windows as one."""
    paces = [window.pace for window in windows if window.pace is not None]
    count = len(paces)
    rates = [window.worker_per_s for window in windows if window.worker_per_s is not None]
    pace = replace(
        paces[-1],
        batches=sum(pace.batches for pace in paces),
        step_s=sum(pace.step_s for pace in paces) / count,
        wait_s=sum(pace.wait_s for pace in paces) / count,
    )
    return replace(
        windows[-1],
        seconds=sum(window.seconds for window in windows),
        pace=pace,
        worker_per_s=sum(rates) / len(rates) if len(rates) == len(windows) else None,
        busy=sum(window.busy for window in windows) / len(windows),
        processor=sum(window.processor for window in windows) / len(windows),
    )


def _weigh(
    memory: ModelMemory, window: Measured, limits: ScalingLimits, now: float
) -> tuple[ModelMemory, Measured | None]:
    """Add up what a settled number loses; return what is to be decided on, or None where it stays."""
    if _is_due(memory.curve, now):
        return replace(memory, settled=False), _average(memory.recent[-SEVERAL:])
    seen, _ = _forget_what_moved(memory, window, limits, now)
    wanted, _ = _choose(_learn(seen, window, limits, now), window, limits)
    wanted, held = limits.clip(wanted), memory.held
    if wanted == held or _as_good(memory, window, wanted, limits):
        demand_per_s = memory.demand_per_s + (window.demand_per_s - memory.demand_per_s) / FOLLOWS
        return replace(memory, demand_per_s=demand_per_s, doubts=0, lost_s=0.0), None
    lost = min(1 - min(wanted, held) / max(wanted, held), MOST_LOST)
    memory = replace(memory, doubts=memory.doubts + 1, lost_s=memory.lost_s + lost * window.seconds)
    if memory.doubts < SEVERAL:
        return memory, None
    figures = _average(memory.recent[-LOOK:])  # it changed its speed in the middle of the first
    enough = LOST_S if wanted < held else 0.0 if _is_faster(memory, figures) else 2 * LOST_S
    return (memory, None) if memory.lost_s < enough else (replace(memory, settled=False), figures)


def _forget_what_moved(
    memory: ModelMemory, figures: Measured, limits: ScalingLimits, now: float
) -> tuple[ModelMemory, str]:
    """Return what is still true of what was found out, and what is no longer, if anything."""
    if _is_due(memory.curve, now):
        why = f"see whether {memory.curve.ceiling_per_s:.3g}/s are still all that can be had"
        return replace(memory, curve=WorkerCurve()), why
    made, ceiling_per_s = made_in(figures, limits), memory.curve.ceiling_per_s
    if made > (1 + MOVED) * ceiling_per_s:
        why = f"workers make {made:.3g}/s, and no longer {ceiling_per_s:.3g}/s at most"
        return replace(memory, curve=WorkerCurve()), why
    if memory.demand_per_s and differ(figures.demand_per_s, memory.demand_per_s):
        why = f"the trainer takes {figures.demand_per_s:.3g}/s and no longer {memory.demand_per_s:.3g}/s"
        return replace(memory, curve=memory.curve.for_demand(figures.demand_per_s)), why
    known = memory.curve.at(figures.workers)
    if known is not None and figures.worker_per_s is not None:
        useful = limits.useful(known.workers)
        if differ(made, known.made_per_s) and (made < known.made_per_s or known.short):  # else it was not to be seen
            why = f"a worker makes {made / useful:.3g}/s and no longer {known.made_per_s / useful:.3g}/s"
            return replace(memory, curve=WorkerCurve()), why
    return memory, ""


def _learn(memory: ModelMemory, figures: Measured, limits: ScalingLimits, now: float) -> ModelMemory:
    """Enter what the present number of workers makes."""
    rate = memory.worker_per_s if figures.worker_per_s is None else figures.worker_per_s
    return replace(memory, curve=memory.curve.entered(figures, limits, now), worker_per_s=rate)


def _is_due(curve: WorkerCurve, now: float) -> bool:
    """Say whether a ceiling was found so long ago that it is looked at again."""
    return curve.has_ceiling and now - curve.ceiling_at >= LOOK_AGAIN_S


def _choose(memory: ModelMemory, figures: Measured, limits: ScalingLimits) -> tuple[int, str]:
    """Return how many workers the curve asks for, and why."""
    demand, curve = figures.demand_per_s, memory.curve
    if not curve.tried:
        return memory.held or math.ceil(figures.workers), memory.reason or "measuring"
    goal = min(demand, curve.ceiling_per_s)
    slowest = min(tried.made_per_s / tried.workers for tried in curve.tried)
    enough = math.ceil(goal / max(slowest, 1e-9)) + 1 if limits.streams is None else limits.streams
    upto = limits.clip(max(enough, math.ceil(curve.tried[-1].workers)))
    candidates = range(max(limits.least, 1), upto + 1)
    rent = limits.rent
    if rent is not None:
        best = min(candidates, key=lambda n: _batch_cost(curve, limits, rent, n, demand))
        goal = min(goal, curve.made(best, limits))
    place = bisect_left(candidates, goal / (1 + WORTHWHILE), key=lambda n: curve.made(n, limits))
    wanted = candidates[min(place, len(candidates) - 1)]
    if curve.has_ceiling and goal < demand:
        why = f"storage or network give {curve.ceiling_per_s:.3g}/s, however many share them"
        if not curve.knee:
            why = f"workers are in each other's way, and make {curve.ceiling_per_s:.3g}/s at most"
    elif figures.worker_per_s is None:
        why = f"the trainer takes {demand:.1f}/s, and workers wait for it"
    else:
        why = f"the trainer takes {demand:.1f}/s, a worker makes {figures.worker_per_s:.1f}/s"
    if rent is not None and goal < demand / (1 + WORTHWHILE):
        why += "; one more would cost more than the waiting it saves"
    short = max((t.workers for t in curve.tried if t.short and t.made_per_s * (1 + WORTHWHILE) < goal), default=0.0)
    if wanted < figures.workers and goal == demand:
        # Down to one at which the trainer waited a little would be for nothing.
        short = max((t.workers for t in curve.tried if t.short and t.made_per_s < goal), default=0.0)
    if wanted <= short:
        wanted, why = math.floor(short) + 1, f"{why}, and {short:g} were seen to be too few"
    most = min((tried.workers for tried in curve.tried if not tried.short), default=math.inf)
    if curve.has_ceiling:
        most = min(most, math.ceil(curve.tried[-1].workers))  # there it was seen
    return int(min(wanted, most)) if math.isfinite(most) else wanted, why


def _batch_cost(curve: WorkerCurve, limits: ScalingLimits, rent: Rent, workers: int, demand: float) -> float:
    """Return what is paid for a batch, in any unit: trainer and workers, for as long as it takes."""
    per_s = min(demand, curve.made(workers, limits))
    return (rent.trainer_per_h + workers * rent.worker_per_h) / max(per_s, 1e-9)


def _settle(
    memory: ModelMemory, figures: Measured, wanted: int, why: str, limits: ScalingLimits
) -> tuple[ModelMemory, WorkerTarget]:
    """Take a decision over, unless the one that holds is as good."""
    held, reason = memory.held, memory.reason or why
    settled = wanted == held or bool(held and _as_good(memory, figures, wanted, limits))
    if not settled:
        held, reason = wanted, why
    memory = replace(memory, held=held, reason=reason, settled=settled, doubts=0, lost_s=0.0)
    return replace(memory, demand_per_s=figures.demand_per_s), WorkerTarget(held, reason)


def _as_good(memory: ModelMemory, figures: Measured, wanted: int, limits: ScalingLimits) -> bool:
    """Say whether the decision in force should stay although another number is wanted."""
    held = memory.held
    if figures.workers < min(wanted, held):  # a pool that is exhausted
        return abs(wanted - held) <= max(1.0, MOVED * held)
    if figures.workers != held:
        return False
    if wanted > held:
        goal = min(figures.demand_per_s, memory.curve.ceiling_per_s)
        flat = memory.curve.has_ceiling  # one more brings less than can be measured
        made = figures.taken_per_s
        if _is_faster(memory, figures):
            made = min(made, made_in(figures, limits))  # what was made before lasts for a while
        return (memory.settled or flat) and made * (1 + TOLERATED) >= goal
    near = held - wanted <= max(1.0, MOVED * held)
    if memory.curve.has_ceiling:  # all but the needed ones wait for what they share, and look busy
        return near and memory.settled
    if _is_slower(memory, figures):
        return near  # workers are busy all the same, while there is room
    return near or figures.busy > SPARE * wanted / held


def _is_faster(memory: ModelMemory, figures: Measured) -> bool:
    return is_lower(memory.demand_per_s, figures.demand_per_s) and memory.demand_per_s > 0


def _is_slower(memory: ModelMemory, figures: Measured) -> bool:
    return is_lower(figures.demand_per_s, memory.demand_per_s)
