"""Runs the control core under seeded faults and checks its promises; a failing schedule is made small.

    python -m penstock.testing.simulator --seeds 1000

One process, one heap of happenings, no threads and no clock: a seed says everything. A dispatcher (the real core, over
a disk that can lose what was not synced), agents, runners and a trainer talk over a network that loses, doubles, delays
and reorders. `bug=` breaks one thing in these fakes, to show that the checks would see it.

What is checked, while it runs: no grant leaves before it is on disk; the same question has the same answer; a consumer
takes data of the present incarnation only, in order, within its credit. And in the end: every element was given once,
relative to the checkpoints that were loaded; consumers end at the same step, and only what does not fill a last round
is missing, or with `uneven="pad"` comes twice; where streams are read in turn, a step is one round of one stream for
all consumers; with `uneven="allow"` nothing is missing, and consumers may end at different steps; in deterministic
order the sequence is the one that the description alone implies.

Not here: jobs that trainers share.
"""

from __future__ import annotations

import argparse
import random
import sys
import traceback
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, TypeAlias, get_args

from penstock.core.ids import WorkerId
from penstock.testing.simulator_consumer import How
from penstock.testing.simulator_dispatcher import Bug, FakeDispatcher, Tail
from penstock.testing.simulator_trainer import Trainer
from penstock.testing.simulator_workers import FakeAgent, Shape, round_of
from penstock.testing.simulator_world import DISPATCHER, Failed, World
from penstock.wire.jobs import Uneven
from penstock.wire.messages import DrainWorker

