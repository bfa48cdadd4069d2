"""The hands of a served stream: a lock, a pump, encoding, memory and the socket. What is done is decided in `stream/`.

What readers say is heard in the data socket's thread, where nothing waits; what the pump says in the pump's. Both hold
the stream's lock while the protocol decides and while its instructions are carried out, so that they are in order;
sending is putting a frame into the socket's queue. Encoding, and copying into shared memory, happen without it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar

from penstock.core.element import Element
from penstock.core.ids import StreamId
from penstock.stream.rounds import Taken
from penstock.stream.serving import Dealt, End, Fail, Given, Send, Served, StartRun, StopRun, Terms, Wanted
from penstock.wire.failures import describe_failure
from penstock.wire.frames import Credit, FromRunner, OpenStream, RemoteFailure, Rounds, SlabPlaces, StreamFailed
from penstock.wire.jobs import Cut, Named
from penstock.wire.runs import encode_run
from penstock.worker.pump import OpenedRun, Pump

SLAB_FROM_BYTES = 32 << 10  # below, a lease costs more than the copy
LOOK_AGAIN_S = 1.0  # of a pump that waits for room: not a deadline, it is woken


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """`count` rounds from `seq` on, encoded."""

    seq: int
    count: int
    layout: bytes
    buffers: Sequence[Any]
    nbytes: int


def encode_frame(seq: int, elements: Sequence[Element]) -> Frame:
    """Encode one element a round. The buffers are the elements' own memory."""
    layout, buffers = encode_run(elements)
    nbytes = len(layout) + sum(memoryview(buffer).nbytes for buffer in buffers)
    return Frame(seq, len(elements), layout, buffers, nbytes)


@dataclass(slots=True)
class Counts:
    rounds: int = 0
    """Made."""
    nbytes: int = 0
    """Sent, to all readers together."""
    credit_wait_s: float = 0.0
    runs: int = 0

    def made(self, rounds: int) -> None:
        self.rounds += rounds

    def sent(self, nbytes: int) -> None:
        self.nbytes += nbytes

    def waited(self, seconds: float) -> None:
        self.credit_wait_s += seconds

    def began(self) -> None:
        self.runs += 1


class Host(Protocol):
    """What a stream needs of the process it lives in."""

    def send(
        self, peer: bytes, header: FromRunner, buffers: Sequence[Any] = (), *, unsent: Callable[[], None] | None = None
    ) -> None: ...

    def place(self, peer: bytes, buffers: Sequence[Any], *, exclusive: bool) -> SlabPlaces | None:
        """Put buffers where a reader on this host can see them, and it alone; None where there is no room."""

    def release(self, lease: int) -> None: ...

    def compress(self, buffers: Sequence[Any]) -> tuple[str, Sequence[Any]]: ...

    def open_run(self, stream: Any, terms: Terms, start: Cut, pump: Pump) -> OpenedRun: ...

    def say(self, text: str) -> None: ...


HostKind = TypeVar("HostKind", bound=Host)
ServedKind = TypeVar("ServedKind", bound=Served[Any, Any])


