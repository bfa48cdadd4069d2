"""A consumer opens an epoch: who starts one, who joins one, who waits.

- A slot (`wire.jobs.Slot`) has one reader; the newest wins, and the older one is told so at once. On one host the
  newest is who began last, not whose message arrives last: a dead reader's may still be on its way.
- A job keeps two iterations at most, since consumers may be an epoch apart. The older one goes when everybody has
  opened a newer one: until then who has left it may come back to it with a state.
- A reader that is near the end of an epoch may open the next one **ahead**. Until it says that it has come there it has
  received nothing of it: for everybody else it is in the epoch before, and closed ahead it was never in the next one.
- A consumer that comes back without its state, while others go on, cannot be served: its part of the epoch would be
  read twice, or not at all. If all who had opened the epoch come back so, it starts over. A checkpoint that is loaded a
  second time is the same case.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

import msgspec

from penstock.control import events as e
from penstock.control.completing import complete
from penstock.control.draft import Asker, Draft
from penstock.control.fitting import misfit, spec_of
from penstock.control.permissions import KIND as NOT_PERMITTED
from penstock.control.permissions import distrust
from penstock.control.placing import create_fixed_streams
from penstock.control.records import Iteration, Job, Opened
from penstock.control.resuming import resume_misfit
from penstock.control.runners import settle
from penstock.control.sharing import (
    epoch_to_join,
    held_up_by_trainers,
    lacks_trainers,
    life_of,
    newest_life,
    surplus_trainer,
)
from penstock.control.views import view_of
from penstock.core.ids import AttemptId, BlobHash, JobName
from penstock.wire.jobs import JobSpec, Slot
from penstock.wire.messages import Answer, EpochOpened, NotKnown, NotYet, OpenEpoch, Refused, Superseded
from penstock.wire.modes import Mode
from penstock.wire.principals import Principal

WISH_LASTS_S = 5.0  # clients that are told "not yet" ask again well within it
FEWEST_IN_TURN = 4  # streams of coordinated reads: each has its own windows to fill, so not more than are of use
IN_TURN_A_WORKER = 2  # one is read while the other gets ready, and some can move to workers that join
# The job's creator decides, others take what it has. The fingerprint stands for graph and splits: pickled functions may
# differ in their bytes and not in what they do. Feeds follow from how many workers there were when the job was made.
CREATORS = frozenset({"seed", "host", "owner", "share_with", "versions", "graph", "splits", "feeds"})


def open_epoch(draft: Draft, request: OpenEpoch, asker: Asker, blobs: Container[BlobHash]) -> Answer:
    """Return the answer, having put what it takes into the draft."""
    refused = _refusal(draft, request)
    if refused is not None:
        return refused
    answer = _open_job(draft, request, asker.principal, blobs)
    if answer is not None:
        return answer
    _close_finished(draft, request)
    chosen = _choose_attempt(draft, request)
    if not isinstance(chosen, str):
        return chosen
    life = life_of(draft.job(request.job), chosen, request)
    _take_slot(draft, request, chosen, life, asker)
    drop_left_behind(draft, request.job)
    settle(draft, request.job)
    draft.publish()
    job = draft.job(request.job)
    iteration = job.iterations[chosen]
    return EpochOpened(
        spec=spec_of(job, iteration),
        view=view_of(draft.state, request.job, chosen),
        done=iteration.done_before,
        life=life,
    )


def _refusal(draft: Draft, request: OpenEpoch) -> Refused | None:
    if not request.job:
        return Refused(reason="a job needs a name", kind="invalid_argument")
    if not 0 <= request.consumer < request.spec.ranks.count:
        return Refused(
            reason=f"consumer={request.consumer} is not one of 0 to {request.spec.ranks.count - 1}, as the job has it",
            kind="invalid_argument",
        )
    if request.replica < 0:
        return Refused(reason=f"replica={request.replica} is negative", kind="invalid_argument")
    if request.resume is not None and (why := resume_misfit(request.spec, request.resume)):
        return Refused(reason=f"job {request.job!r}: {why}; load a state of this job", kind="state_mismatch")
    job = draft.state.jobs.get(request.job)
    left_behind = job is not None and bool(job.spec.sharing) and request.rejoin not in (None, *job.iterations)
    past = job is not None and request.client in job.past_clients and not left_behind
    if job is not None and (past or _is_late(job, request)):
        return Refused(
            reason="another reader has taken this consumer's place, or this one was closed", kind="superseded"
        )
    return None


def _is_late(job: Job, request: OpenEpoch) -> bool:
    """Whether a reader that began later holds the slot: then this was sent by one that is dead, or about to be told."""
    found = (iteration.opened.get(request.slot) for iteration in job.iterations.values())
    holders = (held for held in found if held and (request.ahead or not held.ahead))  # its own, one epoch further
    return any(held.is_later_than(request.client, request.host, request.began_ns) for held in holders)


# The job


def _open_job(draft: Draft, request: OpenEpoch, principal: Principal, blobs: Container[BlobHash]) -> Answer | None:
    """Make sure that the job exists and is the one asked for; else return the answer."""
    name = request.job
    job = draft.state.jobs.get(name)
    made = msgspec.structs.replace(request.spec, owner=principal.name)
    if job is not None:
        held = bool(draft.state.clients.get(name))
        if job.failure:
            if held or request.rejoin is not None:
                return Refused(reason=f"job {name!r}: {job.failure}", kind="job_cancelled")
            why = "cancelled, and opened anew"
        else:
            differing = differing_fields(job.spec, request.spec, seed_too=request.resume is not None)
            if not differing:
                return distrust(f"job {name!r} was made", job.spec.owner, principal, request.trust)
            if request.rejoin is not None:
                return NotKnown(what=f"attempt {request.rejoin!r} of the job as it is described now")
            if request.resume is None and (held or not _given_up(job)):
                return Refused(reason=_mismatch(name, differing), kind="job_mismatch")
            if held:
                return NotYet(waiting_for=f"the readers of job {name!r} as it was ({', '.join(differing)}) to leave")
            how = "resumed" if request.resume is not None else "given up by all its readers, and opened"
            why = f"{how} with another spec"
        if principal.name != job.spec.owner:
            return Refused(
                reason=(
                    f"job {name!r} is over, and only {job.spec.owner!r}, whose it was, makes it anew under that name; "
                    "give another job= name"
                ),
                kind=NOT_PERMITTED,
            )
        draft.emit(e.JobCollected(name, why))
        settle(draft, name)
    elif request.rejoin is not None:
        return NotKnown(what=f"job {name!r}")
    waiting = missing_blobs(request.spec, blobs)
    if waiting is not None:
        return waiting
    draft.emit(e.JobCreated(name, _with_streams(draft, made)))
    return None


def _given_up(job: Job) -> bool:
    """Whether all who read the job last left in the middle of it, as when its function fails: it is to be mended."""
    newest = next(reversed(job.iterations.values()), None)
    return newest is not None and all(held.closed and not held.finished for held in newest.opened.values())


def _with_streams(draft: Draft, spec: JobSpec) -> JobSpec:
    """Return the spec with a number of streams, where it is the job's and was left to us."""
    if not spec.ranks.coordinated or spec.sharding.streams or spec.feeds:
        return spec
    workers = sum(misfit(draft.state, spec, worker) is None for worker in draft.state.workers.values())
    workers = min(workers, spec.placement.max_workers or workers)
    return spec.with_streams(max(FEWEST_IN_TURN, IN_TURN_A_WORKER * workers))


