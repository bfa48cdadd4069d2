"""The guard of a context: a ZAP handler that lets in those whose key is known, says who they are, and counts the rest.

What it says goes with every message of the connection: the principal as its user id, and which key was shown
(`sender_of`, `key_of`). A key that is not known may be asked about elsewhere while its handshake waits.

It answers for every socket bound in its context. A peer that never gets as far as showing something (garbage, another
mechanism, silence) is refused by libzmq itself; the guard sees that in the sockets' events and counts it too. Those
events tell of each connection's descriptor, too: so what libzmq has no option for is set here.
"""

from __future__ import annotations

import collections
import contextlib
import os
import secrets
import socket as sockets
import stat
import struct
import threading
from collections.abc import Callable
from typing import TypeAlias

import zmq

from penstock.core.errors import PenstockError
from penstock.wire.addresses import unix_path
from penstock.wire.credentials import verifier_of
from penstock.wire.framing import KEY_PROPERTY
from penstock.wire.principals import Principal

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
Socket: TypeAlias = "zmq.Socket[bytes]"

ZAP_DOMAIN = "penstock"
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_COUNTED = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
_STOP_DEADLINE_S = 5.0
_REST_MS = 50  # between two looks at events: what strangers do takes the GIL from user code so often, and no oftener
_EVENT = struct.Struct("=Hi")
_LENGTH = struct.Struct(">I")
MAX_WAITING = 256  # handshakes that wait for an answer about their key; libzmq ends each after its own deadline

PrincipalOf: TypeAlias = Callable[[str], Principal | None]
"""Who has the key of this verifier; None: nobody that is let in."""
Inquire: TypeAlias = Callable[[str, Callable[[Principal | None], None]], None]
"""Asks elsewhere whose key this is, without waiting; the answer is told once, in any thread."""

_guards: dict[int, Guard] = {}


class Monitored(zmq.Socket[bytes]):
    """A socket whose events somebody takes, and that stops sending them before it closes.

    libzmq sends events from its I/O thread, and waits there if nobody is at the other end: then every socket of the
    context stands still.
    """

    made_in: int = 0
    events: Socket | None = None
    """The receiving end, if it is this socket's to close."""

    def send_events(self, wanted: int, receiving: Context) -> Socket:
        """Return the end that receives the events from now on, a socket of `receiving` (the context or its shadow)."""
        self.made_in = os.getpid()
        endpoint = f"inproc://penstock-events-{secrets.token_hex(8)}"
        self.monitor(endpoint, wanted)
        receiver = receiving.socket(zmq.PAIR)
        receiver.setsockopt(zmq.LINGER, 0)
        receiver.setsockopt(zmq.RCVHWM, 0)
        receiver.connect(endpoint)
        return receiver

    def close(self, linger: int | None = None) -> None:
        if not self.closed and self.made_in == os.getpid():
            self.disable_monitor()
        super().close(linger=linger)
        events, self.events = self.events, None
        if events is not None:
            events.close(linger=0)


def event_of(frames: list[bytes]) -> tuple[int, int]:
    """Return the kind and the value of a socket's event. pyzmq's own way imports asyncio, and a start waits for that.

    >>> event_of([b"\\x20\\x00\\x07\\x00\\x00\\x00", b"tcp://127.0.0.1:5050"]) == (zmq.EVENT_ACCEPTED, 7)
    True
    """
    event, value = _EVENT.unpack(frames[0])
    return event, value


def _property(name: str, value: str) -> bytes:
    """Return a property of a connection as ZMTP writes it."""
    return bytes((len(name),)) + name.encode() + _LENGTH.pack(len(value)) + value.encode()


def _make_room(descriptor: int, address: str, nbytes: int) -> None:
    """Give a connection that a Unix socket has accepted such a buffer: libzmq's own option is for TCP alone.

    The descriptor is libzmq's, and may be closed, or somebody else's, by now: so a duplicate, which stays what it is,
    must be of a connection to this address.
    """
    with contextlib.suppress(OSError):
        duplicate = os.dup(descriptor)
        if not stat.S_ISSOCK(os.fstat(duplicate).st_mode):
            os.close(duplicate)
            return
        with sockets.socket(fileno=duplicate) as connection:
            if connection.getsockname() == unix_path(address):
                connection.setsockopt(sockets.SOL_SOCKET, sockets.SO_SNDBUF, nbytes)


def guard_of(context: Context) -> Guard:
    """Return the guard that runs in this context; raise if none does, since then anybody would be let in."""
    guard = _guards.get(id(context))
    if guard is None:
        raise PenstockError("no Guard runs in this context: start one before anything is bound")
    return guard


class _Counted:
    """A listening socket whose connections are counted."""

    def __init__(self, unix_buffer_bytes: int) -> None:
        self.unix_buffer_bytes = unix_buffer_bytes
        self.handshaking: dict[int, None] = {}
        """Descriptors of connections whose handshake is under way, the oldest first."""


