"""The way to one runner: a data socket and its watch, and the runner's memory if it lies on this host.

It never reconnects. Once lost it is closed, and a new opening of a stream makes a new one. All of it belongs to the
thread that reads; what cannot be sent yet, because the other side has not let us in, waits here.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Iterator
from time import monotonic
from typing import Any

import msgspec
import zmq

from penstock.core.errors import CodecError, PenstockError
from penstock.core.ids import RunnerId
from penstock.wire.addresses import RunnerAddress, host_id
from penstock.wire.allocation import keep_freed_memory
from penstock.wire.credentials import Credentials
from penstock.wire.frames import CloseStream, Credit, FromRunner, Rounds, StreamLeft, ToRunner
from penstock.wire.parcels import Assembly
from penstock.wire.slab_reader import SlabReader
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


class RunnerConnection:
    def __init__(
        self,
        context: Context,
        credentials: Credentials,
        runner: RunnerId,
        address: str,
        slabs: SlabReader | None = None,
        *,
        writable: bool = True,
    ) -> None:
        """`slabs`: from an earlier connection to the same process, whose memory is still mapped."""
        self.runner = runner
        self.address = RunnerAddress.parse(address)
        self.slabs = slabs
        may_share = os.environ.get(NO_SLABS_VARIABLE, "") != "1"
        if slabs is None and may_share and self.address.slab and self.address.host == host_id():
            self.slabs = SlabReader.connect(self.address.slab, writable=writable)
        if self.slabs is None:
            keep_freed_memory()
        self.socket = dial(context, credentials, self.address.tcp, data=True)
        self.watch = Watch(self.socket)
        self.closed = False
        self.streams: set[Any] = set()
        """Readings that are open here."""
        self.last_credit: Credit | None = None
        """Carries returned memory once no stream is open any more."""
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

    def receive(self) -> Iterator[tuple[FromRunner, list[Any]]]:
        """Yield what has arrived: a header and the buffers after it, or the lease of those in memory. Never waits."""
        for _ in range(MAX_RECEIVED):
            try:
                frame = self.socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                whole = self._assembly.add(frame)
                message = None if whole is None else _decoder.decode(whole[0])
                buffers = [] if whole is None else whole[1]
                if isinstance(message, Rounds) and message.slab is not None and self.slabs is not None:
                    buffers = [self.slabs.claim(message.slab)]
            except (msgspec.DecodeError, CodecError) as error:
                raise PenstockError(f"runner {self.runner} sent what is no message ({error})") from None
            if message is not None:
                yield message, buffers

    def lost(self, now: float) -> str | None:
        """Return why it cannot be used any more, as far as is known: it looks now and then only."""
        if now < self._look_at:
            return None
        self._look_at = now + LOOK_S
        reason = self.watch.lost()
        if reason is None and not self.watch.connected and now > self._connect_by:
            reason = f"no connection within {CONNECT_S:.0f} s"
        return reason

    def leave(self, *, settled: bool) -> None:
        """Say that the streams read here are not come back to.

        `settled`: the marks are where the trainer stands; should it return, it goes on there.
        """
        for reading in self.streams:
            taken = reading.mark.round if settled else -1
            self.send(CloseStream(stream=reading.stream, opening=reading.opening, leaving=True, round=taken))

    def await_left(self, until: float) -> None:
        """Wait until that was heard.

        A connection that is closed while something is on its way to us would take our last word with it, so all of that
        is let in first.
        """
        unheard = {(reading.stream, reading.opening) for reading in self.streams}
        while unheard and not self.pending and self.watch.lost() is None and (left_s := until - monotonic()) > 0:
            self.socket.poll(int(min(left_s, LEAVING_LOOK_S) * 1000) + 1)
            for message, _ in self.receive():
                if isinstance(message, StreamLeft):
                    unheard.discard((message.stream, message.opening))

    def drop_unread(self) -> None:
        """Let go of what was not looked at, and will not be."""
        for reading in self.streams:
            reading.queue.clear()

    def close(self, *, linger_ms: int = 0) -> None:
        if self.closed:
            return
        self.closed = True
        if self.slabs is not None:
            linger_ms = max(linger_ms, LAST_WORD_MS)
            with contextlib.suppress(zmq.ZMQError):  # the link went first
                self.send(self.slabs.close_connection(self._number))
        self.streams.clear()  # they refer to this
        self.socket.close(linger=linger_ms)
