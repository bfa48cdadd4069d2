"""Who runs which stream.

- A stream that nobody runs goes to the least loaded process of its job, on another worker than the last one if there is
  a choice, because the last one may be what is wrong. Processes of an agent that is doubted come after all others: when
  a host is gone, all its processes are, and of one that is noticed long before the agent's lease has run out.
- Where guests work at another pace than others (`Placement.guest_pace`) and the number of streams is the job's, what
  counts is a process's streams divided by its pace: in deterministic order every turn waits for the slowest. Elsewhere
  whoever is faster takes more splits, and nobody takes another's only stream.
- A process without a stream takes some from those that have at least two more than it. In relaxed order, if there are
  none, it gets a new one; splits are granted as they are needed, so load evens out by itself. So there are never more
  streams than there were processes at once, however often processes die or checkpoints are loaded.
- Where streams have owners, a process gets one for each consumer. With many processes that would be a connection from
  every consumer to every one of them: above the job's reach a process serves a part of the consumers only
  (`Delivery.streams_on`). A stream stays its consumer's when it moves: parts stay even as processes come and go.
- Streams that were dealt to workers up front are not all given to the process that is ready first: each process has its
  share, and those that are being started are waited for, a moment.
- A job that was given fewer workers has more streams than processes. In relaxed order each process keeps as many as a
  new one would get, and the others are retired: they are granted nothing more of the pass that is read, end by
  themselves, and what does not fill their last round goes to the tail.
- Every change raises the stream's binding: that is what fences the process that had it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle

import msgspec

from penstock.control import events as e
from penstock.control.draft import Draft
from penstock.control.fitting import asked_of, may_take_streams, ready_runners, runners_of, spec_of
from penstock.control.records import Bound, Iteration, Job, Runner, Stream, Streams
from penstock.control.resuming import GRANTED
from penstock.core.ids import AttemptId, JobName, RunnerId, StreamId, stream_id
from penstock.wire.jobs import FeedSpec, JobSpec, delivery_of
from penstock.wire.modes import guest_of

WAIT_FOR_SHARE_S = (
    3.0  # a process takes a tenth of a second to start; one that takes longer finds its streams elsewhere
)


def create_fixed_streams(draft: Draft, name: JobName, attempt: AttemptId) -> None:
    """Make the streams of an epoch whose number is the job's to say; those a checkpoint brought are there already."""
    job = draft.job(name)
    spec = spec_of(job, job.iterations[attempt])
    delivery = delivery_of(spec)
    fixed = delivery.streams
    if fixed is None:
        return
    dealt = tuple(FeedSpec(kind="dealt", number=j, of=fixed) for j in range(fixed))
    feeds = spec.feeds or (dealt if spec.order == "deterministic" else (GRANTED,) * fixed)
    there = {stream.number for stream in job.iterations[attempt].streams.values()}
    made = tuple(
        e.NewStream(number, feed, fixed, delivery.owner_of(number, feed))
        for number, feed in enumerate(feeds)
        if number not in there
    )
    if made:
        draft.emit(e.StreamsCreated(name, attempt, made))


def place_streams(draft: Draft, name: JobName, arrived: Sequence[Runner] | None = None) -> None:
    """Bind what is not bound, and make streams for processes that have none.

    `arrived`: no others have come since streams were last placed. None: any may have.
    """
    for attempt in [iteration.attempt for iteration in draft.iterations(name)]:
        job = draft.job(name)
        iteration = job.iterations[attempt]
        if job.paused or job.failure or not iteration.needs_runners:
            continue
        candidates = ready_runners(draft.state, job).values() if arrived is None else arrived
        _bind(draft, name, attempt, _waiting(draft, job, iteration))
        _bind(draft, name, attempt, _moves(draft, name, attempt, _idle(draft, name, attempt, candidates)))
        if delivery_of(job.spec).streams is None and iteration.tail is None and not iteration.finished:
            made = (
                _own_runs(draft, name, attempt, candidates)
                if job.spec.sharding.off
                else _newcomers(draft, name, attempt, _idle(draft, name, attempt, candidates))
            )
            if made:
                draft.emit(e.StreamsCreated(name, attempt, tuple(stream for stream, _ in made)))
                new = draft.job(name).iterations[attempt].streams
                bindings = [_bind_to(new[stream_id(attempt, stream.number)], runner) for stream, runner in made]
                _bind(draft, name, attempt, bindings)
        _retire_surplus(draft, name, attempt)


