"""A stream that several trainers share: one run makes its rounds, a window keeps them, each trainer has its place.

Rules:

1. A round is made when a reader that is through with the window has credit for it, and for nobody else. It is encoded
   once; every reader is sent the same buffers, or leases of the same memory.
2. `skip`: what does not fit into the window's budget goes, oldest first, whoever has not read it. A reader that comes
   too late for a round is told how many it missed. `wait`: a round goes when every trainer has taken it; until then the
   front-runner waits. A trainer that keeps others waiting and is silent for `timeout_s` is passed over from then on.
3. A reader that holds nothing begins at the oldest round in the window, or, if this process has served that trainer
   before, after what it was sent: nobody is given a round twice. With `trainers` it begins at the stream's beginning.
4. Readers of one stream stand at different rounds. After a loss the run starts again at the newest cut (`skip`) or the
   oldest (`wait`); those ahead of it wait until it gets there, and discard by `seq`.
5. The window outlives readers, bindings and runs. Rounds follow from the stream's list of splits, so those of an older
   binding are as good. It goes with the stream, or when another epoch needs its memory.

One lock guards all of it. Encoding happens outside of it, in the pump's thread; sending is putting a frame into the
socket's queue, so whoever finds that a reader can be served, serves it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

from penstock.core.ids import StreamId
from penstock.wire.failures import describe_failure
from penstock.wire.frames import (
    Credit,
    FromRunner,
    OpenStream,
    Rounds,
    SlabPlaces,
    StreamEnded,
    StreamFailed,
    StreamRefused,
)
from penstock.wire.jobs import Cut, JobSpec
from penstock.worker.grouping import Taken
from penstock.worker.places import Places, SharedReader
from penstock.worker.pump import FRAME_BYTES, End, OpenedRun, Pump
from penstock.worker.streams import SLAB_FROM_BYTES, Counts, Terms, encode_elements
from penstock.worker.window import Entry, Window

GATHER_S = 0.3  # after a loss: how long the first reader to return waits for the others
PROBE_S = 2.0
FLUSH_S = 10.0  # how long memory that is being sent is waited for, before more is taken; a dead peer is cut off sooner
FRAMES_A_WINDOW = 8  # at least: what goes from the window goes frame by frame


@dataclass(slots=True)
class SharedCounts(Counts):
    sent: int = 0
    """Rounds sent, to all readers together."""
    skipped: int = 0


class SharedHost(Protocol):
    """What a shared stream needs of the process it lives in."""

    def send(
        self, peer: bytes, header: FromRunner, buffers: Sequence[Any] = (), *, unsent: Callable[[], None] | None = None
    ) -> None: ...

    def array(self, shape: Sequence[int], dtype: Any) -> Any:
        """Return an array where readers on this host can see it; None where there is no room."""

    def keep(self, buffers: Sequence[Any]) -> tuple[SlabPlaces, Sequence[Any]] | None:
        """Put buffers where readers on this host can see them; None where there is no room."""

    def lease(self, peer: bytes, places: SlabPlaces) -> SlabPlaces | None: ...

    def release(self, lease: int) -> None: ...

    def compress(self, buffers: Sequence[Any]) -> tuple[str, Sequence[Any]]: ...

    def open_run(self, stream: Any, terms: Terms, start: Cut, pump: Pump) -> OpenedRun: ...

    def window_share(self) -> int:
        """Return how many bytes the window of one stream may have now."""

    def say(self, text: str) -> None: ...


class SharedStream:
    def __init__(self, stream: StreamId, host: SharedHost, spec: JobSpec) -> None:
        self.id = stream
        self.counts = SharedCounts()
        self._host = host
        self._places = Places(spec)
        self._readers = self._places.readers
        self._waits = self._places.waits
        self._timeout_s = spec.trainer_timeout_s
        self._changed = threading.Condition()
        self._terms: Terms | None = None
        self._window = Window(Cut(), 0)
        self._pump: Pump | None = None
        self._end: End | None = None
        self._start_at: float | None = None
        self._probed_at = 0.0
        self._pump_waits = False
        self._closed = False
        self.idle_since = monotonic()

    # What readers say. Called by the data socket's thread: nothing here waits.

    def open(self, peer: bytes, message: OpenStream, consumers: int = 1) -> None:
        with self._changed:
            refusal = self._refusal(message)
            if refusal:
                self._host.send(peer, StreamRefused(stream=self.id, opening=message.opening, reason=refusal))
                return
            if self._terms is None or message.binding > self._terms.binding:
                self._rebind(message)
            present = self._readers.get(message.replica)
            if present is not None and present.opening == message.opening and present.peer == peer:
                return  # said twice
            reader = self._places.admit(peer, message, monotonic())
            self._admit(reader)
            self._serve(reader)
            self._changed.notify_all()

    def _refusal(self, message: OpenStream) -> str:
        if self._closed:
            return "this worker is closing"
        terms = self._terms
        if terms is not None and message.binding < terms.binding:
            return f"binding {message.binding} is over, the stream has binding {terms.binding} by now"
        if message.cut_round > message.round:
            return f"the cut is that of round {message.cut_round}, after round {message.round}"
        present = self._readers.get(message.replica)
        if present is not None and message.opening < present.opening:
            return f"opening {message.opening} is over, opening {present.opening} has come since"
        return ""

    def _rebind(self, message: OpenStream) -> None:
        """Take over a newer binding. What was made stays; who has not come again yet is told to."""
        self._drop_pump()
        for reader in list(self._readers.values()):
            self._refuse(reader, f"the stream has binding {message.binding} by now")
            self._places.forget(reader, monotonic())
        self._terms = Terms(
            attempt=message.attempt,
            epoch=message.epoch,
            feed=message.feed,
            share=message.share,
            binding=message.binding,
        )

    def _refuse(self, reader: SharedReader, reason: str) -> None:
        self._host.send(reader.peer, StreamRefused(stream=self.id, opening=reader.opening, reason=reason))

    def _admit(self, reader: SharedReader) -> None:
        """See that the run gets to where the reader stands, or was."""
        idle = self._pump is None and self._end is None and not len(self._window)
        if self._start_at is not None:
            return
        if idle:
            from_beginning = reader.cut.engine is None and reader.cut_round == 0
            if from_beginning:
                self._start(reader.cut, reader.cut_round)
            else:
                self._start_at = monotonic() + GATHER_S
        elif self._needs_again(reader):
            self._start(reader.cut, reader.cut_round)
        elif reader.cut_round > self._window.end:
            if not self._waits:
                self._start(reader.cut, reader.cut_round)
            elif self._pump is None:
                self._start_pump()
        elif self._end is None and (self._pump is None or self._pump.failure is not None):
            self._start_pump()

    def _needs_again(self, reader: SharedReader) -> bool:
        """Rounds are to be made once more for it: they were made elsewhere, or before it came."""
        if not self._waits or reader.next_round is None or reader.was_passed_over:
            return False
        return reader.next_round < self._window.first

    def take_credit(self, peer: bytes, message: Credit) -> None:
        with self._changed:
            for reader in self._places.find(peer, message.opening):
                reader.credit = max(reader.credit, message.credit)
                reader.taken = max(reader.taken, message.round)
                reader.heard_at = monotonic()
                reader.passed_over = False
                self._serve(reader)
                if self._pump_waits:
                    self._changed.notify_all()

    def close_reader(self, peer: bytes, opening: int | None = None, *, leaving: bool = False, taken: int = -1) -> None:
        """Forget a reader that closed the stream, or (no opening given) is gone; `taken`: where its trainer stands."""
        with self._changed:
            for reader in self._places.find(peer, opening):
                self._places.forget(reader, monotonic(), leaving=leaving, taken=taken)
                self._changed.notify_all()

    def tick(self, now: float) -> list[bytes]:
        """Start what has waited long enough, and pass over who is silent. Return peers to be probed."""
        with self._changed:
            if self._readers:
                self.idle_since = now
            if self._start_at is not None and now >= self._start_at and self._readers:
                self._start_where_readers_are()
            if self._waits:
                self._pass_over(now)
            if now - self._probed_at < PROBE_S:
                return []
            self._probed_at = now
            return [reader.peer for reader in self._readers.values() if not reader.hungry]

    def close(self) -> Pump | None:
        """End the run; return its pump, whose thread may take a moment."""
        with self._changed:
            self._closed = True
            pump = self._pump
            self._drop_pump()
            self._readers.clear()
            self._clear()
            self._changed.notify_all()
            return pump

    def retire(self) -> None:
        """Another epoch needs the memory: if nobody reads this one, let go of what can be made again."""
        with self._changed:
            if not self._readers and not self._places.absent and not self._places.lacks_trainers:
                self._drop_pump()
                self._clear()
                self._window, self._end = Window(Cut(), 0), None

    @property
    def running(self) -> bool:
        pump = self._pump
        return pump is not None and pump.end is None and pump.failure is None

    @property
    def holds_memory(self) -> bool:
        return self.running or bool(len(self._window))

    @property
    def pump(self) -> Pump | None:
        return self._pump

    @property
    def attempt(self) -> str:
        return "" if self._terms is None else self._terms.attempt

    # The run

    def _start_where_readers_are(self) -> None:
        held = [reader for reader in self._readers.values() if reader.next_round is not None] or list(
            self._readers.values()
        )
        choose = min if self._waits else max
        chosen = choose(held, key=lambda reader: reader.cut_round)
        self._start(chosen.cut, chosen.cut_round)

    def _start(self, cut: Cut, round_: int) -> None:
        """Begin to make rounds there, with an empty window."""
        self._clear()
        self._window, self._end = Window(cut, round_), None
        self._start_pump()

    def _start_pump(self) -> None:
        terms, window = self._terms, self._window
        assert terms is not None
        self._drop_pump()
        start = window.end_cut
        self._pump = Pump(
            self,
            self.id,
            start=start,
            start_round=window.end,
            share=terms.share,
            width=1,
            open_run=lambda pump: self._host.open_run(self, terms, start, pump),
            frame_bytes=self._frame_bytes(),
        )
        self.counts.runs += 1
        self._pump.start()

    def _drop_pump(self) -> None:
        pump, self._pump, self._start_at = self._pump, None, None
        if pump is not None:
            pump.abandon()
            self._changed.notify_all()

    def _frame_bytes(self) -> int:
        return max(1, min(FRAME_BYTES, self._host.window_share() // FRAMES_A_WINDOW))

    # The window

    def trim(self) -> None:
        """Make room: there are more streams now."""
        with self._changed:
            self._make_room(0)

    def _clear(self) -> None:
        while len(self._window):
            self._evict()

    def _evict(self) -> None:
        entry = self._window.evict()
        if entry.places is not None:
            self._host.release(entry.places.lease)

    def _make_room(self, nbytes: int) -> bool:
        """Let go of the oldest rounds until so much fits; False if those left are still needed."""
        limit = self._host.window_share()
        while len(self._window) and self._window.nbytes + nbytes > limit:
            if not self._may_evict():
                return False
            self._evict()
        return True

    def _may_evict(self) -> bool:
        return not self._places.needs(self._window.oldest.after)

    def _pass_over(self, now: float) -> None:
        """Wait no longer for trainers that say nothing, where others do wait for them."""
        if not self._held_back():
            return
        for who in self._places.pass_over(self._window.oldest.after, now):
            self._host.say(
                f"stream {self.id}: {who} and others wait; after {self._timeout_s:.0f} s (trainer_timeout) they go on "
                "without, and what leaves the window meanwhile will be skipped"
            )
            self._changed.notify_all()

    def _held_back(self) -> bool:
        limit = self._host.window_share()
        full = len(self._window) > 0 and self._window.nbytes + self._frame_bytes() > limit
        return full and self._places.demand(self._window.end) and not self._may_evict()

    # Serving

    def _serve(self, reader: SharedReader) -> None:
        """Send what the window has for a reader, as far as its credit goes."""
        if self._pump is None and self._end is None:
            return
        window = self._window
        if reader.next_round is None:
            reader.next_round = reader.taken = window.first
        while reader.hungry:
            entry = window.holding(reader.next_round)
            if entry is None:
                break
            self._send(reader, entry)
        end = self._end
        if end is not None and not reader.told_end and (reader.next_round >= end.seq or not len(window)):
            self._tell_end(reader, end)

    def _send(self, reader: SharedReader, entry: Entry) -> None:
        terms = self._terms
        assert terms is not None
        slab: SlabPlaces | None = None
        buffers: Sequence[Any] = entry.buffers
        compression = ""
        if reader.slab and entry.places is not None and entry.nbytes >= SLAB_FROM_BYTES:
            slab = self._host.lease(reader.peer, entry.places)
        if slab is not None:
            buffers = ()
        elif not reader.slab:
            if entry.packed is None:
                entry.packed = self._host.compress(entry.buffers)
            compression, buffers = entry.packed
        skipped = max(0, entry.seq - reader.due)
        header = Rounds(
            stream=self.id,
            binding=terms.binding,
            opening=reader.opening,
            seq=entry.seq,
            count=entry.count,
            cut=entry.cut,
            nbytes=entry.nbytes,
            layout=entry.layout,
            slab=slab,
            compression=compression,
            skipped=skipped,
            shared=entry.made_for != reader.trainer,
            had=max(0, (reader.next_round or 0) - entry.seq),
        )
        lease = None if slab is None else slab.lease
        unsent = None if lease is None else lambda: self._host.release(lease)
        self._host.send(reader.peer, header, buffers, unsent=unsent)
        reader.sent_bytes += entry.nbytes
        self._places.sent(reader, entry.after)
        self.counts.nbytes += entry.nbytes
        self.counts.sent += entry.count
        self.counts.skipped += skipped

    def _tell_end(self, reader: SharedReader, end: End) -> None:
        terms = self._terms
        assert terms is not None
        reader.told_end = True
        self._host.send(
            reader.peer,
            StreamEnded(
                stream=self.id,
                binding=terms.binding,
                opening=reader.opening,
                seq=end.seq,
                cut=end.cut,
                leftover=end.leftover,
                skipped=max(0, end.seq - reader.due),
            ),
        )
        self._places.sent(reader, max(end.seq, reader.due))

    # What the pump says. Called by its thread.

    def wait_room(self, pump: Pump) -> int | None:
        began = monotonic()
        with self._changed:
            while True:
                if self._pump is not pump:
                    return None
                if self._places.demand(self._window.end) and (not self._waits or self._make_room(self._frame_bytes())):
                    break
                self._pump_waits = True
                self._changed.wait(1.0)
            self._pump_waits = False
            self.counts.credit_wait_s += monotonic() - began
            return self._frame_bytes()

    def deliver(self, pump: Pump, taken: Taken, cut: Cut) -> None:
        layout, buffers = encode_elements(taken.of(0))
        nbytes = len(layout) + sum(memoryview(buffer).nbytes for buffer in buffers)
        with self._changed:
            if self._pump is not pump:
                return
            self._make_room(nbytes)
        kept = self._keep(buffers)
        entry = Entry(
            seq=taken.seq,
            count=taken.count,
            cut=cut,
            layout=layout,
            buffers=buffers if kept is None else kept[1],
            nbytes=nbytes,
            places=None if kept is None else kept[0],
        )
        with self._changed:
            if self._pump is not pump:
                if entry.places is not None:
                    self._host.release(entry.places.lease)
                return
            entry.made_for = next((r.trainer for r in self._readers.values() if r.wants(entry.seq)), None)
            self._window.add(entry)
            pump.next_round = entry.after
            self.counts.rounds += entry.count
            if pump.ledger is not None:
                pump.ledger.forget_done(
                    pump.ledger.done_count
                )  # cuts name what they need, and nobody saves what is done
            for reader in self._readers.values():
                self._serve(reader)

    def allocate(self, shape: Sequence[int], dtype: Any) -> Any:
        """Return memory for a batch in the making, at the window's cost but not all of it; None: there is none.

        What an engine reads ahead would otherwise lie beside the budget, and a fast one reads far ahead.
        """
        while (made := self._host.array(shape, dtype)) is None:
            with self._changed:
                small = self._window.nbytes * 4 < self._host.window_share()
                if small or not len(self._window) or not self._may_evict():
                    return None
                self._evict()
        return made

    def _keep(self, buffers: Sequence[Any]) -> tuple[SlabPlaces, Sequence[Any]] | None:
        """Put buffers into the memory readers map; slow readers may hold much of it, and then the window is smaller."""
        give_up_at = monotonic() + FLUSH_S
        while (kept := self._host.keep(buffers)) is None:
            with self._changed:
                if len(self._window) and self._may_evict():
                    self._evict()
                    continue
                if self._waits or self._closed or monotonic() > give_up_at:
                    return None
                self._changed.wait(0.01)  # what is on its way to readers is free once it has left
        return kept

    def ended(self, pump: Pump, end: End) -> None:
        with self._changed:
            if self._pump is not pump:
                return
            pump.end = self._end = end
            for reader in self._readers.values():
                self._serve(reader)

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
                        seq=reader.due,
                        failure=failure,
                    ),
                )

    def stale(self, pump: Pump, reason: str) -> None:
        with self._changed:
            if self._pump is not pump:
                return
            self._drop_pump()
            for reader in list(self._readers.values()):
                self._refuse(reader, reason)
            self._readers.clear()
            self._places.absent.clear()
            self._clear()
