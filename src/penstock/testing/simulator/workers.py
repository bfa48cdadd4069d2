"""Agents, the runners they start, and streams as those serve them.

A stream has the hands of the real protocol, over an engine that makes numbered batches. A run of it is a chain of
happenings: a pull, waiting for a split, waiting for room, encoding, delivering. Anything else may happen between two of
them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias
from zlib import crc32

from msgspec.structs import replace

from penstock.core.ids import AgentId, JobName, RunnerId, StreamId, WorkerId
from penstock.runtime.streams import places
from penstock.stream.rounds import End, RoundMaker, Send, StartRun, StopRun, Taken
from penstock.stream.serving import Dealt, ReaderSays
from penstock.stream.sharing import Shared
from penstock.stream.window import Entry, RankReader
from penstock.testing.simulator.engine import (
    FakeBatch,
    FakeOutputs,
    Shape,
    SplitNeeded,
    batches_from,
    known_splits,
    numbered,
    tail_outputs,
)
from penstock.testing.simulator.world import Failed, Link, Peer, World
from penstock.wire.frames import OpenStream, Rounds, Units
from penstock.wire.jobs import Cut, Named, delivery_of
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
from penstock.wire.principals import Principal
from penstock.worker.feeds import FedUnits, Settled, StreamLedger, fixed_feed

ROUND_BYTES = 400_000  # a batch's: a client's smallest window has room for two or three
WINDOW_SHARE = 6 * ROUND_BYTES

FakeFrame: TypeAlias = tuple[Rounds, list[FakeBatch]]
Wait: TypeAlias = Literal["a moment", "a change", "an answer", "nothing"]
"""What a run waits for before it goes on."""


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
        self._agent.ask(RunnerReady(agent=self._agent.id, place=self.place))

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


class FakeStream(ABC):
    """What streams of both kinds do. The units are those that its reader sent, where it feeds the stream."""

    served: Dealt | Shared
    kind: type[Dealt | Shared]

    def __init__(self, runner: FakeRunner, stream: StreamId) -> None:
        self.runner, self.world, self.id = runner, runner.world, stream
        self.delivery = delivery_of(runner.spec)
        self.served = self.kind(stream, self.delivery, now=self.world.now)
        self.units = FedUnits()
        self.pump: FakePump | None = None

    def hear(self, peer: bytes, message: ReaderSays | Units) -> None:
        """Take in what came from a peer; None: it is lost."""
        if isinstance(message, Units):
            self.units.take(message)
        else:
            self.served.hear(peer, message, self.world.now)
        self.carry_out()

    def tick(self) -> None:
        self.served.tick(self.world.now)
        self.carry_out()

    def carry_out(self) -> None:
        """Do what the protocol says is to be done."""
        self.obey()
        if self.pump is not None:
            self.pump.wake()

    def obey(self) -> None:
        for instruction in self.served.instructions():
            match instruction:
                case Send(peer, message):
                    self.runner.tell(peer, message)
                case StopRun():
                    self.pump = None
                case StartRun():
                    self.pump = FakePump(self, instruction)

    @abstractmethod
    def has_room(self, run: int) -> bool: ...

    @abstractmethod
    def deliver(self, run: int, taken: Taken, cut: Cut, done: tuple[Named, ...]) -> Iterator[Wait]:
        """Deliver rounds, after whatever has to be encoded first."""

    def frame(self, batches: list[FakeBatch], **where: Any) -> FakeFrame:
        """Return a reader's rounds, and their header."""
        count, binding = len(batches), self.served.binding
        header = Rounds(stream=self.id, binding=binding, count=count, nbytes=count * ROUND_BYTES, layout=b"", **where)
        return header, batches


class FakeDealtStream(FakeStream):
    served: Dealt
    kind = Dealt

    def has_room(self, run: int) -> bool:
        return self.served.room(run) is not None

    def deliver(self, run: int, taken: Taken, cut: Cut, done: tuple[Named, ...]) -> Iterator[Wait]:
        frames: dict[tuple[bytes, int], FakeFrame] = {}
        while missing := [
            each for each in self.served.wanted(run, taken.seq, taken.count) if (each.peer, each.opening) not in frames
        ]:
            for each in missing:
                batches = taken.of(each.seat, skip=each.first - taken.seq)
                frames[each.peer, each.opening] = self.frame(batches, opening=each.opening, seq=each.first, cut=cut)
            yield "a moment"  # to encode it; others may want it meanwhile
        headers = {key: header for key, (header, _) in frames.items()}
        given = self.served.give(run, taken.seq + taken.count, cut, done, headers)
        for key, header in given.items():
            self.runner.tell(key[0], header, frames[key][1])
        self.carry_out()


class FakeSharedStream(FakeStream):
    served: Shared
    kind = Shared

    def tick(self) -> None:
        self.served.pass_over(WINDOW_SHARE, self.world.now)
        super().tick()

    def carry_out(self) -> None:
        self.obey()
        self.served.evicted()
        while sum(self._send(reader) for reader in self.served.readers.values()):
            pass
        self.served.tell_ends()
        super().carry_out()

    def _send(self, reader: RankReader) -> bool:
        offer = self.served.offer(reader)
        if offer is None:
            return False
        header, batches = self.frame(
            offer.entry.payload[reader.seat],
            opening=reader.opening,
            seq=offer.entry.seq,
            cut=offer.entry.cut,
            skipped=offer.skipped,
            shared=offer.shared,
            had=offer.had,
            holes=offer.holes,
        )
        self.runner.tell(reader.peer, header, batches)
        self.served.sent(reader, offer, header.nbytes)
        return True

    def has_room(self, run: int) -> bool:
        return self.served.room(run, WINDOW_SHARE) is not None

    def deliver(self, run: int, taken: Taken, cut: Cut, done: tuple[Named, ...]) -> Iterator[Wait]:
        payload = [taken.of(seat) for seat in range(self.delivery.width)]
        nbytes = taken.count * len(payload) * ROUND_BYTES
        self.served.make_room(nbytes, WINDOW_SHARE)
        self.served.add(run, Entry(taken.seq, taken.count, cut, nbytes, payload))
        self.carry_out()
        return iter(())


