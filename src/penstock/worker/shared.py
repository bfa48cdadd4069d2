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
from typing import Any, Protocol, TypeVar

import numpy as np

from penstock.core.ids import StreamId
from penstock.stream.rounds import Taken
from penstock.stream.serving import StartRun
from penstock.stream.sharing import FRAMES_A_WINDOW, Offer, Shared, SharingTerms
from penstock.stream.teams import RankReader
from penstock.stream.window import Entry
from penstock.wire.delivery import delivery_of
from penstock.wire.frames import Credit, Rounds, SlabPlaces
from penstock.wire.jobs import Cut, JobSpec, Named
from penstock.worker.pump import Pump
from penstock.worker.streams import SLAB_FROM_BYTES, Frame, Host, HostedStream, encode_frame

FLUSH_S = 10.0  # how long memory that is being sent is waited for, before more is taken; a dead peer is cut off sooner
MOMENT_S = 0.5  # and memory that readers have, or operators
RETRY_S = 0.01  # memory comes back without a word

Made = TypeVar("Made")


class SharedHost(Host, Protocol):
    def array(self, shape: Sequence[int], dtype: Any) -> Any:
        """Return an array where readers on this host can see it; None where there is no room."""

    def keep(self, buffers: Sequence[Any]) -> tuple[SlabPlaces, Sequence[Any]] | None:
        """Put buffers where readers on this host can see them; None where there is no room."""

    def lease(self, peer: bytes, places: SlabPlaces) -> SlabPlaces | None: ...

    def window_share(self) -> int:
        """Return how many bytes the window of one stream may have now."""


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
        if kept.places is not None:
            self._shared += buffers
        else:
            self._own += buffers

    def __bool__(self) -> bool:
        """Some of it is memory that readers map."""
        self._shared = [buffer for buffer in self._shared if buffer() is not None]
        return bool(self._shared)

    @property
    def own_bytes(self) -> int:
        """How much of it lies in this process's own memory."""
        alive = [(ref, buffer.nbytes) for ref in self._own if (buffer := ref()) is not None]
        self._own = [ref for ref, _ in alive]
        return sum(nbytes for _, nbytes in alive)


