"""Who is connected to whom where many consumers read from many workers: 512 and 5,000, and workers come and go.

python experiments/routing.py [--consumers 512] [--workers 5000]     or: make experiment E=routing

What decides is the dispatcher's own (`penstock.control`): jobs, processes and streams are real records, and nothing is
read. Streams have owners (`uneven="allow"`). A hundredth of the workers are lost in an hour, one by one, and each is
replaced. Printed is who has how many connections, then every claim beside what was seen; it ends with 1 if one does not
hold.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from penstock.control.decide import decide
from penstock.control.state import ClusterState
from penstock.control.views import view_of
from penstock.core.ids import AgentId, AttemptId, BlobHash, ClientId, Fingerprint, JobName, WorkerId
from penstock.wire.jobs import JobSpec, StreamView
from penstock.wire.messages import (
    AgentLeaving,
    OpenEpoch,
    RegisterAgent,
    Request,
    RunnerPlace,
    RunnerReady,
    StartRunner,
    WorkerPlace,
)
from penstock.wire.modes import Ranks, Sharding
from penstock.wire.principals import Principal

JOB = JobName("job")
BLOBS = frozenset({BlobHash("graph"), BlobHash("splits")})
MOST_CONNECTIONS = 200
APART = 0.1
LOST = 0.01
HOUR_S = 3600.0
TRAINER, FLEET = Principal("trainer", "trainer"), Principal("agent", "fleet")


@dataclass
class Dispatcher:
    """Applies what is decided, and plays the agents: a process that is asked for is there at once."""

    state: ClusterState = field(default_factory=ClusterState)
    now: float = 100.0
    _ids: Iterator[int] = field(default_factory=count)
    _asked_for: list[StartRunner] = field(default_factory=list)

    def ask(self, request: Request, principal: Principal = FLEET) -> None:
        peer = str(getattr(request, "client", "agents"))
        self._take(
            decide(self.state, request, principal=principal, now=self.now, peer=peer, draw=self._draw, blobs=BLOBS)
        )

    def _draw(self) -> str:
        return f"r{next(self._ids)}"

    def _take(self, decision: Any) -> None:
        for event in decision.events:
            self.state.apply(event)
        self._asked_for += [push for _, push in decision.pushes if isinstance(push, StartRunner)]

    def start_processes(self) -> None:
        while self._asked_for:
            asked, self._asked_for = self._asked_for, []
            for each in asked:
                place = RunnerPlace(each.runner, each.worker, each.job, f"tcp://{each.runner}")
                self.ask(RunnerReady(agent=agent_of(each.worker), place=place))

    def join(self, worker: str) -> None:
        name = WorkerId(worker)
        self.ask(RegisterAgent(agent=agent_of(name), host=f"host of {worker}", workers=(WorkerPlace(name),)))

    def lose(self, worker: str) -> None:
        name = WorkerId(worker)
        self.ask(AgentLeaving(agent=agent_of(name), workers=(name,), gone=True))

    def open(self, consumer: int, consumers: int) -> None:
        spec = JobSpec(
            fingerprint=Fingerprint("f"),
            graph=BlobHash("graph"),
            splits=BlobHash("splits"),
            split_counts=(1_000_000,),
            seed=7,
            ranks=Ranks(consumers, uneven="allow"),
            sharding=Sharding(),
        )
        self.ask(
            OpenEpoch(
                job=JOB,
                client=ClientId(f"c{consumer}"),
                consumer=consumer,
                replica=0,
                epoch=0,
                spec=spec,
                attempt=AttemptId("attempt"),
                host="trainers",
            ),
            TRAINER,
        )

    def streams(self) -> Sequence[StreamView]:
        return view_of(self.state, JOB, None).streams


def agent_of(worker: WorkerId) -> AgentId:
    return AgentId(f"agent of {worker}")


@dataclass(frozen=True)
class Connections:
    """How many processes each consumer is connected to, how many consumers each process, and streams of consumers."""

    consumers: Sequence[int]
    processes: Sequence[int]
    streams: Sequence[int]

    def line(self) -> str:
        return (
            f"a consumer has {min(self.consumers)} to {max(self.consumers)} connections and {min(self.streams)} to "
            f"{max(self.streams)} streams, a process {min(self.processes)} to {max(self.processes)} connections"
        )


def connections(streams: Iterable[StreamView], consumers: int) -> Connections:
    processes: list[set[str]] = [set() for _ in range(consumers)]
    owners: dict[str, set[int]] = {}
    served = [0] * consumers
    for stream in streams:
        assert stream.owner is not None, "streams have owners here"
        if stream.runner is not None and not stream.ended:
            processes[stream.owner].add(stream.runner)
            owners.setdefault(stream.runner, set()).add(stream.owner)
            served[stream.owner] += 1
    return Connections([len(each) for each in processes], [len(each) for each in owners.values()], served)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--consumers", type=int, default=512)
    parser.add_argument("--workers", type=int, default=5_000)
    given = parser.parse_args()
    rng, dispatcher, began = random.Random(3), Dispatcher(), time.perf_counter()
    workers = [f"w{number}" for number in range(given.workers)]
    for worker in workers:
        dispatcher.join(worker)
    for consumer in range(given.consumers):
        dispatcher.open(consumer, given.consumers)
    dispatcher.start_processes()
    seen = [connections(dispatcher.streams(), given.consumers)]
    print(f"{given.workers} workers, {given.consumers} consumers, after {time.perf_counter() - began:.0f} s")
    print(f"at the beginning: {seen[0].line()}", flush=True)
    losses = max(1, round(given.workers * LOST))
    for number in range(losses):
        dispatcher.now += HOUR_S / losses
        dispatcher.lose(workers.pop(rng.randrange(len(workers))))
        seen.append(connections(dispatcher.streams(), given.consumers))
        workers.append(f"more{number}")
        dispatcher.join(workers[-1])
        dispatcher.start_processes()
        seen.append(connections(dispatcher.streams(), given.consumers))
    print(f"after {losses} were lost and replaced, {time.perf_counter() - began:.0f} s: {seen[-1].line()}")
    most = max(max(*each.consumers, *each.processes) for each in seen)
    apart = max((max(each.streams) - min(each.streams)) / max(each.streams) for each in seen)
    read = len({stream.number for stream in dispatcher.streams() if stream.runner is not None})
    claims = [
        (f"at most {most} connections ({MOST_CONNECTIONS} at most)", most <= MOST_CONNECTIONS),
        (f"consumers' streams are {apart:.0%} apart ({APART:.0%} at most)", apart <= APART),
        (f"{read} of {len(dispatcher.streams())} streams run (all)", read == len(dispatcher.streams())),
    ]
    for text, holds in claims:
        print(f"{'yes' if holds else 'NO '}  {text}")
    return 0 if all(holds for _, holds in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
