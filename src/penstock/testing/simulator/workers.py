"""Agents, and runners that serve streams: the real protocol, over an engine that makes numbered batches.

A run is a chain of happenings: a pull, waiting for a split, waiting for room, encoding, delivering. Anything else may
happen between two of them.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from penstock.core.ids import AgentId, JobName, RunnerId, StreamId, WorkerId
from penstock.runtime.streams import places
from penstock.stream.rounds import RoundMaker, Taken
from penstock.stream.serving import Dealt, End, Fail, Send, StartRun, StopRun
from penstock.stream.sharing import Shared, SharingTerms
from penstock.stream.teams import RankReader
from penstock.stream.window import Entry
from penstock.testing.simulator.dispatcher import Bug
from penstock.testing.simulator.engine import Engine, FedEngine, Shape, SplitNeeded, TailEngine
from penstock.testing.simulator.world import Failed, Link, Peer, World
from penstock.wire.delivery import Delivery, delivery_of
from penstock.wire.frames import CloseStream, Credit, OpenStream, Rounds, StreamLeft, StreamRefused, Units
from penstock.wire.jobs import Cut, JobSpec, Named
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
from penstock.worker.fed import FedUnits
from penstock.worker.feeds import fixed_feed
from penstock.worker.ledger import Ledger

ROUND_BYTES = 400_000  # a batch's: a client's smallest window has room for two or three
WINDOW_SHARE = 6 * ROUND_BYTES
TRAINER_TIMEOUT_S = 20.0

Jobs = dict[JobName, tuple[JobSpec, Shape]]
"""What a dispatcher's blobs would say."""


class FakeAgent(Peer):
    def __init__(self, world: World, jobs: Jobs, bug: Bug, workers: tuple[WorkerId, ...]) -> None:
        super().__init__(world, world.draw("agent"))
        self.jobs, self.bug, self.workers = jobs, bug, workers
        self.runners: dict[RunnerId, FakeRunner] = {}
        self.started = 0
        """Runners in all. A late message can cost one that was well: then another takes its place."""
        self._registering = False
        self._register()
        world.at(0.5, self, self._beat)

    def _register(self) -> None:
        if not self._registering:
            self._registering = True
            found = tuple(r.place for r in self.runners.values() if r.ready)
            workers = tuple(WorkerPlace(worker) for worker in self.workers)
            request = RegisterAgent(agent=AgentId(self.name), host="host", workers=workers, runners=found)
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
                runner = FakeRunner(self, push)
                self.started += 1
                self.runners[push.runner] = runner
                self.world.at(self.world.rng.uniform(0.05, 0.3), runner, self._ready, runner)
            case StopRunner() if push.runner in self.runners:
                self.kill(push.runner, "stopped: as asked")

    def _ready(self, runner: FakeRunner) -> None:
        runner.serve()
        self.ask(RunnerReady(agent=AgentId(self.name), place=runner.place), self._beaten)

    def kill(self, runner: RunnerId, reason: str = "killed by signal 9") -> None:
        victim = self.runners.pop(runner)
        victim.die()
        place = victim.place
        self.ask(RunnerGone(agent=AgentId(self.name), runner=runner, worker=place.worker, job=place.job, reason=reason))

    def freeze(self, seconds: float) -> None:
        """The machine stops for a while; those connected to it find it silent, and give it up."""
        for peer in (self, *self.runners.values()):
            peer.freeze_until(self.world.now + seconds)
            if seconds > 3.0:
                for link in list(peer.links.values()):
                    link.cut(silently=True)

    def die(self, *, silently: bool = True) -> None:
        """The whole machine goes: nobody is left to say so."""
        for runner in self.runners.values():
            runner.die(silently=True)
        super().die(silently=True)


