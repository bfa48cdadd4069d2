"""A stream as its readers see it: who reads, from which round, with how much credit; and the pump that works for them.

Rules:

1. An incarnation is (binding, opening). A lower binding is refused; a higher one ends the run and all older readers. Of
   one consumer's openings the highest counts.
2. A stream starts when all its consumers have opened it, or one at its very beginning (nothing can be lower), or after
   a moment. It starts at the lowest cut: so it knows of every split that was opened or done since any reader's cut.
   Whoever opens later at a lower round, or with a lower cut, makes it start again, lower.
3. A reader is sent the rounds from its own on, each once, in order, and nothing twice within an opening.
4. A round is made only while every reader that needs it has credit left. One frame may exceed it.
5. A stream whose run ended, or failed, stays answerable: opened again, it is told the end, or run again.

One lock guards all of it. Encoding and sending happen outside of it, in the pump's thread; a reader that is replaced
meanwhile gets nothing of that, because frames carry the opening they were made for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

from penstock.core.element import Element
from penstock.core.errors import CodecError, InvalidArgumentError
from penstock.core.ids import AttemptId, StreamId
from penstock.wire.failures import describe_failure
from penstock.wire.frames import FromRunner, OpenStream, Rounds, SlabPlaces, StreamEnded, StreamFailed, StreamRefused
from penstock.wire.jobs import Cut, Feed, Named
from penstock.wire.runs import encode_run
from penstock.worker.grouping import Taken
from penstock.worker.pump import End, Mixes, OpenedRun, Pump

GATHER_S = 1.0  # how long the first of several consumers waits for the others to open a stream
GATHER_IN_STEP_S = 0.1  # those read in step: one that waits for this stream is not ahead of one that is still training
PROBE_S = 2.0  # how often a reader that keeps the others waiting is looked after
PROBE_ALONE_S = 10.0  # and one that keeps only a run waiting
LONG_LOG = 4_096  # entries that every reader knows, kept for one that may open with an older cut
SLAB_FROM_BYTES = 32 << 10  # below, a lease costs more than the copy

Key = tuple[int, int]
"""(place in the round, replica)"""


@dataclass(slots=True, kw_only=True)
class Reader:
    peer: bytes
    opening: int
    place: int
    next_round: int
    cut: Cut
    cut_round: int
    credit: int
    slab: bool
    mixes: Mixes
    """Changes of weights that this reader knows of."""
    sent_round: int
    """The first not sent yet. `next_round` is ahead of it while rounds are on their way to the socket."""
    sent_bytes: int = 0
    told: int = 0
    """Entries of the run's log of done splits that this reader knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What all openings of one binding have in common."""

    attempt: AttemptId
    epoch: int
    feed: Feed
    share: int
    binding: int


class Host(Protocol):
    """What a stream needs of the process it lives in."""

    def send(
        self, peer: bytes, header: FromRunner, buffers: Sequence[Any] = (), *, unsent: Callable[[], None] | None = None
    ) -> None: ...

    def place(self, peer: bytes, buffers: Sequence[Any], *, exclusive: bool) -> SlabPlaces | None:
        """Put buffers where a reader on this host can see them, and it alone; None where there is no room."""

    def release(self, lease: int) -> None: ...

    def compress(self, buffers: Sequence[Any]) -> tuple[str, Sequence[Any]]: ...

    def open_run(self, stream: Stream, terms: Terms, start: Cut, pump: Pump) -> OpenedRun: ...


@dataclass(slots=True)
class Counts:
    rounds: int = 0
    nbytes: int = 0
    credit_wait_s: float = 0.0
    runs: int = 0


