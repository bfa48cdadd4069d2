"""Whether the processors of others help a training, which part of its pipeline goes there, and how many of them.

Words: G is the pace of the training step alone, L the pace when this host's processors do everything, R that when
others do all that stands before a cut. All are outputs (batches) a second.

The one idea: places pull from the same splits, so that what both make adds up and nobody sets a ratio. What is made
there still costs something here: it is received, and what stands after the cut is done here. With o(c) processor
seconds of this host an output at cut c, and `cores` of them,

    both(c) = min(G, R(c) + L max(0, 1 - R(c) o(c) / cores))

The best cut is the one with the most of it; of two that are as good, the one with the least work here. A cut is worth
no more than its bytes let through the link, and a place no more than its disk gives. Both are known once they were seen
to hold a trial up: a link or a disk that is not full has been measured by nobody. Where this host reads for the others,
its disk is the one that counts, for both together.

No stall, no offloading: with G <= 1.1 L the processors here will do, and nothing is asked of anybody else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec
from msgspec.structs import replace

WORTH = 1.1  # with less than a tenth to gain, processes elsewhere cost more than they bring
AS_GOOD = 1.02  # paces that are this close are equal as measured: the cut with less work here wins
SPARE = 1.1  # a place that is asked for exactly the pace that is wanted misses it every now and then
A_LITTLE = 0.25  # of a processor: less than this is left to whoever needs it
MOST_APART = 8.0  # times that one place may be faster than the other: each is dealt something
MOST_TRIALS = 4  # cuts that are tried: a window each is what the first epoch pays

ReadingPlace: TypeAlias = Literal["here", "there", "both"]
"""here: guests of this host only. there: the service's own workers only. both: whoever has time."""