class Guard:
    """Start it before any bind, close it after the sockets and before the context."""

    def __init__(self, context: Context, principal_of: PrincipalOf, inquire: Inquire | None = None) -> None:
        """`principal_of` is called in the guard's thread and must not block; whom it does not know, `inquire` may."""
        self.refused = 0
        """How many connections were not let in."""
        # A shadow: `destroy` of the owner's context does not reach into our thread for its sockets, but ends its poll.
        self._context: Context = zmq.Context.shadow(context.underlying)
        self._guarded = id(context)
        self._principal_of, self._inquire = principal_of, inquire
        self._waiting: dict[str, list[list[bytes]]] = {}
        """Handshakes that wait until it is known whose key they showed, by its verifier."""
        self._told: collections.deque[tuple[str, Principal | None]] = collections.deque()
        self._thread: threading.Thread | None = None
        self._wake = -1
        self._stopping = False
        self._new: collections.deque[tuple[Socket, _Counted]] = collections.deque()

    def start(self) -> None:
        door = self._context.socket(zmq.ROUTER)
        door.setsockopt(zmq.LINGER, 0)
        try:
            door.bind(_ZAP_ENDPOINT)
        except zmq.ZMQError:
            door.close(linger=0)
            raise PenstockError("another Guard runs in this context; one is enough") from None
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._serve, args=(door,), name="penstock-guard", daemon=True)
        self._thread.start()
        _guards[self._guarded] = self

    def count(self, socket: Monitored, *, unix_buffer_bytes: int = 0) -> None:
        """Count the connections a socket refuses. Called by the thread that owns the socket, before it binds.

        `unix_buffer_bytes`: how much of what is sent has room in each connection to a Unix socket; 0: the system's own.
        """
        self._new.append((socket.send_events(_COUNTED, self._context), _Counted(unix_buffer_bytes)))
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if _guards.get(self._guarded) is self:
            del _guards[self._guarded]
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        thread.join(_STOP_DEADLINE_S)
        if thread.is_alive():
            raise PenstockError(
                f"the guard still watches over open sockets after {_STOP_DEADLINE_S:.0f} s; close them before the guard"
            )
        os.close(self._wake)

    def _serve(self, door: Socket) -> None:
        poller, without_events = zmq.Poller(), zmq.Poller()
        for each in (poller, without_events):
            each.register(door, zmq.POLLIN)
            each.register(self._wake, zmq.POLLIN)
        counted: dict[Socket, _Counted] = {}
        resting = False
        try:
            while not self._stopping or counted or self._new:
                ready = dict(without_events.poll(_REST_MS) if resting and not self._stopping else poller.poll())
                resting = False
                if self._wake in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                    while self._new:
                        events, new = self._new.popleft()
                        counted[events] = new
                        poller.register(events, zmq.POLLIN)
                    self._answer_waiting(door)
                if door in ready:
                    self._answer(door)
                for events in [socket for socket in counted if socket in ready]:
                    resting = True
                    if self._tally(events, counted[events]):
                        poller.unregister(events)
                        del counted[events]
                        events.close(linger=0)
        except zmq.ContextTerminated:
            pass  # the context went first
        finally:
            for socket in (door, *counted, *(events for events, _ in self._new)):
                socket.close(linger=0)

    def _answer(self, door: Socket) -> None:
        while True:
            try:
                frames = door.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            # [route..., empty, version, request, domain, address, identity, mechanism, what is shown...]
            try:
                start = frames.index(b"") + 1
                version, request, domain, _, _, mechanism, *shown = frames[start:]
            except ValueError:
                continue
            envelope = [*frames[:start], b"1.0", request]
            verifier = verifier_of(mechanism, shown) if version == b"1.0" and domain == ZAP_DOMAIN.encode() else None
            principal = None if verifier is None else self._principal_of(verifier)
            if principal is None and verifier is not None and self._hold(verifier, envelope):
                continue
            self._say(door, envelope, verifier, principal)

    def _hold(self, verifier: str, envelope: list[bytes]) -> bool:
        """Have the handshake wait until it is known whose key this is; False: nobody can be asked, or too many wait."""
        if self._inquire is None or sum(map(len, self._waiting.values())) >= MAX_WAITING:
            return False
        asked = verifier in self._waiting
        self._waiting.setdefault(verifier, []).append(envelope)
        if not asked:
            self._inquire(verifier, lambda principal: self._tell(verifier, principal))
        return True

    def _tell(self, verifier: str, principal: Principal | None) -> None:
        """Called in any thread, when it is known whose key this is."""
        self._told.append((verifier, principal))
        with contextlib.suppress(OSError):  # the guard is closed
            os.eventfd_write(self._wake, 1)

    def _answer_waiting(self, door: Socket) -> None:
        while self._told:
            verifier, principal = self._told.popleft()
            for envelope in self._waiting.pop(verifier, ()):
                self._say(door, envelope, verifier, principal)

    def _say(self, door: Socket, envelope: list[bytes], verifier: str | None, principal: Principal | None) -> None:
        verdict = [b"400", b"refused", b"", b""]
        if principal is not None and verifier is not None:
            verdict = [b"200", b"OK", str(principal).encode(), _property(KEY_PROPERTY, verifier)]
        with contextlib.suppress(zmq.ZMQError):  # whoever asked is gone
            door.send_multipart([*envelope, *verdict], zmq.NOBLOCK)

    def _tally(self, events: Socket, counted: _Counted) -> bool:
        """Count what happened at one socket; return whether it was closed.

        An event of success does not say whose it is. It is put down to the oldest handshake under way: so the number of
        those refused is right as soon as no handshake is under way, whoever of them it was.
        """
        handshaking = counted.handshaking
        while True:
            try:
                frames = events.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            event, descriptor = event_of(frames)
            if event == zmq.EVENT_MONITOR_STOPPED:
                return True
            if event == zmq.EVENT_ACCEPTED:
                handshaking[descriptor] = None
                if counted.unix_buffer_bytes:
                    _make_room(descriptor, frames[1].decode(), counted.unix_buffer_bytes)
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                if handshaking:
                    del handshaking[next(iter(handshaking))]
            elif event == zmq.EVENT_DISCONNECTED and descriptor in handshaking:
                del handshaking[descriptor]
                self.refused += 1
