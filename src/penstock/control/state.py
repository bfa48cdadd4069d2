"""The truth about the cluster.

Rules:

1. Only `apply` changes the state, and it needs nothing but the event: no clock, no randomness, no decision.
2. What journaled events change is the *hard* part: it is what a snapshot holds and what replay rebuilds. What the
   others change is *soft*: who is alive, until when. No journaled event's outcome depends on the soft part.
3. Records are replaced, never changed (the ledger apart), so `copy` is shallow and a decision may try events on a copy.

An event that does not fit the state is a bug of ours, not of a peer: it raises, with what happened before.
"""

from __future__ import annotations

from collections import deque
from typing import assert_never

from msgspec.structs import replace

from penstock.control import events as e
from penstock.control.records import (
    BLAMED_RUNNERS,
    PAST_CLIENTS,
    Agent,
    Bound,
    FailedStart,
    Iteration,
    Job,
    Lease,
    Opened,
    RestartWish,
    Runner,
    Slot,
    Stream,
    Worker,
)
from penstock.control.resuming import new_iteration
from penstock.core.errors import PenstockError
from penstock.core.ids import AgentId, AttemptId, ClientId, JobName, RunnerId, StreamId, WorkerId, stream_id
from penstock.wire.jobs import Cut, JobSpec

STORY_LENGTH = 64


class InvalidTransitionError(PenstockError):
    """An event that does not fit the state. The state is as it was before it."""

    def __init__(self, event: e.AnyEvent, why: str, story: tuple[e.AnyEvent, ...]) -> None:
        self.event, self.why, self.story = event, why, story
        told = "\n".join(f"  {past}" for past in story) or "  nothing"
        super().__init__(f"{why}\nevent: {event}\nwhat happened before, oldest first:\n{told}")


