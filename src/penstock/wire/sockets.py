"""ZeroMQ sockets as both planes use them, the guard at the door, and a bell for who polls them.

Rules, each bought with a lost message somewhere:

- The guard runs before anything is bound: without a ZAP handler CURVE accepts any key.
- A dialled socket has a fresh random identity, so nobody inherits what was meant for another.
- A data socket never reconnects by itself: frames lost in between would go unnoticed. `Watch` says that it is lost.
- Nothing is queued for a peer that is not there (IMMEDIATE), no high-water mark drops what credit allowed, a ROUTER
  raises for a peer it does not know, and nothing lingers.
- A listener takes frames of 8 KiB, whoever sends them (`wire.framing`): what a stranger can have allocated is that.
- TCP is always CURVE, on loopback too. A Unix socket lies in a folder that only its user can enter, and both ends look
  at that: the one that binds and, before a key is shown, the one that dials.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import secrets
import socket as sockets
import stat
import threading
import time
from collections.abc import Iterator
from typing import cast

import zmq

from penstock.core.errors import CannotListenError, InvalidArgumentError, PenstockError
from penstock.wire.addresses import Listening, advertised, is_unix, join_tcp, unix_path
from penstock.wire.credentials import Credentials
from penstock.wire.framing import LISTENER_FRAME_BYTES, has_arrived
from penstock.wire.guard import ZAP_DOMAIN, Context, Guard, Monitored, Socket, event_of, guard_of

__all__ = ["Bell", "Guard", "Watch", "bind_router", "dial"]


# What those who dial take in one frame. They know whom they have dialled before they receive anything.
MAX_ANSWER_BYTES = 256 << 20  # a whole view of a large job
MAX_DATA_BYTES = 64 << 30  # a single array; what a reader can be sent is limited by its credit
# A listener has room for so many messages of one connection that nobody took yet; beyond, the peer waits.
LISTENER_QUEUE = 2_000
# An unauthenticated peer holds a connection no longer than this, and who dials gives up as soon. A runner's guard may
# have to wait for user code that holds the GIL, and for the dispatcher.
HANDSHAKE_MS = 5_000
CONNECT_MS = 4_000
LISTEN_BACKLOG = 1_024
# With the default of 208 KB sender and reader of a large frame wake each other up for every 216 KB of it; with several
# MB what waits has left the processor's cache when it is read.
UNIX_BUFFER_BYTES = 1 << 19

# (interval, timeout, time to live) in ms. The listening side of the control plane gives up first, so that a client that
# reconnects under its identity does not meet its own ghost.
_DATA_BEATS = (2_000, 3_000, 5_000)
_CONTROL_BEATS = (2_000, 5_000, 7_000)
_CONTROL_CLIENT_BEATS = (2_000, 9_000, 7_000)


def bind_router(
    context: Context, listening: Listening, name: str, server: Credentials, *, data: bool
) -> tuple[Socket, str]:
    """Return a listening ROUTER and the address others should dial.

    `name` is the socket's in a folder; `server` is the key of a TCP listener, whose public half those who dial must
    know.
    """
    guard = guard_of(context)
    socket = cast(Monitored, context.socket(zmq.ROUTER, socket_class=Monitored))
    try:
        _common(socket, beats=_DATA_BEATS if data else _CONTROL_BEATS)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        socket.setsockopt(zmq.BACKLOG, LISTEN_BACKLOG)
        # libzmq makes room for a frame when it has read its size, before and after the handshake alike. What is larger
        # comes in pieces, and is put together once it is known who sends it.
        socket.setsockopt(zmq.MAXMSGSIZE, LISTENER_FRAME_BYTES)
        socket.setsockopt(zmq.RCVHWM, LISTENER_QUEUE)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        if listening.unix:
            socket.plain_server = True
            guard.count(socket, unix_buffer_bytes=UNIX_BUFFER_BYTES if data else 0)
            return socket, _listen_unix(socket, listening.folder, name)
        host = _numeric(listening.bind)
        socket.curve_server = True
        socket.curve_secretkey = server.secret.encode()
        guard.count(socket)
        bound = _bind(socket, host, listening.port, listening.port_range)
    except BaseException:
        socket.close(linger=0)
        raise
    return socket, advertised(listening.bind, bound, listening.advertise)


_LOST: dict[int, str] = {
    zmq.EVENT_DISCONNECTED: "the connection was lost",
    zmq.EVENT_CLOSED: "the connection was refused or timed out",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the other side did not finish the handshake",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the other side speaks another protocol, or other credentials",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the other side refused our key",
}


class Dialled(Monitored):
    """A dialled socket and the events of its connection, which it owns: `Watch` reads them."""


def dial(context: Context, credentials: Credentials, address: str, *, data: bool, queue: int = 0) -> Dialled:
    """Return a connecting DEALER. It can be written to once it polls for output: the other side has let us in.

    `queue`: how many frames may wait in it to be sent; 0: any number, where credit says how many there are.
    """
    unix = is_unix(address)
    if not unix and not credentials.server:
        raise InvalidArgumentError(f"{address} is reached by TCP, and the key for it does not say who is there")
    socket = cast(Dialled, context.socket(zmq.DEALER, socket_class=Dialled))
    try:
        prepare_dealer(socket, credentials, data=data, unix=unix)
        socket.setsockopt(zmq.SNDHWM, queue)
        if unix:
            check_folder(os.path.dirname(unix_path(address)))
        # Before connecting: on loopback a refusal comes at once. In a shadow of the context, so that the context's
        # `destroy` closes the receiving end with the socket, and not before.
        shadow: Context = zmq.Context.shadow(context.underlying)
        socket.events = socket.send_events(zmq.EVENT_HANDSHAKE_SUCCEEDED | sum(_LOST), shadow)
        socket.connect(address)
    except BaseException:
        socket.close(linger=0)
        raise
    return socket


def prepare_dealer(socket: Socket, credentials: Credentials, *, data: bool, unix: bool) -> None:
    """Set all options of a DEALER that is about to connect."""
    _common(socket, beats=_DATA_BEATS if data else _CONTROL_CLIENT_BEATS)
    socket.setsockopt(zmq.ROUTING_ID, b"P" + secrets.token_bytes(16))
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_DATA_BYTES if data else MAX_ANSWER_BYTES)
    if data:
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
    else:
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
    if unix:
        socket.plain_username = credentials.public.encode()
        socket.plain_password = credentials.secret.encode()
    else:
        socket.curve_serverkey = credentials.server.encode()
        socket.curve_publickey = credentials.public.encode()
        socket.curve_secretkey = credentials.secret.encode()


def _common(socket: Socket, *, beats: tuple[int, int, int]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, beats[0])
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, beats[1])
    socket.setsockopt(zmq.HEARTBEAT_TTL, beats[2])
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)


def check_folder(folder: str) -> None:
    """Raise unless the folder of a Unix socket is ours, and nobody else's: whoever can enter it could listen there.

    One that is not there is nobody's: the service has ended, or begins.
    """
    try:
        found = os.lstat(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise InvalidArgumentError(f"{folder!r}, where the service listens, cannot be seen: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise InvalidArgumentError(
            f"{folder!r}, where the service listens, is not a folder of this user's alone (mode 0700); another user "
            "could answer there. Remove it and start the service again"
        )


def _listen_unix(socket: Socket, folder: str, name: str) -> str:
    check_folder(folder)
    address = f"ipc://{folder}/{name}"
    try:
        socket.bind(address)  # a file that a killed predecessor left is replaced
    except zmq.ZMQError as error:
        raise CannotListenError(address, os.strerror(error.errno or 0)) from None
    return address


def _numeric(bind: str) -> str:
    """Return the address to bind to: libzmq takes no names there."""
    host = bind.strip("[]")
    if host == "*":
        return host
    if host == "localhost":
        return "127.0.0.1"
    try:
        return str(sockets.getaddrinfo(host, None, type=sockets.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise InvalidArgumentError(f"bind={bind!r} is not an address of this host: {error.strerror}") from None


def _bind(socket: Socket, bind: str, port: int, port_range: tuple[int, int] | None) -> int:
    candidates = [port]
    if not port and port_range is not None:
        first, last = port_range
        if not 0 < first <= last < 65536:
            raise InvalidArgumentError(f"port_range={port_range!r} is not (first, last) of ports from 1 to 65535")
        candidates = list(range(first, last + 1))
        random.shuffle(candidates)  # processes that start together should not race through the same order
    for candidate in candidates:
        try:
            return _listen(socket, bind, candidate)
        except OSError as error:  # ZMQError is not one; see `_listen`
            reason = error
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                break
    where = join_tcp(bind, port) if len(candidates) == 1 else f"tcp://{bind} in ports {port_range}"
    raise CannotListenError(where, os.strerror(reason.errno) if reason.errno else str(reason))


def _listen(socket: Socket, bind: str, port: int) -> int:
    try:
        socket.bind(f"tcp://[{bind}]:{port or '*'}" if ":" in bind else f"tcp://{bind}:{port or '*'}")
    except zmq.ZMQError as error:
        raise OSError(error.errno, error.strerror) from None
    return _bound_port(socket)


def _bound_port(socket: Socket) -> int:
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return int(endpoint.rstrip(b"\0").rpartition(b":")[2])


class Watch:
    """Watches a dialled socket's connection, from the thread that owns the socket. It owns nothing itself.

    `socket` polls for input when there is something for `lost` to look at.
    """

    def __init__(self, dialled: Dialled) -> None:
        if dialled.events is None:
            raise PenstockError("only a socket from dial() that is still open can be watched")
        self.socket: Socket = dialled.events
        self.connected = False
        self.refused = False
        """Our key was refused."""
        self.failed_handshakes = 0
        """How many handshakes have failed since one last succeeded."""
        self._reason: str | None = None
        self._give_up_at: float | None = time.monotonic() + (CONNECT_MS + HANDSHAKE_MS) / 1000

    def lost(self) -> str | None:
        """Return why the connection is gone (or was not to be had), or None. Never blocks.

        A control socket reconnects by itself: then `connected` is true again and there is no reason any more.
        """
        for event, value in self._events():
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected, self.refused, self._reason, self.failed_handshakes = True, False, None, 0
                self._give_up_at = None
                continue
            self.connected = False
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                # Only 400 is a verdict on us; 300 and 500 say that the guard itself is in trouble.
                self.refused = value == 400
            if event not in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED):
                self.failed_handshakes += 1
            self._reason = self._reason or _LOST[event]
        # A name that does not resolve causes no event at all.
        if self._reason is None and self._give_up_at is not None and time.monotonic() > self._give_up_at:
            self._reason = "there was no connection in time"
        return self._reason

    def _events(self) -> Iterator[tuple[int, int]]:
        while not self.socket.closed and has_arrived(self.socket):
            try:
                event, value = event_of(self.socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            if event in _LOST or event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                yield event, value


class Bell:
    """Wakes a poll from any thread. The descriptor is closed once, and never written afterwards."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._open = True

    def ring(self) -> None:
        with self._lock:
            if self._open:
                os.eventfd_write(self.descriptor, 1)

    def quiet(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._open:
                os.eventfd_read(self.descriptor)

    def close(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                os.close(self.descriptor)