def _retire_surplus(draft: Draft, name: JobName, attempt: AttemptId) -> None:
    """Retire what each process has too much, once all the processes that the job is to have are there."""
    job = draft.job(name)
    iteration = job.iterations[attempt]
    allotted = draft.state.allotted.workers.get(name, ())
    by_arrival = delivery_of(job.spec).kind == "by arrival" and delivery_of(job.spec).streams is None
    if asked_of(job) is None or not by_arrival or job.spec.sharding.off or iteration.finished:
        return
    ready = ready_runners(draft.state, job)
    if not allotted or {runner.worker for runner in ready.values()} != set(allotted):
        return
    surplus = tuple(
        stream.stream
        for runner in sorted(ready)
        for stream in [s for s in iteration.streams.on(runner) if s.wanted and not s.retired][1:]
        if stream.feed.kind == "granted" and not stream.ended
    )
    if surplus:
        draft.emit(e.StreamsRetired(name, attempt, surplus, iteration.ledger.begun))


def _bind(draft: Draft, name: JobName, attempt: AttemptId, bindings: Sequence[e.NewBinding]) -> None:
    if bindings:
        draft.emit(e.StreamsBound(name, attempt, tuple(bindings)))


def rebind(draft: Draft, name: JobName, attempt: AttemptId, streams: Iterable[Stream]) -> None:
    """Take streams from whoever runs them and give them to another process, if one is ready; else they wait."""
    job = draft.job(name)
    ready = {} if job.paused or job.failure else ready_runners(draft.state, job)
    loads = {runner: job.iterations[attempt].streams.load(runner) for runner in ready}
    bindings = []
    for stream in streams:
        if stream.bound is not None and stream.bound.runner in loads:
            loads[stream.bound.runner] -= 1
        bindings.append(
            _binding(draft, job, stream, ready, loads)
            if stream.wanted
            else e.NewBinding(stream.stream, stream.binding + 1)
        )
    _bind(draft, name, attempt, bindings)


def release_streams(draft: Draft, name: JobName, runner: RunnerId, reason: str, *, graceful: bool) -> None:
    """Let go of all streams of a process that is no more (or, `graceful`, that is being let go)."""
    for iteration in draft.iterations(name):
        held = iteration.streams.on(runner)
        if graceful:
            rebind(draft, name, iteration.attempt, held)
        else:
            take_away(draft, name, iteration.attempt, held, reason)


def take_away(draft: Draft, name: JobName, attempt: AttemptId, streams: Sequence[Stream], reason: str) -> None:
    """Take streams from a process that failed them, whoever noticed: they are given up, or go on elsewhere."""
    spec = draft.job(name).spec
    lost = tuple(stream.stream for stream in streams if _is_given_up(spec, stream))
    if lost:
        draft.emit(e.StreamsLost(name, attempt, lost, reason))
    rebind(draft, name, attempt, [stream for stream in streams if stream.stream not in lost])


def _is_given_up(spec: JobSpec, stream: Stream) -> bool:
    """Say whether a stream that its process failed may not go on, for something of it might come twice.

    Given up, a coordinated stream would end at another step for each consumer: it goes on, which is once too. One that
    has ended is run again only for a consumer that came back, which asks for what it does not have.
    """
    if spec.sharding.guarantee != "at_most_once" or spec.ranks.coordinated:
        return False
    return stream.bound is not None and not stream.ended and not stream.lost


