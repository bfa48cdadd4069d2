"""A stream that several trainers share: one run makes its rounds, a window keeps them, each trainer has its place.

Rules, beside those of all streams (`served`):

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
6. Batches are made where the window lies, at its cost: what an engine reads ahead would otherwise be beside the budget.

Encoding happens outside of the lock, in the pump's thread; sending is putting a frame into the socket's queue, so
whoever finds that a reader can be served, serves it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any, Protocol, TypeVar

import numpy as np

from penstock.core.ids import StreamId
from penstock.wire.frames import Credit, OpenStream, SlabPlaces
from penstock.wire.jobs import Cut, JobSpec
from penstock.worker.encoding import Frame, encode_frame
from penstock.worker.grouping import Taken
from penstock.worker.places import Places, SharedReader
from penstock.worker.pump import FRAME_BYTES, End, Pump
from penstock.worker.served import PROBE_S, SLAB_FROM_BYTES, ServedHost, ServedStream
from penstock.worker.window import Entry, Leaving, Window

GATHER_S = 0.3  # after a loss: how long the first reader to return waits for the others
FLUSH_S = 10.0  # how long memory that is being sent is waited for, before more is taken; a dead peer is cut off sooner
MOMENT_S = 0.5  # and memory that readers have, or operators
RETRY_S = 0.01  # memory comes back without a word
FRAMES_A_WINDOW = 8  # at least: what goes from the window goes frame by frame

Made = TypeVar("Made")


class SharedHost(ServedHost, Protocol):
    def array(self, shape: Sequence[int], dtype: Any) -> Any:
        """Return an array where readers on this host can see it; None where there is no room."""

    def keep(self, buffers: Sequence[Any]) -> tuple[SlabPlaces, Sequence[Any]] | None:
        """Put buffers where readers on this host can see them; None where there is no room."""

    def lease(self, peer: bytes, places: SlabPlaces) -> SlabPlaces | None: ...

    def window_share(self) -> int:
        """Return how many bytes the window of one stream may have now."""

    def say(self, text: str) -> None: ...


class SharedStream(ServedStream[int, SharedReader]):
    _host: SharedHost

    def __init__(self, stream: StreamId, host: SharedHost, spec: JobSpec) -> None:
        self._places = Places(spec)
        super().__init__(stream, host, self._places.readers)
        self._waits = self._places.waits
        self._timeout_s = spec.trainer_timeout_s
        self._window = Window(Cut(), 0)
        self._end: End | None = None
        self._pump_waits = False
        self._leaving = Leaving()
        self._stuck = False
        """Memory was waited for in vain, and is not again until there is room."""

    # What readers say

    def open(self, peer: bytes, message: OpenStream, consumers: int = 1) -> None:
        with self._changed:
            if self._accept(peer, message):
                reader = self._places.admit(peer, message, monotonic())
                self._admit(reader)
                self._serve(reader)
                self._changed.notify_all()

    def _key(self, message: OpenStream) -> int:
        return message.replica

    def _forget_readers(self) -> None:
        """What was made stays; who has not come again yet is expected."""
        for reader in list(self._readers.values()):
            self._places.forget(reader, monotonic())

    def _forget_all(self) -> None:
        self._readers.clear()
        self._places.absent.clear()
        self._clear()

    def _admit(self, reader: SharedReader) -> None:
        """See that the run gets to where the reader stands, or was."""
        idle = self.pump is None and self._end is None and not len(self._window)
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
            elif self.pump is None:
                self._start_pump()
        elif self._end is None and (self.pump is None or self.pump.failure is not None):
            self._start_pump()

    def _needs_again(self, reader: SharedReader) -> bool:
        """Rounds are to be made once more for it: they were made elsewhere, or before it came."""
        if not self._waits or reader.next_round is None or reader.was_passed_over:
            return False
        return reader.next_round < self._window.first

    def take_credit(self, peer: bytes, message: Credit) -> None:
        with self._changed:
            for reader in self._of(peer, message.opening).values():
                reader.credit = max(reader.credit, message.credit)
                reader.taken = max(reader.taken, message.round)
                reader.heard_at = monotonic()
                reader.passed_over = False
                self._serve(reader)
                if self._pump_waits and self._places.demand(self._window.end):
                    self._changed.notify_all()

    def close_reader(self, peer: bytes, opening: int | None = None, *, leaving: bool = False, taken: int = -1) -> None:
        with self._changed:
            for reader in self._of(peer, opening).values():
                self._places.forget(reader, monotonic(), leaving=leaving, taken=taken)
                self._changed.notify_all()

    def tick(self, now: float) -> list[bytes]:
        """Pass over who is silent, too."""
        with self._changed:
            if self._readers:
                self.idle_since = now
            if self._start_at is not None and now >= self._start_at and self._readers:
                self._start_where_readers_are()
            if self._waits:
                self._pass_over(now)
            for reader in self._readers.values():
                self._serve(reader)
            if now - self._probed_at < PROBE_S:
                return []
            self._probed_at = now
            return [reader.peer for reader in self._readers.values() if not reader.hungry]

    def retire(self) -> None:
        """Another epoch needs the memory: if nobody reads this one, let go of what can be made again."""
        with self._changed:
            if not self._readers and not self._places.absent and not self._places.lacks_trainers:
                self._drop_pump()
                self._clear()
                self._window, self._end = Window(Cut(), 0), None

    @property
    def holds_memory(self) -> bool:
        return self.running or bool(len(self._window))

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
        self._run_from(self._window.end_cut, self._window.end, frame_bytes=self._frame_bytes())

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
        self._let_go(self._window.evict())

    def _let_go(self, entry: Entry) -> None:
        self._leaving.add(entry)
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
        return len(self._window) > 0 and not self._places.needs(self._window.oldest.after)

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
        if self.pump is None and self._end is None:
            return
        window = self._window
        if reader.next_round is None:
            reader.next_round = reader.taken = window.first
        while reader.hungry:
            entry = window.holding(reader.next_round)
            if entry is None or not self._send(reader, entry):
                break
        end = self._end
        if end is not None and not reader.told_end and (reader.next_round >= end.seq or not len(window)):
            self._tell_end(reader, end)

    def _send(self, reader: SharedReader, entry: Entry) -> bool:
        """Send rounds, unless too much is on its way already; it is tried again, and may be skipped until then."""
        slab: SlabPlaces | None = None
        if reader.slab and entry.places is not None and entry.nbytes >= SLAB_FROM_BYTES:
            slab = self._host.lease(reader.peer, entry.places)
        if slab is None and self._leaving.own_bytes > self._host.window_share() // FRAMES_A_WINDOW:
            return False
        self._send_frame(
            reader,
            entry,
            slab,
            skipped=max(0, entry.seq - reader.due),
            shared=entry.made_for != reader.trainer,
            had=max(0, (reader.next_round or 0) - entry.seq),
        )
        reader.sent_bytes += entry.nbytes
        self._places.sent(reader, entry.after)
        self.counts.nbytes += entry.nbytes
        return True

    def _packed(self, frame: Frame) -> tuple[str, Sequence[Any]]:
        assert isinstance(frame, Entry)
        if frame.packed is None:
            self._window.pack(frame, *super()._packed(frame))
        assert frame.packed is not None
        return frame.packed

    def _tell_end(self, reader: SharedReader, end: End) -> None:
        reader.told_end = True
        self._send_end(reader, end, skipped=max(0, end.seq - reader.due))
        self._places.sent(reader, max(end.seq, reader.due))

    # What the pump says. Called by its thread.

    def _room(self, pump: Pump) -> int | None:
        wanted = self._places.demand(self._window.end)
        self._pump_waits = not wanted or (self._waits and not self._make_room(self._frame_bytes()))
        return None if self._pump_waits else self._frame_bytes()

    def deliver(self, pump: Pump, taken: Taken, cut: Cut) -> None:
        frame = encode_frame(taken.seq, taken.of(0), cut)
        with self._changed:
            if self.pump is not pump:
                return
            self._make_room(frame.nbytes)
        entry = self._keep(pump, frame)
        with self._changed:
            if self.pump is not pump:
                self._let_go(entry)
                return
            entry.made_for = next((r.trainer for r in self._readers.values() if r.wants(entry.seq)), None)
            self._window.add(entry)
            pump.next_round = entry.after
            self.counts.rounds += entry.count
            if pump.ledger is not None:
                # Cuts name what they need, and nobody saves what is done.
                pump.ledger.forget_done(pump.ledger.done_count)
            for reader in self._readers.values():
                self._serve(reader)

    def allocate(self, pump: Pump, shape: Sequence[int], dtype: Any) -> Any:
        """Return memory for a batch in the making, for which the window gives way in part; None: there is none."""
        share = self._host.window_share()
        if math.prod(shape) * np.dtype(dtype).itemsize > share:
            return None
        return self._take_memory(pump, partial(self._host.array, shape, dtype), least_bytes=share // 4)

    def _keep(self, pump: Pump, frame: Frame) -> Entry:
        """Put a frame where readers map it; slow readers may hold much of that, and then the window is smaller."""
        kept = self._take_memory(pump, partial(self._host.keep, frame.buffers), least_bytes=0)
        places, buffers = (None, frame.buffers) if kept is None else kept
        return Entry(
            seq=frame.seq,
            count=frame.count,
            cut=frame.cut,
            layout=frame.layout,
            buffers=buffers,
            nbytes=frame.nbytes,
            places=places,
        )

    def _take_memory(self, pump: Pump, take: Callable[[], Made | None], *, least_bytes: int) -> Made | None:
        """Return what `take` gives, once there is room: the window gives way until it has `least_bytes`.

        What is on its way to readers is waited for. What readers or operators hold may be held for long, and operators
        may wait for more themselves: for that it waits a moment, and no more until there was room again.
        """
        began = monotonic()
        while (made := take()) is None:
            with self._changed:
                if self._window.nbytes > least_bytes and self._may_evict():
                    self._evict()
                elif self._stuck or pump.abandoned:
                    return None
                else:
                    self._changed.wait(RETRY_S)
                    self._stuck = monotonic() - began > (FLUSH_S if self._leaving else MOMENT_S)
        self._stuck = False
        return made

    def ended(self, pump: Pump, end: End) -> None:
        with self._changed:
            if self.pump is not pump:
                return
            pump.end = self._end = end
            for reader in self._readers.values():
                self._serve(reader)
