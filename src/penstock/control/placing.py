"""Who runs which stream.

- A stream that nobody runs goes to the least loaded process of its job, on another worker than the last one if there is
  a choice: the last one may be what is wrong.
- A process without a stream takes some from those that have at least two more than it. In relaxed order, if there are
  none, it gets a new one; splits are granted as they are needed, so load evens out by itself. So there are never more
  streams than there were processes at once, however often processes die or checkpoints are loaded.
- Every change raises the stream's binding: that is what fences the process that had it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from penstock.control import events as e
from penstock.control.draft import Draft
from penstock.control.fitting import fitting_workers, fixed_streams, ready_runners, spec_of
from penstock.control.records import Iteration, Job, Runner, Stream
from penstock.control.resuming import GRANTED, owner_of
from penstock.core.ids import AttemptId, JobName, RunnerId, StreamId, stream_id
from penstock.wire.jobs import Feed


def create_fixed_streams(draft: Draft, name: JobName, attempt: AttemptId) -> None:
    """Make the streams of an epoch whose number is the job's to say; those a checkpoint brought are there already."""
    job = draft.job(name)
    spec = spec_of(job, job.iterations[attempt])
    fixed = fixed_streams(spec)
    if fixed is None:
        return
    dealt = tuple(Feed(kind="dealt", number=j, of=fixed) for j in range(fixed))
    feeds = spec.feeds or (dealt if spec.order == "deterministic" else (GRANTED,) * fixed)
    share = spec.shuffle_parts or fixed
    there = {stream.number for stream in job.iterations[attempt].streams.values()}
    made = tuple(
        e.NewStream(number, feed, share, owner_of(spec, number, feed))
        for number, feed in enumerate(feeds)
        if number not in there
    )
    if made:
        draft.emit(e.StreamsCreated(name, attempt, made))


def place_streams(draft: Draft, name: JobName) -> None:
    """Bind what is not bound, and make streams for processes that have none."""
    for attempt in [iteration.attempt for iteration in draft.iterations(name)]:
        job = draft.job(name)
        ready = ready_runners(draft.state, job)
        if not ready or job.paused or job.failure or not job.iterations[attempt].needs_runners:
            continue
        _bind(draft, name, attempt, _waiting(job.iterations[attempt], ready))
        _bind(draft, name, attempt, _moves_to_newcomers(job, draft.job(name).iterations[attempt], ready))
        iteration = draft.job(name).iterations[attempt]
        if fixed_streams(job.spec) is None and iteration.tail is None and not iteration.finished:
            made = (
                _own_runs(job, iteration, ready)
                if job.spec.sharding == "off"
                else _newcomers(draft, job, iteration, ready)
            )
            if made:
                draft.emit(e.StreamsCreated(name, attempt, tuple(stream for stream, _ in made)))
                new = draft.job(name).iterations[attempt].streams
                bindings = [_bind_to(new[stream_id(attempt, stream.number)], runner) for stream, runner in made]
                _bind(draft, name, attempt, bindings)


def _bind(draft: Draft, name: JobName, attempt: AttemptId, bindings: Sequence[e.NewBinding]) -> None:
    if bindings:
        draft.emit(e.StreamsBound(name, attempt, tuple(bindings)))


def rebind(draft: Draft, name: JobName, attempt: AttemptId, streams: Iterable[Stream]) -> None:
    """Take streams from whoever runs them and give them to another process, if one is ready; else they wait."""
    job = draft.job(name)
    ready = {} if job.paused or job.failure else ready_runners(draft.state, job)
    loads = _loads(job.iterations[attempt], ready)
    bindings = []
    for stream in streams:
        if stream.bound is not None and stream.bound.runner in loads:
            loads[stream.bound.runner] -= 1
        bindings.append(
            _binding(stream, ready, loads) if stream.wanted else e.NewBinding(stream.stream, stream.binding + 1)
        )
    _bind(draft, name, attempt, bindings)


def release_streams(draft: Draft, name: JobName, runner: RunnerId, reason: str, *, graceful: bool) -> None:
    """Let go of all streams of a process that is no more (or, `graceful`, that is being let go)."""
    for iteration in draft.iterations(name):
        held = [s for s in iteration.streams.values() if s.bound is not None and s.bound.runner == runner]
        spec = draft.job(name).spec
        # Given up, a coordinated stream would end at another step for each consumer: it goes on, which is once too.
        if spec.guarantee == "at_most_once" and not spec.coordinated and not graceful:
            lost = tuple(s.stream for s in held if s.wanted)
            if lost:
                draft.emit(e.StreamsLost(name, iteration.attempt, lost, reason))
            held = [s for s in held if not s.wanted]
        rebind(draft, name, iteration.attempt, held)