def _binding(
    draft: Draft, job: Job, stream: Stream, ready: Mapping[RunnerId, Runner], loads: dict[RunnerId, int]
) -> e.NewBinding:
    """Choose a process and count the stream as its load."""
    if not ready:
        return e.NewBinding(stream.stream, stream.binding + 1)
    best = min(
        ready,
        key=lambda r: (
            _is_doubted(draft, ready[r]),
            ready[r].worker == stream.last_worker,
            (loads[r] + 1) / _pace(draft, job, ready[r]),
            r,
        ),
    )
    loads[best] += 1
    return _bind_to(stream, ready[best])


def _pace(draft: Draft, job: Job, runner: Runner) -> float:
    """Return how fast a process works beside the others, as far as the job says and it matters."""
    pace = 1.0 if delivery_of(job.spec).streams is None else job.spec.placement.guest_pace
    return pace if pace == 1.0 or guest_of(draft.state.workers[runner.worker].tags) else 1.0


def _is_doubted(draft: Draft, runner: Runner) -> bool:
    return draft.state.agents[draft.state.workers[runner.worker].agent].doubted


def _bind_to(stream: Stream, runner: Runner) -> e.NewBinding:
    binding = stream.binding + 1
    return e.NewBinding(stream.stream, binding, runner.runner, runner.worker, runner.address, runner.verifier)


def _waiting(draft: Draft, job: Job, iteration: Iteration) -> list[e.NewBinding]:
    waiting = iteration.streams.waiting
    ready = ready_runners(draft.state, job) if waiting else {}
    if not ready:
        return []
    loads = {runner: iteration.streams.load(runner) for runner in ready}
    share = _share(draft, job, iteration, len(ready))
    given = (stream for stream in waiting if stream.binding or min(loads.values()) < share)
    return [_binding(draft, job, stream, ready, loads) for stream in given]


def _share(draft: Draft, job: Job, iteration: Iteration, ready: int) -> int:
    """Return how many streams that nobody has run yet a process is given at most."""
    if not job.spec.sharding.static:
        return len(iteration.streams)
    starting = runners_of(draft.state, job.name).starting()
    awaited = sum(draft.now - runner.since <= WAIT_FOR_SHARE_S for runner in starting)
    return math.ceil(len(iteration.streams) / (ready + awaited))


def has_waited_for_shares(draft: Draft, name: JobName) -> bool:
    """Say whether streams are still kept for processes that have taken too long to start."""
    late = any(draft.now - runner.since > WAIT_FOR_SHARE_S for runner in runners_of(draft.state, name).starting())
    return late and any(iteration.streams.waiting for iteration in draft.iterations(name))


def _idle(draft: Draft, job: JobName, attempt: AttemptId, candidates: Iterable[Runner]) -> list[Runner]:
    """Return the processes that have not had a stream of this epoch, and may be given one."""
    streams = draft.job(job).iterations[attempt].streams
    able = (r for r in candidates if may_take_streams(draft.state, r) and not _is_doubted(draft, r))
    return [runner for runner in able if not streams.has_some(runner.runner)]


def _moves(draft: Draft, name: JobName, attempt: AttemptId, idle: Sequence[Runner]) -> list[e.NewBinding]:
    """Return what processes without a stream take over from those that have at least two shares more."""
    job = draft.job(name)
    share = streams_a_process(draft, job)
    streams = job.iterations[attempt].streams
    moves: dict[StreamId, e.NewBinding] = {}
    for newcomer in idle:
        while True:
            load, busiest = _busiest(draft, job, streams)
            enough = streams.load(newcomer.runner) + 2 * share - 1
            if busiest is None or load <= enough / _pace(draft, job, newcomer):
                break
            stream = next(s for s in reversed(streams.on(busiest)) if s.wanted and not s.retired)
            moves[stream.stream] = _bind_to(stream, newcomer)
            bound = Bound(
                runner=newcomer.runner,
                worker=newcomer.worker,
                address=newcomer.address,
                verifier=newcomer.verifier,
            )
            streams = streams.put({stream.stream: msgspec.structs.replace(stream, bound=bound)})
    return list(moves.values())