class FakeRunner(Peer):
    def __init__(self, agent: FakeAgent, start: StartRunner) -> None:
        super().__init__(agent.world, f"runner {start.runner}")
        self.bug = agent.bug
        self.spec, self.shape = agent.jobs[start.job]
        self.delivery: Delivery = delivery_of(self.spec)
        self.runner = start.runner
        self.place = RunnerPlace(start.runner, start.worker, start.job, self.name)
        self.ready = False
        self.units: dict[StreamId, FedUnits] = {}
        self._streams: dict[StreamId, FakeStream] = {}
        self.world.at(0.1, self, self._tick)

    def serve(self) -> None:
        self.ready = True

    def _tick(self) -> None:
        for stream in self._streams.values():
            stream.tick()
        self.world.at(0.1, self, self._tick)

    def heard(self, link: Link, header: Any, payload: Any) -> None:
        peer = link.name.encode()
        match header:
            case OpenStream():
                if header.runner != self.runner:
                    raise Failed(f"{self.name} was asked for {header.runner}")
                if header.stream not in self._streams:
                    made = SharedStream if self.spec.sharing else DealtStream
                    self._streams[header.stream] = made(self, header.stream)
                self._streams[header.stream].open(peer, header)
            case Units():
                self.units.setdefault(header.stream, FedUnits()).take(header)
                if header.stream in self._streams:
                    self._streams[header.stream].wake()
            case Credit() if header.stream in self._streams:
                self._streams[header.stream].take_credit(peer, header)
            case CloseStream():
                if header.stream in self._streams:
                    self._streams[header.stream].close_reader(peer, header)
                if header.leaving:
                    link.send(self, StreamLeft(stream=header.stream, opening=header.opening))

    def lost(self, link: Link) -> None:
        for stream in self._streams.values():
            stream.lose(link.name.encode())

    def tell(self, peer: bytes, header: Any, payload: Any = None) -> None:
        link = self.links.get(peer.decode())
        if link is not None:
            link.send(self, header, payload)


class FakeStream:
    """The hands of a served stream."""

    def __init__(self, runner: FakeRunner, stream: StreamId) -> None:
        self.runner, self.world, self.id = runner, runner.world, stream
        self.served: Dealt | Shared = self._serve()
        self.pump: FakePump | None = None

    def _serve(self) -> Dealt | Shared:
        raise NotImplementedError

    def open(self, peer: bytes, message: OpenStream) -> None:
        self.served.open(peer, message, self.world.now)
        self.carry_out()

    def take_credit(self, peer: bytes, message: Credit) -> None:
        credit = message.credit
        if self.runner.bug == "incremental_credits":  # a sum of differences does not survive being said again
            credit += next((r.credit for r in self.served.readers.values() if r.peer == peer), 0)
        self.served.take_credit(peer, message.opening, credit, message.round, self.world.now)
        self.carry_out()

    def close_reader(self, peer: bytes, message: CloseStream) -> None:
        self.served.close_reader(peer, message.opening, self.world.now, leaving=message.leaving, taken=message.round)
        self.carry_out()

    def lose(self, peer: bytes) -> None:
        self.served.close_reader(peer, None, self.world.now)
        self.carry_out()

    def tick(self) -> None:
        self.served.tick(self.world.now)
        self.carry_out()

    def wake(self) -> None:
        if self.pump is not None:
            self.pump.go_on()

    def carry_out(self) -> None:
        self._obey()
        self.follow()
        self._obey()
        self.wake()

    def _obey(self) -> None:
        for instruction in self.served.instructions():
            match instruction:
                case Send(peer, message):
                    self.runner.tell(peer, message)
                case Fail():
                    refused = StreamRefused(stream=self.id, opening=instruction.opening, reason=str(instruction.error))
                    self.runner.tell(instruction.peer, refused)
                case StopRun():
                    self.pump = None
                case StartRun():
                    self.pump = FakePump(self, instruction)

    def follow(self) -> None: ...

    def room(self, number: int) -> int | None:
        raise NotImplementedError

    def deliver(self, pump: FakePump, taken: Taken, cut: Cut, done: tuple[Named, ...]) -> bool:
        """Deliver rounds; False: more had to be encoded first."""
        raise NotImplementedError

    def header(self, opening: int, binding: int, seq: int, count: int, cut: Cut, **more: Any) -> Rounds:
        return Rounds(
            stream=self.id,
            binding=binding,
            opening=opening,
            seq=seq,
            count=count,
            cut=cut,
            nbytes=count * ROUND_BYTES,
            layout=b"",
            **more,
        )


