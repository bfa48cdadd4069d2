"""Which epoch a trainer reads in a job that several trainers share.

Each rank of a trainer has a slot of its own: its consumer, and a number made of the trainer's id. There is one epoch at
a time, and whoever comes reads that one, in the middle too: an epoch of its own would be the work that sharing saves.
Nobody reads an epoch twice. So a trainer that comes back, with or without its state, goes on in the epoch it was in,
and one that has finished it starts the next.

- With `trainers=n` the job has n of them, and each reads every epoch from its beginning: the oldest epoch it has not
  finished is its own, however far the others are.
- Ranks of one trainer read one epoch: a rank goes where the others of its trainer are. A trainer has finished an epoch
  when all its ranks have.
- A trainer that comes back without its states begins another **life**. Of several ranks all have to come back so: one
  alone is told to wait for the others. Streams are told the life that their readers are of, and so know whether one
  that holds nothing begins where its trainer once began, or after all that the trainer was sent.
- An epoch that nobody reads and no process serves is over: where it stood went with them.
"""

from __future__ import annotations

from penstock.control import events as e
from penstock.control.draft import Draft
from penstock.control.fitting import ready_runners
from penstock.control.records import Iteration, Job
from penstock.control.runners import RESTART_GRACE_S
from penstock.core.ids import AttemptId
from penstock.wire.jobs import Slot
from penstock.wire.messages import OpenEpoch, Refused


def surplus_trainer(job: Job, request: OpenEpoch) -> Refused | None:
    """Refuse one more than the job has, by any epoch that all of them have opened."""
    most = job.spec.awaited_trainers
    come = [trainers_in(iteration) for iteration in job.iterations.values()]
    full = any(most and request.trainer not in known and len(known) >= most for known in come)
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
    slot = request.slot
    for iteration in job.iterations.values():
        held = iteration.opened.get(slot)
        if held is not None and held.client == request.client:
            return iteration  # said twice
    present = next((i for i in reversed(job.iterations.values()) if request.trainer in trainers_in(i)), None)
    if job.spec.ranks.count > 1 and present is not None and not _is_through(job, present, request):
        return present
    if job.spec.awaited_trainers:
        return next((i for i in job.iterations.values() if not _has_finished(i, slot)), None)
    newest = next(reversed(job.iterations.values()), None)
    if newest is None or _has_finished(newest, slot):
        return None
    read = any(lease.attempt == newest.attempt for lease in draft.state.leases(job.name))
    return newest if read or (not newest.finished and _may_be_served(draft, job)) else None


def _is_through(job: Job, iteration: Iteration, request: OpenEpoch) -> bool:
    """Say whether a rank goes on to the next epoch: it comes from this one, or all ranks of its trainer finished it.

    One that has finished it and does not say so was started anew, and reads what its trainer does.
    """
    ranks = [request.slot._replace(consumer=consumer) for consumer in range(job.spec.ranks.count)]
    own = _has_finished(iteration, request.slot)
    return (own and request.after == iteration.attempt) or all(_has_finished(iteration, rank) for rank in ranks)


def newest_life(iteration: Iteration, trainer: str) -> int:
    return max((held.life for slot, held in iteration.opened.items() if slot.trainer == trainer), default=0)


def life_of(job: Job, attempt: AttemptId, request: OpenEpoch) -> int:
    """Return the life of its trainer in which a rank is let in."""
    if not job.spec.sharing:
        return 0
    iteration = job.iterations[attempt]
    held = iteration.opened.get(request.slot)
    newest = newest_life(iteration, request.trainer)
    if held is None or held.client == request.client or held.life < newest:
        return newest
    return newest if request.rejoin is not None else newest + 1


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
    slot = request.slot
    draft.emit(e.RestartAsked(request.job, oldest.attempt, slot, request.client, draft.now))
    assert job.spec.sharing is not None
    if draft.now - draft.state.wishes[oldest.attempt][slot].since > job.spec.sharing.trainer_timeout_s:
        return ""
    return f"{job.spec.awaited_trainers} trainers to open epoch {oldest.epoch}: {len(trainers_in(oldest))} have"


def lacks_trainers(job: Job, iteration: Iteration) -> bool:
    """Say whether somebody is still to read an epoch from its beginning."""
    return len(trainers_in(iteration)) < job.spec.awaited_trainers


def trainers_in(iteration: Iteration) -> set[str]:
    """Return the trainers of which a rank has opened an epoch."""
    return {slot.trainer for slot in iteration.opened}