class HostedStream(ABC, Generic[ServedKind, HostKind]):
    """One stream of a runner; the audience of its pump."""

    def __init__(self, served: ServedKind, host: HostKind, *, makes_rounds: bool = False) -> None:
        self._served, self._host = served, host
        self._makes_rounds = makes_rounds
        self._changed = threading.Condition()
        self._waiting = False
        """The pump waits for room."""
        self._failure: RemoteFailure | None = None
        self.pump: Pump | None = None
        self.counts = Counts()

    @property
    def id(self) -> StreamId:
        return self._served.id

    @property
    def idle_since(self) -> float:
        return self._served.idle_since

    @property
    def running(self) -> bool:
        return self._served.running

    # What readers say

    def open(self, peer: bytes, message: OpenStream) -> None:
        with self._changed:
            self._served.open(peer, message, monotonic())
            self._carry_out()

    def take_credit(self, peer: bytes, message: Credit) -> None:
        with self._changed:
            self._served.take_credit(peer, message.opening, message.credit, message.round, monotonic())
            self._carry_out()

    def close_reader(self, peer: bytes, opening: int | None = None, *, leaving: bool = False, taken: int = -1) -> None:
        with self._changed:
            self._served.close_reader(peer, opening, monotonic(), leaving=leaving, taken=taken)
            self._carry_out()

    def tick(self, now: float) -> list[bytes]:
        """Start what has waited long enough. Return peers to be probed: others wait for them."""
        with self._changed:
            probed = self._served.tick(now)
            self._carry_out()
            return probed

    def close(self) -> Pump | None:
        """End the run; return its pump, whose thread may take a moment."""
        with self._changed:
            pump = self.pump
            self._served.close(monotonic())
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
        if self._waiting and (self.pump is None or self._room(self.pump) is not None):
            self._changed.notify_all()

    def _obey(self) -> None:
        for instruction in self._served.instructions():
            match instruction:
                case Send(peer, message):
                    self._host.send(peer, message)
                case Fail():
                    self._tell_failure(instruction)
                case StopRun():
                    self._stop_pump()
                case StartRun():
                    self._start_pump(instruction)

    def _follow(self) -> None:
        """See to what follows from a change, where the protocol asks for more than instructions."""

    def _tell_failure(self, fail: Fail) -> None:
        failure = self._failure if fail.error is None else describe_failure(fail.error)
        assert failure is not None
        message = StreamFailed(
            stream=self.id, binding=fail.binding, opening=fail.opening, seq=fail.seq, failure=failure
        )
        self._host.send(fail.peer, message)

    def _start_pump(self, start: StartRun) -> None:
        self.counts.began()
        self.pump = Pump(
            self,
            self.id,
            start,
            width=self._served.delivery.width,
            makes_rounds=self._makes_rounds,
            open_run=lambda pump: self._host.open_run(self, start.terms, start.start, pump),
        )
        self.pump.start()

    def _stop_pump(self) -> None:
        if self.pump is not None:
            self.pump.abandon()
            self.pump = None
            self._changed.notify_all()

    # What the pump says. Called by its thread.

    def wait_room(self, pump: Pump) -> int | None:
        began = monotonic()
        with self._changed:
            while self.pump is pump:
                room = self._room(pump)
                if room is not None:
                    self.counts.waited(monotonic() - began)
                    return room
                self._waiting = True
                self._changed.wait(LOOK_AGAIN_S)
                self._waiting = False
        return None

    @abstractmethod
    def _room(self, pump: Pump) -> int | None:
        """Return how many bytes may be made and sent now; None: none yet."""

    @abstractmethod
    def deliver(self, pump: Pump, taken: Taken, cut: Cut, done: tuple[Named, ...]) -> None: ...

    def ended(self, pump: Pump, end: End, done: tuple[Named, ...]) -> None:
        with self._changed:
            self._served.ended(pump.number, end, done)
            self._carry_out()

    def failed(self, pump: Pump, error: BaseException) -> None:
        failure = describe_failure(error)
        with self._changed:
            if self.pump is pump:
                self._failure = failure
                self._served.failed(pump.number)
                self._carry_out()

    def stale(self, pump: Pump, reason: str) -> None:
        with self._changed:
            self._served.stale(pump.number, reason, monotonic())
            self._carry_out()

    def _send_frame(
        self,
        peer: bytes,
        header: Rounds,
        buffers: Sequence[Any],
    ) -> None:
        """Send rounds: where they lie, or, without a place that this reader sees, their bytes."""
        slab = header.slab
        unsent = None if slab is None else partial(self._host.release, slab.lease)
        self._host.send(peer, header, buffers if slab is None else (), unsent=unsent)
        self.counts.sent(header.nbytes)