def missing_blobs(spec: JobSpec, blobs: Container[BlobHash]) -> NotYet | None:
    missing = tuple(blob for blob in (spec.graph, spec.splits) if blob not in blobs)
    return NotYet(waiting_for="the pipeline and its splits", missing_blobs=missing) if missing else None


def differing_fields(job: JobSpec, asked: JobSpec, *, seed_too: bool = False) -> list[str]:
    """Return each field in which two consumers of one job must agree and do not, with both values."""
    if asked.ranks.coordinated and asked.sharding.streams is None:
        asked = asked.with_streams(job.sharding.streams)  # left to the job
    creators = CREATORS - {"seed"} if seed_too else CREATORS
    compared = (name for name in JobSpec.__struct_fields__ if name not in creators)
    return [text for name in compared for text in _differences(name, getattr(job, name), getattr(asked, name))]


def _differences(name: str, job: object, asked: object) -> Iterator[str]:
    if isinstance(job, Mode) and type(job) is type(asked):
        for field in job.__struct_fields__:
            yield from _differences(f"{name}.{field}", getattr(job, field), getattr(asked, field))
    elif job != asked:
        yield f"{name}: {asked!r} here, {job!r} in the job"


def _mismatch(name: str, differing: list[str]) -> str:
    return (
        f"job {name!r} exists and is another one: {'; '.join(differing)}. "
        "Give this loader the same arguments, or another job= name"
    )