def _busiest(draft: Draft, job: Job, streams: Streams) -> tuple[float, RunnerId | None]:
    """Return how many streams the process has to run that has the most for its pace, and that process."""
    runners = runners_of(draft.state, job.name)
    if job.spec.placement.guest_pace == 1.0 or delivery_of(job.spec).streams is None:
        return streams.busiest(lambda r: r in runners and may_take_streams(draft.state, runners[r]))
    able = [each for each in runners.values() if may_take_streams(draft.state, each)]
    found = [(streams.load(each.runner) / _pace(draft, job, each), each.runner) for each in able]
    return max(found, default=(0.0, None))


def _own_runs(
    draft: Draft, name: JobName, attempt: AttemptId, candidates: Iterable[Runner]
) -> list[tuple[e.NewStream, Runner]]:
    """Sharding "off": each worker, once, runs over everything."""
    job = draft.job(name)
    streams, number = job.iterations[attempt].streams, job.iterations[attempt].next_number
    # A checkpoint's runs are nobody's in particular: each stands for one worker.
    resumed = streams.own_runs(None)
    if resumed:
        candidates = ready_runners(draft.state, job).values()
    without = [r for r in candidates if may_take_streams(draft.state, r) and not streams.own_runs(r.worker)]
    feed = FeedSpec(kind="dealt", number=0, of=1)
    made: list[tuple[e.NewStream, Runner]] = []
    for runner in sorted(without, key=lambda r: r.worker)[resumed:]:
        owner = delivery_of(job.spec).owner_of(number, feed)
        made.append((e.NewStream(number, feed, 1, owner, runner.worker), runner))
        number += 1
    return made


def _newcomers(
    draft: Draft, name: JobName, attempt: AttemptId, idle: Sequence[Runner]
) -> list[tuple[e.NewStream, Runner]]:
    """Relaxed order: a process that has no stream gets one, or several if streams have owners."""
    job = draft.job(name)
    iteration = job.iterations[attempt]
    made = granted_streams(draft, job, iteration, processes=len(idle))
    placed = list(zip(made, (runner for runner in idle for _ in range(streams_a_process(draft, job)))))
    return placed + _for_the_unserved(draft, job, iteration, placed)


def _for_the_unserved(
    draft: Draft, job: Job, iteration: Iteration, placed: Sequence[tuple[e.NewStream, Runner]]
) -> list[tuple[e.NewStream, Runner]]:
    """Return streams for consumers that own none, once no process is awaited: fewer may have come than expected."""
    delivery = delivery_of(job.spec)
    all_made = iteration.next_number - iteration.first_number >= delivery.consumers  # numbers in a row have all owners
    if not delivery.owned or all_made or runners_of(draft.state, job.name).starting():
        return []
    ready = sorted(ready_runners(draft.state, job).values(), key=lambda runner: runner.runner)
    served = {stream.owner for stream in iteration.streams.values()} | {stream.owner for stream, _ in placed}
    first, share = iteration.next_number + len(placed), expected_streams(draft, job)
    owners = ((number, delivery.owner_of(number, GRANTED)) for number in range(first, first + delivery.consumers))
    unserved = [e.NewStream(number, GRANTED, share, owner) for number, owner in owners if owner not in served]
    return list(zip(unserved, cycle(ready)))


def granted_streams(draft: Draft, job: Job, iteration: Iteration, *, processes: int = 1) -> tuple[e.NewStream, ...]:
    """Return new streams for so many processes, to be granted splits from the epoch's beginning on."""
    if not processes:
        return ()
    share, delivery = expected_streams(draft, job), delivery_of(job.spec)
    first = iteration.next_number
    return tuple(
        e.NewStream(number, GRANTED, share, delivery.owner_of(number, GRANTED))
        for number in range(first, first + processes * streams_a_process(draft, job))
    )


def expected_streams(draft: Draft, job: Job) -> int:
    """Return how many streams there will be: of the processes that serve, and of those that are being started."""
    return max(1, len(runners_of(draft.state, job.name))) * streams_a_process(draft, job)


def streams_a_process(draft: Draft, job: Job) -> int:
    """Return how many streams a new process gets in relaxed order."""
    return delivery_of(job.spec).streams_on(len(runners_of(draft.state, job.name)))
