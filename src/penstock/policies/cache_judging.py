"""Measure, choose, try it on a few splits, and see whether it was right: how a choice about caching comes and goes.

    measuring ── a profile and the storage are known ──► chosen, to compute; or trying, at a point
    trying    ── some entries were read back ──────────► chosen, by how fast that was; slow ones are tried twice
    chosen    ── keeping is seen not to be faster ─────► doubting
    doubting  ── computing was measured anew ──────────► chosen, by what was seen of both
    chosen    ── to compute, and figures say otherwise ► trying

What is measured in one step says nothing in another: evidence carries the number of the verdict under which it was
gathered, which every change raises. A choice is revised a few times at most, so that two modes between which nothing
tells do not take turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec
from msgspec.structs import fields, replace

from penstock.policies.caching import (
    TIE,
    CacheChoice,
    CacheDemand,
    PipelineProfile,
    PointProfile,
    StorageModel,
    choose_caching,
)

CacheStep: TypeAlias = Literal["measuring", "trying", "chosen", "doubting"]

MOST_REVISIONS = 3
MOST_POINTS, MOST_SPEEDS, MOST = 64, 64, 1e15  # in what others say
CLEARLY = 1.25  # so much better must another mode be than computing, once that is chosen: profiles differ by themselves


class CacheEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured under one verdict."""

    number: int
    """The verdict's."""
    profile: PipelineProfile | None = None
    """Of computing; None: not enough is known."""
    storage: StorageModel | None = None
    read_back_bytes_per_s: float = 0.0
    """How fast entries were read that had been written to try it; 0: they were not yet."""
    got_s: Mapping[int, float] = {}
    """By point: how long a worker took for an element that was kept there."""
    several: bool = False
    """Whether that is the least of several windows: one alone may have been disturbed."""


class CacheVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What is done, and what that rests on."""

    step: CacheStep = "measuring"
    number: int = 0
    choice: CacheChoice | None = None
    """None: nothing is chosen yet."""
    profile: PipelineProfile | None = None
    storage: StorageModel | None = None
    compute_s: float = 0.0
    """How long an element took in all when it was chosen; 0: it was not seen."""
    read_back_bytes_per_s: float = 0.0
    got_s: Mapping[int, float] = {}
    """By point: how long an element was seen to take in all, where it is kept there and that was too long."""
    getting_s: float = 0.0
    """How long a worker takes for an element that it gets, as it was first seen; 0: elements are not there yet."""
    revised: int = 0

    @property
    def point(self) -> int:
        """At which point elements are kept and asked for now; 0: they are computed."""
        return 0 if self.choice is None or self.step == "doubting" else self.choice.point

    @property
    def is_getting(self) -> bool:
        """Whether elements are there, and are got."""
        return bool(self.getting_s and self.point)

    @property
    def speed_up(self) -> float:
        """How much faster a worker was seen to be than when it computed."""
        seen_s = 0.0 if self.profile is None else self.profile.seen_s
        return seen_s / self.getting_s if self.is_getting and seen_s else 1.0

    @property
    def reason(self) -> str:
        if self.choice is None:
            return ""
        if self.step == "trying":
            return f"trying: {self.choice.reason}"
        if self.step == "doubting":
            return f"compute, to see how long that takes now: {self._what_was_seen()}"
        return self.choice.reason + (f"; {self._what_was_seen()}" if self.got_s else "")

    def _what_was_seen(self) -> str:
        kept = ", ".join(f"{seconds * 1e3:.3g} ms kept at point {point}" for point, seconds in self.got_s.items())
        return f"seen were {kept}, and {self.compute_s * 1e3:.3g} ms computed"


def check_evidence(evidence: CacheEvidence) -> CacheEvidence:
    """Return it, or raise `ValueError`: it comes from a process that runs somebody's code."""
    numbers = [evidence.read_back_bytes_per_s, *evidence.got_s.values()]
    speeds: list[float] = []
    if evidence.profile is not None:
        points = evidence.profile.points
        if [point.number for point in points] != list(range(1, len(points) + 1)) or len(points) > MOST_POINTS:
            raise ValueError("points are numbered from 1 on")
        records: tuple[PipelineProfile | PointProfile, ...] = (evidence.profile, *points)
        for record in records:
            values = [getattr(record, each.name) for each in fields(record)]
            numbers += [value for value in values if isinstance(value, (int, float))]
    if evidence.storage is not None:
        every = (*evidence.storage.reads, *evidence.storage.writes)
        if not evidence.storage.reads or len(every) > MOST_SPEEDS:
            raise ValueError("a storage has some speeds of reading")
        speeds = [speed.bytes_per_s for speed in every]
    if not all(0 <= number < MOST for number in numbers) or not all(1 <= speed < MOST for speed in speeds):
        raise ValueError("figures are finite, and not below 0")
    if not all(1 <= point <= MOST_POINTS for point in evidence.got_s):
        raise ValueError("points are numbered from 1 on")
    return evidence


