"""FastFlow's policy (VLDB 2023, algorithm 1), as the paper has it: a yardstick.

Assumes a fixed share of the outputs that is made elsewhere, whatever happens afterwards:

    no offloading     if G <= 1.1 L
    the candidate     that makes L (1 - O / P) + R the largest
    Upper = R, Lower = (G - L) (1 + O / P)
    share offloaded   R / G if Lower < Upper, else R / (L + R)

Its candidates are three: read here and prepare there, everything up to the batch, and everything. What is made of the
share is said by `pace_at`: each place makes its part, and the slower one is waited for.
"""

from __future__ import annotations

import msgspec

from penstock.policies.offloading import WORTH, CutPace, OffloadProfile


class FixedShare(msgspec.Struct, frozen=True, kw_only=True):
    """FastFlow's decision."""

    cut: str | None
    share: float
    """Of the outputs, that is made elsewhere."""


def _overhead(pace: CutPace, profile: OffloadProfile) -> float:
    """Return O / P: processor time of this host with and without offloading, for an output."""
    alone = profile.cores / profile.here_per_s
    return min(1.0, pace.here_cpu_s / alone)


def decide_share(profile: OffloadProfile) -> FixedShare:
    """
    >>> profile = OffloadProfile(
    ...     step_per_s=40.0,
    ...     here_per_s=10.0,
    ...     cores=4,
    ...     cuts=(CutPace(cut="all there", per_s=8.0), CutPace(cut="before batch", per_s=24.0, here_cpu_s=0.04)),
    ... )
    >>> chosen = decide_share(profile)
    >>> chosen.cut, round(chosen.share, 2)
    ('before batch', 0.71)
    >>> decide_share(OffloadProfile(step_per_s=10.0, here_per_s=9.5, cores=4)).cut is None
    True
    """
    step, here = profile.step_per_s, profile.here_per_s
    usable = [pace for pace in profile.cuts if not pace.failure]
    if step <= WORTH * here or not usable:
        return FixedShare(cut=None, share=0.0)
    chosen = max(usable, key=lambda pace: here * (1 - _overhead(pace, profile)) + pace.per_s)
    lower = (step - here) * (1 + _overhead(chosen, profile))
    share = chosen.per_s / step if lower < chosen.per_s else chosen.per_s / (here + chosen.per_s)
    return FixedShare(cut=chosen.cut, share=min(1.0, share))


def pace_at(decision: FixedShare, *, step_per_s: float, here_per_s: float, there_per_s: float) -> float:
    """Return the pace of a fixed share, of what each place makes when the other is at work, too.

    >>> pace_at(FixedShare(cut="all there", share=0.5), step_per_s=40.0, here_per_s=10.0, there_per_s=30.0)
    20.0
    """
    bounds = [step_per_s]
    if decision.share > 0:
        bounds.append(there_per_s / decision.share)
    if decision.share < 1:
        bounds.append(here_per_s / (1 - decision.share))
    return min(bounds)