def _loads(iteration: Iteration, ready: Mapping[RunnerId, Runner]) -> dict[RunnerId, int]:
    loads = dict.fromkeys(ready, 0)
    for stream in iteration.streams.values():
        if stream.wanted and stream.bound is not None and stream.bound.runner in loads:
            loads[stream.bound.runner] += 1
    return loads


def _binding(stream: Stream, ready: Mapping[RunnerId, Runner], loads: dict[RunnerId, int]) -> e.NewBinding:
    """Choose a process and count the stream as its load."""
    if not ready:
        return e.NewBinding(stream.stream, stream.binding + 1)
    best = min(ready, key=lambda r: (ready[r].worker == stream.last_worker, loads[r], r))
    loads[best] += 1
    return _bind_to(stream, ready[best])


def _bind_to(stream: Stream, runner: Runner) -> e.NewBinding:
    return e.NewBinding(stream.stream, stream.binding + 1, runner.runner, runner.worker, runner.address)


def _waiting(iteration: Iteration, ready: Mapping[RunnerId, Runner]) -> tuple[e.NewBinding, ...]:
    waiting = [stream for stream in iteration.streams.values() if stream.bound is None and stream.wanted]
    if not waiting:
        return ()
    loads = _loads(iteration, ready)
    return tuple(_binding(stream, ready, loads) for stream in waiting)


def _idle(iteration: Iteration, ready: Mapping[RunnerId, Runner]) -> list[Runner]:
    """Return the processes that have not had a stream of this epoch."""
    busy = {stream.bound.runner for stream in iteration.streams.values() if stream.bound is not None}
    return [runner for name, runner in ready.items() if name not in busy]


def _moves_to_newcomers(job: Job, iteration: Iteration, ready: Mapping[RunnerId, Runner]) -> tuple[e.NewBinding, ...]:
    """Return what processes without a stream take over from those that have at least two shares more."""
    share = streams_a_process(job)
    moves: dict[StreamId, e.NewBinding] = {}
    held: dict[RunnerId, list[Stream]] = {name: [] for name in ready}
    for stream in iteration.streams.values():
        if stream.wanted and stream.bound is not None and stream.bound.runner in held:
            held[stream.bound.runner].append(stream)
    for newcomer in _idle(iteration, ready):
        mine = held[newcomer.runner]
        while True:
            fullest = max(held.values(), key=len)
            if len(fullest) < len(mine) + 2 * share:
                break
            stream = fullest.pop()
            moves[stream.stream] = _bind_to(stream, newcomer)
            mine.append(stream)
    return tuple(moves.values())


def _own_runs(job: Job, iteration: Iteration, ready: Mapping[RunnerId, Runner]) -> list[tuple[e.NewStream, Runner]]:
    """Sharding "off": each worker, once, runs over everything."""
    homes = {stream.home for stream in iteration.streams.values()}
    feed = Feed(kind="dealt", number=0, of=1)
    number = iteration.next_number
    made: list[tuple[e.NewStream, Runner]] = []
    without = [r for r in sorted(ready.values(), key=lambda r: r.worker) if r.worker not in homes]
    # A checkpoint's runs are nobody's in particular: each stands for one worker.
    resumed = sum(1 for stream in iteration.streams.values() if stream.home is None)
    for runner in without[resumed:]:
        owner = owner_of(job.spec, number, feed)
        made.append((e.NewStream(number, feed, job.spec.shuffle_parts or 1, owner, runner.worker), runner))
        number += 1
    return made


def _newcomers(
    draft: Draft, job: Job, iteration: Iteration, ready: Mapping[RunnerId, Runner]
) -> list[tuple[e.NewStream, Runner]]:
    """Relaxed order: a process that has no stream gets one, or one for each consumer if streams have owners."""
    idle = _idle(iteration, ready)
    made = granted_streams(draft, job, iteration, processes=len(idle))
    return list(zip(made, (runner for runner in idle for _ in range(streams_a_process(job)))))


def granted_streams(draft: Draft, job: Job, iteration: Iteration, *, processes: int = 1) -> tuple[e.NewStream, ...]:
    """Return new streams for so many processes, to be granted splits from the epoch's beginning on."""
    if not processes:
        return ()
    spec = job.spec
    share = spec.shuffle_parts or expected_streams(draft, job)
    first = iteration.next_number
    return tuple(
        e.NewStream(number, GRANTED, share, owner_of(spec, number, GRANTED))
        for number in range(first, first + processes * streams_a_process(job))
    )


def expected_streams(draft: Draft, job: Job) -> int:
    return max(1, len(fitting_workers(draft.state, job))) * streams_a_process(job)


def streams_a_process(job: Job) -> int:
    """Return how many streams a new process gets in relaxed order: one, or one for each owner."""
    return job.spec.consumers if job.spec.uneven == "allow" and fixed_streams(job.spec) is None else 1
