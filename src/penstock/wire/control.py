"""A client of the dispatcher: one thread with one socket, for any number of threads that ask.

Every request is idempotent, so it is simply sent again: after a second of silence, and at once when the connection is
back. Nobody is told of that; whoever asked gets an answer or, at the deadline, an error that names what was asked.

Only the thread touches the socket. Callers put an entry into a queue and write an eventfd. After a fork the child has
neither the thread nor the right to the socket: it is refused.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from penstock.core.errors import AuthenticationError, DispatcherUnavailableError, PenstockError, ProtocolError
from penstock.wire.addresses import check_address, is_unix
from penstock.wire.credentials import Credentials
from penstock.wire.framing import check_request_size, cut_request, decode_tell, encode_ask, encode_body, refusal
from penstock.wire.guard import Context
from penstock.wire.messages import Answer, Push, Refused, Request, TryAgain
from penstock.wire.sockets import Watch, dial

RESEND_S = 1.0
RETRY_S = 0.1  # after `TryAgain`
REDIAL_S = 8.0  # connected, yet silent for so long: the other side took us for somebody else, or is stuck
CLOSE_DEADLINE_S = 1.0
ENVELOPE_BYTES = 32  # at most, around a body
SUSPICIOUS_HANDSHAKES = 3  # a CURVE server hangs up on a wrong server key without a word

_log = logging.getLogger(__name__)


class _Pending:
    """A request without an answer yet."""

    __slots__ = ("answer", "answered", "body", "due", "error", "number", "sent", "then")

    def __init__(self, number: int, body: msgspec.Raw, then: Callable[[Answer], None] | None, waits: bool) -> None:
        self.number, self.body, self.then = number, body, then
        self.answered = threading.Event() if waits else None
        self.answer: Answer | None = None
        self.error: PenstockError | None = None
        self.due = 0.0
        self.sent = False


class ControlClient:
    """See the module. `on_push` and `then` run in the client's thread and must not block, nor call `ask`."""

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        *,
        name: str,
        on_push: Callable[[Push], None] | None = None,
        on_reconnect: Callable[[], None] | None = None,
        context: Context | None = None,
        known_soon: bool = False,
    ) -> None:
        """`on_reconnect` is called in the client's thread each time the connection is back after it was lost.

        `known_soon`: somebody else tells the dispatcher of our key, so that a refusal only means: not yet.
        """
        check_address(address)
        self.address, self.name = address, name
        self.seen = 0
        """The highest journal position any answer carried."""
        self.proof = b""
        """What came with it."""
        self.connected = False
        self._credentials = credentials
        self._on_push, self._on_reconnect = on_push, on_reconnect
        self._known_soon = known_soon
        self._own_context = context is None
        # A shadow: `destroy` of the owner's context does not reach into our thread for its sockets, but ends its poll.
        self._context: Context = zmq.Context() if context is None else zmq.Context.shadow(context.underlying)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._number = 0
        self._pending: dict[int, _Pending] = {}
        self._refused_because: str | None = None
        self._closing_at: float | None = None
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name=f"penstock-control-{name}", daemon=True)
        self._thread.start()

    def ask(self, body: Request, *, timeout_s: float, what: str) -> Answer:
        """Return the answer. `what` says, in the error at the deadline, what was asked for.

        `TryAgain` is retried until then; `Refused` is raised as the error it names.
        """
        if threading.current_thread() is self._thread:
            raise PenstockError("ask() from a callback of the same client would wait for itself; use post()")
        pending = self._submit(body, None, waits=True)
        assert pending.answered is not None
        try:
            pending.answered.wait(timeout_s)
        finally:
            with self._lock:
                self._pending.pop(pending.number, None)
        if pending.error is not None:
            raise pending.error
        answer = pending.answer
        if answer is None or isinstance(answer, TryAgain):
            raise DispatcherUnavailableError(self.address, what, timeout_s, self._state(answer))
        if isinstance(answer, Refused):
            raise refusal(answer)
        return answer

    def post(self, body: Request, then: Callable[[Answer], None] | None = None) -> None:
        """Send, and send again until there is an answer; `then` gets it, a refusal too, in the client's thread."""
        self._submit(body, then, waits=False)

    def close(self) -> None:
        """End the thread, after at most a second in which posts that are under way may be answered."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._closing_at = time.monotonic() + CLOSE_DEADLINE_S
            os.eventfd_write(self._wake, 1)
        if threading.current_thread() is self._thread:
            return  # from a callback: the thread ends after it
        self._thread.join(CLOSE_DEADLINE_S + 4.0)
        if self._thread.is_alive():
            _log.warning("a control thread is stuck in a callback and was left behind", extra={"client": self.name})

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, body: Request, then: Callable[[Answer], None] | None, *, waits: bool) -> _Pending:
        if self._pid != os.getpid():
            raise PenstockError("this connection was made before a fork; the child must make one of its own")
        encoded = encode_body(body)
        check_request_size(len(encoded) + ENVELOPE_BYTES)
        with self._lock:
            if self._closed:
                raise PenstockError(f"the connection to {self.address} is closed")
            if waits and self._refused_because is not None:
                raise AuthenticationError(self.address, self._refused_because)
            self._number += 1
            pending = _Pending(self._number, encoded, then, waits)
            self._pending[pending.number] = pending
            os.eventfd_write(self._wake, 1)
        return pending

    def _state(self, answer: Answer | None) -> str:
        if isinstance(answer, TryAgain):
            return f"it answers, but not yet: {answer.reason}"
        return "connected, but silent" if self.connected else "not connected"

    # What follows runs in the thread.

    def _run(self) -> None:
        connection: _Connection | None = None
        try:
            connection = _Connection(self._context, self._credentials, self.address, self._wake)
            while not self._ended():
                connection = self._turn(connection)
        except zmq.ContextTerminated:
            pass  # the caller's context went first
        finally:
            if connection is not None:
                connection.close()
            with self._lock:
                self._closed = True
                self.connected = False
                left = [pending for pending in self._pending.values() if pending.answered is not None]
                self._pending.clear()
                os.close(self._wake)
            # Whoever owns this client is referred to by them, and shall be free with its last reference.
            self._on_push = self._on_reconnect = None
            for pending in left:
                self._fail(pending, PenstockError(f"the connection to {self.address} was closed while waiting"))
            if self._own_context:
                self._context.destroy(linger=0)

    def _ended(self) -> bool:
        with self._lock:
            if self._closing_at is None:
                return False
            posts = any(pending.answered is None for pending in self._pending.values())
            return not (posts and self.connected and time.monotonic() < self._closing_at)

    def _turn(self, connection: _Connection) -> _Connection:
        """Wait for something to happen, and deal with it. Return the connection to go on with."""
        connection.wait(RETRY_S if connection.watch.refused else self._next_due())
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        self._look_at(connection)
        if connection.watch.refused and self._known_soon and time.monotonic() >= connection.heard_at + RETRY_S:
            connection = self._redialled(connection)
        for frames in connection.receive():
            connection.heard_at = time.monotonic()
            self._take(frames)
        if self.connected:
            silent_s = time.monotonic() - connection.heard_at
            if silent_s > REDIAL_S and any(pending.sent for pending in self._waiting()):
                connection = self._redialled(connection)
            else:
                self._send_due(connection)
        return connection

    def _redialled(self, connection: _Connection) -> _Connection:
        again = connection.again or self.connected
        connection.close()
        self.connected = False
        connection = _Connection(self._context, self._credentials, self.address, self._wake)
        connection.again = again
        return connection

    def _look_at(self, connection: _Connection) -> None:
        watch = connection.watch
        watch.lost()
        if watch.connected and not self.connected:
            self.connected, self._refused_because = True, None
            connection.heard_at = time.monotonic()
            for pending in self._waiting():
                pending.due, pending.sent = 0.0, False
            if connection.again:
                self._call(self._on_reconnect)
            connection.again = True
        elif not watch.connected:
            self.connected = False
            wrong_key = not is_unix(self.address) and watch.failed_handshakes >= SUSPICIOUS_HANDSHAKES
            if watch.refused and self._known_soon:
                return
            if watch.refused or wrong_key:
                why = "it does not know our key" if watch.refused else "it is not who our key is for"
                with self._lock:
                    self._refused_because = why
                for pending in self._waiting():
                    if pending.answered is not None:
                        self._fail(pending, AuthenticationError(self.address, why))

    def _take(self, frames: list[bytes]) -> None:
        try:
            if len(frames) != 1:
                raise ProtocolError(f"a message of {len(frames)} frames where one is expected; dropped")
            tell = decode_tell(frames[0])
        except ProtocolError as error:
            _log.warning("dropped a message of the dispatcher", extra={"reason": str(error), "address": self.address})
            return
        if tell.position > self.seen:
            self.seen, self.proof = tell.position, tell.proof
        body: Any = tell.body
        if tell.number == 0:
            self._call(self._on_push, body)
            return
        with self._lock:
            pending = self._pending.get(tell.number)
            if pending is None:
                return  # an answer to something sent twice, or given up
            if isinstance(body, TryAgain):
                pending.answer = body
                pending.due, pending.sent = time.monotonic() + RETRY_S, False
                return
            del self._pending[tell.number]
        pending.answer = body
        if pending.answered is not None:
            pending.answered.set()
        else:
            self._call(pending.then, body)

    def _send_due(self, connection: _Connection) -> None:
        now = time.monotonic()
        for pending in self._waiting():
            if pending.due > now:
                continue
            if not connection.send(encode_ask(pending.number, self.seen, pending.body, self.proof)):
                return  # not connected any more: the monitor will say so
            pending.due, pending.sent = now + RESEND_S, True

    def _next_due(self) -> float:
        """Return how many seconds there is nothing to do unless something arrives."""
        now = time.monotonic()
        due = [pending.due for pending in self._waiting()] if self.connected else []
        if self._closing_at is not None:
            due.append(self._closing_at)
        return max(0.0, min(due, default=now + 60.0) - now)

    def _waiting(self) -> list[_Pending]:
        with self._lock:
            return list(self._pending.values())

    def _fail(self, pending: _Pending, error: PenstockError) -> None:
        pending.error = error
        if pending.answered is not None:
            pending.answered.set()

    def _call(self, callback: Callable[..., None] | None, *arguments: Any) -> None:
        if callback is None:
            return
        try:
            callback(*arguments)
        except Exception:
            _log.exception("a callback of a control client failed", extra={"client": self.name})


class _Connection:
    """The socket and its monitor, in the thread that polls them."""

    def __init__(self, context: Context, credentials: Credentials, address: str, wake: int) -> None:
        self.heard_at = time.monotonic()
        self.again = False
        """Whether it has been connected before."""
        self._socket = dial(context, credentials, address, data=False)
        self.watch = Watch(self._socket)
        self._poller = zmq.Poller()
        for source in (self._socket, self.watch.socket, wake):
            self._poller.register(source, zmq.POLLIN)

    def wait(self, timeout_s: float) -> None:
        self._poller.poll(int(timeout_s * 1000) + 1)

    def receive(self) -> list[list[bytes]]:
        received: list[list[bytes]] = []
        while len(received) < 100:
            try:
                received.append(self._socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
        return received

    def send(self, request: bytes) -> bool:
        try:
            for frame in cut_request(request):
                self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self._socket.close(linger=0)
