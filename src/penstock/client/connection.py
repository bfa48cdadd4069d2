"""The ways to runners: a data socket and its watch for each, and the runner's memory if it lies on this host.

A connection never reconnects. Once lost it is closed, and a new opening of a stream makes a new one. All of it belongs
to the thread that reads; what cannot be sent yet, because the other side has not let us in, waits here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from time import monotonic
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import zmq
from msgspec.structs import replace

from penstock.client.link import ServiceLink
from penstock.core.element import Element
from penstock.core.errors import CodecError, PenstockError, ProtocolError
from penstock.core.ids import RunnerId, StreamId
from penstock.stream.consuming import TellRunner
from penstock.stream.reading import StreamReader
from penstock.wire.addresses import RunnerAddress, host_id
from penstock.wire.allocation import keep_freed_memory
from penstock.wire.compression import decompress
from penstock.wire.elements import unflatten
from penstock.wire.frames import (
    CloseStream,
    Credit,
    FromRunner,
    OpenStream,
    ReturnLeases,
    Rounds,
    SourceStorageOptions,
    StreamLeft,
    ToRunner,
)
from penstock.wire.framing import Assembly, Outbox, decode_message, has_arrived
from penstock.wire.leases import SlabLease, SlabReader
from penstock.wire.modes import Transport
from penstock.wire.runs import ElementRun
from penstock.wire.sockets import Watch, dial

CONNECT_S = 5.0
LOOK_S = 0.005  # how often it is asked whether the connection stands: that costs as much as receiving a frame
LEAVE_S = 1.0  # for a last word to those who may be waiting for this trainer
LEAVING_LOOK_S = 0.05  # how often the connection is looked at while it is on its way
LAST_WORD_MS = 500  # for what memory is not needed, to a process of this host; a lost connection waits for nothing
NO_SLABS_VARIABLE = "PENSTOCK_NO_SLABS"
"""Set to 1, payloads come by socket on one host too: to measure that, or where memory cannot be passed on."""
MAX_RECEIVED = 64  # messages of one runner in a row, so that the others get their turn

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[FromRunner] = msgspec.msgpack.Decoder(FromRunner)
MemoryAccess: TypeAlias = Literal["own", "copied", "read-only"]
"""What a trainer may do with arrays: write to them, since they are nobody else's; write to copies; read."""
RunnerMet: TypeAlias = Callable[[RunnerId, str], None]
"""Told of a runner and its address."""


class FramePayload:
    """What the rounds of one frame are decoded from, when the trainer gets to them. Dropped, its memory is free."""

    __slots__ = ("_access", "_elements", "_lease", "_parts")

    def __init__(self, lease: SlabLease | None, parts: list[Any], access: MemoryAccess) -> None:
        """The buffers lie in shared memory, or came with the message."""
        self._lease, self._access = lease, access
        self._parts: list[Any] | None = parts
        self._elements: ElementRun | list[Element] = []

    def elements(self, header: Rounds, start: int, stop: int) -> list[Element]:
        """Return those of the rounds from `start` to `stop`, which are made now."""
        if self._parts is not None:
            buffers: list[Any] = (
                [part.buffer for part in self._parts] if self._lease is None else list(self._lease.arrays())
            )
            if header.compression:
                buffers = list(decompress(header.compression, buffers))
            if self._access == "copied":
                buffers = [_own(buffer) for buffer in buffers]
            elif self._access == "read-only":
                # Whether others see the same memory depends on where the worker runs.
                buffers = [memoryview(buffer).toreadonly() for buffer in buffers]
            self._elements = (
                [unflatten(header.layout, buffers)]
                if header.count == 1
                else ElementRun(header.layout, buffers, count=header.count)
            )
            self._lease = self._parts = None
        return self._elements[start:stop]


def _own(buffer: Any) -> Any:
    """Return a buffer that nobody else sees: what is shared, or cannot be written to, is copied."""
    return np.array(np.frombuffer(buffer, np.uint8)) if memoryview(buffer).readonly else buffer