class ClusterState:
    """See the module's rules."""

    __slots__ = (
        "agents",
        "began_at",
        "clients",
        "drained",
        "failed_starts",
        "generation",
        "heard",
        "idle_since",
        "jobs",
        "pipelines",
        "runners",
        "story",
        "ticked_at",
        "versions",
        "wishes",
        "workers",
    )

    def __init__(self) -> None:
        # hard
        self.generation = 0
        self.jobs: dict[JobName, Job] = {}
        self.pipelines: dict[str, JobSpec] = {}
        self.drained: frozenset[WorkerId] = frozenset()
        # soft
        self.began_at: float | None = None
        self.ticked_at: float | None = None
        self.agents: dict[AgentId, Agent] = {}
        self.workers: dict[WorkerId, Worker] = {}
        self.runners: dict[JobName, dict[RunnerId, Runner]] = {}
        self.heard: dict[RunnerId, float] = {}
        """When a process that serves was last known to be alive."""
        self.failed_starts: dict[tuple[WorkerId, JobName], FailedStart] = {}
        self.clients: dict[JobName, dict[ClientId, Lease]] = {}
        self.idle_since: dict[JobName, float] = {}
        self.wishes: dict[AttemptId, dict[Slot, RestartWish]] = {}
        self.versions: dict[AttemptId, int] = {}
        self.story: deque[e.AnyEvent] = deque(maxlen=STORY_LENGTH)

    def copy(self) -> ClusterState:
        """Return a state that can be changed without changing this one, except by `SplitsGranted`."""
        other = ClusterState.__new__(ClusterState)
        for name in ClusterState.__slots__:
            value = getattr(self, name)
            setattr(other, name, value.copy() if isinstance(value, (dict, deque)) else value)
        return other

    def iteration(self, job: JobName, attempt: AttemptId) -> Iteration | None:
        found = self.jobs.get(job)
        return None if found is None else found.iterations.get(attempt)

    def apply(self, event: e.AnyEvent) -> None:
        """Change the state by an event."""
        try:
            self._apply(event)
        except (KeyError, ValueError) as error:
            raise InvalidTransitionError(event, f"{type(error).__name__}: {error}", tuple(self.story)) from error
        if type(event) not in _UNTOLD:
            self.story.append(event)

    def _apply(self, event: e.AnyEvent) -> None:
        match event:
            case e.SplitsGranted():
                iteration = self.jobs[event.job].iterations[event.attempt]
                if event.stream not in iteration.streams:
                    raise KeyError(event.stream)
                iteration.ledger.grant(event.stream, event.source, event.pass_, event.ordinals)
            case e.AgentSeen():
                agent = self.agents[event.agent]
                statistics = event.statistics or agent.statistics
                self.agents[event.agent] = replace(agent, seen=event.now, peer=event.peer, statistics=statistics)
                for seen in event.runners:
                    if seen in self.heard:
                        self.heard[seen] = event.now
            case e.ClientSeen():
                self._see_client(event)
            case e.DispatcherBegan():
                if event.generation <= self.generation:
                    raise ValueError(f"generation {event.generation} after {self.generation}")
                self.generation = event.generation
            case e.PipelineRegistered():
                self.pipelines[event.id] = event.spec
            case e.WorkerDrained():
                self.drained |= {event.worker}
            case e.WorkerForgotten():
                self.drained -= {event.worker}
            case e.JobCreated():
                if event.job in self.jobs:
                    raise ValueError(f"job {event.job!r} exists")
                self.jobs[event.job] = Job(name=event.job, spec=event.spec)
            case e.JobCollected():
                for attempt in self.jobs.pop(event.job).iterations:
                    self._forget_attempt(attempt)
                self.clients.pop(event.job, None)
                self.idle_since.pop(event.job, None)
                self.failed_starts = {k: v for k, v in self.failed_starts.items() if k[1] != event.job}
            case e.JobSteered():
                self.jobs[event.job] = replace(self.jobs[event.job], paused=event.paused, failure=event.failure)
            case e.IterationStarted():
                job = self.jobs[event.job]
                if event.attempt in job.iterations:
                    raise ValueError(f"attempt {event.attempt!r} exists")
                iteration = new_iteration(job.spec, event.attempt, event.epoch, event.resume)
                self.jobs[event.job] = replace(job, iterations={**job.iterations, event.attempt: iteration})
            case e.IterationDropped():
                self._drop_iteration(event)
            case e.IterationFinished():
                self._put(event.job, replace(self._iteration(event.job, event.attempt), finished=True))
            case e.ConsumerOpened():
                self._open_slot(event)
            case e.ConsumerClosed():
                self._close_slot(event)
            case e.StreamsCreated():
                self._create_streams(event)
            case e.StreamsBound():
                self._bind_streams(event)
            case e.StreamsLost():
                iteration = self._iteration(event.job, event.attempt)
                changed = {s: _unbound(iteration.streams[s], lost=True) for s in event.streams}
                self._put(event.job, replace(iteration, streams={**iteration.streams, **changed}))
            case e.StreamReopened():
                iteration = self._iteration(event.job, event.attempt)
                stream = iteration.streams[event.stream]
                if not stream.ended or stream.lost:
                    raise ValueError(f"stream {event.stream!r} has not ended")
                self._put_stream(event.job, iteration, replace(stream, reopened=True))
            case e.ConsumerEnded():
                self._end_stream(event)
            case e.ElementsBlamed():
                self._blame(event)
            case e.LeasesBegan():
                self.began_at = event.now if self.began_at is None else self.began_at
                self.agents = {k: replace(agent, seen=event.now) for k, agent in self.agents.items()}
                self.clients = {
                    job: {k: replace(lease, seen=event.now) for k, lease in leases.items()}
                    for job, leases in self.clients.items()
                }
                self.heard = dict.fromkeys(self.heard, event.now)
                self.idle_since = {job: event.now for job in self.jobs if not self.clients.get(job)}
            case e.Ticked():
                self.ticked_at = event.now
            case e.AgentRegistered():
                self._register(event)
            case e.AgentRemoved():
                del self.agents[event.agent]
                self.workers = {k: worker for k, worker in self.workers.items() if worker.agent != event.agent}
                self.failed_starts = {k: v for k, v in self.failed_starts.items() if k[0] in self.workers}
            case e.WorkersLeft():
                for left in event.workers:
                    worker = self.workers[left]
                    if not event.gone:
                        self.workers[left] = replace(worker, leaving=True)
                        continue
                    del self.workers[left]
                    owner = self.agents[worker.agent]
                    kept = tuple(w for w in owner.workers if w != left)
                    self.agents[worker.agent] = replace(owner, workers=kept)
            case e.RunnerAsked():
                runner = Runner(runner=event.runner, worker=event.worker, job=event.job, since=event.now)
                self.runners[event.job] = {**self.runners.get(event.job, {}), event.runner: runner}
            case e.RunnerServes():
                runner = Runner(
                    runner=event.runner,
                    worker=event.worker,
                    job=event.job,
                    address=event.address,
                    ready=True,
                    since=event.now,
                )
                self.runners[event.job] = {**self.runners.get(event.job, {}), event.runner: runner}
                self.heard[event.runner] = event.now
                self.failed_starts.pop((event.worker, event.job), None)
            case e.RunnerRemoved():
                rest = {k: runner for k, runner in self.runners[event.job].items() if k != event.runner}
                self.runners.pop(event.job)
                self.heard.pop(event.runner, None)
                if rest:
                    self.runners[event.job] = rest
            case e.StartFailed():
                key = (event.worker, event.job)
                count = self.failed_starts[key].count + 1 if key in self.failed_starts else 1
                self.failed_starts[key] = FailedStart(count=count, reason=event.reason, not_before=event.not_before)
            case e.ClientGone():
                rest_clients = {k: v for k, v in self.clients.get(event.job, {}).items() if k != event.client}
                self.clients.pop(event.job, None)
                if rest_clients:
                    self.clients[event.job] = rest_clients
                elif event.job in self.jobs:
                    self.idle_since.setdefault(event.job, event.now)
            case e.RestartAsked():
                wishes = self.wishes.get(event.attempt, {})
                before = wishes.get((event.consumer, event.replica))
                since = before.since if before is not None and before.client == event.client else event.now
                wish = RestartWish(client=event.client, seen=event.now, since=since)
                self.wishes[event.attempt] = {**wishes, (event.consumer, event.replica): wish}
            case e.ViewRaised():
                self.versions[event.attempt] = event.version
            case _:
                assert_never(event)

    # hard

    def _iteration(self, job: JobName, attempt: AttemptId) -> Iteration:
        return self.jobs[job].iterations[attempt]

    def _put(self, job: JobName, iteration: Iteration) -> None:
        record = self.jobs[job]
        self.jobs[job] = replace(record, iterations={**record.iterations, iteration.attempt: iteration})

    def _put_stream(self, job: JobName, iteration: Iteration, stream: Stream) -> None:
        self._put(job, replace(iteration, streams={**iteration.streams, stream.stream: stream}))

    def _drop_iteration(self, event: e.IterationDropped) -> None:
        job = self.jobs[event.job]
        dropped = job.iterations[event.attempt]
        kept = {k: v for k, v in job.iterations.items() if k != event.attempt}
        past = tuple(opened.client for opened in dropped.opened.values())
        self.jobs[event.job] = replace(job, iterations=kept, past_clients=_add_past(job, *past))
        self._forget_attempt(event.attempt)

    def _forget_attempt(self, attempt: AttemptId) -> None:
        self.versions.pop(attempt, None)
        self.wishes.pop(attempt, None)

    def _open_slot(self, event: e.ConsumerOpened) -> None:
        iteration = self._iteration(event.job, event.attempt)
        slot = (event.consumer, event.replica)
        before = iteration.opened.get(slot)
        opened = {**iteration.opened, slot: Opened(client=event.client)}
        self._put(event.job, replace(iteration, opened=opened))
        job = self.jobs[event.job]
        if before is not None and before.client != event.client:
            self.jobs[event.job] = replace(job, past_clients=_add_past(job, before.client))

    def _close_slot(self, event: e.ConsumerClosed) -> None:
        iteration = self._iteration(event.job, event.attempt)
        slot = (event.consumer, event.replica)
        if iteration.opened[slot].client != event.client:
            raise ValueError(f"slot {slot} is read by {iteration.opened[slot].client!r}, not by {event.client!r}")
        closed = Opened(client=event.client, closed=True, finished=event.finished)
        self._put(event.job, replace(iteration, opened={**iteration.opened, slot: closed}))
        job = self.jobs[event.job]
        self.jobs[event.job] = replace(job, past_clients=_add_past(job, event.client))

    def _create_streams(self, event: e.StreamsCreated) -> None:
        iteration = self._iteration(event.job, event.attempt)
        new: dict[StreamId, Stream] = {}
        tail = iteration.tail
        for made in event.streams:
            stream = stream_id(event.attempt, made.number)
            if stream in iteration.streams:
                raise ValueError(f"stream {stream!r} exists")
            new[stream] = Stream(
                stream=stream,
                number=made.number,
                feed=made.feed,
                share=made.share,
                owner=made.owner,
                home=made.home,
                start=Cut(share=made.share),
            )
            if made.feed.kind == "tail":
                tail = stream
        self._put(event.job, replace(iteration, streams={**iteration.streams, **new}, tail=tail))

    def _bind_streams(self, event: e.StreamsBound) -> None:
        iteration = self._iteration(event.job, event.attempt)
        changed: dict[StreamId, Stream] = {}
        for made in event.bindings:
            stream = changed.get(made.stream) or iteration.streams[made.stream]
            if made.binding <= stream.binding:
                raise ValueError(f"binding {made.binding} of stream {made.stream!r} after {stream.binding}")
            if made.runner is None or made.worker is None:
                changed[made.stream] = replace(stream, binding=made.binding, bound=None)
            else:
                bound = Bound(runner=made.runner, worker=made.worker, address=made.address)
                changed[made.stream] = replace(stream, binding=made.binding, bound=bound, last_worker=made.worker)
        self._put(event.job, replace(iteration, streams={**iteration.streams, **changed}))

    def _end_stream(self, event: e.ConsumerEnded) -> None:
        iteration = self._iteration(event.job, event.attempt)
        stream = iteration.streams[event.stream]
        ended_by = {**stream.ended_by, event.consumer: event.rounds}
        needed = self.jobs[event.job].spec.consumers if stream.owner is None else 1
        self._put_stream(
            event.job,
            iteration,
            replace(
                stream,
                ended_by=ended_by,
                leftover=event.leftover if stream.leftover is None else stream.leftover,
                ended=len(ended_by) >= needed,
                reopened=False,
            ),
        )

    def _blame(self, event: e.ElementsBlamed) -> None:
        job = self.jobs[event.job]
        deaths = dict(job.deaths)
        for element in event.exact:
            deaths[element] = deaths.get(element, 0) + 1
        self.jobs[event.job] = replace(
            job,
            deaths=deaths,
            suspects=(*job.suspects, *event.suspects),
            dropped=(*job.dropped, *(x for x in event.dropped if x not in job.dropped)),
            blamed=(*job.blamed, event.runner)[-BLAMED_RUNNERS:],
        )

    # soft

    def _see_client(self, event: e.ClientSeen) -> None:
        leases = self.clients.get(event.job, {})
        held = leases.get(event.client)
        lease = Lease(
            client=event.client,
            attempt=event.attempt,
            consumer=event.consumer,
            replica=event.replica,
            peer=event.peer,
            seen=event.now,
            beat=event.beat if event.beat is not None else None if held is None else held.beat,
        )
        self.clients[event.job] = {**leases, event.client: lease}
        self.idle_since.pop(event.job, None)

    def _register(self, event: e.AgentRegistered) -> None:
        self.agents[event.agent] = Agent(
            agent=event.agent,
            peer=event.peer,
            host=event.host,
            versions=dict(event.versions),
            seen=event.now,
            workers=tuple(place.worker for place in event.workers),
        )
        before = self.workers
        self.workers = {k: worker for k, worker in before.items() if worker.agent != event.agent}
        for place in event.workers:
            held = before.get(place.worker)
            leaving = held is not None and held.agent == event.agent and held.leaving
            self.workers[place.worker] = Worker(
                worker=place.worker, agent=event.agent, tags=place.tags, leaving=leaving
            )


_UNTOLD = frozenset({e.SplitsGranted, e.AgentSeen, e.ClientSeen, e.Ticked, e.ViewRaised, e.RestartAsked})


def _unbound(stream: Stream, *, lost: bool) -> Stream:
    return replace(stream, binding=stream.binding + 1, bound=None, lost=lost)


def _add_past(job: Job, *clients: ClientId) -> tuple[ClientId, ...]:
    new = [client for client in dict.fromkeys(clients) if client not in job.past_clients]
    return (*job.past_clients, *new)[-PAST_CLIENTS:]