class Stream:
    def __init__(self, stream: StreamId, host: Host, *, coordinated: bool = False) -> None:
        self.id = stream
        self._coordinated = coordinated
        self.counts = Counts()
        self._host = host
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._terms: Terms | None = None
        self._consumers = 1
        self._readers: dict[Key, Reader] = {}
        self._mixes: Mixes = ()
        """All changes of weights that any reader of this binding knew of."""
        self._pump: Pump | None = None
        self._start_at: float | None = None
        self._probed_at = 0.0
        self._closed = False
        self.idle_since = monotonic()
        """When it last had a reader."""

    # What readers say. Called by the data socket's thread: nothing here waits.

    def open(self, peer: bytes, message: OpenStream, consumers: int) -> None:
        """Take a reader in. `consumers` is how many the job has, or one for a stream with an owner."""
        with self._changed:
            self._consumers = consumers
            refusal = self._refusal(message)
            if refusal:
                self._host.send(peer, StreamRefused(stream=self.id, opening=message.opening, reason=refusal))
                return
            if self._terms is None or message.binding > self._terms.binding:
                self._rebind(message)
            both = min(len(message.mixes), len(self._mixes))
            if consumers > 1 and message.mixes[:both] != self._mixes[:both]:
                self._refuse_weights(peer, message)
                return
            key = (self._place(message), message.replica)
            present = self._readers.get(key)
            if present is not None and present.opening == message.opening and present.peer == peer:
                return  # said twice
            reader = Reader(
                peer=peer,
                opening=message.opening,
                place=key[0],
                next_round=message.round,
                sent_round=message.round,
                cut=message.cut,
                cut_round=message.cut_round,
                credit=message.credit,
                slab=message.slab,
                mixes=message.mixes,
            )
            self._readers[key] = reader
            if self._learn_mixes(reader) and self._pump is not None:
                self._start_pump()
            else:
                self._admit(reader)
            self._changed.notify_all()

    def _refusal(self, message: OpenStream) -> str:
        if self._closed:
            return "this worker is closing"
        terms = self._terms
        if terms is not None and message.binding < terms.binding:
            return f"binding {message.binding} is over, the stream has binding {terms.binding} by now"
        if message.consumer < 0 or (self._consumers > 1 and message.consumer >= self._consumers):
            return f"there is no consumer {message.consumer}: the job has {self._consumers}"
        if message.cut_round > message.round:
            return f"the cut is that of round {message.cut_round}, after round {message.round}"
        present = self._readers.get((self._place(message), message.replica))
        same = terms is not None and message.binding == terms.binding
        if same and present is not None and message.opening < present.opening:
            return f"opening {message.opening} is over, opening {present.opening} has come since"
        return ""

    def _place(self, message: OpenStream) -> int:
        return message.consumer if self._consumers > 1 else 0

    def _rebind(self, message: OpenStream) -> None:
        self._drop_pump()
        for reader in self._readers.values():
            self._refuse(reader, f"the stream has binding {message.binding} by now")
        self._readers.clear()
        self._mixes = ()
        self._terms = Terms(
            attempt=message.attempt,
            epoch=message.epoch,
            feed=message.feed,
            share=message.share,
            binding=message.binding,
        )

    def _refuse(self, reader: Reader, reason: str) -> None:
        self._host.send(reader.peer, StreamRefused(stream=self.id, opening=reader.opening, reason=reason))

    def _admit(self, reader: Reader) -> None:
        """Let a new reader in: the run goes on for it, or starts, or starts again lower."""
        pump = self._pump
        if pump is None:
            self._start_or_wait(reader)
        elif pump.failure is not None or reader.next_round < pump.next_round or reader.cut_round < pump.remembers_from:
            self._start_pump()
        elif pump.end is not None:
            self._tell_end(reader, pump, pump.end)

    def _refuse_weights(self, peer: bytes, message: OpenStream) -> None:
        one, other = next((one, other) for one, other in zip(message.mixes, self._mixes) if one != other)
        error = InvalidArgumentError(
            f"consumers changed weights differently: to {list(one[1])} at round {one[0]} of a stream here, to "
            f"{list(other[1])} at round {other[0]} elsewhere; call set_weights() with the same at the same step on all"
        )
        failed = StreamFailed(
            stream=self.id,
            binding=message.binding,
            opening=message.opening,
            seq=message.round,
            failure=describe_failure(error),
        )
        self._host.send(peer, failed)

    def _learn_mixes(self, reader: Reader) -> bool:
        """Take over the changes of weights a reader knows of; say whether there are new ones."""
        if reader.mixes == self._mixes or (self._consumers > 1 and len(reader.mixes) < len(self._mixes)):
            return False
        self._mixes = reader.mixes
        return True

    def _knows_mixes(self, reader: Reader) -> bool:
        """Whether the reader's cut was made with all changes of weights before it: one may not have been told yet."""
        made_until = reader.cut_round - reader.cut.since
        return self._consumers == 1 or all(at >= made_until for at, _ in self._mixes[len(reader.mixes) :])

    def _start_or_wait(self, reader: Reader) -> None:
        places = {place for place, _ in self._readers}
        from_beginning = reader.cut.engine is None and reader.cut_round == 0 and reader.next_round == 0
        if from_beginning or len(places) >= self._consumers:
            self._start_pump()
        elif self._start_at is None:
            self._start_at = monotonic() + (GATHER_IN_STEP_S if self._coordinated else GATHER_S)

    def credit(self, peer: bytes, opening: int, credit: int) -> None:
        with self._changed:
            for reader in self._readers.values():
                if reader.peer == peer and reader.opening == opening and credit > reader.credit:
                    reader.credit = credit
                    self._changed.notify_all()

    def close_reader(self, peer: bytes, opening: int | None = None) -> None:
        """Forget a reader that closed the stream, or (no opening given) is gone. The last one takes the run along."""
        with self._changed:
            gone = [
                key
                for key, reader in self._readers.items()
                if reader.peer == peer and (opening is None or reader.opening == opening)
            ]
            for key in gone:
                del self._readers[key]
            if gone and not self._readers:
                self._drop_pump()
                self._mixes = ()  # should they all come back from an older state, they may change weights otherwise
            if gone:
                self._changed.notify_all()

    def tick(self, now: float) -> list[bytes]:
        """Start what has waited long enough. Return peers to be probed: others wait for their credit."""
        with self._changed:
            if self._start_at is not None and now >= self._start_at and self._readers:
                self._start_pump()
            every_s = PROBE_ALONE_S if len(self._readers) < 2 else PROBE_S
            if self._readers:
                self.idle_since = now
            if now - self._probed_at < every_s or self._pump is None:
                return []
            self._probed_at = now
            return [reader.peer for reader in self._blocking(self._pump)]

    def close(self) -> Pump | None:
        """End the run; return its pump, whose thread may take a moment."""
        with self._changed:
            self._closed = True
            pump = self._pump
            self._drop_pump()
            self._readers.clear()
            self._changed.notify_all()
            return pump

    @property
    def running(self) -> bool:
        """There is a run that has not ended."""
        pump = self._pump
        return pump is not None and pump.end is None and pump.failure is None

    @property
    def uses_slabs(self) -> bool:
        return any(reader.slab for reader in list(self._readers.values()))

    @property
    def pump(self) -> Pump | None:
        return self._pump

    # The run

    def _start_pump(self) -> None:
        terms = self._terms
        assert terms is not None
        self._drop_pump()
        readers = list(self._readers.values())
        lowest = min(filter(self._knows_mixes, readers), key=lambda reader: reader.cut_round, default=None)
        lowest = lowest or min(readers, key=lambda reader: reader.cut_round)
        start, start_round = lowest.cut, lowest.cut_round
        pump = Pump(
            self,
            self.id,
            start=start,
            start_round=start_round,
            share=terms.share,
            width=self._consumers,
            coordinated=self._coordinated,
            mixes=self._mixes,
            open_run=lambda pump: self._host.open_run(self, terms, start, pump),
        )
        for reader in self._readers.values():
            reader.told = 0
        self._pump = pump
        self.counts.runs += 1
        pump.start()

    def _drop_pump(self) -> None:
        pump, self._pump, self._start_at = self._pump, None, None
        if pump is not None:
            pump.abandon()
            self._changed.notify_all()

    def _blocking(self, pump: Pump) -> list[Reader]:
        """Return the readers without whose credit the next round may not be made."""
        return [
            reader
            for reader in self._readers.values()
            if reader.next_round <= pump.next_round and reader.sent_bytes >= reader.credit
        ]

    # What the pump says. Called by its thread.

    def wait_room(self, pump: Pump) -> int | None:
        began = monotonic()
        with self._changed:
            while True:
                if self._pump is not pump:
                    return None
                if not self._blocking(pump):
                    break
                self._changed.wait(1.0)
            self.counts.credit_wait_s += monotonic() - began
            waiting = [r for r in self._readers.values() if r.next_round <= pump.next_round]
            return min((reader.credit - reader.sent_bytes for reader in waiting), default=1 << 20)

    def deliver(self, pump: Pump, taken: Taken, cut: Cut) -> None:
        after = taken.seq + taken.count
        with self._sending:  # a pump that was just abandoned sends its last frames before the next one's first
            with self._changed:
                if self._pump is not pump:
                    return
                targets = [(r, r.next_round) for r in self._readers.values() if taken.seq <= r.next_round < after]
                for reader, _ in targets:
                    reader.next_round = after
                    reader.cut, reader.cut_round = cut, after
                pump.next_round = after
                self.counts.rounds += taken.count
            for reader, first in targets:
                elements = taken.of(reader.place, skip=first - taken.seq)
                self._send_rounds(pump, reader, first, elements, cut, alone=not taken.repeated)

    def _send_rounds(
        self, pump: Pump, reader: Reader, first: int, elements: Sequence[Element], cut: Cut, *, alone: bool
    ) -> None:
        """Send rounds from `first` on. `alone`: no other consumer gets these elements."""
        terms = self._terms
        assert terms is not None
        layout, buffers = encode_elements(elements)
        nbytes = len(layout) + sum(memoryview(buffer).nbytes for buffer in buffers)
        slab: SlabPlaces | None = None
        sent: Sequence[Any] = buffers
        compression = ""
        if reader.slab and nbytes >= SLAB_FROM_BYTES:
            alone = alone and sum(other.place == reader.place for other in list(self._readers.values())) < 2
            slab = self._host.place(reader.peer, buffers, exclusive=alone)
        if slab is not None:
            sent = ()
        elif not reader.slab:
            compression, sent = self._host.compress(buffers)
        with self._changed:
            reader.sent_bytes += nbytes
            self.counts.nbytes += nbytes
            done = self._newly_done(pump, reader)
            mixes = sum(at <= first for at, _ in self._mixes)
        header = Rounds(
            stream=self.id,
            binding=terms.binding,
            opening=reader.opening,
            seq=first,
            count=len(elements),
            cut=cut,
            nbytes=nbytes,
            layout=layout,
            done=done,
            slab=slab,
            compression=compression,
            mixes=mixes,
        )
        lease = None if slab is None else slab.lease
        unsent = None if lease is None else lambda: self._host.release(lease)
        self._host.send(reader.peer, header, sent, unsent=unsent)
        reader.sent_round = first + len(elements)

    def _newly_done(self, pump: Pump, reader: Reader) -> tuple[Named, ...]:
        if pump.ledger is None or self._pump is not pump:
            return ()  # the pump that came after tells it again, and more
        told, reader.told = reader.told, pump.ledger.done_count
        done = pump.ledger.done_since(told)
        everybody = min((other.told for other in self._readers.values()), default=0)
        if everybody - pump.ledger.forgotten >= LONG_LOG:
            pump.ledger.forget_done(everybody)
            pump.remembers_from = pump.next_round
        return done

    def ended(self, pump: Pump, end: End) -> None:
        with self._changed:
            if self._pump is not pump:
                return
            pump.end = end
            for reader in self._readers.values():
                self._tell_end(reader, pump, end)

    def _tell_end(self, reader: Reader, pump: Pump, end: End) -> None:
        terms = self._terms
        assert terms is not None
        self._host.send(
            reader.peer,
            StreamEnded(
                stream=self.id,
                binding=terms.binding,
                opening=reader.opening,
                seq=end.seq,
                cut=end.cut,
                done=self._newly_done(pump, reader),
                leftover=end.leftover,
            ),
        )

    def failed(self, pump: Pump, error: BaseException) -> None:
        failure = describe_failure(error)
        with self._changed:
            if self._pump is not pump:
                return
            pump.failure = error
            terms = self._terms
            assert terms is not None
            for reader in self._readers.values():
                self._host.send(
                    reader.peer,
                    StreamFailed(
                        stream=self.id,
                        binding=terms.binding,
                        opening=reader.opening,
                        seq=reader.sent_round,
                        failure=failure,
                    ),
                )

    def stale(self, pump: Pump, reason: str) -> None:
        with self._changed:
            if self._pump is not pump:
                return
            self._drop_pump()
            for reader in self._readers.values():
                self._refuse(reader, reason)
            self._readers.clear()


def encode_elements(elements: Sequence[Element]) -> tuple[bytes, Sequence[Any]]:
    try:
        return encode_run(elements)
    except CodecError:
        for element in elements:
            encode_run([element])  # one by one, the error says which leaf it is
        raise
