"""Agents, and runners that make batches of numbered elements out of splits.

A runner makes each consumer's rounds by itself: streams are deterministic given their lists, so that is the same as
making them once for all, and it is harder on the control plane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from penstock.core.ids import AgentId, JobName, RunnerId, StreamId, WorkerId
from penstock.testing.simulator_dispatcher import Bug
from penstock.testing.simulator_world import Data, Failed, Peer, World
from penstock.wire.frames import Credit, OpenStream, Rounds, StreamEnded, StreamRefused
from penstock.wire.jobs import Cut, Feed, Leftover, Named, Uneven
from penstock.wire.messages import (
    AgentBeat,
    Answer,
    Granted,
    GrantSplits,
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

JOB = JobName("job")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is read: `splits[ordinal]` are a split's elements."""

    splits: tuple[tuple[int, ...], ...]
    batch: int
    consumers: int
    streams: int
    """Read in turn, round by round, over so many streams; 0: relaxed, as they come."""
    epochs: int = 1
    coordinated: bool = False
    """In turn, splits are granted to streams; without it they are dealt, which is deterministic order."""
    uneven: Uneven = "drop"
    fed: bool = False
    """The one consumer says what is read: batches of all elements, in order, are units and dealt to streams in turn."""

    @property
    def order(self) -> str:
        """For people."""
        if not self.streams:
            return "relaxed order"
        if self.fed:
            return f"{self.streams} streams fed by the consumer"
        return f"{self.streams} streams " + ("read in turn" if self.coordinated else "in deterministic order")

    @property
    def width(self) -> int:
        """Batches in a round."""
        return 1 if self.uneven == "allow" else self.consumers

    @property
    def round_size(self) -> int:
        return self.batch * self.width

    @property
    def units(self) -> list[tuple[int, ...]]:
        whole = [x for split in self.splits for x in split]
        return [tuple(whole[at : at + self.batch]) for at in range(0, len(whole), self.batch)]

    def streams_of(self, consumer: int) -> int:
        """Return how many streams this consumer reads in turn."""
        return len(range(consumer, self.streams, self.consumers)) if self.uneven == "allow" else self.streams


class FakeAgent(Peer):
    def __init__(self, world: World, shape: Shape, bug: Bug, workers: tuple[WorkerId, ...]) -> None:
        super().__init__(world, world.draw("agent"))
        self.shape, self.bug, self.workers = shape, bug, workers
        self.runners: dict[RunnerId, FakeRunner] = {}
        self._registering = False
        self._register()
        world.at(0.5, self, self._beat)

    def _register(self) -> None:
        if not self._registering:
            self._registering = True
            places = tuple(RunnerPlace(r.runner, r.worker, JOB, r.name) for r in self.runners.values() if r.ready)
            workers = tuple(WorkerPlace(worker) for worker in self.workers)
            request = RegisterAgent(agent=AgentId(self.name), host="host", workers=workers, runners=places)
            self.ask(request, self._registered)

    def _registered(self, answer: Answer) -> None:
        self._registering = False

    def _beat(self) -> None:
        self.ask(AgentBeat(agent=AgentId(self.name), runners=tuple(self.runners)), self._beaten)
        self.world.at(1.0, self, self._beat)

    def _beaten(self, answer: Answer) -> None:
        if isinstance(answer, NotKnown):
            self._register()

    def pushed(self, push: Push) -> None:
        match push:
            case StartRunner() if push.runner not in self.runners:
                runner = FakeRunner(self, push.runner, push.worker)
                self.runners[push.runner] = runner
                self.world.at(self.world.rng.uniform(0.05, 0.3), runner, self._ready, runner)
            case StopRunner() if push.runner in self.runners:
                self.kill(push.runner, "stopped: as asked")

    def _ready(self, runner: FakeRunner) -> None:
        runner.ready = True
        place = RunnerPlace(runner.runner, runner.worker, JOB, runner.name)
        self.ask(RunnerReady(agent=AgentId(self.name), place=place), self._beaten)

    def kill(self, runner: RunnerId, reason: str = "killed by signal 9") -> None:
        victim = self.runners.pop(runner)
        victim.die()
        self.ask(RunnerGone(agent=AgentId(self.name), runner=runner, worker=victim.worker, job=JOB, reason=reason))

    def freeze(self, seconds: float) -> None:
        for peer in (self, *self.runners.values()):
            peer.frozen_until = self.world.now + seconds

    def die(self) -> None:
        """The whole machine goes: nobody is left to say so."""
        for runner in self.runners.values():
            runner.die()
        super().die()


