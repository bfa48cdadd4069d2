"""Schedules of faults: made from a seed, run, checked, and made small if they break a promise.

One process, one heap of happenings, no threads and no clock: a seed says everything. A dispatcher (the real core, over
a disk that can lose what was not synced), agents, runners and trainers (the real stream protocol, with other hands)
talk over a network that loses, doubles, delays and reorders what goes to the dispatcher, and cuts connections.

What is checked, while it runs: nothing is said before it is on disk; the same question has the same answer; what
arrives keeps within its credit. And in the end: see `engine.check`. That these would see a bug is shown by planting
some: see the simulator's own tests.
"""

from __future__ import annotations

import random
import traceback
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from penstock.core.ids import JobName, WorkerId
from penstock.testing.simulator.client import How
from penstock.testing.simulator.dispatcher import Disk, FakeDispatcher, HostileFriend, Tail
from penstock.testing.simulator.engine import Shape, check
from penstock.testing.simulator.trainer import Trainer
from penstock.testing.simulator.workers import FakeAgent
from penstock.testing.simulator.world import DISPATCHER, HEALS_AT_S, Failed, Peer, World
from penstock.wire.messages import DrainWorker
from penstock.wire.modes import REACH, ShareKind, Uneven, WorkersAsked
from penstock.wire.principals import Principal
from penstock.wire.scaling import ScaleJob

