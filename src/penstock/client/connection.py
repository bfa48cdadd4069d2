"""The way to one runner: a data socket and its watch, and the runner's memory if it lies on this host.

It never reconnects. Once lost it is closed, and a new opening of a stream makes a new one. All of it belongs to the
thread that reads; what cannot be sent yet, because the other side has not let us in, waits here.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Iterator, Sequence
from time import monotonic
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import zmq

from penstock.core.element import Element
from penstock.core.errors import CodecError, PenstockError
from penstock.core.ids import RunnerId, StreamId
from penstock.wire.addresses import RunnerAddress, host_id
from penstock.wire.allocation import keep_freed_memory
from penstock.wire.compression import decompress
from penstock.wire.credentials import Credentials
from penstock.wire.frames import FromRunner, Rounds, StreamLeft, ToRunner
from penstock.wire.modes import Transport
from penstock.wire.parcels import Assembly
from penstock.wire.runs import decode_run
from penstock.wire.slab_reader import SlabLease, SlabReader
from penstock.wire.sockets import Context, Watch, dial

CONNECT_S = 5.0
LOOK_S = 0.005  # how often it is asked whether the connection stands: that costs as much as receiving a frame
LEAVING_LOOK_S = 0.05  # and while our last word is on its way
LAST_WORD_MS = 500  # for what memory is not needed, to a process of this host; a lost connection waits for nothing
NO_SLABS_VARIABLE = "PENSTOCK_NO_SLABS"
"""Set to 1, payloads come by socket on one host too: to measure that, or where memory cannot be passed on."""
MAX_RECEIVED = 64  # messages of one runner in a row, so that the others get their turn

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[FromRunner] = msgspec.msgpack.Decoder(FromRunner)
_log = logging.getLogger(__name__)


Access: TypeAlias = Literal["own", "copied", "read-only"]
"""What a trainer may do with arrays: write to them, since they are nobody else's; write to copies; read."""


class Payload:
    """What the rounds of one frame are decoded from, when the trainer gets to them. Dropped, its memory is free."""

    __slots__ = ("_access", "_elements", "_lease", "_parts")

    def __init__(self, lease: SlabLease | None, parts: list[Any], access: Access) -> None:
        """The buffers lie in shared memory, or came with the message."""
        self._lease, self._access = lease, access
        self._parts: list[Any] | None = parts
        self._elements: Sequence[Element] = ()

    @property
    def decoded(self) -> bool:
        return self._parts is None

    def elements(self, header: Rounds) -> Sequence[Element]:
        if self._parts is not None:
            buffers: list[Any]
            buffers = [part.buffer for part in self._parts] if self._lease is None else list(self._lease.arrays())
            if header.compression:
                buffers = list(decompress(header.compression, buffers))
            if self._access == "copied":
                buffers = [_own(buffer) for buffer in buffers]
            elif self._access == "read-only":
                # Whether others see the same memory depends on where the worker runs.
                buffers = [memoryview(buffer).toreadonly() for buffer in buffers]
            self._lease = self._parts = None
            self._elements = decode_run(header.layout, buffers)
        return self._elements


def _own(buffer: Any) -> Any:
    """Return a buffer that nobody else sees: what is shared, or cannot be written to, is copied."""
    return np.array(np.frombuffer(buffer, np.uint8)) if memoryview(buffer).readonly else buffer


class RunnerConnection:
    def __init__(
        self,
        context: Context,
        credentials: Credentials,
        runner: RunnerId,
        address: str,
        slabs: SlabReader | None = None,
        *,
        access: Access = "own",
        transport: Transport = "auto",
    ) -> None:
        """`slabs`: from an earlier connection to the same process, whose memory is still mapped."""
        self.runner = runner
        self.address = RunnerAddress.parse(address)
        self.slabs = slabs
        may_share = transport != "sockets" and os.environ.get(NO_SLABS_VARIABLE, "") != "1"
        if slabs is None and may_share and self.address.slab and self.address.host == host_id():
            self.slabs = SlabReader.connect(self.address.slab, writable=access == "own")
        if self.slabs is None:
            keep_freed_memory()
        self.socket = dial(context, credentials, self.address.tcp, data=True)
        self.watch = Watch(self.socket)
        self._access = access
        self._closed = False
        self._outbox: deque[bytes] = deque()
        self._assembly = Assembly()
        self._connect_by = monotonic() + CONNECT_S
        self._look_at = 0.0
        self._number = 0
        """Of this connection among those that share the memory."""
        if self.slabs is not None:
            using = self.slabs.open_connection()
            self._number = using.connection
            self.send(using)

    @property
    def pending(self) -> bool:
        return bool(self._outbox)

    def send(self, message: ToRunner) -> None:
        self._outbox.append(_encoder.encode(message))
        self.flush()

    def flush(self) -> None:
        while self._outbox:
            try:
                self.socket.send(self._outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._outbox.popleft()

    def receive(self) -> Iterator[tuple[FromRunner, Payload | None]]:
        """Yield what has arrived: a header, and what its rounds are decoded from. Never waits."""
        for _ in range(MAX_RECEIVED):
            try:
                frame = self.socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                whole = self._assembly.add(frame)
                if whole is None:
                    continue
                message = _decoder.decode(whole[0])
                payload = self._payload(message, whole[1]) if isinstance(message, Rounds) else None
            except (msgspec.DecodeError, CodecError) as error:
                raise PenstockError(f"runner {self.runner} sent what is no message ({error})") from None
            yield message, payload

    def _payload(self, message: Rounds, parts: list[Any]) -> Payload:
        if message.slab is None:
            return Payload(None, parts, self._access)
        if self.slabs is None:
            raise CodecError("rounds lie in memory that is not mapped here")
        return Payload(self.slabs.claim(message.slab), parts, self._access)

    def lost(self, now: float) -> str | None:
        """Return why it cannot be used any more, as far as is known: it looks now and then only."""
        if now < self._look_at:
            return None
        self._look_at = now + LOOK_S
        reason = self.watch.lost()
        if reason is None and not self.watch.connected and now > self._connect_by:
            reason = f"no connection within {CONNECT_S:.0f} s"
        return reason

    def await_left(self, unheard: set[tuple[StreamId, int]], until: float) -> None:
        """Wait until the runner has heard that these (stream, opening) are left.

        A connection that is closed while something is on its way to us would take our last word with it, so all of that
        is let in first.
        """
        while unheard and not self.pending and self.watch.lost() is None and (left_s := until - monotonic()) > 0:
            self.socket.poll(int(min(left_s, LEAVING_LOOK_S) * 1000) + 1)
            for message, _ in self.receive():
                if isinstance(message, StreamLeft):
                    unheard.discard((message.stream, message.opening))

    def close(self, *, linger_ms: int = 0) -> None:
        if self._closed:
            return
        self._closed = True
        if self.slabs is not None:
            linger_ms = max(linger_ms, LAST_WORD_MS)
            with contextlib.suppress(zmq.ZMQError):  # the link went first
                self.send(self.slabs.close_connection(self._number))
        self.socket.close(linger=linger_ms)