# The attempt


def _close_finished(draft: Draft, request: OpenEpoch) -> None:
    """Close the epoch that the reader says it is through with: what it said then may have been overtaken by this."""
    iteration = None if request.after is None else draft.state.iteration(request.job, request.after)
    slot = request.slot
    if iteration is None or slot not in iteration.opened:
        return
    held = iteration.opened[slot]
    if not held.finished:
        draft.emit(e.ConsumerClosed(request.job, iteration.attempt, slot, held.client, True))
        if held.client in draft.state.clients.get(request.job, {}):
            draft.emit(e.ClientGone(request.job, held.client, draft.now))


def _choose_attempt(draft: Draft, request: OpenEpoch) -> AttemptId | Answer:
    job = draft.job(request.job)
    if request.rejoin is not None:
        if request.rejoin in job.iterations:
            return request.rejoin
        return NotKnown(what=f"attempt {request.rejoin!r} of job {request.job!r}")
    if job.spec.sharing:
        return _choose_shared(draft, job, request)
    slot = request.slot
    present = _present(job, request)
    if request.ahead and (too_early := _too_early(job, request, present)):
        return NotYet(waiting_for=too_early)
    if present is None:
        return _start(draft, request)
    opened = present.opened.get(slot)
    wishes = _wishes(draft, present)
    if opened is not None and opened.client == request.client:
        return present.attempt
    if opened is not None and opened.ahead and not present.has_come(slot):
        opened = None  # of a reader that never came
    # One that began at a checkpoint lacks, for a consumer without it, all that came before.
    begins_alike = (present.digest is None) == (request.resume is None)
    if opened is None and begins_alike and not wishes:
        return present.attempt
    if opened is not None and opened.finished:
        return _start(draft, request)
    if all(held.closed or held.ahead for held in present.opened.values()):
        return _start(draft, request, instead_of=present.attempt)
    draft.emit(e.RestartAsked(request.job, present.attempt, request.slot, request.client, draft.now))
    asking = {*wishes, slot}
    there = [s for s, held in present.opened.items() if not held.ahead]
    reading = [s for s in there if not present.opened[s].finished and s not in asking]
    if reading:
        return NotYet(waiting_for=_returned_alone(slot, reading))
    return _start(draft, request, instead_of=present.attempt)


def _too_early(job: Job, request: OpenEpoch, present: Iteration | None) -> str:
    """Return what an opening ahead has to wait for; empty: the epoch before is about to end, and nobody is wronged."""
    epoch, slot = request.epoch - 1, request.slot
    before = next((each for each in reversed(job.iterations.values()) if each.epoch == epoch), None)
    if job.spec.sharing or before is None or slot not in before.opened:
        return f"consumer {slot.consumer} to read epoch {epoch}"
    if before.ledger.has_more:
        return f"the last splits of epoch {epoch} to be granted"
    held = None if present is None else present.opened.get(slot)
    if held is not None and not held.ahead:
        return f"consumer {slot.consumer}, which is in epoch {request.epoch} already"
    return ""


def _choose_shared(draft: Draft, job: Job, request: OpenEpoch) -> AttemptId | Answer:
    refused = surplus_trainer(job, request)
    if refused is not None:
        return refused
    joined = epoch_to_join(draft, job, request)
    if joined is not None:
        return _join_shared(draft, joined, request)
    newest = next(reversed(job.iterations.values()), None)
    epoch = request.epoch if newest is None else newest.epoch + 1
    return _start(draft, msgspec.structs.replace(request, epoch=epoch, resume=None))


