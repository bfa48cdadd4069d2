"""The runner's data socket: one thread owns it, any thread may hand it something to send.

A message is a header and its buffers, each a frame of its own. Large buffers go as they lie in memory; small ones are
copied, which is cheaper than keeping track of them. The ROUTER raises for a peer that is gone, and that is how the
runner learns of it: `on_lost` is told, and what was to be sent is given back through `unsent`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeAlias

import msgspec
import zmq

from penstock.wire.frames import FromRunner, ToRunner
from penstock.wire.parcels import pack

Socket: TypeAlias = "zmq.Socket[bytes]"

COPY_BELOW_BYTES = 64 << 10  # a zero-copy frame costs about what copying this much does
ONE_FRAME_BYTES = 256 << 10  # see `wire.parcels`
TICK_S = 0.1
RECEIVE_AT_ONCE = 200
CLOSE_WAIT_S = 2.0
_LAST = int(zmq.NOBLOCK)
_MORE = int(zmq.SNDMORE | zmq.NOBLOCK)

_log = logging.getLogger(__name__)
_decoder: msgspec.msgpack.Decoder[ToRunner] = msgspec.msgpack.Decoder(ToRunner)


@dataclass(frozen=True, slots=True)
class _Parcel:
    peer: bytes
    header: bytes
    buffers: Sequence[Any]
    unsent: Callable[[], None] | None


class DataSocket:
    """Serves one ROUTER from one thread. All callbacks run in that thread and must not block."""

    def __init__(
        self,
        socket: Socket,
        *,
        on_message: Callable[[bytes, ToRunner], None],
        on_lost: Callable[[bytes], None],
        on_tick: Callable[[float], None],
    ) -> None:
        self._socket = socket
        self._on_message, self._on_lost, self._on_tick = on_message, on_lost, on_tick
        self._parcels: deque[_Parcel] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._rung = False
        """The thread was woken up, and has not looked yet."""
        self._lock = threading.Lock()
        self._stopping = self._tick_asked = False
        self.peers: set[bytes] = set()
        """Those that have said something and are not known to be gone."""
        self._thread = threading.Thread(target=self._serve, name="penstock data", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(
        self, peer: bytes, header: FromRunner, buffers: Sequence[Any] = (), *, unsent: Callable[[], None] | None = None
    ) -> None:
        """Send soon, in the order of the calls of each thread. `unsent` is called if the peer is gone."""
        self._parcels.append(_Parcel(peer, msgspec.msgpack.encode(header), buffers, unsent))
        self._ring()

    def tick(self) -> None:
        """Have `on_tick` called now."""
        self._tick_asked = True
        self._ring()

    def _ring(self) -> None:
        with self._lock:
            if self._wake >= 0 and not self._rung:
                self._rung = True
                os.eventfd_write(self._wake, 1)

    @property
    def serving(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> bool:
        """End the thread and close the socket; False if it does not end in time."""
        self._stopping = True
        self._ring()
        self._thread.join(CLOSE_WAIT_S)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        ticked = monotonic()
        try:
            while not self._stopping:
                # Only what is ready is tried: finding out by an exception costs more than sending a frame.
                ready = [where for where, _ in poller.poll(int(TICK_S * 1000))]
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                    self._rung = False  # not earlier: who rings in between would be forgotten
                if self._socket in ready:
                    self._receive()
                self._send_all()
                now = monotonic()
                if now - ticked >= TICK_S or self._tick_asked:
                    ticked, self._tick_asked = now, False
                    self._tick(now)
            self._send_all()
        except zmq.ContextTerminated:
            pass  # the context went first
        finally:
            self._socket.close(linger=0)
            with self._lock:
                os.close(self._wake)
                self._wake = -1

    def _tick(self, now: float) -> None:
        try:
            self._on_tick(now)
        except Exception:  # without this thread the process would be deaf, and nobody would see why
            _log.exception("looking after the streams failed")

    def _receive(self) -> None:
        for _ in range(RECEIVE_AT_ONCE):
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise msgspec.DecodeError(f"{len(frames)} frames where one is expected")
                message = _decoder.decode(frames[0])
            except msgspec.DecodeError as error:
                _log.warning("dropped a message that is none", extra={"reason": str(error)})
                continue
            self.peers.add(peer)
            try:
                self._on_message(peer, message)
            except Exception:  # one reader's nonsense must not keep the others from being served
                _log.exception("a message could not be dealt with", extra={"message": type(message).__name__})

    def _send_all(self) -> None:
        while self._parcels:
            parcel = self._parcels.popleft()
            try:
                self._put(parcel)
            except zmq.ZMQError as error:
                if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                    raise
                self.peers.discard(parcel.peer)
                if parcel.unsent is not None:
                    parcel.unsent()
                self._on_lost(parcel.peer)

    def _put(self, parcel: _Parcel) -> None:
        socket, buffers = self._socket, parcel.buffers
        socket.send(parcel.peer, _MORE)
        if buffers and sum(memoryview(buffer).nbytes for buffer in buffers) < ONE_FRAME_BYTES:
            socket.send(pack(parcel.header, buffers), _LAST)
            return
        socket.send(parcel.header, _MORE if buffers else _LAST)
        for number, buffer in enumerate(buffers, 1):
            small = memoryview(buffer).nbytes < COPY_BELOW_BYTES
            socket.send(buffer, _MORE if number < len(buffers) else _LAST, copy=small)
