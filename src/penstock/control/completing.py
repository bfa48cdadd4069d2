"""An epoch ends when its streams have, and then its tail.

A stream has ended when its readers say so, not when its worker does. What ended streams could not give as whole rounds
becomes one more stream, so that an epoch has one short batch, not one a stream.

Where splits are granted, an ended stream vouches for more than itself: it was told that there is no further split, for
every pass of every source that its pipeline reads. Only the pipeline knows which passes an epoch has (`repeat` makes
several) and of which sources it reads everything (a mix may stop with the first that ends), so that a stream's end is
asked, and never the ledger. For which ends can be trusted, an attempt is looked at from where it began:

- At the epoch's beginning. Any stream's end vouches for all: what others were granted is theirs, and they have ended.
- At a checkpoint. A state holds every stream that its consumer had opened when it was saved, and only streams that
  somebody has opened are granted anything. So when a stream in it had passed something by, as it was told that there
  was no more, whoever had got that is in the state as well, and reads on from before it. Three cases are different.
  Where streams have owners, nobody's state but the owner's tells of a stream. Consumer 1 saves before it has seen its
  stream. The stream opens and is granted all that is left, consumer 0 sees its own end, and then saves, at the same
  step. In the merged state everything has ended, and what the one stream was granted is nowhere. The second case is a
  stream that is given up after it was loaded: what it had been granted before, and had not named, went back. The third
  is the first without owners, one pass earlier: consumer 0 opens a new stream after it has saved, others are told that
  a pass has no more and go on to the next, and then consumer 1 saves. Of a pass that they left behind streams are
  granted nothing more (see `resuming`), and that something is left of it the ledger knows.
  In all three, one that begins at the beginning is made, and asks for what is left in every pass.

A retired stream (`placing`) was told that there is no more where there was, and its end vouches for nothing. A
checkpoint does not say which streams were: where none was told so in this attempt, and something is left of a pass that
was begun, one more asks for it. Where the pipeline has read enough, that one ends at once.
"""

from __future__ import annotations

from penstock.control import events as e
from penstock.control.draft import Draft
from penstock.control.fitting import fitting_workers
from penstock.control.placing import granted_streams
from penstock.control.records import Iteration, Job, Stream
from penstock.core.ids import AttemptId, JobName
from penstock.wire.jobs import FeedSpec, Leftover, delivery_of


def complete(draft: Draft, name: JobName, attempt: AttemptId) -> bool:
    """Make what an epoch still lacks when all its streams have ended, or finish it; return whether either happened."""
    job = draft.job(name)
    iteration = job.iterations[attempt]
    if iteration.finished or not _all_ended(draft, job, iteration):
        return False
    if not _all_asked_for(job, iteration):
        draft.emit(e.StreamsCreated(name, attempt, granted_streams(draft, job, iteration)))
        return True
    leftovers = tuple(
        Leftover(stream.number, stream.leftover, stream.feed)
        for stream in sorted(iteration.streams.values(), key=lambda stream: stream.number)
        if stream.leftover is not None and not stream.lost
    )
    if iteration.tail is None and leftovers and not job.spec.sharding.off:
        number = iteration.next_number
        feed = FeedSpec(kind="tail", leftovers=leftovers)
        owner = delivery_of(job.spec).owner_of(number, feed)
        draft.emit(e.StreamsCreated(name, attempt, (e.NewStream(number, feed, 1, owner),)))
    else:
        draft.emit(e.IterationFinished(name, attempt))
    return True


def _all_ended(draft: Draft, job: Job, iteration: Iteration) -> bool:
    if not iteration.streams or iteration.streams.unfinished:
        return False
    if iteration.tail is not None or not job.spec.sharding.off:
        return True
    return any(stream.ended for stream in iteration.streams.values()) and not _yet_to_run(draft, job, iteration)


def _all_asked_for(job: Job, iteration: Iteration) -> bool:
    """Say whether a stream has ended that vouches for there being no split that no stream was granted."""
    if job.spec.sharding.off or delivery_of(job.spec).streams is not None or iteration.tail is not None:
        return True
    ledger = iteration.ledger
    ended = [s for s in iteration.streams.values() if s.ended and not s.lost and not s.retired]
    if iteration.digest is None:
        return bool(ended)
    if delivery_of(job.spec).owned or len(ended) < len(iteration.streams) or ledger.was_passed_by:
        return any(stream.number >= iteration.first_number for stream in ended)
    return any(_asked_here(iteration, stream) for stream in ended) or (bool(ended) and not ledger.has_more)


def _asked_here(iteration: Iteration, stream: Stream) -> bool:
    """Say whether a stream was told in this attempt that there is no more, and not in one whose checkpoint it is of."""
    if stream.number >= iteration.first_number:
        return True
    return stream.binding > 0 and not any(named.ended for named in stream.start.named)


def _yet_to_run(draft: Draft, job: Job, iteration: Iteration) -> bool:
    """Say whether a worker that should run over everything has not begun: a small epoch must not end before it."""
    failed = {worker for worker, name in draft.state.failed_starts if name == job.name}
    without = sum(
        not iteration.streams.own_runs(worker.worker) and worker.worker not in failed
        for worker in fitting_workers(draft.state, job)
    )
    return without > iteration.streams.own_runs(None)  # those of a checkpoint stand for one worker each
