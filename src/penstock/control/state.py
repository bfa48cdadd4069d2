"""The truth about the cluster.

Rules:

1. Only `apply` changes the state, and it needs nothing but the event: no clock, no randomness, no decision.
2. What journaled events change is the *hard* part: it is what a snapshot holds and what replay rebuilds. What the
   others change is *soft*: who is alive, until when. No journaled event's outcome depends on the soft part.
3. Records and tables are replaced, never changed (the ledger apart), so `copy` is shallow and a decision may try events
   on a copy.

An event that does not fit the state is a bug of ours, not of a peer: it raises, with what happened before.
"""

from __future__ import annotations

from collections import deque
from typing import assert_never

from msgspec.structs import replace

from penstock.control import events as e
from penstock.control.metric_store import MetricStore
from penstock.control.records import (
    BLAMED_RUNNERS,
    KEPT_BEATS,
    PAST_CLIENTS,
    Agent,
    FailedStart,
    Iteration,
    Job,
    Lease,
    Opened,
    RestartWish,
    Runner,
    Runners,
    ViewLog,
    Worker,
)
from penstock.control.resuming import new_iteration
from penstock.control.scaling_records import NOTHING_ALLOTTED, Allotted, JobTracking, Provisioner
from penstock.control.streams import after
from penstock.control.tables import VersionedTable
from penstock.control.totals import JobTotals, samples_of
from penstock.core.errors import PenstockError
from penstock.core.ids import AgentId, AttemptId, ClientId, JobName, RunnerId, WorkerId
from penstock.wire.jobs import JobSpec, Slot

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
        "allotted",
        "began_at",
        "clients",
        "drained",
        "failed_starts",
        "generation",
        "heard",
        "idle_since",
        "jobs",
        "metrics",
        "pipelines",
        "provisioners",
        "runners",
        "story",
        "ticked_at",
        "totals",
        "tracked",
        "view_logs",
        "wishes",
        "workers",
    )

    def __init__(self) -> None:
        # hard
        self.generation = 0
        self.jobs: dict[JobName, Job] = {}
        self.pipelines: dict[str, JobSpec] = {}
        self.drained: frozenset[WorkerId] = frozenset()
        self.metrics = MetricStore()
        # soft
        self.began_at: float | None = None
        self.ticked_at: float | None = None
        self.agents: VersionedTable[AgentId, Agent] = VersionedTable()
        self.workers: VersionedTable[WorkerId, Worker] = VersionedTable()
        self.runners: dict[JobName, Runners] = {}
        self.heard: VersionedTable[RunnerId, float] = VersionedTable()
        """When a process that serves was last known to be alive."""
        self.failed_starts: VersionedTable[tuple[WorkerId, JobName], FailedStart] = VersionedTable()
        self.clients: dict[JobName, VersionedTable[ClientId, Lease]] = {}
        self.idle_since: dict[JobName, float] = {}
        self.wishes: dict[AttemptId, dict[Slot, RestartWish]] = {}
        self.view_logs: dict[AttemptId, ViewLog] = {}
        self.totals: dict[JobName, JobTotals] = {}
        """What was done for jobs by processes and clients that are gone."""
        self.tracked: dict[JobName, JobTracking] = {}
        """Jobs of which somebody said how many workers they have, as they are measured."""
        self.allotted: Allotted = NOTHING_ALLOTTED
        self.provisioners: dict[str, Provisioner] = {}
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

    def leases(self, job: JobName) -> list[Lease]:
        """Return who reads a job."""
        found = self.clients.get(job)
        return [] if found is None else found.values()

    def reads(self, job: JobName, client: ClientId) -> bool:
        found = self.clients.get(job)
        return found is not None and client in found

    def view_version(self, attempt: AttemptId) -> int:
        """Return the version of what consumers see of an attempt: no dispatcher before this one gave it another."""
        log = self.view_logs.get(attempt)
        return self.generation << 32 if log is None else log.version

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
                told = (*agent.told, event.statistics)[-KEPT_BEATS:] if event.statistics else agent.told
                agent = replace(agent, seen=event.now, peer=event.peer, told=told, doubted=False)
                self.agents = self.agents.put({event.agent: agent})
                self.heard = self.heard.put({seen: event.now for seen in event.runners if seen in self.heard})
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
                self.totals.pop(event.job, None)
                self.tracked.pop(event.job, None)
                self.idle_since.pop(event.job, None)
                self.failed_starts = self.failed_starts.drop(
                    *(key for key in self.failed_starts if key[1] == event.job)
                )
            case e.JobSteered():
                self.jobs[event.job] = replace(self.jobs[event.job], paused=event.paused, failure=event.failure)
            case e.IterationStarted():
                job = self.jobs[event.job]
                if event.attempt in job.iterations:
                    raise ValueError(f"attempt {event.attempt!r} exists")
                iteration = new_iteration(job.spec, event.attempt, event.epoch, event.resume)
                if event.resume is None:
                    job = replace(job, deaths={}, suspects=())  # of another epoch: see `control.blaming`
                self.jobs[event.job] = replace(job, iterations={**job.iterations, event.attempt: iteration})
            case e.IterationDropped():
                self._drop_iteration(event)
            case e.IterationFinished():
                self._put(event.job, replace(self._iteration(event.job, event.attempt), finished=True))
            case e.ConsumerOpened():
                self._open_slot(event)
            case e.ConsumerClosed():
                self._close_slot(event)
            case (
                e.StreamsCreated()
                | e.StreamsBound()
                | e.StreamsLost()
                | e.StreamsRetired()
                | e.StreamReopened()
                | e.ConsumerEnded()
            ):
                job = self.jobs[event.job]
                self._put(event.job, after(job.iterations[event.attempt], event, consumers=job.spec.ranks.count))
            case e.ElementsBlamed():
                self._blame(event)
            case e.WorkersDecided():
                job = self.jobs[event.job]
                self.jobs[event.job] = replace(job, scaling=job.scaling.after(event.decision))
            case e.JobRescaled():
                job = self.jobs[event.job]
                self.jobs[event.job] = replace(job, scaling=replace(job.scaling, asked=event.workers))
            case e.CachingDecided():
                job = self.jobs[event.job]
                self.jobs[event.job] = replace(job, caching=job.caching.after(event.at_s, event.source, event.verdict))
            case e.MetricLearned():
                self.metrics = self.metrics.put(event.key, event.values)
            case e.LeasesBegan():
                self.began_at = event.now if self.began_at is None else self.began_at
                self.agents = VersionedTable({k: replace(agent, seen=event.now) for k, agent in self.agents.items()})
                self.clients = {
                    job: VersionedTable({k: replace(lease, seen=event.now) for k, lease in leases.items()})
                    for job, leases in self.clients.items()
                }
                self.heard = VersionedTable(dict.fromkeys(self.heard, event.now))
                self.idle_since = {job: event.now for job in self.jobs if not self.clients.get(job)}
                self.provisioners = {name: replace(found, seen=event.now) for name, found in self.provisioners.items()}
            case e.Ticked():
                self.ticked_at = event.now
            case e.AgentRegistered():
                self._register(event)
            case e.AgentDoubted():
                self.agents = self.agents.put({event.agent: replace(self.agents[event.agent], doubted=True)})
            case e.AgentRemoved():
                for worker_lost in self.workers_of(event.agent):
                    for runners in self.runners.values():
                        for lost in runners.on(worker_lost):
                            self._count_runner(lost)
                self.workers = self.workers.drop(*self.workers_of(event.agent))
                self.agents = self.agents.drop(event.agent)
                gone = [key for key in self.failed_starts if key[0] not in self.workers]
                self.failed_starts = self.failed_starts.drop(*gone)
            case e.WorkersLeft():
                for left in event.workers:
                    worker = self.workers[left]
                    if not event.gone:
                        self.workers = self.workers.put({left: replace(worker, leaving=True)})
                        continue
                    self.workers = self.workers.drop(left)
                    owner = self.agents[worker.agent]
                    kept = tuple(w for w in owner.workers if w != left)
                    self.agents = self.agents.put({worker.agent: replace(owner, workers=kept)})
            case e.RunnerAsked():
                runner = Runner(runner=event.runner, worker=event.worker, job=event.job, since=event.now)
                self._put_runner(runner)
            case e.RunnerServes():
                runner = Runner(
                    runner=event.runner,
                    worker=event.worker,
                    job=event.job,
                    address=event.address,
                    ready=True,
                    since=event.now,
                    verifier=event.verifier,
                )
                self._put_runner(runner)
                self.heard = self.heard.put({event.runner: event.now})
                self.failed_starts = self.failed_starts.drop((event.worker, event.job))
            case e.RunnerExpected():
                self._put_runner(replace(self.runners[event.job][event.runner], verifier=event.verifier))
            case e.RunnerRemoved():
                self._count_runner(self.runners[event.job][event.runner])
                rest = self.runners.pop(event.job).drop(event.runner)
                self.heard = self.heard.drop(event.runner)
                if rest:
                    self.runners[event.job] = rest
            case e.StartFailed():
                key = (event.worker, event.job)
                count = self.failed_starts[key].count + 1 if key in self.failed_starts else 1
                failed = FailedStart(count=count, reason=event.reason, not_before=event.not_before)
                self.failed_starts = self.failed_starts.put({key: failed})
            case e.ClientGone():
                leases = self.clients.pop(event.job, None)
                lease = None if leases is None else leases.get(event.client)
                if lease is not None and lease.beats and event.job in self.jobs:
                    totals = self.totals.get(event.job, JobTotals())
                    self.totals[event.job] = totals.with_reader(lease.slot, lease.beats[-1])
                rest_clients = leases.drop(event.client) if leases is not None else None
                if rest_clients:
                    self.clients[event.job] = rest_clients
                elif event.job in self.jobs:
                    self.idle_since.setdefault(event.job, event.now)
            case e.RestartAsked():
                wishes = self.wishes.get(event.attempt, {})
                before = wishes.get(event.slot)
                since = before.since if before is not None and before.client == event.client else event.now
                wish = RestartWish(client=event.client, seen=event.now, since=since)
                self.wishes[event.attempt] = {**wishes, event.slot: wish}
            case e.JobTracked():
                self.tracked[event.job] = event.tracking
            case e.WorkersAllotted():
                self.allotted = event.allotted
            case e.ProvisionerSeen():
                self.provisioners[event.provisioner.provisioner] = event.provisioner
            case e.ProvisionerLost():
                self.provisioners.pop(event.provisioner, None)
            case e.ViewRaised():
                log = self.view_logs.get(event.attempt) or ViewLog(base=self.view_version(event.attempt))
                self.view_logs[event.attempt] = log.add(event)
            case _:
                assert_never(event)

    # hard

    def _iteration(self, job: JobName, attempt: AttemptId) -> Iteration:
        return self.jobs[job].iterations[attempt]

    def _put(self, job: JobName, iteration: Iteration) -> None:
        record = self.jobs[job]
        self.jobs[job] = replace(record, iterations={**record.iterations, iteration.attempt: iteration})

    def _drop_iteration(self, event: e.IterationDropped) -> None:
        job = self.jobs[event.job]
        dropped = job.iterations[event.attempt]
        kept = {k: v for k, v in job.iterations.items() if k != event.attempt}
        past = tuple(opened.client for opened in dropped.opened.values())
        self.jobs[event.job] = replace(job, iterations=kept, past_clients=_add_past(job, *past))
        self._forget_attempt(event.attempt)

    def _forget_attempt(self, attempt: AttemptId) -> None:
        self.view_logs.pop(attempt, None)
        self.wishes.pop(attempt, None)

    def _open_slot(self, event: e.ConsumerOpened) -> None:
        iteration = self._iteration(event.job, event.attempt)
        slot = event.slot
        before = iteration.opened.get(slot)
        held = Opened(
            client=event.client,
            reader=event.reader,
            life=event.life,
            host=event.host,
            began_ns=event.began_ns,
            by=event.by,
            reading=event.reading,
            ahead=event.ahead,
        )
        opened = {**iteration.opened, slot: held}
        self._put(event.job, replace(iteration, opened=opened))
        wishes = self.wishes.get(event.attempt, {})
        if slot in wishes:
            self.wishes[event.attempt] = {other: wish for other, wish in wishes.items() if other != slot}
        job = self.jobs[event.job]
        if before is not None and before.client != event.client:
            self.jobs[event.job] = replace(job, past_clients=_add_past(job, before.client))

    def _close_slot(self, event: e.ConsumerClosed) -> None:
        iteration = self._iteration(event.job, event.attempt)
        slot = event.slot
        if iteration.opened[slot].client != event.client:
            raise ValueError(f"slot {slot} is read by {iteration.opened[slot].client!r}, not by {event.client!r}")
        held = iteration.opened[slot]
        opened = {**iteration.opened, slot: replace(held, closed=True, finished=event.finished)}
        if held.ahead:
            del opened[slot]
        self._put(event.job, replace(iteration, opened=opened))
        job = self.jobs[event.job]
        self.jobs[event.job] = replace(job, past_clients=_add_past(job, event.client))

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
        leases = self.clients.get(event.job) or VersionedTable()
        held = leases.get(event.client)
        before = () if held is None else held.beats
        lease = Lease(
            client=event.client,
            attempt=event.attempt,
            slot=event.slot,
            peer=event.peer,
            seen=event.now,
            beats=(*before, event.beat)[-KEPT_BEATS:] if event.beat is not None else before,
            key=event.key,
        )
        self.clients[event.job] = leases.put({event.client: lease})
        self.idle_since.pop(event.job, None)

    def _count_runner(self, runner: Runner) -> None:
        """A process is gone: what it has done stays counted."""
        worker = self.workers.get(runner.worker)
        agent = None if worker is None else self.agents.get(worker.agent)
        samples = () if agent is None else samples_of(agent, runner.runner)
        if samples and runner.job in self.jobs:
            self.totals[runner.job] = self.totals.get(runner.job, JobTotals()).with_runner(samples[-1])

    def _put_runner(self, runner: Runner) -> None:
        self.runners[runner.job] = (self.runners.get(runner.job) or Runners()).put({runner.runner: runner})

    def workers_of(self, agent: AgentId) -> list[WorkerId]:
        """Return the workers that are an agent's: another may have taken over one that it registered."""
        found = self.agents.get(agent)
        registered = () if found is None else found.workers
        return [w for w in registered if (worker := self.workers.get(w)) is not None and worker.agent == agent]

    def _register(self, event: e.AgentRegistered) -> None:
        before = {worker: self.workers[worker] for worker in self.workers_of(event.agent)}
        known = self.agents.get(event.agent)
        self.agents = self.agents.put(
            {
                event.agent: Agent(
                    agent=event.agent,
                    peer=event.peer,
                    host=event.host,
                    versions=dict(event.versions),
                    seen=event.now,
                    principal=event.principal,
                    workers=tuple(place.worker for place in event.workers),
                    told=() if known is None else known.told,
                )
            }
        )
        registered = {
            place.worker: Worker(
                worker=place.worker,
                agent=event.agent,
                tags=place.tags,
                leaving=place.worker in before and before[place.worker].leaving,
                threads=place.threads,
            )
            for place in event.workers
        }
        self.workers = self.workers.drop(*(key for key in before if key not in registered)).put(
            {key: worker for key, worker in registered.items() if worker != self.workers.get(key)}
        )


_UNTOLD = frozenset(
    {
        e.SplitsGranted,
        e.AgentSeen,
        e.AgentDoubted,
        e.ClientSeen,
        e.Ticked,
        e.ViewRaised,
        e.RestartAsked,
        e.JobTracked,
        e.WorkersAllotted,
        e.ProvisionerSeen,
    }
)


def _add_past(job: Job, *clients: ClientId) -> tuple[ClientId, ...]:
    new = [client for client in dict.fromkeys(clients) if client not in job.past_clients]
    return (*job.past_clients, *new)[-PAST_CLIENTS:]
