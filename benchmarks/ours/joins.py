"""Workers that join one job one by one, on the dispatcher's decisions alone: no socket, no disk, no waiting."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import count

import msgspec
from ours.dispatcher import JOB, spec

from penstock.control.decide import Decision, decide, tick
from penstock.control.events import encode
from penstock.control.state import ClusterState
from penstock.core.ids import AgentId, AttemptId, ClientId, RunnerId, WorkerId
from penstock.dispatcher.asks import encode_tell
from penstock.wire.messages import (
    PROTOCOL,
    AgentBeat,
    Beat,
    EpochOpened,
    OpenEpoch,
    RegisterAgent,
    Request,
    RunnerPlace,
    RunnerReady,
    StartRunner,
    WorkerPlace,
)
from penstock.wire.modes import Ranks
from penstock.wire.principals import Principal

GRAPH, LISTING = b"graph", b"listing"
JOIN_EVERY_S = 0.002
TICK_EVERY_S = 0.2
BEAT_EVERY_S = 1.0


def address(number: int) -> str:
    """Return one as long as those of real runners."""
    return f"tcp://10.{number >> 16}.{number >> 8 & 255}.{number & 255}:45123#0123456789abcdef#@penstock-{number:016x}"


@dataclass(slots=True)
class Joined:
    workers: int
    sent_bytes: int
    """To each client."""
    cpu_s: float
    """Deciding, applying, and encoding what goes to disk and out, beats and ticks included."""


class Core:
    """A dispatcher without a socket: what it would send is encoded and counted."""

    def __init__(self, clients: int) -> None:
        self._state = ClusterState()
        self._now = 0.0
        self._ids = count()
        self._blobs = frozenset({spec(GRAPH, LISTING, 1).graph, spec(GRAPH, LISTING, 1).splits})
        self._runners: dict[AgentId, RunnerId] = {}
        self._clients: dict[ClientId, tuple[int, AttemptId]] = {}
        self.sent: dict[str, int] = {}
        for number in range(clients):
            self._open(number, clients)

    def _open(self, number: int, clients: int) -> None:
        described = msgspec.structs.replace(spec(GRAPH, LISTING, 1_000_000), ranks=Ranks(clients))
        client = ClientId(f"client{number}")
        request = OpenEpoch(
            job=JOB,
            client=client,
            consumer=number,
            replica=0,
            epoch=0,
            spec=described,
            attempt=AttemptId(f"{number:012x}"),
            host="h",
        )
        opened = self._ask(request, client).answer
        assert isinstance(opened, EpochOpened), opened
        self._clients[client] = (number, opened.view.attempt)

    def _ask(self, request: Request, peer: str) -> Decision:
        # The clients are ranks of one training, with one key.
        principal = Principal("agent", peer) if peer.startswith("agent") else Principal("trainer", "training")
        decision = decide(
            self._state,
            request,
            principal=principal,
            now=self._now,
            peer=peer,
            draw=self._draw,
            blobs=self._blobs,
        )
        return self._take(decision, peer)

    def _draw(self) -> str:
        return f"{next(self._ids):016x}"

    def _take(self, decision: Decision, peer: str = "") -> Decision:
        for event in decision.events:
            self._state.apply(event)
        encode([event for event in decision.events if event.JOURNALED])
        if decision.answer is not None:
            self._send(peer, len(encode_tell(PROTOCOL, 1, 1, decision.answer)))
        frames: dict[int, int] = {}
        for receiver, push in decision.pushes:
            if id(push) not in frames:
                frames[id(push)] = len(encode_tell(PROTOCOL, 0, 1, push))
            self._send(receiver, frames[id(push)])
        return decision

    def _send(self, receiver: str, size: int) -> None:
        self.sent[receiver] = self.sent.get(receiver, 0) + size

    def join(self, number: int) -> None:
        """One worker joins and has a process for the job; others go on beating meanwhile."""
        agent, worker = AgentId(f"agent{number:012x}"), WorkerId(f"worker{number:010x}")
        asked = self._ask(RegisterAgent(agent=agent, host=f"h{number}", workers=(WorkerPlace(worker=worker),)), agent)
        for _, push in asked.pushes:
            if isinstance(push, StartRunner):
                self._runners[agent] = push.runner
                place = RunnerPlace(push.runner, push.worker, push.job, address(number))
                self._ask(RunnerReady(agent=agent, place=place), agent)
        before, self._now = self._now, self._now + JOIN_EVERY_S
        if int(self._now / TICK_EVERY_S) > int(before / TICK_EVERY_S):
            self._take(tick(self._state, now=self._now, draw=self._draw))
        if int(self._now / BEAT_EVERY_S) > int(before / BEAT_EVERY_S):
            self._beat()

    def _beat(self) -> None:
        for agent, runner in self._runners.items():
            self._ask(AgentBeat(agent=agent, runners=(runner,)), agent)
        for client, (consumer, attempt) in self._clients.items():
            version = self._state.view_version(attempt)
            self._ask(Beat(job=JOB, client=client, consumer=consumer, attempt=attempt, version=version), client)

    @property
    def streams(self) -> int:
        (iteration,) = self._state.jobs[JOB].iterations.values()
        return len(iteration.streams)


def join(workers: int, clients: int) -> Joined:
    core = Core(clients)
    core.sent.clear()
    begin = time.process_time()
    for number in range(workers):
        core.join(number)
    cpu_s = time.process_time() - begin
    if core.streams != workers:
        raise AssertionError(f"{core.streams} streams for {workers} workers")
    return Joined(workers, max(core.sent[f"client{number}"] for number in range(clients)), cpu_s)