def _join_shared(draft: Draft, joined: Iteration, request: OpenEpoch) -> AttemptId | Answer:
    """Let a rank in. One that was there and returns without its state waits for the others of its trainer."""
    slot = request.slot
    held = joined.opened.get(slot)
    present = newest_life(joined, request.trainer)
    if (
        draft.job(request.job).spec.ranks.count == 1
        or held is None
        or held.client == request.client
        or held.life < present
    ):
        return joined.attempt
    asking = {*_wishes(draft, joined), slot}
    draft.emit(e.RestartAsked(request.job, joined.attempt, slot, request.client, draft.now))
    ranks = [other for other, opened in joined.opened.items() if other.trainer == slot.trainer and not opened.closed]
    reading = [other for other in ranks if other not in asking]
    if reading:
        return NotYet(waiting_for=_returned_alone(slot, reading))
    for other in ranks:
        draft.emit(e.ConsumerClosed(request.job, joined.attempt, other, joined.opened[other].client, False))
    return joined.attempt


def _wishes(draft: Draft, iteration: Iteration) -> list[Slot]:
    """Return who has asked lately to start over."""
    wishes = draft.state.wishes.get(iteration.attempt, {})
    return [slot for slot, wish in wishes.items() if draft.now - wish.seen <= WISH_LASTS_S]


def _present(job: Job, request: OpenEpoch) -> Iteration | None:
    """Return the newest attempt at what is asked for."""
    digest = None if request.resume is None else request.resume.digest
    for iteration in reversed(job.iterations.values()):
        if iteration.epoch == request.epoch and (digest is None or iteration.digest == digest):
            return iteration
    return None


def _returned_alone(slot: Slot, reading: list[Slot]) -> str:
    others = ", ".join(str(consumer) for consumer in sorted({other.consumer for other in reading}))
    return (
        f"consumers {others} to start over: consumer {slot.consumer} returned without its state while others go on; "
        "load its state_dict(), or restart all consumers"
    )


def _start(draft: Draft, request: OpenEpoch, instead_of: AttemptId | None = None) -> AttemptId | Answer:
    job = draft.job(request.job)
    # A part of it is drawn here: an opening that is sent again, to a dispatcher that has lost its journal, must not
    # give an id a second life, in which data of the first would pass for the second's.
    attempt = AttemptId(f"{request.attempt}-{draft.draw()}")
    leaving = [instead_of] if instead_of is not None else []
    if request.resume is not None:
        leaving += [i.attempt for i in job.iterations.values() if i.epoch == request.epoch and i.attempt not in leaving]
    kept = [iteration for iteration in job.iterations.values() if iteration.attempt not in leaving]
    if len(kept) > 1:
        # Consumers of one job may be an epoch apart, not two: a small epoch can be read to its end by one of them
        # before another has begun it, and must not be dropped under that one's feet.
        reading = _held_back_by(draft, job, kept[0]) if request.epoch >= kept[-1].epoch else []
        if (
            request.resume is None
            and job.spec.sharing
            and (held_up := held_up_by_trainers(draft, job, request, reading))
        ):
            return NotYet(waiting_for=held_up)
        if request.resume is None and reading:
            others = ", ".join(str(consumer) for consumer in sorted({other.consumer for other in reading}))
            return NotYet(waiting_for=f"consumers {others} to be through with epoch {kept[0].epoch}")
        leaving.append(kept[0].attempt)
    for left in leaving:
        draft.emit(e.IterationDropped(request.job, left, "a newer attempt started"))
        _release_clients(draft, request.job, left, request)
    draft.emit(e.IterationStarted(request.job, attempt, request.epoch, request.resume))
    create_fixed_streams(draft, request.job, attempt)
    complete(draft, request.job, attempt)
    return attempt