class FakeRunner(Peer):
    def __init__(self, agent: FakeAgent, runner: RunnerId, worker: WorkerId) -> None:
        super().__init__(agent.world, f"runner {runner}")
        self.shape, self.bug = agent.shape, agent.bug
        self.runner, self.worker = runner, worker
        self.ready = False
        self._highest: dict[StreamId, int] = {}
        self._readings: dict[tuple[StreamId, int], Reading] = {}

    def data(self, sender: str, message: Data) -> None:
        header = message.header
        match header:
            case OpenStream():
                self._open(sender, header, message.elements)
            case Credit():
                for reading in self._readings.values():
                    terms = reading.terms
                    if (reading.reader, terms.stream, terms.opening) == (sender, header.stream, header.opening):
                        if self.bug == "incremental_credits":
                            reading.credit += header.credit
                        else:
                            reading.credit = max(reading.credit, header.credit)
                        reading.pump()

    def _open(self, sender: str, terms: OpenStream, fed: tuple[int, ...]) -> None:
        if terms.runner != self.runner:
            raise Failed(f"{self.name} was asked for {terms.runner}")
        key = (terms.stream, terms.consumer)
        present = self._readings.get(key)
        if present is not None and (terms.binding, terms.opening) <= (present.terms.binding, present.terms.opening):
            return
        if terms.binding < self._highest.get(terms.stream, 0):
            self.refuse(sender, terms, "an older binding")
            return
        self._highest[terms.stream] = terms.binding
        self._readings[key] = Reading(self, sender, terms, fed)
        self._readings[key].pump()

    def refuse(self, reader: str, terms: OpenStream, reason: str) -> None:
        header = StreamRefused(stream=terms.stream, opening=terms.opening, reason=reason)
        self.world.send(self.name, reader, Data(header))

    def is_current(self, reading: Reading) -> bool:
        return self._readings.get((reading.terms.stream, reading.terms.consumer)) is reading

    def drop(self, reading: Reading) -> None:
        if self.is_current(reading):
            del self._readings[reading.terms.stream, reading.terms.consumer]


