"""A stream that trainers share: its window's memory, and leases of it. Who is sent what is decided in `stream.sharing`.

Rounds are encoded once; every reader is sent the same buffers, or leases of the same memory. Batches are made where the
window lies, at its cost: what an engine reads ahead would otherwise be beside the budget.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any, TypeVar

import numpy as np

from penstock.core.ids import AttemptId, StreamId
from penstock.stream.rounds import StartRun, Taken
from penstock.stream.serving import ReaderSays
from penstock.stream.sharing import FRAMES_A_WINDOW, Shared
from penstock.stream.window import Entry, RankReader
from penstock.wire.frames import Credit, Rounds, SlabPlaces
from penstock.wire.jobs import Cut, Named, delivery_of
from penstock.worker.host import LEASES_SHARE, Host
from penstock.worker.streams import SLAB_FROM_BYTES, Frame, HostedStream, Pump, encode_frame

FLUSH_S = 10.0  # how long memory that is being sent is waited for, before more is taken; a dead peer is cut off sooner
MOMENT_S = 0.5  # and memory that readers have, or operators
RETRY_S = 0.01  # memory comes back without a word
FORGET_SHARED_S = 600.0  # longer than other streams: it also knows what trainers had that left without a word

Made = TypeVar("Made")


class KeptFrame:
    """A frame of one seat in the window."""

    def __init__(self, frame: Frame, places: SlabPlaces | None, buffers: Sequence[Any]) -> None:
        self.frame = frame
        self.places = places
        """Where the buffers lie in memory that readers on this host map; None: only here."""
        self.buffers = buffers
        self._packed: tuple[str, Sequence[Any]] | None = None

    def packed(self, compress: Callable[[Sequence[Any]], tuple[str, Sequence[Any]]]) -> tuple[int, str, Sequence[Any]]:
        """Return the buffers as they go to readers elsewhere, and how much more is kept since."""
        more = 0
        if self._packed is None:
            self._packed = compress(self.buffers)
            more = sum(memoryview(buffer).nbytes for buffer in self._packed[1]) if self._packed[0] else 0
        return more, *self._packed


class Leaving:
    """What was let go and is still on its way to somebody: the socket sends it from where it lies."""

    def __init__(self) -> None:
        self._shared: list[weakref.ref[Any]] = []
        self._own: list[weakref.ref[Any]] = []

    def add(self, kept: KeptFrame) -> None:
        buffers = [weakref.ref(buffer) for buffer in kept.buffers if isinstance(buffer, np.ndarray)]
        (self._own if kept.places is None else self._shared).extend(buffers)

    def __bool__(self) -> bool:
        """Some of it is memory that readers map."""
        self._shared = [buffer for buffer in self._shared if buffer() is not None]
        return bool(self._shared)

    @property
    def own_bytes(self) -> int:
        """How much of it lies in this process's own memory."""
        if not self._own:
            return 0
        alive = [(ref, buffer.nbytes) for ref in self._own if (buffer := ref()) is not None]
        self._own = [ref for ref, _ in alive]
        return sum(nbytes for _, nbytes in alive)


