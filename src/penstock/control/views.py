"""The state as others see it: a consumer's picture of its epoch, and the lines of `penstock jobs` and `workers`."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from penstock.control.events import ElementKey
from penstock.control.figures import ServingRunner, job_figures, per_second, serving_runners
from penstock.control.fitting import asked_of, is_served, ready_runners, version_failure, waiting_for_runners
from penstock.control.records import Iteration, Job, Stream
from penstock.control.state import ClusterState
from penstock.core.ids import AttemptId, JobName, StreamId, WorkerId
from penstock.policies.cost import cost_of
from penstock.policies.scaling.records import Rent
from penstock.wire.jobs import JobView, StreamMove, StreamView, ViewChange
from penstock.wire.messages import JobLine, TrainerLine, WorkerLine
from penstock.wire.scaling import DecisionLine

# Two beats of a client, and a second for the way. Its lease lasts longer: beats need the trainer's interpreter, which
# may be busy with something else for a while, and the job's processes are not to be stopped for that.
SILENT_AFTER_S = 5.0


def view_of(state: ClusterState, job: JobName, attempt: AttemptId | None = None) -> JobView:
    """Return the view of an attempt; None: of the newest. Raises KeyError if there is none."""
    record = state.jobs[job]
    iteration = record.iterations[next(reversed(record.iterations)) if attempt is None else attempt]
    about = about_epoch(state, job, iteration.attempt)
    return JobView(
        job=job,
        attempt=iteration.attempt,
        epoch=iteration.epoch,
        version=state.view_version(iteration.attempt),
        streams=tuple(map(_stream_view, iteration.streams.values())),
        finished=about.finished,
        failure=about.failure,
        waiting_for=about.waiting_for,
        dropped=tuple(map(element_name, about.dropped)),
    )


def change_since(state: ClusterState, job: JobName, attempt: AttemptId, version: int) -> ViewChange | None:
    """Return what changed in a view since a version; None: that is not known any more."""
    log = state.view_logs.get(attempt)
    raises = None if log is None else log.since(version)
    if raises is None:
        return None
    streams = state.jobs[job].iterations[attempt].streams
    made = dict.fromkeys(stream for raised in raises for stream in raised.made)
    moved = dict.fromkeys(stream for raised in raises for stream in raised.moved if stream not in made)
    about = about_epoch(state, job, attempt)
    dropped = any(raised.dropped for raised in raises)
    return ViewChange(
        job=job,
        attempt=attempt,
        since=version,
        version=state.view_version(attempt),
        made=tuple(_stream_view(streams[stream]) for stream in made),
        moved=tuple(_stream_move(streams[stream]) for stream in moved),
        finished=about.finished,
        failure=about.failure,
        waiting_for=about.waiting_for,
        dropped=tuple(map(element_name, about.dropped)) if dropped else None,
    )


class AboutEpoch(NamedTuple):
    """What a view says beside its streams."""

    finished: bool
    failure: str
    waiting_for: str
    dropped: tuple[ElementKey, ...]


def about_epoch(state: ClusterState, job: JobName, attempt: AttemptId) -> AboutEpoch:
    record = state.jobs[job]
    iteration = record.iterations[attempt]
    failure = record.failure
    if not failure and not iteration.finished and not is_served(state, record):
        failure = version_failure(state, record)
    return AboutEpoch(iteration.finished, failure, _waiting_for(state, record, iteration), record.dropped)


def shown_differently(one: Stream, other: Stream) -> bool:
    """Say whether two states of a stream look different to a consumer."""
    return _stream_move(one) != _stream_move(other)


def _stream_move(stream: Stream) -> StreamMove:
    bound = stream.bound
    if bound is None:
        return StreamMove(stream.number, stream.binding, ended=stream.ended, lost=stream.lost)
    return StreamMove(
        stream.number, stream.binding, bound.runner, bound.worker, bound.address, stream.ended, stream.lost
    )


def _stream_view(stream: Stream) -> StreamView:
    bound = stream.bound
    return StreamView(
        stream=stream.stream,
        number=stream.number,
        binding=stream.binding,
        feed=stream.feed,
        share=stream.share,
        start=stream.start,
        first_round=stream.first_round,
        marks=stream.marks,
        owner=stream.owner,
        runner=None if bound is None else bound.runner,
        address="" if bound is None else bound.address,
        worker=None if bound is None else bound.worker,
        ended=stream.ended,
        lost=stream.lost,
    )


def _waiting_for(state: ClusterState, job: Job, iteration: Iteration) -> str:
    if job.failure or iteration.finished:
        return ""
    if job.paused:
        return "the job is paused; `penstock jobs resume` lets it go on"
    waiting = waiting_for_runners(state, job)
    if waiting:
        return waiting
    here = {slot.consumer for slot in iteration.opened}
    missing = [str(c) for c in range(job.spec.ranks.count) if c not in here]
    return f"consumers {', '.join(missing)} have not opened the epoch" if missing else ""


def element_name(element: ElementKey) -> str:
    """
    >>> element_name((0, 12, 5))
    'element 5 of split 12 of source 0'
    """
    source, split, index = element
    return f"element {index} of split {split} of source {source}"


def job_lines(
    state: ClusterState, now: float, readable: Container[JobName], rent: Rent | None = None
) -> tuple[JobLine, ...]:
    return tuple(_job_line(state, job, now, rent) for job in state.jobs.values() if job.name in readable)


def _job_line(state: ClusterState, job: Job, now: float, rent: Rent | None) -> JobLine:
    last = job.scaling.last if asked_of(job) is not None else None
    iteration = _read_last(job)
    heard = (lease for lease in state.leases(job.name) if now - lease.seen <= SILENT_AFTER_S)
    return JobLine(
        job=job.name,
        owner=job.spec.owner,
        epoch=-1 if iteration is None else iteration.epoch,
        ranks=job.spec.ranks.count,
        clients=len({lease.slot for lease in heard}),
        workers=len(ready_runners(state, job)),
        streams=0 if iteration is None else len(iteration.streams),
        splits_left=0 if iteration is None else splits_left(iteration),
        status=_job_status(state, job, iteration, now),
        trainers=_trainer_lines(state, job),
        target=None if last is None else last.target,
        reason="" if last is None else "; ".join(filter(None, (last.reason, last.shortage))),
        cost=None if rent is None else cost_of(job_figures(state, job.name), rent).total,
    )


def _read_last(job: Job) -> Iteration | None:
    """Return the newest iteration that somebody has come to."""
    newest_first = list(reversed(job.iterations.values()))
    come_to = (each for each in newest_first if not all(held.ahead for held in each.opened.values()))
    return next(come_to, newest_first[0] if newest_first else None)


def decision_lines(job: Job, now: float) -> tuple[DecisionLine, ...]:
    return tuple(
        DecisionLine(
            ago_s=now - each.at_s if now >= each.at_s else -1.0,
            target=each.target,
            allotted=each.allotted,
            reason=each.reason,
            shortage=each.shortage,
            figures=each.figures,
        )
        for each in job.scaling.decisions
    )


def _trainer_lines(state: ClusterState, job: Job) -> tuple[TrainerLine, ...]:
    """Return what the trainers that read now have said of themselves."""
    if not job.spec.sharing:
        return ()
    lines = []
    for lease in state.leases(job.name):
        iteration, beats = job.iterations.get(lease.attempt), lease.beats
        if iteration is not None and beats:
            beat = beats[-1]
            lines.append(
                TrainerLine(
                    trainer=beat.trainer,
                    epoch=iteration.epoch,
                    read=beat.batches,
                    skipped=beat.skipped,
                    shared=beat.shared,
                )
            )
    return tuple(sorted(lines, key=lambda line: line.trainer))


def splits_left(iteration: Iteration) -> int:
    """Return how many splits of the newest passes nobody has been granted yet (0 where splits are dealt up front)."""
    if not any(stream.feed.kind == "granted" for stream in iteration.streams.values()):
        return 0
    ledger = iteration.ledger
    newest = dict.fromkeys(range(len(ledger.counts)), 0)
    for source, pass_ in ledger.cursors:
        newest[source] = max(newest[source], pass_)
    return sum(ledger.cursor(source, pass_).left for source, pass_ in newest.items())


def _job_status(state: ClusterState, job: Job, iteration: Iteration | None, now: float) -> str:
    if job.failure:
        return job.failure
    if job.paused:
        return "paused"
    if not state.clients.get(job.name):
        return "nobody reads it"
    status = "reading"
    if iteration is None or iteration.finished:
        status = "epoch finished"
    elif waiting := waiting_for_runners(state, job):
        status = waiting
    silent = [lease for lease in state.leases(job.name) if now - lease.seen > SILENT_AFTER_S]
    if not silent:
        return status
    who = ", ".join(str(consumer) for consumer in sorted({lease.slot.consumer for lease in silent}))
    for_s = now - min(lease.seen for lease in silent)
    since = (
        f"consumer {who} not heard of for {for_s:.0f} s"
        if job.spec.ranks.count > 1
        else f"not heard of for {for_s:.0f} s"
    )
    return since if len(silent) == len(state.leases(job.name)) else f"{status}; {since}"


def worker_lines(state: ClusterState, readable: Container[JobName]) -> tuple[WorkerLine, ...]:
    """Return all workers, each with those of its jobs that are readable."""
    jobs: dict[WorkerId, list[JobName]] = {}
    streams: dict[WorkerId, set[StreamId]] = {}
    for job, runners in state.runners.items():
        for runner in runners.values() if job in readable else ():
            jobs.setdefault(runner.worker, []).append(job)
    for record in state.jobs.values():
        for iteration in record.iterations.values():
            for stream in iteration.streams.values():
                if stream.bound is not None and stream.wanted:
                    streams.setdefault(stream.bound.worker, set()).add(stream.stream)
    serving: dict[WorkerId, list[ServingRunner]] = {}
    for known in serving_runners(state):
        serving.setdefault(known.worker, []).append(known)
    return tuple(
        WorkerLine(
            worker=worker.worker,
            host=state.agents[worker.agent].host,
            tags=worker.tags,
            jobs=tuple(jobs.get(worker.worker, ())),
            streams=len(streams.get(worker.worker, ())),
            status="draining" if worker.leaving or worker.worker in state.drained else "ready",
            rounds_per_s=sum(per_second(each.samples, lambda s: s.rounds) for each in serving.get(worker.worker, ())),
            cores=sum(each.figures.cores for each in serving.get(worker.worker, ())),
            rss_bytes=sum(each.figures.rss_bytes for each in serving.get(worker.worker, ())),
        )
        for worker in state.workers.values()
    )