@dataclass(slots=True)
class Elements:
    """What a stream reads, from a place on: elements, each with the place after it.

    A place is `["@", ordinal, index]`, in a tail `["t", elements passed]`, in what is fed `["f", units passed]`, at the
    beginning None. At a split's end it stays at that split, whose successor is then asked for by its name.
    """

    shape: Shape
    feed: Feed
    place: list[Any] | None
    fed: tuple[int, ...] = ()
    """What the reader wants read from the place on."""
    ordinals: list[int] = field(default_factory=list)
    """Opened, from the place on."""
    pending: list[tuple[int, list[Any]]] = field(default_factory=list)
    ended: bool = False

    def __post_init__(self) -> None:
        if self.feed.kind == "tail":
            whole = [x for leftover in self.feed.leftovers for x in left_in(self.shape, leftover)]
            passed = 0 if self.place is None else self.place[1]
            self.pending = [(x, ["t", passed + i + 1]) for i, x in enumerate(whole[passed:])]
            self.ended = True
        elif self.feed.kind == "fed":
            passed, size = 0 if self.place is None else self.place[1], self.shape.batch
            self.pending = [(x, ["f", passed + i // size + 1]) for i, x in enumerate(self.fed)]
            self.ended = True
        elif self.place is not None:
            self.add(self.place[1], self.place[2])

    def add(self, ordinal: int, index: int = 0) -> None:
        self.ordinals.append(ordinal)
        split = self.shape.splits[ordinal]
        self.pending.extend((split[i], ["@", ordinal, i + 1]) for i in range(index, len(split)))

    def extend_dealt(self) -> None:
        last = self.ordinals[-1] if self.ordinals else self.feed.number - self.feed.of
        if last + self.feed.of < len(self.shape.splits):
            self.add(last + self.feed.of)
        else:
            self.ended = True

    def take(self, count: int) -> tuple[tuple[int, ...], list[int]]:
        """Return elements, and the splits that are behind the new place."""
        taken, self.pending = self.pending[:count], self.pending[count:]
        self.place = taken[-1][1]
        done: list[int] = []
        if self.place[0] == "@":
            at = self.ordinals.index(self.place[1])
            done, self.ordinals = self.ordinals[:at], self.ordinals[at:]
        return tuple(x for x, _ in taken), done

    def cut(self, bug: Bug, *, ended: bool = False) -> Cut:
        if self.feed.kind != "granted":
            return Cut(engine=self.place)
        opened = self.ordinals if ended else self.ordinals[:1]
        at_boundary = self.place is not None and self.place[2] == len(self.shape.splits[self.place[1]])
        if bug == "unnamed_boundary" and at_boundary and not ended:
            return Cut(engine=self.place)
        return Cut(engine=self.place, named=(Named(0, 0, tuple(opened)),) if opened else ())


def left_in(shape: Shape, leftover: Leftover) -> list[int]:
    """Return the elements of a leftover: what its cut's splits hold from its place on."""
    cut, feed = leftover.cut, leftover.feed
    elements = Elements(shape, feed, cut.engine)
    if feed.kind == "granted":
        ordinals = [o for named in cut.named for o in named.ordinals]
        for ordinal in islice(ordinals, 0 if cut.engine is None else 1, None):
            elements.add(ordinal)
    else:
        while not elements.ended:
            elements.extend_dealt()
    return [x for x, _ in elements.pending]


def round_of(shape: Shape, elements: Sequence[int]) -> list[tuple[int, ...]]:
    """Return each reader's batch of a round; one that is not whole is filled up with its own batches."""
    batches = [tuple(elements[at : at + shape.batch]) for at in range(0, len(elements), shape.batch)]
    return [batches[place % len(batches)] for place in range(shape.width)]


class Reading:
    """One consumer's rounds of one stream, within one opening."""

    def __init__(self, runner: FakeRunner, reader: str, terms: OpenStream, fed: tuple[int, ...]) -> None:
        self.runner, self.reader, self.terms = runner, reader, terms
        self.credit = terms.credit
        self._seq = terms.round
        self._elements = Elements(runner.shape, terms.feed, terms.cut.engine, fed)
        self._over = False
        self._asking = False
        self._pumping = False

    def pump(self) -> None:
        if not self._pumping:
            self._pumping = True
            self.runner.world.at(0.005, self.runner, self._pump)

    def _pump(self) -> None:
        self._pumping = False
        if self._over or self._asking or not self.runner.is_current(self):
            return
        elements, shape = self._elements, self.runner.shape
        while len(elements.pending) < shape.round_size and not elements.ended:
            if elements.feed.kind == "dealt":
                elements.extend_dealt()
            else:
                self._ask_for_splits()
                return
        tail = elements.feed.kind in ("tail", "fed")
        # The tail's batches may be short, and what does not fill a round is dropped, or repeated to fill it.
        whole = -(-len(elements.pending) // shape.batch) >= shape.width or shape.uneven == "pad"
        if len(elements.pending) >= shape.round_size or (tail and whole and elements.pending):
            if self._seq < self.credit:
                self._give()
                self.pump()
        else:
            self._end(leftover=bool(elements.pending) and not tail)

    def _give(self) -> None:
        shape, terms = self.runner.shape, self.terms
        taken, done = self._elements.take(shape.round_size)
        mine = round_of(shape, taken)[terms.consumer % shape.width]
        cut = self._elements.cut(self.runner.bug)
        named = (Named(0, 0, tuple(done)),) if done else ()
        header = Rounds(
            stream=terms.stream,
            binding=terms.binding,
            opening=terms.opening,
            seq=self._seq,
            count=1,
            cut=cut,
            nbytes=1,
            layout=b"",
            done=named,
        )
        self._seq += 1
        self.runner.world.send(self.runner.name, self.reader, Data(header, mine))

    def _end(self, *, leftover: bool) -> None:
        self._over = True
        terms = self.terms
        header = StreamEnded(
            stream=terms.stream,
            binding=terms.binding,
            opening=terms.opening,
            seq=self._seq,
            cut=self._elements.cut(self.runner.bug, ended=True),
            leftover=leftover,
        )
        self.runner.world.send(self.runner.name, self.reader, Data(header))

    def _ask_for_splits(self) -> None:
        self._asking = True
        terms = self.terms
        request = GrantSplits(
            job=JOB,
            attempt=terms.attempt,
            stream=terms.stream,
            binding=terms.binding,
            source=0,
            pass_=0,
            after=self._elements.ordinals[-1] if self._elements.ordinals else None,
            seconds_per_split=self.runner.world.rng.choice((0.0, 0.1)),
        )
        self.runner.ask(request, self._granted)

    def _granted(self, answer: Answer) -> None:
        self._asking = False
        if self._over or not self.runner.is_current(self):
            return
        if isinstance(answer, Granted):
            for ordinal in answer.ordinals:
                self._elements.add(ordinal)
            self._elements.ended |= not answer.ordinals
            self.pump()
        else:
            self.runner.drop(self)
            self.runner.refuse(self.reader, self.terms, "the dispatcher refused splits")