class FakePump:
    """One run of a stream."""

    def __init__(self, stream: FakeStream, start: StartRun) -> None:
        self._stream, self._runner, self._start = stream, stream.runner, start
        self._maker = RoundMaker(width=stream.delivery.width, cut=start.start, next_round=start.start_round)
        self._ledger = StreamLedger(start.start.named) if start.terms.feed.kind == "granted" else None
        self._work = self._make_all()
        self._go_on_later()

    def wake(self) -> None:
        """Something changed that the run may have waited for."""
        if self._waits_for == "a change":
            self._go_on_later()

    def _go_on_later(self) -> None:
        self._waits_for: Wait = "a moment"
        self._runner.world.at(self._runner.world.rng.uniform(0.001, 0.02), self._runner, self._go_on)

    @property
    def _abandoned(self) -> bool:
        return self._stream.pump is not self

    def _go_on(self) -> None:
        if not self._abandoned:
            self._waits_for = next(self._work, "nothing")
            if self._waits_for == "a moment" and not self._abandoned:
                self._go_on_later()

    def _make_all(self) -> Iterator[Wait]:
        """Make and deliver all there is."""
        maker = self._maker
        rest: list[int] = []
        for made in self._open(rest):
            if not isinstance(made, SplitNeeded):
                maker.add(made)
                yield "a moment"
            elif self._ledger is None:
                yield "a change"
            else:
                self._ask(self._ledger, made)
                yield "an answer"
            while maker.ready:
                yield from self._wait_room()
                taken = maker.take(self._runner.world.rng.randint(1, 3))
                assert taken is not None
                yield from self._deliver(taken)
        final = self._start.terms.feed.kind in ("tail", "fed")
        if final and maker.incomplete:
            yield from self._wait_room()
            last = maker.take_rest(pad=self._runner.shape.uneven == "pad")
            if last is not None:
                yield from self._deliver(last)
        leftover = not final and (maker.incomplete > 0 or bool(rest))
        cut, done = self._cut(maker.standing)
        if not leftover and self._ledger is not None:
            settled = self._ledger.settle(None)
            cut, done = replace(cut, named=settled.named), done + settled.done
        self._stream.served.ended(self._start.number, End(maker.next_round, cut, leftover), done)
        self._stream.carry_out()

    def _open(self, rest: list[int]) -> FakeOutputs:
        """Begin to make outputs; what does not fill one is in `rest` at the end."""
        terms, shape, state = self._start.terms, self._runner.shape, self._start.start.engine
        if terms.feed.kind == "tail":
            return numbered(dict(enumerate(tail_outputs(shape, terms.epoch, terms.feed.leftovers))).get, state)
        if terms.feed.kind == "fed":
            return numbered(self._fed_output, state)
        if (ledger := self._ledger) is None:
            splits = known_splits(fixed_feed(terms.feed, shape.split_counts))
            return batches_from(shape, terms.epoch, splits, state, rest)
        return batches_from(shape, terms.epoch, lambda key, after: ledger.of(key).following(after), state, rest)

    def _fed_output(self, ordinal: int) -> FakeBatch | SplitNeeded | None:
        units = self._stream.units
        unit = units.get(ordinal)
        return unit if unit is not None or units.ends_before(ordinal) else SplitNeeded((0, 0), ordinal)

    def _ask(self, ledger: StreamLedger, needed: SplitNeeded) -> None:
        terms, key = self._start.terms, needed.key
        after = ledger.of(key).asked_after(needed.after)

        def answered(answer: Answer) -> None:
            if self._abandoned:
                return
            if isinstance(answer, Granted):
                ledger.of(key).granted(after, answer.ordinals)
                self._go_on_later()
            else:
                self._stream.served.stale(self._start.number, "the dispatcher refused splits", self._runner.world.now)
                self._stream.carry_out()

        request = GrantSplits(
            job=self._runner.place.job,
            attempt=terms.attempt,
            stream=self._stream.id,
            binding=terms.binding,
            source=key[0],
            pass_=key[1],
            after=after,
            seconds_per_split=self._runner.world.rng.choice((0.0, 0.1)),
            preferred=self._kept_here(after),
        )
        self._runner.ask(request, answered)

    def _kept_here(self, after: int | None) -> tuple[int, ...]:
        """Return splits that this host keeps, as it says: some that others have, and some that there are not."""
        if not self._runner.shape.keeps:
            return ()
        word = crc32(f"{self._runner.place.runner} {self._stream.id} {after}".encode())
        return tuple(word >> shift & 31 for shift in (0, 8, 16)) if word % 3 == 0 else ()

    def _wait_room(self) -> Iterator[Wait]:
        while not self._stream.has_room(self._start.number):
            yield "a change"

    def _deliver(self, taken: Taken) -> Iterator[Wait]:
        cut, done = self._cut(taken.after)
        yield "a moment"
        yield from self._stream.deliver(self._start.number, taken, cut, done)
        yield "a moment"

    def _cut(self, after: Cut) -> tuple[Cut, tuple[Named, ...]]:
        """Return the cut with the splits it needs, and those that are done by it."""
        named, done = Settled((), ()) if self._ledger is None else self._ledger.settle(places(after.engine))
        return Cut(after.engine, after.since, named, self._start.terms.share, after.regroup), done
