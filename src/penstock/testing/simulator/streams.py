"""A stream as a simulated runner serves it: the hands of the real protocol, over an engine that makes numbered batches.

A run is a chain of happenings: a pull, waiting for a split, waiting for room, encoding, delivering. Anything else may
happen between two of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from zlib import crc32

from msgspec.structs import replace

from penstock.core.ids import StreamId
from penstock.runtime.streams import places
from penstock.stream.instructions import End, Send, StartRun, StopRun
from penstock.stream.rounds import RoundMaker, Taken
from penstock.stream.serving import Dealt, ReaderSays
from penstock.stream.sharing import Shared
from penstock.stream.teams import RankReader
from penstock.stream.window import Entry
from penstock.testing.simulator.engine import (
    FakeBatch,
    FakeOutputs,
    SplitNeeded,
    batches_from,
    granted_splits,
    known_splits,
    numbered,
    tail_outputs,
)
from penstock.wire.frames import Rounds, Units
from penstock.wire.jobs import Cut, Named, delivery_of
from penstock.wire.messages import Answer, Granted, GrantSplits
from penstock.worker.feeds import FedUnits, Settled, StreamLedger, fixed_feed

if TYPE_CHECKING:
    from penstock.testing.simulator.workers import FakeRunner

ROUND_BYTES = 400_000  # a batch's: a client's smallest window has room for two or three
WINDOW_SHARE = 6 * ROUND_BYTES

Wait: TypeAlias = Literal["a moment", "a change", "an answer", "nothing"]
"""What a run waits for before it goes on."""


class FakeStream(ABC):
    """What streams of both kinds do. The units are those that its reader sent, where it feeds the stream."""

    served: Dealt | Shared

    def __init__(self, runner: FakeRunner, stream: StreamId) -> None:
        self.runner, self.world, self.id = runner, runner.world, stream
        self.delivery = delivery_of(runner.spec)
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

    def tell_rounds(self, peer: bytes, batches: list[FakeBatch], **header: Any) -> int:
        """Send a reader its rounds; return how large they are."""
        nbytes = len(batches) * ROUND_BYTES
        rounds = Rounds(stream=self.id, count=len(batches), nbytes=nbytes, layout=b"", **header)
        self.runner.tell(peer, rounds, batches)
        return nbytes


class FakeDealtStream(FakeStream):
    served: Dealt

    def __init__(self, runner: FakeRunner, stream: StreamId) -> None:
        super().__init__(runner, stream)
        self.served = Dealt(stream, self.delivery, now=self.world.now)

    def has_room(self, run: int) -> bool:
        return self.served.room(run) is not None

    def deliver(self, run: int, taken: Taken, cut: Cut, done: tuple[Named, ...]) -> Iterator[Wait]:
        after = taken.seq + taken.count
        nbytes: dict[tuple[bytes, int], int] = {}
        while True:
            wanted = {(each.peer, each.opening): each for each in self.served.wanted(run, taken.seq, taken.count) or ()}
            if wanted.keys() <= nbytes.keys():
                break
            nbytes = {key: (after - each.first) * ROUND_BYTES for key, each in wanted.items()}
            yield "a moment"  # to encode it; others may want it meanwhile
        given = self.served.give(run, after, cut, done, nbytes)
        for key, each in wanted.items():
            self.tell_rounds(
                each.peer,
                taken.of(each.seat, skip=each.first - taken.seq),
                opening=each.opening,
                binding=given[key].binding,
                seq=each.first,
                cut=cut,
                done=given[key].done,
            )
        self.carry_out()


class FakeSharedStream(FakeStream):
    served: Shared

    def __init__(self, runner: FakeRunner, stream: StreamId) -> None:
        super().__init__(runner, stream)
        self.served = Shared(stream, self.delivery, now=self.world.now)

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
        nbytes = self.tell_rounds(
            reader.peer,
            offer.entry.payload[reader.seat],
            opening=reader.opening,
            binding=self.served.binding,
            seq=offer.entry.seq,
            cut=offer.entry.cut,
            skipped=offer.skipped,
            shared=offer.shared,
            had=offer.had,
            holes=offer.holes,
        )
        self.served.sent(reader, offer, nbytes)
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
            settled = self._ledger.settle_all()
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
        ledger = self._ledger
        if ledger is None:
            next_split = known_splits(fixed_feed(terms.feed, shape.split_counts))
        else:
            next_split = granted_splits(ledger)
        return batches_from(shape, terms.epoch, next_split, state, rest)

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