class RunnerConnection:
    def __init__(
        self, link: ServiceLink, runner: RunnerId, address: str, *, access: MemoryAccess, transport: Transport
    ) -> None:
        self.runner = runner
        self._access = access
        self._assembly = Assembly()
        self._connect_by = monotonic() + CONNECT_S
        self._look_at = 0.0
        self._heard = False
        """Whether something came since it was last asked whether the connection stands."""
        parsed = RunnerAddress.parse(address)
        self.slabs = link.slabs.get(runner)
        may_share = transport != "sockets" and os.environ.get(NO_SLABS_VARIABLE, "") != "1"
        if self.slabs is None and may_share and parsed.slab and parsed.host == host_id():
            self.slabs = SlabReader.connect(parsed.slab, writable=access == "own")
        self.socket = dial(link.context, link.reading_key.toward(parsed.key), parsed.socket, data=True)
        self.watch = Watch(self.socket)
        self.outbox = Outbox(self.socket)
        self._number = 0
        """Of this connection among those that share the memory."""
        if self.slabs is None:
            keep_freed_memory()
        else:
            link.slabs[runner] = self.slabs
            using = self.slabs.open_connection()
            self._number = using.connection
            self.send(using)

    def send(self, message: ToRunner) -> None:
        self.outbox.put(_encoder.encode(message))
        self.outbox.flush()

    def receive(self) -> Iterator[tuple[FromRunner, FramePayload | None]]:
        """Yield what has arrived: a header, and what its rounds are decoded from. Never waits."""
        for _ in range(MAX_RECEIVED):
            if not has_arrived(self.socket):
                return
            try:
                frame = self.socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._heard = True
            try:
                whole = self._assembly.add(frame)
                if whole is None:
                    continue
                message = decode_message(_decoder, whole[0])
                payload = self._payload(message, whole[1]) if isinstance(message, Rounds) else None
            except (ProtocolError, CodecError) as error:
                raise PenstockError(f"runner {self.runner} sent what is no message ({error})") from None
            yield message, payload

    def _payload(self, message: Rounds, parts: list[Any]) -> FramePayload:
        if message.slab is None:
            return FramePayload(None, parts, self._access)
        if self.slabs is None:
            raise CodecError("rounds lie in memory that is not mapped here")
        return FramePayload(self.slabs.claim(message.slab), parts, self._access)

    def lost(self, now: float) -> str | None:
        """Return why it cannot be used any more, as far as is known: it looks now and then only."""
        if now < self._look_at:
            return None
        self._look_at = now + LOOK_S
        if self._heard:
            self._heard = False
            return None
        if self.watch.connected and not has_arrived(self.watch.socket):
            return None  # the watch has nothing to look at
        reason = self.watch.lost()
        if reason is None and not self.watch.connected and now > self._connect_by:
            reason = f"no connection within {CONNECT_S:.0f} s"
        return reason

    def await_left(self, unheard: set[tuple[StreamId, int]], until: float) -> None:
        """Wait until the runner has heard that these (stream, opening) are left.

        A connection that is closed while something is on its way to us would take our last word with it, so all of that
        is let in first.
        """
        while unheard and not self.outbox.nbytes and self.watch.lost() is None and (left_s := until - monotonic()) > 0:
            self.socket.poll(int(min(left_s, LEAVING_LOOK_S) * 1000) + 1)
            for message, _ in self.receive():
                if isinstance(message, StreamLeft):
                    unheard.discard((message.stream, message.opening))

    def close(self, *, linger_ms: int = 0) -> None:
        if self.slabs is not None:
            linger_ms = max(linger_ms, LAST_WORD_MS)
            with contextlib.suppress(zmq.ZMQError):  # the link went first
                self.send(self.slabs.close_connection(self._number))
        self.socket.close(linger=linger_ms)


class Connections:
    """One connection a runner."""

    def __init__(
        self,
        link: ServiceLink,
        storage: SourceStorageOptions,
        access: MemoryAccess,
        transport: Transport,
        met: RunnerMet,
    ) -> None:
        """`storage`: what whoever runs a stream reads with. `access`: what the trainer may do with arrays. `met`: is
        told of every runner that a stream is opened at.
        """
        self._link, self._storage, self._access, self._transport = link, storage, access, transport
        self._met = met
        self._connections: dict[RunnerId, RunnerConnection] = {}

    def all(self) -> list[RunnerConnection]:
        return list(self._connections.values())

    def tell(self, tell: TellRunner) -> None:
        """Send a message to a runner; what opens a stream may be the first thing it hears."""
        message, connection = tell.message, self._connections.get(tell.runner)
        if isinstance(message, OpenStream):
            if connection is None:
                connection = RunnerConnection(
                    self._link, tell.runner, tell.address, access=self._access, transport=self._transport
                )
                self._connections[tell.runner] = connection
            self._met(tell.runner, tell.address)
            message = replace(message, slab=connection.slabs is not None, storage=self._storage)
        elif isinstance(message, Credit) and connection is not None and connection.slabs is not None:
            message = replace(message, returned=connection.slabs.returned())
        if connection is not None:
            connection.send(message)

    def send(self, runner: RunnerId, message: ToRunner) -> None:
        self._connections[runner].send(message)

    def drop(self, connection: RunnerConnection) -> None:
        del self._connections[connection.runner]
        connection.close()

    def return_memory(self, *, idle: bool) -> None:
        """Give back what the trainer let go of; while it is busy only if that is much, for a credit soon says so."""
        for connection in self._connections.values():
            slabs = connection.slabs
            if slabs is not None and (idle or slabs.owes_much) and (returned := slabs.returned()):
                connection.send(ReturnLeases(leases=returned))

    def poll(self, bell: int, timeout_s: float) -> bool:
        """Wait until something arrives, the bell rings, or the time is over; return whether the bell rang."""
        watched: list[tuple[Any, int]] = [(bell, zmq.POLLIN)]
        for connection in self._connections.values():
            watched.append((connection.socket, connection.outbox.interest))
            watched.append((connection.watch.socket, zmq.POLLIN))
        return any(where == bell for where, _ in zmq.zmq_poll(watched, max(1, int(timeout_s * 1000))))

    def close(self, *, linger_ms: int = 0) -> None:
        for connection in self._connections.values():
            connection.close(linger_ms=linger_ms)
        self._connections.clear()

    def leave(self, readers: Iterable[StreamReader], *, settled: bool) -> None:
        """Say to all that the streams read there are not come back to, wait until they have heard it, and close.

        `settled`: the readers stand where the trainer does. Should it return, it goes on there.
        """
        unheard: dict[RunnerId, set[tuple[StreamId, int]]] = {runner: set() for runner in self._connections}
        for reader in readers:
            if reader.runner is not None and reader.runner in unheard:
                taken = reader.standing.round if settled else -1
                with contextlib.suppress(zmq.ZMQError):
                    self.send(
                        reader.runner,
                        CloseStream(stream=reader.stream, opening=reader.opening, leaving=True, round=taken),
                    )
                    unheard[reader.runner].add((reader.stream, reader.opening))
        until = monotonic() + LEAVE_S
        for runner, connection in self._connections.items():
            with contextlib.suppress(zmq.ZMQError, PenstockError):  # the link went first, or nonsense came
                connection.await_left(unheard[runner], until)
        self.close(linger_ms=int(LEAVE_S * 1000))