class CutPace(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of one cut with all that stands before it done elsewhere."""

    cut: str
    per_s: float
    """R, as the trainer read it."""
    output_bytes: float = 0.0
    """What crosses the link for an output."""
    here_cpu_s: float = 0.0
    """o: processor time of this host for an output, the training step not counted."""
    workers: int = 1
    """How many workers made it."""
    reads_here: bool = False
    """This host reads for those elsewhere."""
    failure: str = ""
    """Why it could not be read there; empty: it could."""


class HeldUp(msgspec.Struct, frozen=True, kw_only=True):
    """What the workers of a trial waited for while the trainer waited for them."""

    by: Literal["", "link", "disk"] = ""
    read_bytes: float = 0.0
    """What sources gave for an output."""


class OffloadProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured. `None` is not known, and bounds nothing."""

    step_per_s: float
    """G."""
    here_per_s: float
    """L."""
    cores: float
    """How many processors this host has for all of it."""
    step_cpu_s: float = 0.0
    """Processor time of this host for a training step."""
    cuts: tuple[CutPace, ...] = ()
    """The cut with the least work here first."""
    link_bytes_per_s: float | None = None
    read_bytes: float | None = None
    """What is read of storage for an output."""
    disk_here_bytes_per_s: float | None = None
    disk_there_bytes_per_s: float | None = None

    @property
    def stalls(self) -> bool:
        """Whether the training would go a tenth faster if it never waited."""
        return self.step_per_s > WORTH * self.here_per_s


def with_bound(profile: OffloadProfile, trial: Trial, held: HeldUp, seen: CutPace) -> OffloadProfile:
    """Return the profile with what a trial says of the link and the disks, where one of them held it up.

    >>> profile = OffloadProfile(step_per_s=40.0, here_per_s=10.0, cores=2)
    >>> seen = CutPace(cut="all there", per_s=5.0, output_bytes=2e6)
    >>> with_bound(profile, Trial(cut="all there", place="there"), HeldUp(by="link"), seen).link_bytes_per_s
    10000000.0
    >>> disk = HeldUp(by="disk", read_bytes=1e6)
    >>> with_bound(profile, Trial(cut=None, place="here"), disk, seen).disk_here_bytes_per_s
    5000000.0
    """
    read_bytes = held.read_bytes or profile.read_bytes
    if held.by == "link" and trial.place == "there":
        full = max(profile.link_bytes_per_s or 0.0, seen.per_s * seen.output_bytes)
        return replace(profile, link_bytes_per_s=full or None)
    if held.by == "disk" and read_bytes:
        gave = seen.per_s * read_bytes
        if trial.place == "here" or seen.reads_here:
            here = max(profile.disk_here_bytes_per_s or 0.0, gave)
            return replace(profile, read_bytes=read_bytes, disk_here_bytes_per_s=here)
        there = max(profile.disk_there_bytes_per_s or 0.0, gave)
        return replace(profile, read_bytes=read_bytes, disk_there_bytes_per_s=there)
    return profile


class OffloadLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What may be used."""

    most_here: int | None = None
    """Guests on this host; None: one a processor."""
    most_there: int | None = None
    """Workers elsewhere; None: all there are."""


class Offload(msgspec.Struct, frozen=True, kw_only=True):
    """The decision."""

    cut: str | None
    """The cut; None: nothing goes elsewhere."""
    here: int
    """Guest workers on this host; 0: its processors are left to the training."""
    there: int
    """Workers elsewhere."""
    reason: str
    expected_per_s: float = 0.0
    guest_pace: float = 1.0
    """How fast a guest works, beside a worker elsewhere."""

    @property
    def place(self) -> ReadingPlace:
        """Who works on what stands before the cut: here, there, or both."""
        if self.cut is None:
            return "here"
        return "both" if self.here else "there"


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure next: real batches are read so for a while."""

    cut: str | None
    """None: everything is done here."""
    place: ReadingPlace


def next_trial(profile: OffloadProfile | None, candidates: Sequence[str], *, reads_here: str = "") -> Trial | None:
    """Return what is to be measured next; None: it is time to decide.

    `candidates` are in the order of `OffloadProfile.cuts`; `reads_here` is the one at which this host reads for others.
    A cut that cannot win is not tried, for each trial is a time with one place idle: once another reaches the pace of
    the step; or where it leaves more work here than one whose work alone keeps the processors here as busy.

    >>> next_trial(None, ["all there"])
    Trial(cut=None, place='here')
    >>> slow = OffloadProfile(step_per_s=10.0, here_per_s=4.0, cores=2)
    >>> next_trial(slow, ["all there"])
    Trial(cut='all there', place='there')
    >>> next_trial(OffloadProfile(step_per_s=10.0, here_per_s=9.5, cores=2), ["all there"]) is None
    True
    """
    if profile is None:
        return Trial(cut=None, place="here")
    if not profile.stalls:
        return None
    tried = {pace.cut for pace in profile.cuts}
    rest = [cut for cut in candidates if cut not in tried]
    return next((Trial(cut=cut, place="there") for cut in rest if _may_win(cut, profile, reads_here)), None)


def _may_win(cut: str, profile: OffloadProfile, reads_here: str) -> bool:
    """Say whether a cut that was not tried may go faster than the best that was.

    >>> fast = CutPace(cut="all there", per_s=39.5)
    >>> slow = CutPace(cut="before map(a)", per_s=10.0, here_cpu_s=0.2)
    >>> known = OffloadProfile(step_per_s=40.0, here_per_s=10.0, cores=2.0, cuts=(fast,))
    >>> _may_win("before map(a)", known, "")
    False
    >>> known = replace(known, cuts=(CutPace(cut="all there", per_s=12.0), slow))
    >>> _may_win("before map(b)", known, ""), _may_win("read here", known, "read here")
    (False, True)
    """
    usable = [pace for pace in profile.cuts if pace.per_s > 0]
    best = max((pace_of_both(pace, profile) for pace in usable), default=0.0)
    if best * AS_GOOD >= profile.step_per_s:
        return False
    work_here = max((pace.here_cpu_s for pace in usable if not pace.reads_here), default=0.0)
    if cut == reads_here or not work_here:
        return True
    return max(profile.here_per_s, profile.cores / work_here) > best * AS_GOOD


def candidate_cuts(names: Sequence[str]) -> list[str]:
    """Return the cuts that are worth a trial: all, or the ends and some between where there are too many.

    >>> candidate_cuts(["all there", "a", "b", "c", "d", "e", "f"])
    ['all there', 'b', 'd', 'f']
    """
    if len(names) <= MOST_TRIALS:
        return list(names)
    last = len(names) - 1
    return [names[round(each * last / (MOST_TRIALS - 1))] for each in range(MOST_TRIALS)]


def bounded_there(pace: CutPace, profile: OffloadProfile) -> float:
    """Return what a cut gives from elsewhere: as measured, and no more than link and disk let through.

    What passed the link at any cut, it lets through, whoever was thought to be held up by it.

    >>> thin = OffloadProfile(step_per_s=100.0, here_per_s=10.0, cores=2, link_bytes_per_s=1e6)
    >>> bounded_there(CutPace(cut="all there", per_s=50.0, output_bytes=1e5), thin)
    10.0
    """
    bounds = [pace.per_s]
    if profile.link_bytes_per_s is not None and pace.output_bytes > 0:
        passed = max((each.per_s * each.output_bytes for each in profile.cuts), default=0.0)
        bounds.append(max(profile.link_bytes_per_s, passed) / pace.output_bytes)
    disk = profile.disk_here_bytes_per_s if pace.reads_here else profile.disk_there_bytes_per_s
    if disk is not None and profile.read_bytes:
        bounds.append(disk / profile.read_bytes)
    return min(bounds)


def bounded_here(profile: OffloadProfile) -> float:
    """Return what this host gives by itself: as measured, and no more than its disk lets through."""
    if profile.disk_here_bytes_per_s is None or not profile.read_bytes:
        return profile.here_per_s
    return min(profile.here_per_s, profile.disk_here_bytes_per_s / profile.read_bytes)


def pace_of_both(pace: CutPace, profile: OffloadProfile) -> float:
    """Return the pace at a cut with both places at work.

    >>> profile = OffloadProfile(step_per_s=100.0, here_per_s=10.0, cores=2)
    >>> pace_of_both(CutPace(cut="all there", per_s=30.0), profile)
    40.0
    >>> pace_of_both(CutPace(cut="before batch", per_s=30.0, here_cpu_s=0.02), profile)
    37.0
    """
    there, here = bounded_there(pace, profile), bounded_here(profile)
    left = max(0.0, 1.0 - there * pace.here_cpu_s / profile.cores)
    both = there + here * left
    if pace.reads_here and profile.disk_here_bytes_per_s is not None and profile.read_bytes:
        both = min(both, profile.disk_here_bytes_per_s / profile.read_bytes)
    return min(profile.step_per_s, both)


_USUAL = OffloadLimits()


def decide(profile: OffloadProfile, limits: OffloadLimits = _USUAL) -> Offload:
    """Return what goes elsewhere.

    >>> calm = OffloadProfile(step_per_s=10.0, here_per_s=9.5, cores=4)
    >>> decide(calm).reason
    'no stall: the step alone takes 10.0 outputs/s and the processors here make 9.5'
    >>> slow = OffloadProfile(
    ...     step_per_s=40.0,
    ...     here_per_s=10.0,
    ...     cores=4,
    ...     cuts=(
    ...         CutPace(cut="all there", per_s=8.0, output_bytes=9e6, workers=4),
    ...         CutPace(cut="before map(decode)", per_s=24.0, output_bytes=1e6, here_cpu_s=0.05, workers=4),
    ...     ),
    ... )
    >>> chosen = decide(slow)
    >>> chosen.cut, chosen.here, chosen.there, round(chosen.expected_per_s, 1)
    ('before map(decode)', 4, 4, 31.0)
    """
    here = bounded_here(profile)
    stay = f"the step alone takes {profile.step_per_s:.1f} outputs/s and the processors here make {here:.1f}"
    if profile.step_per_s <= WORTH * here:
        return _stays(profile, limits, f"no stall: {stay}")
    usable = [pace for pace in profile.cuts if pace.per_s > 0 and not pace.failure]
    failures = sorted({pace.failure for pace in profile.cuts if pace.failure})
    if not usable or limits.most_there == 0:
        why = "; ".join(failures) or ("no workers are allowed there" if limits.most_there == 0 else "no cut was tried")
        return _stays(profile, limits, f"it stays here, because {why}: {stay}")
    best = max(pace_of_both(pace, profile) for pace in usable)
    chosen = next(pace for pace in usable if pace_of_both(pace, profile) * AS_GOOD >= best)
    expected = pace_of_both(chosen, profile)
    if expected < WORTH * here:
        text = f"the best cut, {chosen.cut!r}, would give {expected:.1f} outputs/s"
        return _stays(profile, limits, f"not worth it: {stay}; {text}")
    there = _workers_there(chosen, profile, here)
    if limits.most_there is not None:
        there = min(there, limits.most_there)
    reason = (
        f"{stay}; cut {chosen.cut!r} gives {bounded_there(chosen, profile):.1f} from {chosen.workers} workers there, "
        f"and {expected:.1f} with both{_bounds_seen(profile)}"
    )
    return Offload(
        cut=chosen.cut,
        here=_guests(profile, limits, expected),
        there=there,
        reason=reason,
        expected_per_s=expected,
        guest_pace=guest_pace(chosen, profile),
    )


def guest_pace(pace: CutPace, profile: OffloadProfile) -> float:
    """Return how many outputs a guest makes while a worker elsewhere makes one, with both places at work.

    >>> profile = OffloadProfile(step_per_s=100.0, here_per_s=10.0, cores=2)
    >>> guest_pace(CutPace(cut="all there", per_s=40.0, workers=4), profile)
    0.5
    """
    there = bounded_there(pace, profile)
    left = max(0.0, 1.0 - there * pace.here_cpu_s / profile.cores)
    ratio = (bounded_here(profile) * left / max(1.0, profile.cores)) / (there / pace.workers)
    return min(MOST_APART, max(1 / MOST_APART, round(ratio, 2)))


def _bounds_seen(profile: OffloadProfile) -> str:
    """Return in words what was seen to be full.

    >>> _bounds_seen(OffloadProfile(step_per_s=1.0, here_per_s=1.0, cores=1, link_bytes_per_s=12.5e6))
    '; seen to be full: the link at 12.5 MB/s'
    """
    seen = {
        "the link": profile.link_bytes_per_s,
        "the disk here": profile.disk_here_bytes_per_s,
        "the disk there": profile.disk_there_bytes_per_s,
    }
    full = [f"{name} at {value / 1e6:.1f} MB/s" for name, value in seen.items() if value is not None]
    return f"; seen to be full: {', '.join(full)}" if full else ""


def _stays(profile: OffloadProfile, limits: OffloadLimits, reason: str) -> Offload:
    here = min(bounded_here(profile), profile.step_per_s)
    return Offload(cut=None, here=_guests(profile, limits, here), there=0, reason=reason, expected_per_s=here)


def _guests(profile: OffloadProfile, limits: OffloadLimits, per_s: float) -> int:
    beside = guests_beside(profile, per_s)
    return beside if limits.most_here is None else min(beside, limits.most_here)


def guests_beside(profile: OffloadProfile, per_s: float) -> int:
    """Return how many guests this host has processors for beside a training at that pace.

    >>> guests_beside(OffloadProfile(step_per_s=10.0, here_per_s=4.0, cores=8, step_cpu_s=0.2), 5.0)
    7
    """
    left = profile.cores - per_s * profile.step_cpu_s
    return max(1, min(math.floor(profile.cores), math.ceil(left - A_LITTLE)))


def _workers_there(pace: CutPace, profile: OffloadProfile, here: float) -> int:
    """Return the fewest workers that keep the step from waiting beside those here; all, if they do not.

    What others cost grows with their number, and guests cost nothing: this is the cheapest mix that meets demand.
    """
    needed = profile.step_per_s * SPARE - here * max(0.0, 1.0 - pace.per_s * pace.here_cpu_s / profile.cores)
    share = needed / bounded_there(pace, profile)
    return max(1, min(pace.workers, math.ceil(pace.workers * share)))


def has_drifted(seen_per_s: float, decision: Offload, profile: OffloadProfile, *, waited: float) -> bool:
    """Say whether an epoch went so much otherwise than expected that the next is to be measured anew.

    `waited` is the share of the epoch in which the trainer waited: where it did not, nothing is to be gained.

    >>> profile = OffloadProfile(step_per_s=40.0, here_per_s=10.0, cores=4)
    >>> decision = Offload(cut="all there", here=4, there=4, reason="", expected_per_s=30.0)
    >>> has_drifted(29.0, decision, profile, waited=0.3), has_drifted(20.0, decision, profile, waited=0.5)
    (False, True)
    >>> has_drifted(20.0, decision, profile, waited=0.01)
    False
    """
    if waited < 1.0 - 1.0 / WORTH:
        return False
    return seen_per_s < DRIFT * decision.expected_per_s


DRIFT = 0.8  # an epoch varies by a few percent by itself
