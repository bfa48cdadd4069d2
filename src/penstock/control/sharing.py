"""Which epoch a trainer reads in a job that several trainers share.

Each rank of a trainer has a slot of its own: its consumer, and a number made of the trainer's id. There is one epoch at
a time, and whoever comes reads that one, in the middle too: an epoch of its own would be the work that sharing saves.
Nobody reads an epoch twice. So a trainer that comes back, with or without its state, goes on in the epoch it was in,
and one that has finished it starts the next.

- With `trainers=n` the job has n of them, and each reads every epoch from its beginning: the oldest epoch it has not
  finished is its own, however far the others are.
- Ranks of one trainer read one epoch: a rank goes where the others of its trainer are.
- An epoch that nobody reads and no process serves is over: where it stood went with them.
"""

from __future__ import annotations

from penstock.control import events as e
from penstock.control.draft import Draft
from penstock.control.fitting import ready_runners
from penstock.control.records import Iteration, Job, Slot
from penstock.control.runners import RESTART_GRACE_S
from penstock.wire.messages import OpenEpoch, Refused


def surplus_trainer(job: Job, request: OpenEpoch) -> Refused | None:
    """Refuse one more than the job has, by any epoch that all of them have opened."""
    most = job.spec.trainers
    come = [trainers_in(iteration) for iteration in job.iterations.values()]
    full = any(most and request.replica not in known and len(known) >= most for known in come)
    if not full:
        return None
    return Refused(
        reason=(
            f"job {request.job!r} has trainers={most}, all of them have come, and {request.trainer!r} is none of them; "
            "give trainers= their number, or leave it out"
        ),
        kind="job_mismatch",
    )


def epoch_to_join(draft: Draft, job: Job, request: OpenEpoch) -> Iteration | None:
    """Return the epoch this trainer reads; None: the next one is to be started."""
    slot = (request.consumer, request.replica)
    for iteration in job.iterations.values():
        held = iteration.opened.get(slot)
        if held is not None and held.client == request.client:
            return iteration  # said twice
    for iteration in job.iterations.values():
        if _has_ranks_of(iteration, slot) and not _has_finished(iteration, slot):
            return iteration
    if job.spec.trainers:
        return next((i for i in job.iterations.values() if not _has_finished(i, slot)), None)
    newest = next(reversed(job.iterations.values()), None)
    if newest is None or _has_finished(newest, slot):
        return None
    read = any(lease.attempt == newest.attempt for lease in draft.state.leases(job.name))
    return newest if read or (not newest.finished and _may_be_served(draft, job)) else None


def _has_ranks_of(iteration: Iteration, slot: Slot) -> bool:
    """Say whether other ranks of the same trainer are reading an epoch."""
    return any(other[1] == slot[1] and other != slot and not held.closed for other, held in iteration.opened.items())


def _has_finished(iteration: Iteration, slot: Slot) -> bool:
    held = iteration.opened.get(slot)
    return held is not None and held.finished


def _may_be_served(draft: Draft, job: Job) -> bool:
    """Say whether a process may still hold its windows; after a restart they have a while to be heard of."""
    began_at = draft.state.began_at
    restarted = began_at is not None and draft.now - began_at <= RESTART_GRACE_S and draft.state.generation > 1
    return restarted or bool(ready_runners(draft.state, job))


def held_up_by_trainers(draft: Draft, job: Job, request: OpenEpoch, reading: list[Slot]) -> str:
    """Return who keeps a third epoch from starting, while the first of them is `reading` or has not come at all.

    The latter is waited for as long as a silent one is: it may never come.
    """
    oldest = next(iter(job.iterations.values()))
    if reading:
        return f"{len(reading)} trainers to be through with epoch {oldest.epoch}"
    if not lacks_trainers(job, oldest):
        return ""
    slot = (request.consumer, request.replica)
    draft.emit(e.RestartAsked(request.job, oldest.attempt, *slot, request.client, draft.now))
    if draft.now - draft.state.wishes[oldest.attempt][slot].since > job.spec.trainer_timeout_s:
        return ""
    return f"{job.spec.trainers} trainers to open epoch {oldest.epoch}: {len(trainers_in(oldest))} have"


def lacks_trainers(job: Job, iteration: Iteration) -> bool:
    """Say whether somebody is still to read an epoch from its beginning."""
    return len(trainers_in(iteration)) < job.spec.trainers


def trainers_in(iteration: Iteration) -> set[int]:
    """Return the trainers of which a rank has opened an epoch."""
    return {trainer for _, trainer in iteration.opened}
