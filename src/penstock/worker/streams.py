"""A stream whose rounds are dealt to consumers: who reads, from which round, with how much credit.

Rules, beside those of all streams (`served`):

1. A stream starts when all its consumers have opened it, or one at its very beginning (nothing can be lower), or after
   a moment. It starts at the lowest cut: so it knows of every split that was opened or done since any reader's cut.
   Whoever opens later at a lower round, or with a lower cut, makes it start again, lower.
2. A reader is sent the rounds from its own on, each once, in order, and nothing twice within an opening.
3. A round is made only while every reader that needs it has credit left. One frame may exceed it.

Encoding and sending happen outside of the lock, in the pump's thread; a reader that is replaced meanwhile gets nothing
of that, because frames carry the opening they were made for.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

from penstock.core.errors import InvalidArgumentError
from penstock.core.ids import StreamId
from penstock.wire.failures import describe_failure
from penstock.wire.frames import Credit, OpenStream, SlabPlaces, StreamFailed
from penstock.wire.jobs import Cut, Named
from penstock.worker.encoding import encode_frame
from penstock.worker.grouping import Taken
from penstock.worker.pump import End, Mixes, Pump
from penstock.worker.served import PROBE_S, SLAB_FROM_BYTES, ServedHost, ServedStream

GATHER_S = 1.0  # how long the first of several consumers waits for the others to open a stream
GATHER_IN_STEP_S = 0.1  # those read in step: one that waits for this stream is not ahead of one that is still training
PROBE_ALONE_S = 10.0  # how often a reader that keeps only a run waiting is looked after
LONG_LOG = 4_096  # entries that every reader knows, kept for one that may open with an older cut

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
    due: int
    """The first not sent yet. `next_round` is ahead of it while rounds are on their way to the socket."""
    sent_bytes: int = 0
    told: int = 0
    """Entries of the run's log of done splits that this reader knows."""


class Host(ServedHost, Protocol):
    def place(self, peer: bytes, buffers: Sequence[Any], *, exclusive: bool) -> SlabPlaces | None:
        """Put buffers where a reader on this host can see them, and it alone; None where there is no room."""