class SharedStream(HostedStream[Shared, SharedHost]):
    def __init__(self, stream: StreamId, host: SharedHost, spec: JobSpec, *, makes_rounds: bool = False) -> None:
        assert spec.sharing is not None
        share, timeout_s = spec.sharing, spec.sharing.trainer_timeout_s
        terms = SharingTerms(waits=share.waits, trainers=share.trainers or 0, timeout_s=timeout_s)
        served = Shared(stream, delivery_of(spec), terms, now=monotonic())
        super().__init__(served, host, makes_rounds=makes_rounds)
        self._timeout_s = timeout_s
        self._leaving = Leaving()
        self._own_bytes = 0
        """Of the window, in this process's own memory: there was no room where readers map it."""
        self._stuck = False
        """Memory was waited for in vain, and is not again until there is room."""

    @property
    def holds_memory(self) -> bool:
        return self._served.holds_memory

    @property
    def attempt(self) -> str:
        return self._served.attempt

    def tick(self, now: float) -> list[bytes]:
        """Pass over who is silent, too."""
        with self._changed:
            for who in self._served.pass_over(self._host.window_share(), now):
                self._host.say(
                    f"stream {self.id}: {who} and others wait; after {self._timeout_s:.0f} s (trainer_timeout_s) they "
                    "go on without, and what leaves the window meanwhile will be skipped"
                )
            return super().tick(now)

    def retire(self) -> None:
        """Another epoch needs the memory: if nobody reads this one, let go of what can be made again."""
        with self._changed:
            self._served.retire()
            self._carry_out()

    def trim(self) -> None:
        """Make room: there are more streams now."""
        with self._changed:
            self._served.make_room(0, self._host.window_share())
            self._carry_out()

    def _start_pump(self, start: StartRun) -> None:
        super()._start_pump(start._replace(frame_bytes=self._served.frame_bytes(self._host.window_share())))

    # Serving

    def take_credit(self, peer: bytes, message: Credit) -> None:
        """One reader has room: other trainers are not looked at."""
        with self._changed:
            self._served.take_credit(peer, message.opening, message.credit, message.round, monotonic())
            self._serve(self._served.with_mates(peer))
            self._obey()
            self._wake()

    def _follow(self) -> None:
        """Let go of what left the window, and send readers what it has for them."""
        self._let_go()
        self._serve(list(self._served.readers.values()))

    def _serve(self, readers: list[RankReader]) -> None:
        while sum(self._send_next(reader) for reader in readers):
            pass  # one frame each, since ranks of one trainer are given a round together
        self._served.tell_ends()

    def _send_next(self, reader: RankReader) -> bool:
        offer = self._served.offer(reader)
        return offer is not None and self._send(reader, offer)

    def _let_go(self) -> None:
        for entry in self._served.evicted():
            self._release(entry.payload)

    def _release(self, frames: list[KeptFrame]) -> None:
        for kept in frames:
            self._leaving.add(kept)
            if kept.places is not None:
                self._host.release(kept.places.lease)
            else:
                self._own_bytes -= kept.frame.nbytes

    def _send(self, reader: RankReader, offer: Offer) -> bool:
        """Send rounds, unless too much is on its way already; it is tried again, and may be skipped until then."""
        kept: KeptFrame = offer.entry.payload[reader.seat]
        frame, slab = kept.frame, None
        if reader.slab and kept.places is not None and frame.nbytes >= SLAB_FROM_BYTES:
            slab = self._host.lease(reader.peer, kept.places)
        if slab is None and self._leaving.own_bytes > self._host.window_share() // FRAMES_A_WINDOW:
            return False
        compression, buffers = "", kept.buffers
        if not reader.slab:
            more, compression, buffers = kept.packed(self._host.compress)
            self._served.grow(offer.entry, more)
        header = Rounds(
            stream=self.id,
            binding=self._served.binding,
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
        self._served.sent(reader, offer, frame.nbytes)
        return True

    # What the pump says. Called by its thread.

    def _room(self, pump: Pump) -> int | None:
        share = self._host.window_share()
        room = self._served.room(pump.number, share)
        self._let_go()
        return room if room is not None and self._own_memory_allows(share) else None

    def _own_memory_allows(self, share: int) -> bool:
        """Say whether more may be made, where readers hold so much shared memory that batches lie outside of it.

        What is outside counts beside the shared memory, which is then full: so it is little, whatever readers do.
        """
        most_bytes = share // FRAMES_A_WINDOW
        while self._own_bytes + self._leaving.own_bytes > most_bytes and self._own_bytes and self._served.evict():
            self._let_go()
        return self._own_bytes + self._leaving.own_bytes <= most_bytes

    def deliver(self, pump: Pump, taken: Taken, cut: Cut, done: tuple[Named, ...]) -> None:
        frames = [encode_frame(taken.seq, taken.of(seat)) for seat in range(self._served.delivery.width)]
        nbytes = sum(frame.nbytes for frame in frames)
        with self._changed:
            if self.pump is not pump:
                return
            self._served.make_room(nbytes, self._host.window_share())
            self._let_go()
        kept = [self._keep(pump, frame) for frame in frames]
        with self._changed:
            if not self._served.add(pump.number, Entry(taken.seq, taken.count, cut, nbytes, kept)):
                self._release(kept)
                return
            self.counts.made(taken.count)
            self._carry_out()

    def allocate(self, pump: Pump, shape: Sequence[int], dtype: Any) -> Any:
        """Return memory for a batch in the making, for which the window gives way in part; None: there is none."""
        share = self._host.window_share()
        if math.prod(shape) * np.dtype(dtype).itemsize > share:
            return None
        return self._take_memory(pump, partial(self._host.array, shape, dtype), least_bytes=share // 4)

    def _keep(self, pump: Pump, frame: Frame) -> KeptFrame:
        """Put a frame where readers map it; slow readers may hold much of that, and then the window is smaller."""
        kept = self._take_memory(pump, partial(self._host.keep, frame.buffers), least_bytes=0)
        if kept is not None:
            return KeptFrame(frame, *kept)
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
                if self._served.window_bytes > least_bytes and self._served.evict():
                    self._let_go()
                elif self._stuck or pump.abandoned:
                    return None
                else:
                    self._changed.wait(RETRY_S)
                    self._stuck = monotonic() - began > (FLUSH_S if self._leaving else MOMENT_S)
        self._stuck = False
        return made