def _release_clients(draft: Draft, job: JobName, attempt: AttemptId, newer: OpenEpoch | None = None) -> None:
    """Let go of who reads a dropped attempt, and say so; `newer` is the opening that took its place."""
    for lease in draft.state.leases(job):
        if lease.attempt != attempt:
            continue
        draft.emit(e.ClientGone(job, lease.client, draft.now))
        if draft.job(job).spec.sharing or (newer is not None and newer.client == lease.client):
            continue  # trainers that share are left behind and skip the rest; another begins anew itself
        if newer is None:
            reason = "all consumers are in a newer epoch, and a consumer reads one at a time"
        elif lease.slot == newer.slot:
            reason = superseded(newer.consumer, newer.reader)
        else:
            who = newer.reader or "another reader"
            reason = f"{who} has begun epoch {newer.epoch} anew as consumer {newer.consumer}; start all consumers again"
        draft.pushes.append((lease.peer, Superseded(client=lease.client, reason=reason)))


def superseded(consumer: int, reader: str) -> str:
    return (
        f"{reader or 'another reader'} has taken consumer {consumer}'s place: a consumer has one reader, the newest. "
        "Close one of the two, or give one of them another rank or job="
    )


# The slot


def _take_slot(draft: Draft, request: OpenEpoch, attempt: AttemptId, life: int, asker: Asker) -> None:
    slot = request.slot
    opened = draft.job(request.job).iterations[attempt].opened.get(slot)
    # What it said while it was still on its way here may come late.
    ahead = request.ahead and (opened is None or opened.client != request.client or opened.ahead)
    there = None if opened is None else (opened.client, opened.reading, opened.closed, opened.ahead)
    if there != (request.client, request.reading, False, ahead):
        draft.emit(
            e.ConsumerOpened(
                request.job,
                attempt,
                slot,
                request.client,
                request.reader,
                life,
                request.host,
                request.began_ns,
                asker.principal.name,
                request.reading,
                ahead,
            )
        )
        leases = draft.state.clients.get(request.job)
        older = leases.get(opened.client) if opened is not None and leases is not None else None
        if older is not None and older.client != request.client:
            draft.emit(e.ClientGone(request.job, older.client, draft.now))
            reason = superseded(request.consumer, request.reader)
            draft.pushes.append((older.peer, Superseded(client=older.client, reason=reason)))
    draft.emit(e.ClientSeen(request.job, attempt, request.slot, request.client, asker.peer, draft.now, key=asker.key))


def drop_left_behind(draft: Draft, name: JobName) -> None:
    """Drop an iteration that everybody has closed or left for a newer one."""
    found = draft.iterations(name)
    for iteration in found[:-1]:
        job = draft.job(name)
        if not _still_reading(job, iteration) and not lacks_trainers(job, iteration):
            draft.emit(e.IterationDropped(name, iteration.attempt, "everybody has left it"))
            _release_clients(draft, name, iteration.attempt)


def _still_reading(job: Job, iteration: Iteration) -> list[Slot]:
    """Return who is yet to read in an iteration: those in it, and those who opened neither it nor a newer one.

    Also who has left it, finished or not, may come back to it with a state, until it has opened a newer one. (Trainers
    that share find what the others read then.)
    """
    others = [other for other in job.iterations.values() if other is not iteration]
    newer = {slot: held for other in others for slot, held in other.opened.items() if not held.ahead}
    if job.spec.sharing:
        reading = [slot for slot, held in iteration.opened.items() if not held.closed and slot not in newer]
    else:
        reading = [slot for slot, held in iteration.opened.items() if not _has_moved_on(held, newer.get(slot))]
    known = {slot.consumer for slot in (*iteration.opened, *newer)}
    return reading + [Slot(c) for c in range(job.spec.ranks.count) if c not in known]


def _has_moved_on(held: Opened, newer: Opened | None) -> bool:
    """Say whether a reader reads, or has read last, what it opened in a newer iteration: it may have gone back."""
    return newer is not None and (held.closed or not newer.closed)


def _held_back_by(draft: Draft, job: Job, oldest: Iteration) -> list[Slot]:
    """Return the readers of the oldest iteration that keep a third one from starting; the dead do not."""
    if job.spec.sharing is not None and not job.spec.sharing.waits:
        return []  # nobody waits for anybody: what is left of it is skipped
    alive = {lease.client for lease in draft.state.leases(job.name)}
    return [
        slot
        for slot in _still_reading(job, oldest)
        if (held := oldest.opened.get(slot)) is None or held.client in alive
    ]