class Stream(ServedStream[Key, Reader]):
    _host: Host

    def __init__(self, stream: StreamId, host: Host, *, coordinated: bool = False) -> None:
        super().__init__(stream, host, {})
        self._coordinated = coordinated
        self._sending = threading.Lock()
        self._consumers = 1
        self._mixes: Mixes = ()
        """All changes of weights that any reader of this binding knew of."""

    # What readers say

    def open(self, peer: bytes, message: OpenStream, consumers: int) -> None:
        with self._changed:
            self._consumers = consumers
            if not self._accept(peer, message):
                return
            both = min(len(message.mixes), len(self._mixes))
            if consumers > 1 and message.mixes[:both] != self._mixes[:both]:
                self._refuse_weights(peer, message)
                return
            key = self._key(message)
            reader = Reader(
                peer=peer,
                opening=message.opening,
                place=key[0],
                next_round=message.round,
                due=message.round,
                cut=message.cut,
                cut_round=message.cut_round,
                credit=message.credit,
                slab=message.slab,
                mixes=message.mixes,
            )
            self._readers[key] = reader
            if self._learn_mixes(reader) and self.pump is not None:
                self._start_pump()
            else:
                self._admit(reader)
            self._changed.notify_all()

    def _refusal(self, message: OpenStream) -> str:
        if message.consumer < 0 or (self._consumers > 1 and message.consumer >= self._consumers):
            return f"there is no consumer {message.consumer}: the job has {self._consumers}"
        return super()._refusal(message)

    def _key(self, message: OpenStream) -> Key:
        return (message.consumer if self._consumers > 1 else 0), message.replica

    def _forget_readers(self) -> None:
        self._readers.clear()
        self._mixes = ()  # should they all come back from an older state, they may change weights otherwise

    def _admit(self, reader: Reader) -> None:
        """Let a new reader in: the run goes on for it, or starts, or starts again lower."""
        pump = self.pump
        if pump is None:
            self._start_or_wait(reader)
        elif pump.failure is not None or reader.next_round < pump.next_round or reader.cut_round < pump.remembers_from:
            self._start_pump()
        elif pump.end is not None:
            self._send_end(reader, pump.end, done=self._newly_done(pump, reader))

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

    def take_credit(self, peer: bytes, message: Credit) -> None:
        with self._changed:
            for reader in self._of(peer, message.opening).values():
                if message.credit > reader.credit:
                    reader.credit = message.credit
                    self._changed.notify_all()

    def close_reader(self, peer: bytes, opening: int | None = None, *, leaving: bool = False, taken: int = -1) -> None:
        """Forget a reader; the last one takes the run along. Nobody here waits for one that comes back."""
        with self._changed:
            gone = self._of(peer, opening)
            for key in gone:
                del self._readers[key]
            if gone and not self._readers:
                self._drop_pump()
                self._forget_readers()
            if gone:
                self._changed.notify_all()

    def tick(self, now: float) -> list[bytes]:
        with self._changed:
            if self._start_at is not None and now >= self._start_at and self._readers:
                self._start_pump()
            every_s = PROBE_ALONE_S if len(self._readers) < 2 else PROBE_S
            if self._readers:
                self.idle_since = now
            if now - self._probed_at < every_s or self.pump is None:
                return []
            self._probed_at = now
            return [reader.peer for reader in self._blocking(self.pump)]

    @property
    def uses_slabs(self) -> bool:
        return any(reader.slab for reader in list(self._readers.values()))

    # The run

    def _start_pump(self) -> None:
        readers = list(self._readers.values())
        lowest = min(filter(self._knows_mixes, readers), key=lambda reader: reader.cut_round, default=None)
        lowest = lowest or min(readers, key=lambda reader: reader.cut_round)
        for reader in readers:
            reader.told = 0
        self._run_from(
            lowest.cut, lowest.cut_round, width=self._consumers, coordinated=self._coordinated, mixes=self._mixes
        )

    def _blocking(self, pump: Pump) -> list[Reader]:
        """Return the readers without whose credit the next round may not be made."""
        return [
            reader
            for reader in self._readers.values()
            if reader.next_round <= pump.next_round and reader.sent_bytes >= reader.credit
        ]

    # What the pump says. Called by its thread.

    def _room(self, pump: Pump) -> int | None:
        if self._blocking(pump):
            return None
        waiting = [r for r in self._readers.values() if r.next_round <= pump.next_round]
        return min((reader.credit - reader.sent_bytes for reader in waiting), default=1 << 20)

    def deliver(self, pump: Pump, taken: Taken, cut: Cut) -> None:
        after = taken.seq + taken.count
        with self._sending:  # a pump that was just abandoned sends its last frames before the next one's first
            with self._changed:
                if self.pump is not pump:
                    return
                targets = [(r, r.next_round) for r in self._readers.values() if taken.seq <= r.next_round < after]
                for reader, _ in targets:
                    reader.next_round = after
                    reader.cut, reader.cut_round = cut, after
                pump.next_round = after
                self.counts.rounds += taken.count
            for reader, first in targets:
                self._send_rounds(pump, reader, taken, first, cut)

    def _send_rounds(self, pump: Pump, reader: Reader, taken: Taken, first: int, cut: Cut) -> None:
        frame = encode_frame(first, taken.of(reader.place, skip=first - taken.seq), cut)
        slab: SlabPlaces | None = None
        if reader.slab and frame.nbytes >= SLAB_FROM_BYTES:
            alone = sum(other.place == reader.place for other in list(self._readers.values())) < 2
            slab = self._host.place(reader.peer, frame.buffers, exclusive=alone and not taken.repeated)
        with self._changed:
            reader.sent_bytes += frame.nbytes
            self.counts.nbytes += frame.nbytes
            done = self._newly_done(pump, reader)
            mixes = sum(at <= first for at, _ in self._mixes)
        self._send_frame(reader, frame, slab, done=done, mixes=mixes)
        reader.due = frame.after

    def _newly_done(self, pump: Pump, reader: Reader) -> tuple[Named, ...]:
        if pump.ledger is None or self.pump is not pump:
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
            if self.pump is not pump:
                return
            pump.end = end
            for reader in self._readers.values():
                self._send_end(reader, end, done=self._newly_done(pump, reader))