class DealtStream(FakeStream):
    served: Dealt

    def _serve(self) -> Dealt:
        self._encoded: dict[tuple[bytes, int], int] = {}
        return Dealt(self.id, self.runner.delivery, now=self.world.now)

    def room(self, number: int) -> int | None:
        return self.served.room(number)

    def deliver(self, pump: FakePump, taken: Taken, cut: Cut, done: tuple[Named, ...]) -> bool:
        wanted = self.served.wanted(pump.start.number, taken.seq, taken.count)
        if wanted is None:
            return True
        missing = [each for each in wanted if self._encoded.get((each.peer, each.opening)) != taken.seq]
        if missing:
            for each in missing:
                self._encoded[each.peer, each.opening] = taken.seq
            return False
        counts = {(each.peer, each.opening): taken.seq + taken.count - each.first for each in wanted}
        nbytes = {key: count * ROUND_BYTES for key, count in counts.items()}
        given = self.served.give(pump.start.number, taken.seq + taken.count, cut, done, nbytes)
        for each in wanted:
            key = (each.peer, each.opening)
            said = given[key]
            header = self.header(each.opening, said.binding, each.first, counts[key], cut, done=said.done)
            self.runner.tell(each.peer, header, taken.of(each.seat, skip=each.first - taken.seq))
        self._encoded.clear()
        self.carry_out()
        return True


class SharedStream(FakeStream):
    served: Shared

    def _serve(self) -> Shared:
        spec = self.runner.spec
        assert spec.sharing is not None
        terms = SharingTerms(waits=spec.sharing.waits, trainers=spec.awaited_trainers, timeout_s=TRAINER_TIMEOUT_S)
        return Shared(self.id, self.runner.delivery, terms, now=self.world.now)

    def open(self, peer: bytes, message: OpenStream) -> None:
        if self.runner.bug == "torn_trainer":  # ranks with a place each skip each for itself
            message = replace(message, trainer=f"{message.trainer}.{message.consumer}")
        super().open(peer, message)

    def tick(self) -> None:
        self.served.pass_over(WINDOW_SHARE, self.world.now)
        super().tick()

    def follow(self) -> None:
        self.served.evicted()
        while sum(self._send(reader) for reader in self.served.readers.values()):
            pass
        self.served.tell_ends()

    def _send(self, reader: RankReader) -> bool:
        offer = self.served.offer(reader)
        if offer is None:
            return False
        entry = offer.entry
        header = self.header(
            reader.opening,
            self.served.binding,
            entry.seq,
            entry.count,
            entry.cut,
            skipped=offer.skipped,
            shared=offer.shared,
            had=offer.had,
            holes=offer.holes,
        )
        self.runner.tell(reader.peer, header, entry.payload[reader.seat])
        self.served.sent(reader, offer, header.nbytes)
        return True

    def room(self, number: int) -> int | None:
        return self.served.room(number, WINDOW_SHARE)

    def deliver(self, pump: FakePump, taken: Taken, cut: Cut, done: tuple[Named, ...]) -> bool:
        width = self.runner.delivery.width
        nbytes = taken.count * width * ROUND_BYTES
        if self.served.is_current(pump.start.number):
            self.served.make_room(nbytes, WINDOW_SHARE)
            payload = [taken.of(seat) for seat in range(width)]
            self.served.add(pump.start.number, Entry(taken.seq, taken.count, cut, nbytes, payload))
            self.carry_out()
        return True


