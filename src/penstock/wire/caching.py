"""What runners and the dispatcher say to each other about caching.

What was measured and what was judged are records of `policies.cache_judging`, which this package does not know: they
are sent as plain values, and whoever takes them checks what they are.
"""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.core.ids import JobName
from penstock.wire.jobs import Message


class JudgeCaching(Message, frozen=True, tag="judge_caching"):
    """What is done about a source of the job? `evidence` is what was found out under the verdict that it names."""

    job: JobName
    source: int
    evidence: dict[str, Any] | None = None
    """None: the runner asks only."""
    cores: int = 1
    """That the runner may use."""
    epochs_left: int = 1


class CachingJudged(Message, frozen=True, tag="caching_judged"):
    """What holds now."""

    verdict: dict[str, Any]


class CachingLine(msgspec.Struct, frozen=True, kw_only=True):
    """One decision about what a job keeps."""

    ago_s: float
    """How long ago it was taken; -1: before the dispatcher's host was last started."""
    source: int
    step: str
    """"trying", "chosen" or "doubting"."""
    point: int
    """At which autocache() elements are kept from then on; 0: they are computed."""
    reason: str
    seconds_by_mode: dict[str, float] = {}
    """How long an element takes in each mode, as it was measured or predicted."""
