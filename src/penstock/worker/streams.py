"""The hands of a served stream: a lock, a pump, encoding, memory and the socket. What is done is decided in `stream/`.

What readers say is heard in the data socket's thread, where nothing waits; what the pump says in the pump's. Both hold
the stream's lock while the protocol decides and while its instructions are carried out, so that they are in order;
sending is putting a frame into the socket's queue. Encoding, and copying into shared memory, happen without it.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property, partial
from time import monotonic
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from penstock.core.element import Element
from penstock.core.ids import AttemptId, StreamId
from penstock.processes.runner_config import RunnerConfig
from penstock.relays.runner_relays import Relays, RunRelays
from penstock.runtime.budget import Budget
from penstock.stream.instructions import End, Given, Send, StartRun, StopRun, Wanted
from penstock.stream.rounds import Taken
from penstock.stream.serving import Dealt, ReaderSays, Served
from penstock.wire.compression import compress
from penstock.wire.failures import describe_failure
from penstock.wire.frames import Output, Rounds, SlabPlaces
from penstock.wire.jobs import Cut, Named, delivery_of
from penstock.wire.runs import FrameMemory, encode_run
from penstock.wire.slabs import Lending
from penstock.worker.figures import Counts
from penstock.worker.opening import LoadedJob, Opening, RunOpener
from penstock.worker.pump import Pump
from penstock.worker.sending import DataSocket

SLAB_FROM_BYTES = 32 << 10  # below, a lease costs more than the copy
LOOK_AGAIN_S = 1.0  # of a pump that waits for room: not a deadline, it is woken
FORGET_S = 10.0  # a stream nobody reads: of an earlier epoch, or bound elsewhere. It opens anew where a reader stands
ENGINE_SHARE = 0.5  # of the memory, for what engines buffer; credits and slabs have the rest
ARENA_SHARE = 0.5
SHARING_SHARE = 1 / 4  # what sharing may take where nobody says
LEASES_SHARE = 3 / 8  # of that, for what readers hold in place: they may do so for ever. Beyond, they get it by socket
WINDOWS_SHARE = 5 / 8  # for windows, less what readers hold of rounds that have left them
MAKING_SHARE = 1 / 8  # for batches in the making, in the arena; what is left is for engines and connections
LEAST_ENGINE_BYTES = 16 << 20

AnyStream: TypeAlias = "HostedStream[Served[Any]]"

_log = logging.getLogger(__name__)


class Host(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What the streams of a process work with, and share."""

    config: RunnerConfig
    job: LoadedJob
    data: DataSocket
    lending: Lending
    opener: RunOpener
    streams: dict[StreamId, AnyStream]
    relays: Relays | None = None
    """What a trainer reads for the runs; None: they read by themselves."""

    @cached_property
    def window_bytes(self) -> int:
        """What sharing may take."""
        asked, memory_bytes = delivery_of(self.job.spec).window_bytes, self.config.memory_bytes
        return min(asked or int(memory_bytes * SHARING_SHARE), int(memory_bytes * ARENA_SHARE))

    def window_share(self) -> int:
        """Return how many bytes the window of one stream may have now: those that have one share the budget."""
        windows = sum(stream.served.holds_memory for stream in list(self.streams.values()))
        return int(self.window_bytes * WINDOWS_SHARE) // max(1, windows)

    def budget(self) -> Budget:
        """Share memory and threads among the streams that run now, the one that asks included."""
        reading = max(1, sum(stream.served.running for stream in list(self.streams.values())))
        memory = max(LEAST_ENGINE_BYTES, int(self.config.memory_bytes * ENGINE_SHARE) // reading)
        if self.job.spec.sharing:
            memory = max(1 << 20, min(memory, int(self.window_bytes * MAKING_SHARE)) // reading)
        return Budget(threads=max(1, -(-self.config.threads // reading)), memory_bytes=memory)

    def compress(self, buffers: Sequence[Any]) -> tuple[str, Sequence[Any]]:
        kind = self.job.spec.transport
        return ("", buffers) if kind in ("auto", "sockets") else (kind, compress(kind, buffers))

    def say(self, text: str) -> None:
        """Tell whoever reads here."""
        if not self.data.send_all(Output(worker=self.config.worker, text=text)):
            _log.warning(text)


class Frame(msgspec.Struct, frozen=True, eq=False):
    """`count` rounds from `seq` on, encoded."""

    seq: int
    count: int
    layout: bytes
    buffers: Sequence[Any]
    nbytes: int


def encode_frame(seq: int, elements: Sequence[Element], allocate: FrameMemory | None = None) -> Frame:
    """Encode one element a round. The buffers are the elements' own memory, or taken where readers see it."""
    layout, buffers = encode_run(elements, allocate)
    nbytes = len(layout) + sum(memoryview(buffer).nbytes for buffer in buffers)
    return Frame(seq, len(elements), layout, buffers, nbytes)


ServedKind = TypeVar("ServedKind", bound=Served[Any], covariant=True)


class HostedStream(ABC, Generic[ServedKind]):
    """One stream of a runner; the audience of its pump."""

    forget_after_s = FORGET_S
    """How long a stream is kept that has no reader."""

    def __init__(self, served: ServedKind, host: Host) -> None:
        self.served, self._host = served, host
        self._changed = threading.Condition()
        self._waiting = False
        """Whether the pump waits for room."""
        self._pump: Pump | None = None
        self._rounds = self._sent_bytes = 0
        self._credit_wait_s = 0.0

    @property
    def counts(self) -> Counts:
        served = self.served
        return Counts(self._rounds, self._sent_bytes, self._credit_wait_s, served.runs, served.running)

    # What readers say

    def hear(self, peer: bytes, message: ReaderSays) -> None:
        with self._changed:
            self.served.hear(peer, message, monotonic())
            self._carry_out()

    def tick(self, now: float) -> list[bytes]:
        """Start what has waited long enough. Return peers to be probed: see `Served.tick`."""
        with self._changed:
            probed = self.served.tick(now)
            self._carry_out()
            return probed

    def retire(self, attempt: AttemptId) -> None:
        """A stream of that attempt begins: let go of memory that only older ones need, if nobody reads them."""

    def trim(self) -> None:
        """There are more streams now: let go of what is beyond this one's share of memory."""

    def close(self) -> Pump | None:
        """End the run; return its pump, whose thread may take a moment."""
        with self._changed:
            pump = self._pump
            self.served.close(monotonic())
            self._carry_out()
            return pump

    # Carrying out

    def _carry_out(self) -> None:
        self._obey()
        self._follow()
        self._obey()
        self._wake()

    def _wake(self) -> None:
        """Let the pump go on, if it waits and there is room."""
        if self._waiting and (self._pump is None or self._room(self._pump) is not None):
            self._changed.notify_all()

    def _obey(self) -> None:
        for instruction in self.served.instructions():
            match instruction:
                case Send(peer, message):
                    self._host.data.send(peer, message)
                case StopRun():
                    self._stop_pump()
                case StartRun():
                    self._start_pump(instruction)

    def _follow(self) -> None:
        """See to what follows from a change, where the protocol asks for more than instructions."""

    def _start_pump(self, start: StartRun) -> None:
        width, makes_rounds = self.served.delivery.width, self._host.job.makes_rounds
        self._pump = Pump(self, self.served.id, start, width=width, makes_rounds=makes_rounds)
        self._pump.begin()

    def _stop_pump(self) -> None:
        if self._pump is not None:
            self._pump.abandon()
            self._pump = None
            self._changed.notify_all()

    # What the pump says. Called by its thread.

    def prepare(self, pump: Pump) -> Opening:
        return self._host.opener.prepare(
            self.served.id,
            pump.start,
            is_stopped=lambda: pump.abandoned,
            allocate=partial(self._allocate, pump),
            budget=self._host.budget,
            relays=None if self._host.relays is None else RunRelays(self._host.relays),
        )

    @abstractmethod
    def _allocate(self, pump: Pump, shape: Sequence[int], dtype: Any) -> Any:
        """Return memory for a batch in the making that readers on this host can see; None: there is none."""

    def wait_room(self, pump: Pump) -> int | None:
        with self._changed:
            while self._pump is pump:
                room = self._room(pump)
                if room is not None:
                    return room
                self._waiting, began = True, monotonic()
                self._changed.wait(LOOK_AGAIN_S)
                self._waiting = False
                self._credit_wait_s += monotonic() - began
        return None

    @abstractmethod
    def _room(self, pump: Pump) -> int | None:
        """Return how many bytes may be made and sent now; None: none yet."""

    @abstractmethod
    def deliver(self, pump: Pump, taken: Taken, cut: Cut, done: tuple[Named, ...]) -> None: ...

    def ended(self, pump: Pump, end: End, done: tuple[Named, ...]) -> None:
        with self._changed:
            self.served.ended(pump.number, end, done)
            self._carry_out()

    def failed(self, pump: Pump, error: BaseException) -> None:
        failure = describe_failure(error)
        with self._changed:
            self.served.failed(pump.number, failure)
            self._carry_out()

    def stale(self, pump: Pump, reason: str) -> None:
        with self._changed:
            self.served.stale(pump.number, reason, monotonic())
            self._carry_out()

    def _send_frame(self, peer: bytes, header: Rounds, buffers: Sequence[Any]) -> None:
        """Send rounds: where they lie, or, without a place that this reader sees, their bytes."""
        slab = header.slab
        unsent = None if slab is None else partial(self._host.lending.arena.release, (slab.lease,))
        self._host.data.send(peer, header, buffers if slab is None else (), unsent=unsent)
        self._sent_bytes += header.nbytes


class _Prepared(msgspec.Struct, frozen=True):
    """A reader's frame, ready to be sent."""

    frame: Frame
    slab: SlabPlaces | None
    compression: str
    buffers: Sequence[Any]


class DealtStream(HostedStream[Dealt]):
    """Rounds go to those who want them as they are made, and are kept for nobody."""

    def __init__(self, stream: StreamId, host: Host) -> None:
        job = host.job
        super().__init__(Dealt(stream, delivery_of(job.spec), now=monotonic(), makes_rounds=job.makes_rounds), host)

    def _allocate(self, pump: Pump, shape: Sequence[int], dtype: Any) -> Any:
        return self._host.lending.arena.array(shape, dtype) if self.served.uses_slabs else None

    def _room(self, pump: Pump) -> int | None:
        return self.served.room(pump.number)

    def deliver(self, pump: Pump, taken: Taken, cut: Cut, done: tuple[Named, ...]) -> None:
        """Send frames once all that are wanted are made: they are made without the lock, and meanwhile more may be."""
        arena = self._host.lending.arena
        frames: dict[tuple[int, int], Frame] = {}
        prepared: dict[tuple[bytes, int], _Prepared] = {}
        while True:
            with self._changed:
                wanted = self.served.wanted(pump.number, taken.seq, taken.count)
                missing = [each for each in wanted or () if (each.peer, each.opening) not in prepared]
                if not missing:
                    self._send_all(pump, taken, wanted, prepared, cut, done)
                    return
            for each in missing:
                # What a cache holds will be sent again: nobody may write to it.
                exclusive = each.alone and not taken.repeated and not self._host.job.caches
                key = (each.seat, each.first)
                if key not in frames:  # replicas of a consumer get the same
                    elements = taken.of(each.seat, skip=each.first - taken.seq)
                    frames[key] = encode_frame(each.first, elements, arena.array if each.slab and exclusive else None)
                prepared[each.peer, each.opening] = self._prepare(each, frames[key], exclusive=exclusive)

    def _prepare(self, wanted: Wanted, frame: Frame, *, exclusive: bool) -> _Prepared:
        if not wanted.slab:
            return _Prepared(frame, None, *self._host.compress(frame.buffers))
        slab: SlabPlaces | None = None
        if frame.nbytes >= SLAB_FROM_BYTES:
            slab = self._host.lending.place(wanted.peer, frame.buffers, exclusive=exclusive)
        return _Prepared(frame, slab, "", frame.buffers)

    def _send_all(
        self,
        pump: Pump,
        taken: Taken,
        wanted: list[Wanted] | None,
        prepared: dict[tuple[bytes, int], _Prepared],
        cut: Cut,
        done: tuple[Named, ...],
    ) -> None:
        given: dict[tuple[bytes, int], Given] = {}
        if wanted is not None:
            nbytes = {(each.peer, each.opening): prepared[each.peer, each.opening].frame.nbytes for each in wanted}
            given = self.served.give(pump.number, taken.seq + taken.count, cut, done, nbytes)
            self._rounds += taken.count
        for (peer, opening), ready in prepared.items():
            said, frame = given.get((peer, opening)), ready.frame
            if said is not None:
                header = Rounds(
                    stream=self.served.id,
                    binding=said.binding,
                    opening=opening,
                    seq=frame.seq,
                    count=frame.count,
                    cut=cut,
                    nbytes=frame.nbytes,
                    layout=frame.layout,
                    slab=ready.slab,
                    compression=ready.compression,
                    done=said.done,
                    mixes=said.mixes,
                )
                self._send_frame(peer, header, ready.buffers)
            elif ready.slab is not None:
                self._host.lending.arena.release((ready.slab.lease,))  # its reader went away meanwhile
