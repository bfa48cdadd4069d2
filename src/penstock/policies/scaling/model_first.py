"""Ask for demand ÷ rate at once, see whether the trainer still waits, and then leave it alone. The default.

Assumes that a trainer's step and a worker's rate can be measured whatever the number of workers is, which credit
makes true: a worker that is not held back by credit shows what it can do, a trainer that waits shows how long it
would not. What cannot be known beforehand is how workers disturb each other (storage, network, memory): that is learned
as a curve, one point for each number of workers that was tried.

    made(n) = n x rate                     up to the first number that was tried
              n / (1/rate + s (n - last))  beyond, and between two that were tried: 1/rate grows by s for each worker
              made                         beyond one that did not pay: the *ceiling*. It begins where those of the
                                           lower one reach it: they wait for something outside of them, or seem to
    goal    = min(demand, ceiling)
    target  = the smallest n with made(n) >= goal / 1.03     or, with prices, the n where a batch costs least

A number at which the trainer was seen to wait is not asked for again, nor more than one that was seen to be enough: so
the search only narrows. One worker too many, or a tenth of them, is left where it is. The search begins anew for a
reason: demand or rate moved by more than a tenth, for several windows on end; the trainer waits for longer than
noise explains; or an hour has passed since a ceiling was found. A trainer that changes its speed leaves the curve as it
is: that is the workers'.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from penstock.policies.scaling.records import WORTHWHILE, Measured, Rent, ScalingLimits, WorkerTarget

MOVED = 0.1  # figures that differ by less are the same: averages over a window differ by a few percent
SEVERAL = 3  # windows that must agree before a decision that held is left
LOOK = 2  # windows before a new number of workers is judged; the one in which it changed is not looked at
LITTLE = 0.6  # of what one alone makes: those that bring less are rather held up than in each other's way
PAYS = 0.5  # of what workers make on average: those that bring less by being in each other's way are not asked for
LOOK_AGAIN_S = 3600.0  # a ceiling may have gone away, and cannot be seen from below
TOLERATED = 2.5 * WORTHWHILE  # a decision allows for some waiting already, and noise is added to it
SPARE = 0.97  # workers that are busy for more of their time have nothing to give back


class Tried(msgspec.Struct, frozen=True):
    """What came of a number of workers."""

    workers: float
    made_per_s: float
    """What they could make: their rate, or what was taken where they waited for credit."""
    short: bool
    """Whether the trainer waited."""
    processor: float


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
    demand_per_s: float = 0.0
    """What the decision rests on; so for the rate, which is 0 where it is not known."""
    worker_per_s: float = 0.0
    curve: tuple[Tried, ...] = ()
    ceiling_per_s: float = math.inf
    ceiling_at: float = 0.0
    knee: bool = False
    """Whether workers below the ceiling are taken not to disturb each other: it is a limit outside of them."""
    verified: bool = False
    """Whether the decision was seen to be right."""
    astray: int = 0
    """Windows on end in which the figures were others since."""
    doubts: int = 0
    """Windows on end in which the same figures asked for another number."""


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
    return replace(memory, workers=workers, recent=(), astray=0)


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
    if not memory.verified or not memory.worker_per_s:
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
        memory = replace(memory, workers=measured.workers, recent=(), astray=0)
        return memory, WorkerTarget(
            limits.clip(memory.held or math.ceil(measured.workers)), memory.reason or "measuring"
        )
    memory = replace(memory, recent=(*memory.recent[1 - SEVERAL :], measured))
    if len(memory.recent) < LOOK:
        return memory, WorkerTarget(
            limits.clip(memory.held or math.ceil(measured.workers)), memory.reason or "measuring"
        )
    figures = _average(memory.recent)
    memory, began_anew = _forget_what_moved(memory, figures, limits, now)
    if memory.astray:
        return memory, WorkerTarget(limits.clip(memory.held), memory.reason)
    memory = _learn(memory, figures, limits, now)
    wanted, why = _choose(memory, figures, limits)
    if wanted > figures.workers and not figures.filled:
        return memory, WorkerTarget(
            limits.clip(memory.held or math.ceil(figures.workers)), "a worker's threads still grow"
        )
    return _settle(memory, figures, limits.clip(wanted), began_anew or why, anew=bool(began_anew))


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


def _forget_what_moved(
    memory: ModelMemory, figures: Measured, limits: ScalingLimits, now: float
) -> tuple[ModelMemory, str]:
    """Begin the search anew where its figures are no longer true, without those; say why, or nothing."""
    known = next((tried for tried in memory.curve if tried.workers == figures.workers), None)
    rate = figures.worker_per_s
    why, curve = "", memory.curve
    if memory.demand_per_s and _differ(figures.demand_per_s, memory.demand_per_s):
        why = f"the trainer takes {figures.demand_per_s:.3g}/s and no longer {memory.demand_per_s:.3g}/s"
        enough = figures.demand_per_s / (1 + WORTHWHILE)
        curve = tuple(replace(tried, short=tried.made_per_s < enough) for tried in curve)  # workers are who they were
    elif known is not None and rate is not None:
        made = rate * limits.useful(known.workers)
        if _differ(made, known.made_per_s) and (made < known.made_per_s or known.short):  # else it was not to be seen
            was = known.made_per_s / limits.useful(known.workers)
            why, curve = f"a worker makes {rate:.3g}/s and no longer {was:.3g}/s", ()
    if not why and math.isfinite(memory.ceiling_per_s) and now - memory.ceiling_at >= LOOK_AGAIN_S:
        why, curve = f"see whether {memory.ceiling_per_s:.3g}/s are still all that can be had", ()
        memory = replace(memory, astray=SEVERAL)
    elif not why:
        return replace(memory, astray=0) if memory.verified else memory, ""
    if memory.verified and memory.astray + 1 < SEVERAL:
        return replace(memory, astray=memory.astray + 1), ""
    if not curve:
        memory = replace(memory, ceiling_per_s=math.inf, knee=False)
    return replace(memory, curve=curve, demand_per_s=0.0, verified=False, astray=0), why


def _learn(memory: ModelMemory, figures: Measured, limits: ScalingLimits, now: float) -> ModelMemory:
    """Enter the present number of workers into the curve, and see whether the last ones paid."""
    taken, rate = figures.taken_per_s, figures.worker_per_s
    useful = limits.useful(figures.workers)
    short = figures.waiting > WORTHWHILE
    made = rate * useful if rate is not None else taken / max(min(figures.busy, 1.0), 1e-3)
    if short:
        made = min(made, taken * (1 + WORTHWHILE))  # it is not what readers get, whatever workers say of themselves
    here = Tried(figures.workers, made, short, figures.processor)
    others = tuple(tried for tried in memory.curve if tried.workers != here.workers)
    curve = tuple(sorted((*others, here), key=lambda tried: tried.workers))
    memory = replace(
        memory,
        curve=curve,
        demand_per_s=memory.demand_per_s or figures.demand_per_s,
        worker_per_s=rate if rate is not None else memory.worker_per_s,
    )
    if memory.knee and short and made < (1 - MOVED) * min(memory.ceiling_per_s, _straight(curve, here, limits)):
        return replace(memory, knee=False)  # so they are in each other's way after all
    if short and len(curve) > 1 and here is curve[-1] and math.isinf(memory.ceiling_per_s):
        paid = _judge(curve, limits)
        if paid != "paid":
            return replace(memory, ceiling_per_s=made, ceiling_at=now, knee=paid == "held up")
    return memory


def _straight(curve: Sequence[Tried], here: Tried, limits: ScalingLimits) -> float:
    """Return what so many workers would make if they were as fast as the next smaller number that was tried."""
    below = next((tried for tried in reversed(curve) if tried.workers < here.workers), here)
    return limits.useful(here.workers) * below.made_per_s / limits.useful(below.workers)


def _judge(curve: Sequence[Tried], limits: ScalingLimits) -> Literal["paid", "in the way", "held up"]:
    """Say whether the workers between the last two numbers brought enough, or disturb each other, or wait outside.

    They wait if each uses less of its processor than when there were fewer. What waits inside of a function that has
    one thread looks busy, though: then two points cannot tell the one from the other. Those that bring little are
    taken to wait, since that is tried at once, with the number that would be enough; unless it was to be expected.
    """
    below, here = curve[-2:]
    more = limits.useful(here.workers) - limits.useful(below.workers)
    if more <= 0:
        return "paid"
    alone = below.made_per_s / limits.useful(below.workers)
    brought = (here.made_per_s - below.made_per_s) / more / alone
    fell = 1 - (here.made_per_s / limits.useful(here.workers)) / alone
    if below.processor > 0 and here.processor > 0 and fell > MOVED and 1 - here.processor / below.processor >= fell / 2:
        return "held up"
    if brought >= LITTLE:
        return "paid"
    before = [(limits.useful(tried.workers), tried.made_per_s) for tried in curve[-3:-1]]
    foreseen = _beyond(before, limits.useful(here.workers)) - below.made_per_s
    expected = len(before) > 1 and here.made_per_s - below.made_per_s >= foreseen / 2
    return "in the way" if expected else "held up"


def _choose(memory: ModelMemory, figures: Measured, limits: ScalingLimits) -> tuple[int, str]:
    """Return how many workers the curve asks for, and why."""
    demand, curve = figures.demand_per_s, memory.curve
    if not curve:
        return memory.held or math.ceil(figures.workers), memory.reason or "measuring"
    goal = min(demand, memory.ceiling_per_s)
    slowest = min(tried.made_per_s / tried.workers for tried in curve)
    enough = math.ceil(goal / max(slowest, 1e-9)) + 1 if limits.streams is None else limits.streams
    upto = limits.clip(max(enough, math.ceil(curve[-1].workers)))
    candidates = range(max(limits.least, 1), upto + 1)
    rent = limits.rent
    if rent is not None:
        best = min(candidates, key=lambda n: _batch_cost(curve, memory, limits, rent, n, demand))
        goal = min(goal, _made(curve, memory, limits, best))
    place = bisect_left(candidates, goal / (1 + WORTHWHILE), key=lambda n: _made(curve, memory, limits, n))
    wanted = candidates[min(place, len(candidates) - 1)]
    if math.isfinite(memory.ceiling_per_s) and goal < demand:
        why = f"storage or network give {memory.ceiling_per_s:.3g}/s, however many share them"
        if not memory.knee:
            why = f"workers are in each other's way, and make {memory.ceiling_per_s:.3g}/s at most"
    elif figures.worker_per_s is None:
        why = f"the trainer takes {demand:.1f}/s, and workers wait for it"
    else:
        why = f"the trainer takes {demand:.1f}/s, a worker makes {figures.worker_per_s:.1f}/s"
    if rent is not None and goal < demand / (1 + WORTHWHILE):
        why += "; one more would cost more than the waiting it saves"
    short = max((t.workers for t in curve if t.short and t.made_per_s * (1 + WORTHWHILE) < goal), default=0.0)
    if wanted < figures.workers and goal == demand:
        # Down to one at which the trainer waited a little would be for nothing.
        short = max((t.workers for t in curve if t.short and t.made_per_s < goal), default=0.0)
    if wanted <= short:
        wanted, why = math.floor(short) + 1, f"{why}, and {short:g} were seen to be too few"
    most = min((tried.workers for tried in curve if not tried.short), default=math.inf)
    if math.isfinite(memory.ceiling_per_s):
        most = min(most, math.ceil(curve[-1].workers))  # there it was seen
    return int(min(wanted, most)) if math.isfinite(most) else wanted, why


def _made(curve: Sequence[Tried], memory: ModelMemory, limits: ScalingLimits, workers: float) -> float:
    """Return what so many workers would make, by the curve."""
    n = limits.useful(workers)
    above = next((tried for tried in curve if tried.workers >= workers), None)
    below = next((tried for tried in reversed(curve) if tried.workers <= workers), None)
    if below is None:
        assert above is not None
        return min(n * above.made_per_s / limits.useful(above.workers), memory.ceiling_per_s)
    points = [(limits.useful(tried.workers), tried.made_per_s) for tried in curve]
    if above is None:
        return min(_beyond(points[-2:], n), memory.ceiling_per_s)
    (m, made), (k, more) = points[curve.index(below)], points[curve.index(above)]
    if memory.knee or m == k:
        return min(n * made / m, max(made, more))
    return n / (m / made + (k / more - m / made) * (n - m) / (k - m))


def _beyond(last: Sequence[tuple[float, float]], workers: float) -> float:
    """Return what more workers would make than were tried, from the last one or two of (workers, made).

    >>> _beyond([(4, 40.0)], 8), round(_beyond([(1, 10.0), (4, 32.0)], 8), 1)
    (80.0, 50.5)
    """
    before, (n, made) = last[0], last[-1]
    inverse = n / made
    slope = (inverse - before[0] / before[1]) / max(n - before[0], 1e-9)
    if inverse * before[1] / before[0] < 1 + WORTHWHILE:
        return workers * made / n
    undisturbed = max(inverse - slope * n, 0.0)
    pays_until = n + max((undisturbed / PAYS - inverse) / slope, 0.0)
    upto = min(workers, pays_until)
    return upto / (inverse + slope * (upto - n))


def _batch_cost(
    curve: Sequence[Tried], memory: ModelMemory, limits: ScalingLimits, rent: Rent, workers: int, demand: float
) -> float:
    """Return what is paid for a batch, in any unit: trainer and workers, for as long as it takes."""
    per_s = min(demand, _made(curve, memory, limits, workers))
    return (rent.trainer_per_h + workers * rent.worker_per_h) / max(per_s, 1e-9)


def _settle(
    memory: ModelMemory, figures: Measured, wanted: int, why: str, *, anew: bool
) -> tuple[ModelMemory, WorkerTarget]:
    """Take a decision over, unless the one that holds is as good."""
    held = memory.held
    if wanted == held:
        right = memory.verified or wanted == math.ceil(figures.workers)
        return replace(memory, verified=right, doubts=0), WorkerTarget(held, memory.reason or why)
    if held and not anew and _as_good(memory, figures, wanted):
        right = memory.verified or figures.workers == held
        return replace(memory, verified=right, doubts=0), WorkerTarget(held, memory.reason)
    if memory.verified and memory.doubts + 1 < 2 * SEVERAL:
        return replace(memory, doubts=memory.doubts + 1), WorkerTarget(held, memory.reason)
    return replace(memory, held=wanted, reason=why, verified=False, doubts=0), WorkerTarget(wanted, why)


def _as_good(memory: ModelMemory, figures: Measured, wanted: int) -> bool:
    """Say whether the decision in force should stay although another number is wanted."""
    held = memory.held
    if figures.workers < min(wanted, held):  # a pool that is exhausted
        return abs(wanted - held) <= max(1.0, MOVED * held)
    if figures.workers != held:
        return False
    if wanted > held:
        goal = min(figures.demand_per_s, memory.ceiling_per_s)
        flat = math.isfinite(memory.ceiling_per_s) and not memory.knee  # one more brings less than can be measured
        return (memory.verified or flat) and figures.taken_per_s * (1 + TOLERATED) >= goal
    if math.isfinite(memory.ceiling_per_s) and not memory.verified:
        return False  # all but the needed ones wait for what they share, and look busy
    return held - wanted <= max(1.0, MOVED * held) or figures.busy > SPARE * wanted / held


def _differ(one: float, other: float) -> bool:
    return abs(one - other) > MOVED * max(abs(other), 1e-9)
