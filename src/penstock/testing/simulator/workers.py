"""Agents, and the runners they start."""

from __future__ import annotations

from typing import Any

from penstock.core.ids import AgentId, JobName, RunnerId, StreamId, WorkerId
from penstock.testing.simulator.engine import Shape
from penstock.testing.simulator.streams import FakeDealtStream, FakeSharedStream
from penstock.testing.simulator.world import Failed, Link, Peer, World
from penstock.wire.frames import OpenStream
from penstock.wire.messages import (
    AgentBeat,
    Answer,
    NotKnown,
    Push,
    RegisterAgent,
    RunnerGone,
    RunnerPlace,
    RunnerReady,
    StartRunner,
    StopRunner,
    WorkerPlace,
)
from penstock.wire.principals import Principal


class FakeAgent(Peer):
    """`jobs`: what a dispatcher's blobs would say."""

    def __init__(self, world: World, jobs: dict[JobName, Shape], workers: tuple[WorkerId, ...]) -> None:
        name = world.draw("agent")
        super().__init__(world, name, Principal("agent", "fleet"))
        self.id = AgentId(name)
        self.workers = workers
        self.runners: dict[RunnerId, FakeRunner] = {}
        self.started = 0
        """Runners in all. A late message can cost one that was well: then another takes its place."""
        self._jobs = jobs
        self._register()

    def _register(self) -> None:
        found = tuple(runner.place for runner in self.runners.values() if runner.ready)
        workers = tuple(WorkerPlace(worker) for worker in self.workers)
        self.ask(RegisterAgent(agent=self.id, host="host", workers=workers, runners=found), self._answered)

    def _beat(self) -> None:
        self.ask(AgentBeat(agent=self.id, runners=tuple(self.runners)), self._answered)

    def _answered(self, answer: Answer) -> None:
        """One thing is asked at a time: an older registration must not arrive last."""
        if isinstance(answer, NotKnown):
            self._register()
        else:
            self.world.at(1.0, self, self._beat)

    def pushed(self, push: Push) -> None:
        match push:
            case StartRunner() if push.runner not in self.runners:
                self.started += 1
                self.runners[push.runner] = FakeRunner(self, push, self._jobs[push.job])
            case StopRunner() if push.runner in self.runners:
                self.kill(push.runner, "stopped: as asked")

    def tell_ready(self, place: RunnerPlace) -> None:
        self.ask(RunnerReady(agent=self.id, place=place))

    def kill(self, runner: RunnerId, reason: str = "killed by signal 9") -> None:
        victim = self.runners.pop(runner)
        victim.die()
        place = victim.place
        self.ask(RunnerGone(agent=self.id, runner=runner, worker=place.worker, job=place.job, reason=reason))

    @property
    def machine(self) -> list[Peer]:
        """All that stops when the machine does."""
        return [*self.runners.values(), self]


class FakeRunner(Peer):
    """Its address is its id."""

    def __init__(self, agent: FakeAgent, start: StartRunner, shape: Shape) -> None:
        super().__init__(agent.world, start.runner, Principal("runner", start.runner))
        self.shape, self.spec = shape, shape.spec()
        self.place = RunnerPlace(start.runner, start.worker, start.job, self.name)
        self.ready = False
        self._agent = agent
        self._streams: dict[StreamId, FakeDealtStream | FakeSharedStream] = {}
        self.world.at(0.1, self, self._tick)
        self.world.at(self.world.rng.uniform(0.05, 0.3), self, self._become_ready)

    def _become_ready(self) -> None:
        self.ready = True
        self._agent.tell_ready(self.place)

    def _tick(self) -> None:
        for stream in self._streams.values():
            stream.tick()
        self.world.at(0.1, self, self._tick)

    def heard(self, link: Link, header: Any, payload: Any) -> None:
        if isinstance(header, OpenStream) and header.runner != self.name:
            raise Failed(f"{self.name} was asked for {header.runner}")
        if header.stream not in self._streams:
            self._streams[header.stream] = (FakeSharedStream if self.spec.sharing else FakeDealtStream)(
                self, header.stream
            )
        self._streams[header.stream].hear(link.name.encode(), header)

    def lost(self, link: Link) -> None:
        super().lost(link)
        for stream in self._streams.values():
            stream.hear(link.name.encode(), None)

    def tell(self, peer: bytes, header: Any, payload: Any = None) -> None:
        link = self.links.get(peer.decode())
        if link is not None:
            link.send(self, header, payload)
