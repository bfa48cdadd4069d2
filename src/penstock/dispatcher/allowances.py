"""How much of a dispatcher one principal may take: jobs, blobs, requests a second.

Agents and runners are the service's own, and what they ask grows with the cluster: only people are limited.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from penstock.control.state import ClusterState
from penstock.core.ids import JobName
from penstock.wire.messages import Answer, OpenEpoch, PutBlob, PutPipeline, Refused, Request, TryAgain
from penstock.wire.principals import Principal, Role

KIND = "limit_reached"
LIMITED: frozenset[Role] = frozenset({"operator", "trainer", "provisioner"})
BURST_S = 2.0  # that many seconds' requests may come at once
FORGET_AFTER_S = 60.0


class Allowance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What each principal may have at a time."""

    jobs: int = 1_000
    """Jobs and registered pipelines."""
    blob_bytes: int = 4 << 30
    requests_per_s: float = 5_000.0


class Meter:
    """Counts what each principal takes."""

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self._buckets: dict[Principal, tuple[float, float]] = {}
        """How many requests each may send at once, and when that was so."""

    def over(self, principal: Principal, now: float) -> Answer | None:
        """Count a request; return the answer to one too many."""
        if principal.role not in LIMITED:
            return None
        rate = self._allowance.requests_per_s
        left, at = self._buckets.get(principal, (rate * BURST_S, now))
        left = min(rate * BURST_S, left + rate * (now - at))
        if left < 1.0:
            self._buckets[principal] = (left, now)
            return TryAgain(reason=f"{principal} sends more than {rate:,.0f} requests a second; send fewer")
        if len(self._buckets) > 10_000:
            self._buckets = {who: kept for who, kept in self._buckets.items() if now - kept[1] < FORGET_AFTER_S}
        self._buckets[principal] = (left - 1.0, now)
        return None

    def refusal(
        self, principal: Principal, request: Request, state: ClusterState, blob_bytes: Callable[[], int]
    ) -> Refused | None:
        """Return why a principal may have no more of what it asks for; None: it may. `blob_bytes`: of its blobs."""
        if principal.role not in LIMITED:
            return None
        most = self._allowance
        if isinstance(request, OpenEpoch | PutPipeline) and _is_new(state, request):
            specs = [job.spec for job in state.jobs.values()] + list(state.pipelines.values())
            held = sum(spec.owner == principal.name for spec in specs)
            if held >= most.jobs:
                return Refused(
                    reason=(
                        f"{principal} has {held:,} jobs and pipelines, and may have {most.jobs:,}; cancel some, or let "
                        "them end"
                    ),
                    kind=KIND,
                )
        if isinstance(request, PutBlob) and request.offset == 0:
            size = blob_bytes() + request.size
            if size > most.blob_bytes:
                return Refused(
                    reason=(
                        f"{principal} would have {size:,} bytes of blobs here, and may have {most.blob_bytes:,}; let "
                        "jobs end whose pipelines are large, or read data from files instead"
                    ),
                    kind=KIND,
                )
        return None


def _is_new(state: ClusterState, request: OpenEpoch | PutPipeline) -> bool:
    if isinstance(request, PutPipeline):
        return request.id not in state.pipelines
    return JobName(request.job) not in state.jobs
