"""What is known of a job's workers: what each number of them made, and where more of them stop paying.

    made(n) = n x rate                     up to the first number that was tried
              n / (1/rate + s (n - last))  beyond, and between two that were tried: 1/rate grows by s for each worker
              made                         beyond one that did not pay: the *ceiling*. It begins where those of the
                                           lower one reach it: they wait for something outside of them, or seem to

It holds whatever the trainer's speed is, but for which numbers were *short* of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from penstock.policies.scaling.records import WORTHWHILE, Measured, ScalingLimits

MOVED = 0.1  # figures that differ by less are the same: averages over a window differ by a few percent
LITTLE = 0.6  # of what one alone makes: those that bring less are rather held up than in each other's way
PAYS = 0.5  # of what workers make on average: those that bring less by being in each other's way are not asked for


class Tried(msgspec.Struct, frozen=True):
    """What came of a number of workers."""

    workers: float
    made_per_s: float
    """What they could make: their rate, or what was taken where they waited for credit."""
    short: bool
    """Whether the trainer waited, or will when it has taken what was made before."""
    processor: float


class WorkerCurve(msgspec.Struct, frozen=True, kw_only=True):
    """A point for each number of workers that was tried."""

    tried: tuple[Tried, ...] = ()
    """By the number of workers."""
    ceiling_per_s: float = math.inf
    ceiling_at: float = 0.0
    """When it was found."""
    knee: bool = False
    """Whether workers below the ceiling are taken not to disturb each other: it is a limit outside of them."""

    @property
    def has_ceiling(self) -> bool:
        return math.isfinite(self.ceiling_per_s)

    def at(self, workers: float) -> Tried | None:
        return next((tried for tried in self.tried if tried.workers == workers), None)

    def for_demand(self, demand_per_s: float) -> WorkerCurve:
        """Return the same workers for a trainer that takes so much.

        >>> curve = WorkerCurve(tried=(Tried(2, 20.0, False, 1.0), Tried(4, 40.0, False, 1.0)))
        >>> [tried.short for tried in curve.for_demand(30.0).tried]
        [True, False]
        """
        enough = demand_per_s / (1 + WORTHWHILE)
        return replace(self, tried=tuple(replace(tried, short=tried.made_per_s < enough) for tried in self.tried))

    def entered(self, figures: Measured, limits: ScalingLimits, now: float) -> WorkerCurve:
        """Return it with what the present number of workers makes, and a ceiling where the last ones did not pay."""
        here = self._point_of(figures, limits)
        others = tuple(tried for tried in self.tried if tried.workers != here.workers)
        tried = tuple(sorted((*others, here), key=lambda each: each.workers))
        found = replace(self, tried=tried)
        if self.knee and here.short:
            straight = _straight(tried, here, limits)
            if here.made_per_s < (1 - MOVED) * min(self.ceiling_per_s, straight):
                return replace(found, knee=False)  # so they are in each other's way after all
        if here.short and len(tried) > 1 and here is tried[-1] and not self.has_ceiling:
            paid = _judge(tried, limits)
            if paid != "paid":
                return replace(found, ceiling_per_s=here.made_per_s, ceiling_at=now, knee=paid == "held up")
        return found

    def _point_of(self, figures: Measured, limits: ScalingLimits) -> Tried:
        made, workers = made_in(figures, limits), figures.workers
        known, useful = self.at(workers), limits.useful(workers)
        if known is not None and not differ(made, known.made_per_s):
            made = (known.made_per_s + made) / 2  # both are right, but for noise
        waits = figures.waiting > WORTHWHILE
        if not waits and any(tried.workers > workers for tried in self.tried):
            # Those that are left run the streams of those that are gone beside their own, for as long as these last.
            others = [tried for tried in self.tried if tried.workers != workers]
            made = min(made, useful * max(tried.made_per_s / limits.useful(tried.workers) for tried in others))
        # A trainer that does not wait takes what was made before, for a while.
        return Tried(workers, made, waits or made * (1 + WORTHWHILE) < figures.demand_per_s, figures.processor)

    def made(self, workers: float, limits: ScalingLimits) -> float:
        """Return what so many workers would make; at least one number was tried."""
        n = limits.useful(workers)
        above = next((tried for tried in self.tried if tried.workers >= workers), None)
        below = next((tried for tried in reversed(self.tried) if tried.workers <= workers), None)
        if below is None:
            assert above is not None
            return min(n * above.made_per_s / limits.useful(above.workers), self.ceiling_per_s)
        points = [(limits.useful(tried.workers), tried.made_per_s) for tried in self.tried]
        if above is None:
            return min(_beyond(points[-2:], n), self.ceiling_per_s)
        (m, made), (k, more) = points[self.tried.index(below)], points[self.tried.index(above)]
        if self.knee or m == k:
            return min(n * made / m, max(made, more))
        return n / (m / made + (k / more - m / made) * (n - m) / (k - m))


def made_in(figures: Measured, limits: ScalingLimits) -> float:
    """Return what workers could make: by their rate, or by what was taken where they waited for credit."""
    taken, rate = figures.taken_per_s, figures.worker_per_s
    made = taken / max(min(figures.busy, 1.0), 1e-3) if rate is None else rate * limits.useful(figures.workers)
    if figures.waiting > WORTHWHILE:
        made = min(made, taken * (1 + WORTHWHILE))  # it is not what readers get, whatever workers say of themselves
    return made


def is_lower(one: float, other: float, by: float = MOVED) -> bool:
    return one < (1 - by) * other


def differ(one: float, other: float) -> bool:
    return abs(one - other) > MOVED * max(abs(other), 1e-9)


def _straight(curve: Sequence[Tried], here: Tried, limits: ScalingLimits) -> float:
    """Return what so many workers would make if they were as fast as the next smaller number that was tried."""
    below = next((tried for tried in reversed(curve) if tried.workers < here.workers), here)
    return limits.useful(here.workers) * below.made_per_s / limits.useful(below.workers)


def _judge(curve: Sequence[Tried], limits: ScalingLimits) -> Literal["paid", "in the way", "held up"]:
    """Say whether the workers between the last two numbers brought enough, or disturb each other, or wait outside.

    They wait if each uses less of its processor than when there were fewer. What waits inside of a function that has
    one thread looks busy, though: then two points cannot tell the one from the other. Those that bring little are
    taken to wait, since that is tried at once, with the number that would be enough; unless it was to be expected.
    Then they disturb each other as those before them did, and pay as long as these.
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
    if len(before) < 2 or here.made_per_s - below.made_per_s < foreseen / 2:
        return "held up"
    return "paid" if brought >= PAYS else "in the way"


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