def judge(verdict: CacheVerdict, evidence: CacheEvidence, demand: CacheDemand) -> CacheVerdict:
    """Return what holds from now on: the same verdict, or one with a higher number.

    >>> from penstock.policies.caching import PointProfile, StorageSpeed
    >>> disk = (StorageSpeed(nbytes=1 << 20, parallel=4, latency_s=0.004, bytes_per_s=200e6),)
    >>> point = PointProfile(number=1, cpu_s=0.020, gil_s=0.0, nbytes=150e3)
    >>> profile = PipelineProfile(cpu_s=0.0205, gil_s=0.0, source_s=0.0001, points=(point,), seen_s=0.021)
    >>> storage = StorageModel(reads=disk, writes=disk)
    >>> tried = judge(CacheVerdict(), CacheEvidence(number=0, profile=profile, storage=storage), CacheDemand())
    >>> tried.step, tried.point
    ('trying', 1)
    >>> again = judge(tried, CacheEvidence(number=1, read_back_bytes_per_s=2e6), CacheDemand())
    >>> judge(again, CacheEvidence(number=2, read_back_bytes_per_s=1.9e6), CacheDemand()).choice.mode
    'compute'
    """
    if evidence.number != verdict.number:
        return verdict
    verdict = replace(verdict, storage=evidence.storage or verdict.storage)
    match verdict.step:
        case "measuring":
            if evidence.profile is None or evidence.storage is None:
                return verdict
            return _chosen(verdict, evidence.profile, demand)
        case "trying":
            if not evidence.read_back_bytes_per_s or verdict.profile is None:
                return verdict
            fastest = max(evidence.read_back_bytes_per_s, verdict.read_back_bytes_per_s)
            found = _chosen(replace(verdict, read_back_bytes_per_s=fastest), verdict.profile, demand)
            if not verdict.read_back_bytes_per_s and found.point != verdict.point:
                return replace(verdict, read_back_bytes_per_s=fastest, number=verdict.number + 1)
            return found
        case "doubting":
            return verdict if evidence.profile is None else _chosen(verdict, evidence.profile, demand)
        case "chosen":
            return _looked_at_again(verdict, evidence, demand)


def _chosen(verdict: CacheVerdict, profile: PipelineProfile, demand: CacheDemand) -> CacheVerdict:
    choice = _choose(verdict, profile, demand)
    untried = choice.mode == "keep" and not verdict.read_back_bytes_per_s and not verdict.got_s
    return replace(
        verdict,
        step="trying" if untried else "chosen",
        number=verdict.number + 1,
        getting_s=0.0,
        choice=choice,
        profile=profile,
        compute_s=profile.seen_s / max(1, demand.workers),
    )


def _choose(verdict: CacheVerdict, profile: PipelineProfile, demand: CacheDemand) -> CacheChoice:
    assert verdict.storage is not None
    storage = verdict.storage
    if verdict.read_back_bytes_per_s:
        # As entries are read: with what is under way then, and with what it takes to make elements of their bytes.
        fast = max(storage.reads, key=lambda speed: speed.bytes_per_s)
        storage = replace(storage, reads=(replace(fast, bytes_per_s=verdict.read_back_bytes_per_s),))
    return choose_caching(profile, storage, demand, verdict.got_s)


def _looked_at_again(verdict: CacheVerdict, evidence: CacheEvidence, demand: CacheDemand) -> CacheVerdict:
    choice = verdict.choice
    if choice is None or verdict.revised >= MOST_REVISIONS:
        return verdict
    if choice.mode == "keep":
        got_s = evidence.got_s.get(choice.point)
        if got_s is None or not verdict.compute_s:
            return verdict
        each_s = got_s / max(1, demand.workers)
        if each_s * TIE < verdict.compute_s:
            # Said once: the next number makes those who scale the job look at what a worker makes now.
            return verdict if verdict.getting_s else replace(verdict, getting_s=got_s, number=verdict.number + 1)
        if not evidence.several:
            return verdict
        return replace(
            verdict,
            step="doubting",
            number=verdict.number + 1,
            got_s={**verdict.got_s, choice.point: each_s},
            revised=verdict.revised + 1,
        )
    if evidence.profile is None or verdict.storage is None:
        return verdict
    other = _choose(verdict, evidence.profile, demand)
    if (
        other.mode == "compute"
        or other.seconds_by_mode[f"keep {other.point}"] * CLEARLY >= (other.seconds_by_mode["compute"])
    ):
        return verdict
    return _chosen(replace(verdict, revised=verdict.revised + 1), evidence.profile, demand)
