"""A cluster to decide on: the core with a clock and ids of its own, and one factory a record."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from penstock.control.decide import Decision, decide, tick
from penstock.control.events import AnyEvent, decode, encode
from penstock.control.snapshot import snapshot
from penstock.control.state import ClusterState
from penstock.control.views import view_of
from penstock.core.ids import AgentId, AttemptId, BlobHash, ClientId, JobName, RunnerId, WorkerId
from penstock.wire.admissions import ExpectRunner, WhoReads
from penstock.wire.caching import JudgeCaching
from penstock.wire.fetching import FindFellows
from penstock.wire.jobs import Cut, JobSpec, JobView, StreamView
from penstock.wire.messages import (
    AgentBeat,
    AgentLeaving,
    Answer,
    DrainWorker,
    EndStream,
    EpochOpened,
    Granted,
    GrantSplits,
    OpenEpoch,
    Push,
    Rebind,
    RegisterAgent,
    Request,
    RunnerGone,
    RunnerPlace,
    RunnerReady,
    StartRunner,
    WorkerPlace,
)
from penstock.wire.principals import Principal
from tests.job_specs import job_spec

BLOBS = frozenset({BlobHash("graph"), BlobHash("splits")})
JOB = JobName("resnet")
ALICE, BOB = Principal("trainer", "alice"), Principal("trainer", "bob")
OPERATOR, FLEET = Principal("operator", "olga"), Principal("agent", "fleet")


def spec(**changes: Any) -> JobSpec:
    return job_spec(**{"fingerprint": "f1", **changes})


class Cluster:
    """Applies what is decided, keeps the journal and the pushes, and plays the agents."""

    def __init__(self, state: ClusterState | None = None) -> None:
        self.state = ClusterState() if state is None else state
        self.now = 100.0
        self.journal: list[bytes] = []
        self.pushed: list[tuple[str, Push]] = []
        self.blobs = BLOBS
        self._ids = count()
        self._clients = count()

    def draw(self) -> str:
        return f"r{next(self._ids)}"

    def take(self, decision: Decision) -> Answer | None:
        for event in decision.events:
            self.state.apply(event)
        hard = [event for event in decision.events if event.JOURNALED]
        if hard:
            self.journal.append(encode(hard))
        self.pushed.extend(decision.pushes)
        return decision.answer

    def ask(self, request: Request, peer: str = "somebody", principal: Principal | None = None) -> Any:
        return self.take(self.decide(request, peer, principal))

    def decide(self, request: Request, peer: str = "somebody", principal: Principal | None = None) -> Decision:
        return decide(
            self.state,
            request,
            principal=principal or self.sender_of(request),
            now=self.now,
            peer=peer,
            draw=self.draw,
            blobs=self.blobs,
        )

    def sender_of(self, request: Request) -> Principal:
        """Return who sends a request where everybody is honest."""
        match request:
            case RegisterAgent() | AgentBeat() | RunnerReady() | RunnerGone() | AgentLeaving() | ExpectRunner():
                return FLEET
            case GrantSplits():
                iteration = self.state.iteration(request.job, request.attempt)
                stream = None if iteration is None else iteration.streams.get(request.stream)
                return Principal("runner", stream.bound.runner if stream and stream.bound else "nobody")
            case WhoReads() | JudgeCaching() | FindFellows():
                return Principal("runner", next(iter(self.state.runners.get(request.job) or ["nobody"])))
            case DrainWorker():
                return OPERATOR
            case _:
                return ALICE

    def tick(self, seconds: float = 0.0) -> None:
        """Let time pass, with a tick a second."""
        end = self.now + seconds
        while True:
            self.now = min(end, self.now + 1.0)
            self.take(tick(self.state, now=self.now, draw=self.draw))
            if self.now >= end:
                return

    def live(self, seconds: float, beats: Sequence[Request] = ()) -> None:
        """Let time pass while all agents, and whoever else is given, are heard."""
        for _ in range(int(seconds)):
            self.now += 1.0
            for agent in list(self.state.agents):
                self.beat(agent)
            for beat in beats:
                self.ask(beat)
            self.take(tick(self.state, now=self.now, draw=self.draw))

    def beat(self, agent: str, *, without: Sequence[str] = ()) -> Answer:
        """Have an agent say that it and its processes are alive."""
        here = {worker.worker for worker in self.state.workers.values() if worker.agent == agent}
        runners = tuple(
            r.runner
            for found in self.state.runners.values()
            for r in found.values()
            if r.worker in here and r.runner not in without
        )
        return self.ask(AgentBeat(agent=AgentId(agent), runners=runners), peer=f"peer of {agent}")

    def pushes(self, kind: type[Push]) -> list[Any]:
        """Return the pushes of a kind since the last call, and forget all others."""
        found = [push for _, push in self.pushed if isinstance(push, kind)]
        self.pushed.clear()
        return found

    # Agents

    def register(self, *workers: str, agent: str = "A", host: str = "h1", threads: int = 0, **changes: Any) -> Answer:
        places = tuple(WorkerPlace(WorkerId(w), changes.pop("tags", ()), threads) for w in workers)
        request = RegisterAgent(agent=AgentId(agent), host=host, workers=places, **changes)
        return self.ask(request, peer=f"peer of {agent}")

    def ready(self) -> list[RunnerId]:
        """Have every process that was asked for serve; return their ids."""
        started = []
        for push in self.pushes(StartRunner):
            agent = self.state.workers[push.worker].agent
            place = RunnerPlace(push.runner, push.worker, push.job, f"tcp://{push.runner}")
            self.ask(RunnerReady(agent=agent, place=place), peer=f"peer of {agent}")
            started.append(push.runner)
        return started

    def die(self, runner: RunnerId, *, in_flight: Any = (), reason: str = "killed by signal 9") -> Answer:
        found = next(r for runners in self.state.runners.values() for r in runners.values() if r.runner == runner)
        agent = self.state.workers[found.worker].agent
        return self.ask(
            RunnerGone(
                agent=agent, runner=runner, worker=found.worker, job=found.job, reason=reason, in_flight=in_flight
            ),
            peer=f"peer of {agent}",
        )

    # Clients

    def opening(self, consumer: int = 0, *, replica: int = 0, epoch: int = 0, **changes: Any) -> OpenEpoch:
        number = next(self._clients)
        fields: dict[str, Any] = {
            "job": JOB,
            "client": ClientId(f"c{number}"),
            "consumer": consumer,
            "replica": replica,
            "epoch": epoch,
            "spec": spec(),
            "attempt": AttemptId(f"a{number}"),
            "host": "h1",
        }
        return OpenEpoch(**{**fields, **changes})

    def open(self, consumer: int = 0, **changes: Any) -> EpochOpened:
        request = self.opening(consumer, **changes)
        answer = self.ask(request, peer=f"peer of {request.client}")
        assert isinstance(answer, EpochOpened), answer
        return answer

    def view(self, attempt: str | None = None, job: JobName = JOB) -> JobView:
        return view_of(self.state, job, None if attempt is None else AttemptId(attempt))

    def grant(self, stream: StreamView, after: int | None = None, /, **changes: Any) -> tuple[int, ...]:
        answer = self.ask(self.granting(stream, after, **changes))
        assert isinstance(answer, Granted), answer
        return answer.ordinals

    def granting(self, stream: StreamView, after: int | None = None, /, **changes: Any) -> GrantSplits:
        fields: dict[str, Any] = {
            "job": JOB,
            "attempt": AttemptId(stream.stream.rpartition(".")[0]),
            "stream": stream.stream,
            "binding": stream.binding,
            "source": 0,
            "pass_": 0,
            "after": after,
        }
        return GrantSplits(**{**fields, **changes})

    def end(self, stream: StreamView, consumer: int = 0, *, rounds: int = 3, leftover: Cut | None = None) -> Answer:
        attempt = AttemptId(stream.stream.rpartition(".")[0])
        return self.ask(
            EndStream(
                job=JOB, attempt=attempt, stream=stream.stream, consumer=consumer, rounds=rounds, leftover=leftover
            )
        )

    # The journal

    def events(self) -> list[AnyEvent]:
        return [event for record in self.journal for event in decode(record)]

    def restart(self) -> None:
        """Forget everything but the journal."""
        state = ClusterState()
        for event in self.events():
            state.apply(event)
        assert snapshot(state) == snapshot(self.state)
        self.state = state


def started(workers: int = 1, **changes: Any) -> Cluster:
    """Return a cluster whose job is open for all its consumers and served by all workers."""
    cluster = Cluster()
    cluster.register(*(f"w{i}" for i in range(workers)))
    described = spec(**changes)
    for consumer in range(described.ranks.count):
        cluster.open(consumer, spec=described)
    cluster.ready()
    return cluster


def rebind(view: JobView, number: int = 0, **changes: Any) -> Rebind:
    stream = view.streams[number]
    fields: dict[str, Any] = {"job": JOB, "attempt": view.attempt, "stream": stream.stream, "binding": stream.binding}
    return Rebind(**{**fields, "reason": "the connection was lost", **changes})