class FakePump:
    """One run of a stream."""

    def __init__(self, stream: FakeStream, start: StartRun) -> None:
        self.stream, self.start = stream, start
        runner = self._runner = stream.runner
        self._maker = RoundMaker(width=runner.delivery.width, cut=start.start, next_round=start.start_round)
        feed = start.terms.feed
        self._ledger = Ledger(start.start.named) if feed.kind == "granted" else None
        self._final = feed.kind in ("tail", "fed")
        self._engine = self._open()
        self._waiting = False
        """For a split, or for room."""
        self._asking = self._ended = self._over = False
        self._later(self._pull)

    def _open(self) -> Engine | TailEngine | FedEngine:
        start, shape = self.start, self._runner.shape
        feed, epoch, state = start.terms.feed, start.terms.epoch, start.start.engine
        if feed.kind == "tail":
            return TailEngine(shape, epoch, feed.leftovers, state)
        if feed.kind == "fed":
            units = self._runner.units.setdefault(self.stream.id, FedUnits())
            return FedEngine(shape, units.get, units.ends_before, state)
        if self._ledger is not None:
            ledger = self._ledger
            return Engine(shape, epoch, lambda p, after: ledger.following((0, p), after), state, gives_rest=False)
        fixed = fixed_feed(feed, (len(shape.splits),))
        return Engine(shape, epoch, lambda p, after: fixed.next_split(0, p, after), state, gives_rest=False)

    @property
    def _abandoned(self) -> bool:
        return self.stream.pump is not self

    def _later(self, act: Any, *given: Any) -> None:
        self._runner.world.at(self._runner.world.rng.uniform(0.001, 0.02), self._runner, act, *given)

    def go_on(self) -> None:
        """Something changed that the run may have waited for."""
        if self._waiting and not self._asking and not self._over:
            self._waiting = False
            self._later(self._send if self._maker.ready or self._ended else self._pull)

    def _pull(self) -> None:
        if self._abandoned:
            return
        try:
            made = self._engine.pull()
        except SplitNeeded as needed:
            self._waiting = True
            if self._ledger is not None:
                self._ask(needed)
            return
        if made is not None:
            self._maker.add(made)
            self._later(self._send if self._maker.ready else self._pull)
        else:
            self._ended = True
            self._finish()

    def _ask(self, needed: SplitNeeded) -> None:
        self._asking = True
        terms, ledger = self.start.terms, self._ledger
        assert ledger is not None
        key = (0, needed.pass_)
        after = ledger.last(key, needed.after)
        request = GrantSplits(
            job=self._runner.place.job,
            attempt=terms.attempt,
            stream=self.stream.id,
            binding=terms.binding,
            source=0,
            pass_=needed.pass_,
            after=after,
            seconds_per_split=self._runner.world.rng.choice((0.0, 0.1)),
        )
        self._runner.ask(request, lambda answer: self._granted(key, after, answer))

    def _granted(self, key: tuple[int, int], after: int | None, answer: Answer) -> None:
        self._asking = self._waiting = False
        if self._abandoned:
            return
        if isinstance(answer, Granted):
            assert self._ledger is not None
            self._ledger.granted(key, after, answer.ordinals)
            self._later(self._pull)
        else:
            self.stream.served.stale(self.start.number, "the dispatcher refused splits", self._runner.world.now)
            self.stream.carry_out()

    def _send(self) -> None:
        if self._abandoned:
            return
        if self._ended:
            self._finish()
        elif self.stream.room(self.start.number) is None:
            self._waiting = True
        else:
            taken = self._maker.take(self._runner.world.rng.randint(1, 3))
            assert taken is not None
            self._later(self._deliver, taken, *self._cut(taken.after))

    def _deliver(self, taken: Taken, cut: Cut, done: tuple[Named, ...]) -> None:
        if self._abandoned:
            return
        if not self.stream.deliver(self, taken, cut, done):
            self._later(self._deliver, taken, cut, done)  # what was encoded meanwhile is delivered
        elif not self._abandoned and not self._waiting and not self._over:
            self._later(self._send if self._maker.ready or self._ended else self._pull)

    def _cut(self, after: Cut) -> tuple[Cut, tuple[Named, ...]]:
        named: tuple[Named, ...] = ()
        done: tuple[Named, ...] = ()
        if self._ledger is not None:
            named, done = self._ledger.settle(places(after.engine))
            if self._runner.bug == "unnamed_boundary":
                named = named[1:]
        return Cut(after.engine, after.since, named, self.start.terms.share, after.regroup), done

    def _finish(self) -> None:
        """Everything made was sent: give the last round, if there is one, and tell the end."""
        if self._final and self._maker.incomplete:
            if self.stream.room(self.start.number) is None:
                self._waiting = True
                return
            last = self._maker.take_rest(pad=self._runner.shape.uneven == "pad")
            if last is not None:
                self._later(self._deliver, last, *self._cut(last.after))
                return
        leftover = not self._final and (self._maker.incomplete > 0 or self._engine.has_rest)
        cut, done = self._cut(self._maker.standing)
        if not leftover and self._ledger is not None:
            done += self._ledger.settle_all()
            cut = Cut(cut.engine, cut.since, (), cut.share, cut.regroup)
        self._over = True
        self.stream.served.ended(self.start.number, End(self._maker.next_round, cut, leftover), done)
        self.stream.carry_out()