@dataclass(slots=True)
class _Prepared:
    """A reader's frame, ready to be sent."""

    frame: Frame
    slab: SlabPlaces | None
    compression: str
    buffers: Sequence[Any]


@dataclass(slots=True)
class _Delivery:
    """Frames made for the readers of some rounds, by (peer, opening)."""

    taken: Taken
    frames: dict[tuple[int, int], Frame] = field(default_factory=dict)
    """By (seat, first round): replicas of a consumer get the same."""
    prepared: dict[tuple[bytes, int], _Prepared] = field(default_factory=dict)

    def frame(self, wanted: Wanted) -> Frame:
        key = (wanted.seat, wanted.first)
        if key not in self.frames:
            elements = self.taken.of(wanted.seat, skip=wanted.first - self.taken.seq)
            self.frames[key] = encode_frame(wanted.first, elements)
        return self.frames[key]


class DealtStream(HostedStream[Dealt, Host]):
    """Rounds go to those who want them as they are made, and are kept for nobody."""

    @property
    def uses_slabs(self) -> bool:
        return self._served.uses_slabs

    def _room(self, pump: Pump) -> int | None:
        return self._served.room(pump.number)

    def deliver(self, pump: Pump, taken: Taken, cut: Cut, done: tuple[Named, ...]) -> None:
        delivery = _Delivery(taken)
        while not self._delivered(pump, delivery, cut, done):
            pass

    def _delivered(self, pump: Pump, delivery: _Delivery, cut: Cut, done: tuple[Named, ...]) -> bool:
        """Send the frames if all that are wanted now are made; else make them."""
        taken, prepared = delivery.taken, delivery.prepared
        with self._changed:
            wanted = self._served.wanted(pump.number, taken.seq, taken.count)
            missing = [each for each in wanted or () if (each.peer, each.opening) not in prepared]
            if not missing:
                self._send_all(pump, delivery, wanted, cut, done)
                return True
        for each in missing:
            prepared[each.peer, each.opening] = self._prepare(each, delivery)
        return False

    def _prepare(self, wanted: Wanted, delivery: _Delivery) -> _Prepared:
        frame = delivery.frame(wanted)
        slab: SlabPlaces | None = None
        compression, buffers = "", frame.buffers
        if not wanted.slab:
            compression, buffers = self._host.compress(frame.buffers)
        elif frame.nbytes >= SLAB_FROM_BYTES:
            exclusive = wanted.alone and not delivery.taken.repeated
            slab = self._host.place(wanted.peer, frame.buffers, exclusive=exclusive)
        return _Prepared(frame, slab, compression, buffers)

    def _send_all(
        self,
        pump: Pump,
        delivery: _Delivery,
        wanted: list[Wanted] | None,
        cut: Cut,
        done: tuple[Named, ...],
    ) -> None:
        taken, prepared = delivery.taken, delivery.prepared
        given: dict[tuple[bytes, int], Given] = {}
        if wanted is not None:
            nbytes = {(each.peer, each.opening): prepared[each.peer, each.opening].frame.nbytes for each in wanted}
            given = self._served.give(pump.number, taken.seq + taken.count, cut, done, nbytes)
            self.counts.made(taken.count)
        for key, ready in prepared.items():
            if key in given:
                self._send_frame(key[0], self._header(key[1], ready, cut, given[key]), ready.buffers)
            elif ready.slab is not None:
                self._host.release(ready.slab.lease)  # its reader went away meanwhile

    def _header(self, opening: int, ready: _Prepared, cut: Cut, given: Given) -> Rounds:
        frame = ready.frame
        return Rounds(
            stream=self.id,
            binding=given.binding,
            opening=opening,
            seq=frame.seq,
            count=frame.count,
            cut=cut,
            nbytes=frame.nbytes,
            layout=frame.layout,
            slab=ready.slab,
            compression=ready.compression,
            done=given.done,
            mixes=given.mixes,
        )
