"""What a job keeps and why: the part of the state that caching has."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from penstock.policies.cache_judging import CacheVerdict

KEPT_VERDICTS = 32


class CacheDecision(msgspec.Struct, frozen=True, array_like=True):
    """A verdict about one source, and when it was given."""

    at_s: float
    """By the dispatcher's clock, which goes on over its restarts."""
    source: int
    step: str
    point: int
    reason: str
    seconds_by_mode: dict[str, float] = {}


class JobCaching(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is on disk of it."""

    verdicts: dict[int, CacheVerdict] = {}
    """By source."""
    decisions: tuple[CacheDecision, ...] = ()
    """The last ones, oldest first."""

    def after(self, at_s: float, source: int, verdict: CacheVerdict) -> JobCaching:
        decision = CacheDecision(
            at_s,
            source,
            verdict.step,
            verdict.point,
            verdict.reason,
            {} if verdict.choice is None else dict(verdict.choice.seconds_by_mode),
        )
        return replace(
            self,
            verdicts={**self.verdicts, source: verdict},
            decisions=(*self.decisions, decision)[-KEPT_VERDICTS:],
        )

    @property
    def mode(self) -> str:
        """What workers do now, for all sources together; empty: they compute.

        A job that keeps elements computes them until they are there, so that it is another mode when they are got.
        """
        return " ".join(
            f"{source}:{verdict.point}" for source, verdict in sorted(self.verdicts.items()) if verdict.is_getting
        )

    @property
    def speed_up(self) -> float:
        """How much faster workers were seen to be, of the slowest of the sources, than when they computed."""
        found = [verdict.speed_up for verdict in self.verdicts.values() if verdict.is_getting]
        return min(found, default=1.0)
