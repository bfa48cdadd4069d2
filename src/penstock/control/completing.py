"""An epoch ends when its streams have, and then its tail.

A stream has ended when its readers say so, not when its worker does. What ended streams could not give as whole rounds
becomes one more stream, so that an epoch has one short batch, not one a stream.
"""

from __future__ import annotations

from penstock.control import events as e
from penstock.control.draft import Draft
from penstock.control.fitting import fitting_workers, fixed_streams
from penstock.control.records import Iteration, Job
from penstock.control.resuming import owner_of
from penstock.core.ids import AttemptId, JobName
from penstock.wire.jobs import Feed, Leftover


def complete(draft: Draft, name: JobName, attempt: AttemptId) -> bool:
    """Make the tail if all streams have ended, or finish the epoch; return whether either happened."""
    job = draft.job(name)
    iteration = job.iterations[attempt]
    if iteration.finished or not _all_ended(draft, job, iteration):
        return False
    leftovers = tuple(
        Leftover(stream.number, stream.leftover, stream.feed)
        for stream in sorted(iteration.streams.values(), key=lambda stream: stream.number)
        if stream.leftover is not None and not stream.lost
    )
    if iteration.tail is None and leftovers and job.spec.sharding != "off":
        number = iteration.next_number
        feed = Feed(kind="tail", leftovers=leftovers)
        draft.emit(e.StreamsCreated(name, attempt, (e.NewStream(number, feed, 1, owner_of(job.spec, number, feed)),)))
    else:
        draft.emit(e.IterationFinished(name, attempt))
    return True


def _all_ended(draft: Draft, job: Job, iteration: Iteration) -> bool:
    streams = iteration.streams.values()
    if not streams or not all(stream.ended or stream.lost for stream in streams):
        return False
    if iteration.tail is not None:
        return True
    if job.spec.sharding == "off" and _yet_to_run(draft, job, iteration):
        return False
    if fixed_streams(job.spec) is None:
        # Lost streams alone end nothing: what they were not granted is still to be read. Nor do streams that a
        # checkpoint brought as ended, while there are splits that none of them was granted.
        if all(stream.lost for stream in streams):
            return False
        if job.spec.sharding != "off" and iteration.digest is not None:
            return all(iteration.ledger.cursor(source, 0).left == 0 for source in range(len(iteration.ledger.counts)))
    return True


def _yet_to_run(draft: Draft, job: Job, iteration: Iteration) -> bool:
    """Say whether a worker that should run over everything has not begun: a small epoch must not end before it."""
    homes = {stream.home for stream in iteration.streams.values()}
    failed = {worker for worker, name in draft.state.failed_starts if name == job.name}
    return any(w.worker not in homes and w.worker not in failed for w in fitting_workers(draft.state, job))