FaultKind: TypeAlias = Literal[
    "kill runner",
    "kill machine",
    "freeze machine",
    "cut off machine",
    "crash dispatcher",
    "lose journal",
    "cut connection",
    "kill consumer",
    "restart training",
    "resize training",
    "add worker",
    "drain worker",
    "scale job",
]
MOVING = frozenset(
    {
        "kill runner",
        "kill machine",
        "freeze machine",
        "cut off machine",
        "drain worker",
        "add worker",
        "cut connection",
        "scale job",
    }
)
"""The faults that may move streams to other processes."""
ENDS_AT_S = 90.0
MOST_HAPPENINGS = 60_000
WITHOUT_SCALING: tuple[FaultKind, ...] = tuple(kind for kind in get_args(FaultKind) if kind != "scale job")
SCALES: tuple[WorkersAsked, ...] = (1, 2, 3, 5, (1, 2), "auto", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    at_s: float
    kind: FaultKind
    which: int = 0
    seconds: float = 0.0
    tail: Tail = "lost"
    how: How = "rejoin"
    back: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    seed: int
    shape: Shape
    workers: int
    faults: tuple[Fault, ...]
    hostile: bool = False
    """Whether somebody who is let in asks for what is others'."""

    def __str__(self) -> str:
        friend = ", a hostile friend" if self.hostile else ""
        return "\n  ".join([f"seed {self.seed}: {self.workers} workers, {self.shape}{friend}", *map(str, self.faults)])


class SimulationFailed(Failed):
    """A schedule that broke a promise; `log` is what its actors did."""

    def __init__(self, schedule: Schedule, why: str, log: list[str]) -> None:
        self.schedule, self.why, self.log = schedule, why, log
        super().__init__(f"{why}\n{schedule}")


def make_schedule(seed: int, *, scaled: bool = True) -> Schedule:
    """Return the schedule of a seed; `scaled`: in some of them the job is scaled up and down meanwhile."""
    rng = random.Random(f"schedule {seed}")
    sizes = [rng.choice((0, 1, 2, 3, 4, 6)) for _ in range(rng.randint(1, 7))]
    ids = iter(range(sum(sizes)))
    shape = Shape(
        splits=tuple(tuple(next(ids) for _ in range(size)) for size in sizes),
        batch=rng.choice((1, 1, 2, 3)),
        consumers=rng.choice((1, 1, 2, 3)),
        streams=rng.choice((0, 0, rng.randint(1, 4))),
        epochs=rng.choice((1, 1, 2, 3)),
    )
    kind = random.Random(f"kind {seed}")
    fed = shape.consumers == 1 and bool(shape.streams) and kind.random() < 0.4
    coordinated = bool(shape.streams) and not fed and kind.random() < 0.5
    shared = not fed and (not shape.streams or coordinated) and kind.random() < 0.3
    possible: tuple[Uneven, ...] = (
        ("drop",) if fed or shared else ("drop", "pad") if shape.streams else ("drop", "pad", "allow")
    )
    sharing: tuple[ShareKind | None, ...] = ("skip", "wait") if shared else (None,)
    shape = replace(
        shape,
        coordinated=coordinated,
        uneven=kind.choice(possible),
        fed=fed,
        repeat=1 if fed else kind.choice((1, 1, 2)),
        sharing=kind.choice(sharing),
        trainers=kind.randint(1, 3) if shared else 1,
    )
    shape = replace(
        shape,
        concatenated=shape.repeat > 1 and kind.random() < 0.5,
        reach=random.Random(f"reach {seed}").choice((1, 1, 2, REACH)) if shape.uneven == "allow" else REACH,
        ahead=shape.epochs > 1 and not fed and not shared and random.Random(f"ahead {seed}").random() < 0.7,
        keeps=random.Random(f"keeps {seed}").random() < 0.5,
    )
    faults = [
        Fault(
            at_s=rng.uniform(0.2, HEALS_AT_S - 1.0),
            kind=rng.choice(WITHOUT_SCALING),
            which=rng.randrange(6),
            seconds=rng.choice((0.3, 1.0, 2.0, 6.5)),
            tail=rng.choice(get_args(Tail)),
            how=rng.choice(("rejoin", "resume", "resume", "fresh")),
            back=rng.randrange(4),
        )
        for _ in range(rng.randint(1, 5))
    ]
    scaling = random.Random(f"scaling {seed}")
    workers = rng.randint(1, 3)
    if scaled and scaling.random() < 0.3:
        faults += [
            Fault(at_s=scaling.uniform(0.2, HEALS_AT_S), kind="scale job", which=scaling.randrange(len(SCALES)))
            for _ in range(scaling.randint(1, 5))
        ]
        if not shape.streams and scaling.random() < 0.7:  # long enough to be shrunk in the middle of it
            workers, shape = 3, _longer(scaling, shape)
            faults += [Fault(at_s=at_s, kind="scale job", which=which) for at_s, which in ((0.1, 2), (0.8, 0))]
    return Schedule(
        seed=seed,
        shape=shape,
        workers=workers,
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        hostile=random.Random(f"is hostile {seed}").random() < 0.5,
    )


def _longer(rng: random.Random, shape: Shape) -> Shape:
    """Return a shape with more splits than streams could be granted at once."""
    sizes = [rng.choice((0, 1, 2, 2, 3)) for _ in range(rng.randint(12, 24))]
    ids = iter(range(sum(sizes)))
    return replace(shape, splits=tuple(tuple(next(ids) for _ in range(size)) for size in sizes))


class Simulation:
    """One run of one schedule."""

    def __init__(self, schedule: Schedule) -> None:
        shape = schedule.shape
        self.schedule = schedule
        self.world = World(schedule.seed, readers=shape.trainers)
        self.agents: list[FakeAgent] = []
        self._jobs: dict[JobName, Shape] = {}
        self._start_dispatcher(Disk())
        for _ in range(schedule.workers):
            self._add_agent()
        numbers = range(1, shape.trainers + 1) if shape.sharing else (0,)
        self.trainers = [Trainer(self.world, self._jobs, shape, number) for number in numbers]
        self._operator = Peer(self.world, "operator", Principal("operator", "olga"))
        self.hostile = HostileFriend(self.world, schedule.seed) if schedule.hostile else None
        for fault in schedule.faults:
            self.world.at(fault.at_s, None, self._break, fault)

    def run(self) -> None:
        """Run it; raise `SimulationFailed` if a promise is broken."""
        try:
            if not self.world.run(until=ENDS_AT_S, most=MOST_HAPPENINGS):
                raise Failed(f"not finished after {self.world.now:.1f} s: {self._stand()}")
            again = any(agent.started > 1 for agent in self.agents) or self.schedule.workers > 1
            moved = again or any(fault.kind in MOVING for fault in self.schedule.faults)
            for trainer in self.trainers:
                for read in trainer.epochs_read:
                    check(read, streams_moved=moved)
        except Exception as error:
            why = str(error) if isinstance(error, Failed) else traceback.format_exc()
            raise SimulationFailed(self.schedule, why, self.world.log) from error

    def _stand(self) -> str:
        return " | ".join(
            f"{client.name} at step {trainer.read.steps[client.rank]} of epoch {trainer.epoch}: "
            + ("; ".join(client.consumer.waiting_for(self.world.now)) if client.is_open else "not open")
            for trainer in self.trainers
            for client in trainer.clients
        )

    def _start_dispatcher(self, disk: Disk) -> None:
        self.dispatcher = FakeDispatcher(self.world, disk)

    def _add_agent(self, workers: tuple[WorkerId, ...] = ()) -> None:
        workers = workers or (WorkerId(self.world.draw("worker")),)
        self.agents.append(FakeAgent(self.world, self._jobs, workers))

    def _replace(self, agent: FakeAgent) -> None:
        self.agents.remove(agent)
        self._add_agent(agent.workers)

    def _break(self, fault: Fault) -> None:
        world, which = self.world, fault.which
        agent, trainer = self.agents[which % len(self.agents)], self.trainers[which % len(self.trainers)]
        if trainer.over:
            return
        world.note(str(fault))
        match fault.kind:
            case "kill runner" if agent.alive and agent.runners:
                agent.kill(sorted(agent.runners)[which % len(agent.runners)])
            case "kill machine" if agent.alive:
                for peer in agent.machine:
                    peer.die(silently=True)
                world.at(fault.seconds, None, self._replace, agent)
            case "freeze machine":
                for peer in agent.machine:
                    peer.freeze(fault.seconds)
            case "cut off machine":
                pairs = ((agent.name, DISPATCHER), (DISPATCHER, agent.name))
                world.cuts.extend((world.now + fault.seconds, *pair) for pair in pairs[: 1 + which % 2])
            case "crash dispatcher" | "lose journal" if self.dispatcher.alive:
                self.dispatcher.die()
                disk = self.dispatcher.disk.emptied() if fault.kind == "lose journal" else self.dispatcher.disk
                disk.crash(fault.tail)
                world.at(fault.seconds, None, self._start_dispatcher, disk)
            case "cut connection":
                links = [link for client in trainer.clients for link in client.links.values() if not link.is_cut]
                if links:
                    links[which % len(links)].cut(silently=bool(fault.back % 2))
            case "kill consumer":
                trainer.restart_one(which % trainer.shape.consumers, fault.back)
            case "restart training":
                trainer.restart_all(fault.how, fault.back)
            case "resize training" if not trainer.shape.sharing:
                trainer.restart_all("resume", fault.back, consumers=1 + which % 3)
            case "add worker":
                self._add_agent()
            case "drain worker" if len(self.agents) > 1 and agent.alive:
                self._add_agent()
                self._operator.ask(DrainWorker(worker=agent.workers[0]))
            case "scale job":
                self._operator.ask(ScaleJob(job=trainer.shape.job, workers=SCALES[which % len(SCALES)]))


def fails(schedule: Schedule) -> SimulationFailed | None:
    try:
        Simulation(schedule).run()
    except SimulationFailed as failed:
        return failed
    return None


def shrink(failed: SimulationFailed) -> SimulationFailed:
    """Leave out faults, one at a time, as long as the schedule still fails."""
    faults = failed.schedule.faults
    for i in range(len(faults)):
        again = fails(replace(failed.schedule, faults=faults[:i] + faults[i + 1 :]))
        if again is not None:
            return shrink(again)
    return failed
