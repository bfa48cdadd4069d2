"""What is asked of those who bring workers: targets in, a number for each provisioner out, and who may go.

A provisioner says what it has and how many it could bring, every few seconds: that is its lease. What jobs want in all,
less the workers that nobody provides, is asked of provisioners, the cheapest first. A job that takes every worker that
fits (nobody said how many) wants all that can be had, for as long as it is read.

More are wanted at once; fewer only when there have been too many for a while. Those that serve nobody go first. A
provisioner that is silent is forgotten: its workers go on, as anybody's.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from penstock.control import events as e
from penstock.control.draft import Draft
from penstock.control.fitting import asked_of
from penstock.control.records import Job
from penstock.control.runners import is_kept
from penstock.control.scaling_records import Provisioner
from penstock.control.scaling_rules import ScalingRules
from penstock.core.ids import WorkerId
from penstock.wire.messages import Answer
from penstock.wire.principals import Principal
from penstock.wire.scaling import Provide, Provided

PROVISIONER_LOST_AFTER_S = 15.0
SPARE_FOR_S = 10.0  # a worker that is not needed for so long may go: the next job would have to wait for another


def provide(draft: Draft, request: Provide, principal: Principal, rules: ScalingRules) -> Answer:
    """Take a provisioner's word for what it has, and say what is wanted of it."""
    known = draft.state.provisioners.get(request.provisioner)
    here = Provisioner(
        provisioner=request.provisioner,
        kind=request.kind,
        by=principal.name,
        have=request.have,
        least=max(0, request.least),
        most=max(0, request.most),
        price_per_h=request.price_per_h,
        tags=request.tags,
        seen=draft.now,
        surplus_since=None if known is None else known.surplus_since,
    )
    draft.emit(e.ProvisionerSeen(here))
    wanted, reason = wanted_of(draft, here, rules)
    surplus = len(here.have) - wanted
    since = None if surplus <= 0 else here.surplus_since if here.surplus_since is not None else draft.now
    if since != here.surplus_since:
        draft.emit(e.ProvisionerSeen(replace(here, surplus_since=since)))
    if since is None or draft.now - since < SPARE_FOR_S:
        return Provided(wanted=max(wanted, len(here.have)) if surplus > 0 else wanted, reason=reason)
    return Provided(wanted=wanted, release=_idlest(draft, here.have)[:surplus], reason=reason)


def wanted_of(draft: Draft, here: Provisioner, rules: ScalingRules) -> tuple[int, str]:
    """Return how many workers a provisioner should have, and why."""
    state = draft.state
    provided = {worker for each in state.provisioners.values() for worker in each.have}
    sizes = state.allotted.sizes
    left, reason = _needed(draft, here, rules)
    others = (worker for worker in state.workers.values() if worker.worker not in provided and not worker.leaving)
    left -= sum(sizes.size(worker.worker) for worker in others)
    order = sorted(state.provisioners.values(), key=lambda each: (each.price_per_h, each.provisioner))
    for each in order:
        size = max((sizes.size(worker) for worker in each.have), default=1.0)
        own = max(each.least, min(each.most, math.ceil(max(left, 0) / size)))
        if each.provisioner == here.provisioner:
            return own, reason
        left -= own * size
    return here.least, reason


def _needed(draft: Draft, here: Provisioner, rules: ScalingRules) -> tuple[float, str]:
    """Return how many workers the jobs want that these workers can serve."""
    by_owner: dict[str, float] = {}
    reading = 0
    for job in draft.state.jobs.values():
        if not _could_serve(here, job) or not is_kept(draft, job) or not draft.state.leases(job.name):
            continue
        reading += 1
        if asked_of(job) is None:
            most = job.spec.placement.max_workers or here.most + len(draft.state.workers)
            largest = max(draft.state.allotted.sizes.sizes.values(), default=1.0)
            return most * largest, f"job {job.name!r} takes every worker that fits"
        last = job.scaling.last
        if last is not None:
            by_owner[job.spec.owner] = by_owner.get(job.spec.owner, 0.0) + last.target
    capped = 0.0
    for owner, wanted in by_owner.items():
        quota = rules.of(owner).quota
        capped += wanted if quota is None else min(wanted, quota)
    jobs = f"{reading} job{'' if reading == 1 else 's'}"
    return capped, f"{jobs} want {capped:g} worker{'' if capped == 1 else 's'}"


def _could_serve(here: Provisioner, job: Job) -> bool:
    placement = job.spec.placement
    guests_only = bool(placement.guests) and placement.target == "local"
    return set(placement.requires) <= set(here.tags) and not guests_only


def _idlest(draft: Draft, workers: tuple[WorkerId, ...]) -> tuple[WorkerId, ...]:
    """Return workers in the order in which they may go: those that serve nobody, then those that came last."""
    serving = {runner.worker for runners in draft.state.runners.values() for runner in runners.values()}
    age = {worker: number for number, worker in enumerate(workers)}
    return tuple(sorted(workers, key=lambda worker: (worker in serving, -age[worker])))


def lose_silent_provisioners(draft: Draft) -> None:
    for each in list(draft.state.provisioners.values()):
        if draft.now - each.seen > PROVISIONER_LOST_AFTER_S:
            draft.emit(e.ProvisionerLost(each.provisioner))