Kind: TypeAlias = Literal[
    "kill runner",
    "kill machine",
    "freeze machine",
    "cut off machine",
    "crash dispatcher",
    "lose journal",
    "kill consumer",
    "restart training",
    "add worker",
    "drain worker",
]
HEALS_AT_S = 5.0
ENDS_AT_S = 90.0
MOST_HAPPENINGS = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    at_s: float
    kind: Kind
    which: int = 0
    seconds: float = 0.0
    tail: Tail = "lost"
    how: How = "rejoin"
    back: int = 0

    def __str__(self) -> str:
        return (
            f"{self.at_s:.2f} s: {self.kind} ({self.which}, {self.seconds:.1f} s, {self.tail}, {self.how}, {self.back})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    seed: int
    shape: Shape
    workers: int
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        shape = self.shape
        lines = [
            f"seed {self.seed}: {self.workers} workers, {shape.consumers} consumers, batches of {shape.batch}, "
            f"splits of {[len(split) for split in shape.splits]}, "
            f"{shape.order}, uneven={shape.uneven!r}, {shape.epochs} epochs"
        ]
        return "\n  ".join([*lines, *map(str, self.faults)])


class SimulationFailed(Failed):
    """A schedule that broke a promise; `log` is what its actors did."""

    def __init__(self, schedule: Schedule, why: str, log: list[str]) -> None:
        self.schedule, self.why, self.log = schedule, why, log
        super().__init__(f"{why}\n{schedule}")


def make_schedule(seed: int) -> Schedule:
    """Return the schedule of a seed."""
    rng = random.Random(f"schedule {seed}")
    sizes = [rng.choice((0, 1, 2, 3, 4, 6)) for _ in range(rng.randint(1, 7))]
    ids = iter(range(sum(sizes)))
    shape = Shape(
        splits=tuple(tuple(next(ids) for _ in range(size)) for size in sizes),
        batch=rng.choice((1, 1, 2, 3)),
        consumers=rng.choice((1, 1, 2, 3)),
        streams=rng.choice((0, 0, rng.randint(1, 4))),
        epochs=rng.choice((1, 1, 1, 2)),
    )
    kind = random.Random(f"kind {seed}")
    fed = shape.consumers == 1 and bool(shape.streams) and kind.random() < 0.4
    coordinated = bool(shape.streams) and not fed and kind.random() < 0.5
    possible: tuple[Uneven, ...] = ("drop",) if fed else ("drop", "pad") if coordinated else ("drop", "pad", "allow")
    shape = replace(shape, coordinated=coordinated, uneven=kind.choice(possible), fed=fed)
    faults = [
        Fault(
            at_s=rng.uniform(0.2, HEALS_AT_S - 1.0),
            kind=rng.choice(get_args(Kind)),
            which=rng.randrange(6),
            seconds=rng.choice((0.3, 1.0, 2.0, 6.5)),
            tail=rng.choice(get_args(Tail)),
            how=rng.choice(("rejoin", "resume", "resume", "fresh")),
            back=rng.randrange(4),
        )
        for _ in range(rng.randint(1, 5))
    ]
    return Schedule(
        seed=seed,
        shape=shape,
        workers=rng.randint(1, 3),
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
    )


class Simulation:
    """One run of one schedule."""

    def __init__(self, schedule: Schedule, bug: Bug = "") -> None:
        self.schedule, self.bug = schedule, bug
        self.world = World(schedule.seed, heals_at=HEALS_AT_S)
        self.dispatcher = FakeDispatcher(self.world, bug)
        self.agents: list[FakeAgent] = []
        for _ in range(schedule.workers):
            self._add_agent()
        self.trainer = Trainer(self.world, schedule.shape, bug)
        for fault in schedule.faults:
            self.world.at(fault.at_s, None, self._break, fault)

    def run(self) -> None:
        try:
            finished = self.world.run(lambda: self.trainer.over, until=ENDS_AT_S, most=MOST_HAPPENINGS)
            if not finished:
                raise Failed(f"not finished after {self.world.now:.1f} s: {self._stand()}")
            for histories, places in zip(self.trainer.epochs_read, self.trainer.places_read, strict=True):
                check_histories(self.schedule.shape, histories)
                if self.schedule.shape.streams and self.schedule.shape.uneven != "allow":
                    check_steps(places)
        except Failed as failed:
            raise SimulationFailed(self.schedule, str(failed), self.world.log) from failed
        except Exception as error:
            raise SimulationFailed(self.schedule, traceback.format_exc(), self.world.log) from error

    def _stand(self) -> str:
        held = [None if consumer.held is None else consumer.held.view for consumer in self.trainer.consumers]
        views = ["not open" if view is None else f"{view.waiting_for or view.streams}" for view in held]
        return f"steps {[len(history) for history in self.trainer.histories]}, {'; '.join(views)}"

    def _add_agent(self, workers: tuple[WorkerId, ...] = ()) -> None:
        workers = workers or (WorkerId(self.world.draw("worker")),)
        self.agents.append(FakeAgent(self.world, self.schedule.shape, self.bug, workers))

    def _break(self, fault: Fault) -> None:
        world, trainer = self.world, self.trainer
        if trainer.over:
            return
        world.note(str(fault))
        agent = self.agents[fault.which % len(self.agents)]
        match fault.kind:
            case "kill runner":
                if agent.alive and agent.runners:
                    agent.kill(sorted(agent.runners)[fault.which % len(agent.runners)])
            case "kill machine":
                if agent.alive:
                    agent.die()
                    world.at(fault.seconds, None, self._replace, agent)
            case "freeze machine":
                agent.freeze(fault.seconds)
            case "cut off machine":
                pairs = ((agent.name, DISPATCHER), (DISPATCHER, agent.name))
                world.cuts.extend((world.now + fault.seconds, *pair) for pair in pairs[: 1 + fault.which % 2])
            case "crash dispatcher":
                self.dispatcher.crash(fault.tail, fault.seconds)
            case "lose journal":
                self.dispatcher.crash("lost", fault.seconds, wiped=True)
            case "kill consumer":
                trainer.restart_one(fault.which % self.schedule.shape.consumers, fault.back)
            case "restart training":
                trainer.restart_all(fault.how, fault.back)
            case "add worker":
                self._add_agent()
            case "drain worker":
                if len(self.agents) > 1 and agent.alive:
                    self._add_agent()
                    agent.ask(DrainWorker(worker=agent.workers[0]))

    def _replace(self, agent: FakeAgent) -> None:
        self.agents.remove(agent)
        self._add_agent(agent.workers)


def check_histories(shape: Shape, histories: list[list[tuple[int, ...]]]) -> None:
    """Check what all consumers were given in an epoch, knowing nothing of how it came about."""
    if shape.uneven == "allow":
        histories = [[batch for batch in history if batch] for history in histories]  # without the steps they sat out
    given = sorted(element for history in histories for batch in history for element in batch)
    everything = sorted(element for split in shape.splits for element in split)
    twice = sorted({a for a, b in pairwise(given) if a == b})
    if shape.uneven == "pad":
        last = {element for history in histories if history for element in history[-1]}
        before = [element for history in histories for batch in history[:-1] for element in batch]
        twice = sorted({*(set(twice) - last), *(last & set(before))})
    if twice:
        raise Failed(f"elements {twice} were given more than once")
    if not set(given) <= set(everything):
        raise Failed(f"elements {sorted(set(given) - set(everything))} came from nowhere")
    missing = sorted(set(everything) - set(given))
    most = shape.batch * (shape.consumers - 1) if shape.uneven == "drop" else 0
    if len(missing) > most:
        raise Failed(f"elements {missing} were lost, where at most {most} may be left over")
    if shape.uneven != "allow" and len({len(history) for history in histories}) > 1:
        raise Failed(f"consumers ended at different steps: {[len(history) for history in histories]}")
    if shape.streams and not shape.coordinated:
        expected = deterministic_histories(shape)
        if histories != expected:
            raise Failed(f"deterministic order gave {histories} instead of {expected}")


def check_steps(places: list[list[tuple[int, int]]]) -> None:
    """Check that a step was, for all consumers, the same round of the same stream."""
    for step, taken in enumerate(zip(*places)):
        if len(set(taken)) > 1:
            raise Failed(f"step {step} was torn: consumers took (stream, round) {list(taken)}")


def deterministic_histories(shape: Shape) -> list[list[tuple[int, ...]]]:
    """Return what consumers must see in deterministic order, from the description alone."""
    if shape.fed:
        return [shape.units]
    rounds: list[tuple[int, int, list[int]]] = []
    tail: list[int] = []
    for number in range(shape.streams):
        elements = [x for split in shape.splits[number :: shape.streams] for x in split]
        whole = len(elements) // shape.round_size
        rounds += [(r, number, elements[r * shape.round_size : (r + 1) * shape.round_size]) for r in range(whole)]
        tail += elements[whole * shape.round_size :]
    in_order = [elements for _, _, elements in sorted(rounds)]
    if shape.uneven == "allow":
        own = [
            [tuple(x) for _, number, x in sorted(rounds) if number % shape.consumers == c]
            for c in range(shape.consumers)
        ]
        own[0] += [tuple(tail[at : at + shape.batch]) for at in range(0, len(tail), shape.batch)]
        return own
    while tail and (-(-len(tail) // shape.batch) >= shape.consumers or shape.uneven == "pad"):
        in_order.append(tail[: shape.round_size])
        tail = tail[shape.round_size :]
    rounds_given = [round_of(shape, elements) for elements in in_order]
    return [[batches[c] for batches in rounds_given] for c in range(shape.consumers)]


def simulate(seed: int, bug: Bug = "") -> Simulation:
    """Run the schedule of a seed; raise `SimulationFailed` if a promise is broken."""
    simulation = Simulation(make_schedule(seed), bug)
    simulation.run()
    return simulation


def fails(schedule: Schedule, bug: Bug = "") -> SimulationFailed | None:
    try:
        Simulation(schedule, bug).run()
    except SimulationFailed as failed:
        return failed
    return None


def shrink(failed: SimulationFailed, bug: Bug = "") -> SimulationFailed:
    """Leave out faults, one at a time, as long as the schedule still fails."""
    smaller = True
    while smaller:
        smaller = False
        faults = failed.schedule.faults
        for i in range(len(faults)):
            again = fails(replace(failed.schedule, faults=faults[:i] + faults[i + 1 :]), bug)
            if again is not None:
                failed, smaller = again, True
                break
    return failed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m penstock.testing.simulator", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many schedules")
    parser.add_argument("--first", type=int, default=0, help="the first one's seed")
    parser.add_argument("--bug", choices=get_args(Bug), default="", help="what to break in the fakes")
    parser.add_argument("--log", action="store_true", help="print what happened in a failing schedule")
    given = parser.parse_args(arguments)
    for seed in range(given.first, given.first + given.seeds):
        failed = fails(make_schedule(seed), given.bug)
        if failed is not None:
            failed = shrink(failed, given.bug)
            print(f"seed {seed} failed; with as few faults as still fail:\n{failed}")
            if given.log:
                print("\n".join(failed.log))
            return 1
    print(f"{given.seeds} schedules from seed {given.first} on: all promises kept")
    return 0


if __name__ == "__main__":
    sys.exit(main())