class SharedStream(HostedStream[Shared]):
    forget_after_s = FORGET_SHARED_S

    def __init__(self, stream: StreamId, host: Host) -> None:
        super().__init__(Shared(stream, delivery_of(host.job.spec), now=monotonic()), host)
        self._arena = host.lending.arena
        self._leased_bytes = int(host.window_bytes * LEASES_SHARE)
        """How much of the window readers may hold in place."""
        self._leaving = Leaving()
        self._own_bytes = 0
        """How many bytes of the window lie in this process's own memory, because there was no room where readers map
        it."""
        self._stuck = False
        """Whether memory was waited for in vain; it is not waited for again until there is room."""

    def tick(self, now: float) -> list[bytes]:
        """Pass over who is silent, too."""
        with self._changed:
            for who in self.served.pass_over(self._host.window_share(), now):
                self._host.say(
                    f"stream {self.served.id}: {who} and others wait; after {self.served.timeout_s:.0f} s "
                    "(trainer_timeout_s) they go on without, and what leaves the window meanwhile will be skipped"
                )
            return super().tick(now)

    def retire(self, attempt: AttemptId) -> None:
        self.decide(self.served.retire, attempt)

    def trim(self) -> None:
        self.decide(self.served.make_room, 0, self._host.window_share())

    def _start_pump(self, start: StartRun) -> None:
        super()._start_pump(start._replace(frame_bytes=self.served.frame_bytes(self._host.window_share())))

    # Serving

    def hear(self, peer: bytes, message: ReaderSays) -> None:
        """Of one reader that has room: other trainers are not looked at."""
        if not isinstance(message, Credit):
            super().hear(peer, message)
            return
        with self._changed:
            self._serve(self.served.with_mates(self.served.hear(peer, message, monotonic())))
            self._obey()
            self._wake()

    def _follow(self) -> None:
        """Let go of what left the window, and send readers what it has for them."""
        self._let_go()
        self._serve(list(self.served.readers.values()))

    def _serve(self, readers: list[RankReader]) -> None:
        while sent := [reader for reader in readers if self._send(reader)]:
            readers = self.served.with_mates(sent)  # one frame each: ranks of a trainer are given a round together
        self.served.tell_ends()

    def _let_go(self) -> None:
        for entry in self.served.evicted():
            self._release(entry.payload)

    def _release(self, frames: list[KeptFrame]) -> None:
        for kept in frames:
            self._leaving.add(kept)
            if kept.places is not None:
                self._arena.leases.remove((kept.places.lease,))
            else:
                self._own_bytes -= kept.frame.nbytes

    def _send(self, reader: RankReader) -> bool:
        """Send what the window has next for a reader, unless too much is on its way already: then later, if at all."""
        offer = self.served.offer(reader)
        if offer is None:
            return False
        kept: KeptFrame = offer.entry.payload[reader.seat]
        frame, slab = kept.frame, None
        if reader.slab and kept.places is not None and frame.nbytes >= SLAB_FROM_BYTES:
            slab = self._host.lending.share(reader.peer, kept.places, most_bytes=self._leased_bytes)
        if slab is None and self._leaving.own_bytes > self._host.window_share() // FRAMES_A_WINDOW:
            return False
        compression, buffers = "", kept.buffers
        if not reader.slab:
            more, compression, buffers = kept.packed(self._host.compress)
            self.served.window.grow(offer.entry, more)
        header = Rounds(
            stream=self.served.id,
            binding=self.served.binding,
            opening=reader.opening,
            seq=frame.seq,
            count=frame.count,
            cut=offer.entry.cut,
            nbytes=frame.nbytes,
            layout=frame.layout,
            slab=slab,
            compression=compression,
            skipped=offer.skipped,
            shared=offer.shared,
            had=offer.had,
            holes=offer.holes,
        )
        self._send_frame(reader.peer, header, buffers)
        self.served.sent(reader, offer, frame.nbytes)
        return True

    # What the pump says. Called by its thread.

    def _room(self, pump: Pump) -> int | None:
        share = self._host.window_share()
        room = self.served.room(pump.number, share)
        self._let_go()
        return room if room is not None and self._own_memory_allows(share) else None

    def _own_memory_allows(self, share: int) -> bool:
        """Say whether more may be made, where readers hold so much shared memory that batches lie outside of it.

        What is outside counts beside the shared memory, which is then full: so it is little, whatever readers do.
        """
        most_bytes = share // FRAMES_A_WINDOW
        while self._own_bytes + self._leaving.own_bytes > most_bytes and self._own_bytes and self.served.evict():
            self._let_go()
        return self._own_bytes + self._leaving.own_bytes <= most_bytes

    def deliver(self, pump: Pump, taken: Taken, cut: Cut, done: tuple[Named, ...]) -> None:
        seats = range(self.served.delivery.width)
        frames = [encode_frame(taken.seq, taken.of(seat), self._arena.array) for seat in seats]
        nbytes = sum(frame.nbytes for frame in frames)
        with self._changed:
            if self._pump is not pump:
                return
            self.served.make_room(nbytes, self._host.window_share())
            self._let_go()
        kept = [self._keep(pump, frame) for frame in frames]
        with self._changed:
            if not self.served.add(pump.number, Entry(taken.seq, taken.count, cut, nbytes, kept)):
                self._release(kept)
                return
            self._rounds += taken.count
            self._carry_out()

    def _allocate(self, pump: Pump, shape: Sequence[int], dtype: Any) -> Any:
        """The window gives way to batches in the making, in part."""
        share = self._host.window_share()
        if math.prod(shape) * np.dtype(dtype).itemsize > share:
            return None
        return self._take_memory(pump, partial(self._arena.array, shape, dtype), least_bytes=share // 4)

    def _keep(self, pump: Pump, frame: Frame) -> KeptFrame:
        """Put a frame where readers map it; slow readers may hold much of that, and then the window is smaller."""
        places = self._take_memory(pump, partial(self._arena.place, frame.buffers), least_bytes=0)
        if places is not None:
            return KeptFrame(frame, places, self._arena.views(places))
        with self._changed:
            self._own_bytes += frame.nbytes
        return KeptFrame(frame, None, frame.buffers)

    def _take_memory(self, pump: Pump, take: Callable[[], Made | None], *, least_bytes: int) -> Made | None:
        """Return what `take` gives, once there is room: the window gives way until it has `least_bytes`.

        What is on its way to readers is waited for. What readers or operators hold may be held for long, and operators
        may wait for more themselves: for that it waits a moment, and no more until there was room again.
        """
        began = monotonic()
        while (made := take()) is None:
            with self._changed:
                if self.served.window.nbytes > least_bytes and self.served.evict():
                    self._let_go()
                elif self._stuck or pump.abandoned:
                    return None
                else:
                    self._changed.wait(RETRY_S)
                    self._stuck = monotonic() - began > (FLUSH_S if self._leaving else MOMENT_S)
        self._stuck = False
        return made
