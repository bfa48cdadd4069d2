"""The runner's data socket, and who is let in to it: one thread listens on it, and any thread sends by itself.

A frame that its maker hands to another thread costs both of them the GIL, once in each direction; so a lock guards the
socket instead, and nobody waits for it longer than a message takes. What must not happen in the thread of whoever sends
(being told that a peer is gone, while it holds locks of its own) is left to the listening thread.

How a header and its buffers become messages is the business of `wire.framing`. The ROUTER raises for a peer that is
gone, and that is how the runner learns of it: the listener is told, and what was to be sent goes back through `unsent`.
"""

from __future__ import annotations

import logging
import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic, sleep
from typing import Any, Protocol

import msgspec
import zmq

from penstock.core.errors import CodecError, PenstockError, ProtocolError
from penstock.core.ids import JobName
from penstock.wire.admissions import KnownReader, WhoReads
from penstock.wire.control import ControlClient
from penstock.wire.fetching import FromFellow, ToFellow
from penstock.wire.frames import FromRunner, ToRunner
from penstock.wire.framing import RequestAssembler, decode_message, has_arrived, key_of, pack, sender_of, unpack
from penstock.wire.guard import Socket
from penstock.wire.messages import Answer, NotKnown
from penstock.wire.principals import Principal, Role
from penstock.wire.sockets import Bell

MAX_KNOWN = 10_000  # of readers of one job; the oldest are asked about again
TRIES, AGAIN_S = 10, 0.2  # a dispatcher that has just begun again hears of its readers one by one


class KnownReaders:
    """Who reads from a runner: trainers, known by the reading keys that they made and told the dispatcher, and other
    runners of its job, known by the keys that their agents made for them.

    A key that was not met before is asked about while its handshake waits; what the dispatcher says is kept, so that a
    reader whose connection was lost is known while the dispatcher is away. Any thread may ask.
    """

    def __init__(self, control: ControlClient, job: JobName) -> None:
        self._control, self._job = control, job
        self._known: dict[str, Principal] = {}
        self._lock = threading.Lock()

    def principal_of(self, verifier: str) -> Principal | None:
        return self._known.get(verifier)

    def inquire(self, verifier: str, tell: Callable[[Principal | None], None]) -> None:
        """Ask the dispatcher whose key this is. While it is away the handshake waits, and ends by its own deadline."""
        self._ask(verifier, tell, TRIES)

    def _ask(self, verifier: str, tell: Callable[[Principal | None], None], tries: int) -> None:
        def heard(answer: Answer) -> None:
            if isinstance(answer, KnownReader):
                tell(self._keep(verifier, Principal.parse(answer.principal)))
            elif isinstance(answer, NotKnown) and tries > 1:
                _later(AGAIN_S, lambda: self._ask(verifier, tell, tries - 1))
            else:
                tell(None)

        try:
            self._control.post(WhoReads(job=self._job, verifier=verifier), heard)
        except PenstockError:
            tell(None)  # this runner ends

    def _keep(self, verifier: str, principal: Principal) -> Principal:
        with self._lock:
            self._known[verifier] = principal
            while len(self._known) > MAX_KNOWN:
                del self._known[next(iter(self._known))]
        return principal


def _later(delay_s: float, act: Callable[[], None]) -> None:
    def wait() -> None:
        sleep(delay_s)
        act()

    threading.Thread(target=wait, name="penstock again", daemon=True).start()


TICK_S = 0.1
RECEIVE_AT_ONCE = 200
CLOSE_WAIT_S = 2.0
COMPLAIN_S = 10.0
_LAST = int(zmq.NOBLOCK)
_MORE = int(zmq.SNDMORE | zmq.NOBLOCK)

_log = logging.getLogger(__name__)
_decoder: msgspec.msgpack.Decoder[ToRunner] = msgspec.msgpack.Decoder(ToRunner)
_fellows: msgspec.msgpack.Decoder[FromFellow] = msgspec.msgpack.Decoder(FromFellow)


class Listener(Protocol):
    """Who is told what happens at the socket, in its thread, where nothing may block."""

    def take(self, peer: bytes, message: ToRunner, buffers: Sequence[Any]) -> None:
        """Hear a message; `buffers`: what came with it."""

    def take_from_fellow(self, peer: bytes, message: FromFellow) -> None: ...

    def lose(self, peer: bytes) -> None:
        """A peer was not there when something was sent to it."""

    def tick(self, now: float) -> None: ...


class DataSocket:
    """Serves one ROUTER from one thread."""

    def __init__(self, socket: Socket, listener: Listener) -> None:
        self._socket = socket
        self._listener = listener
        self._using = threading.Lock()
        self._closed = False
        self._lost: deque[tuple[bytes, Callable[[], None] | None]] = deque()
        """Peers that were gone when something was sent to them, and what is to be done about it."""
        self._bell = Bell()
        self._stopping = self._tick_asked = False
        self._assembler = RequestAssembler()
        self._garbage, self._complain_at = 0, float("-inf")
        self._peers: dict[bytes, tuple[str, Role]] = {}
        """Peers that have said something and are not known to be gone, the keys they showed, and as what. A peer
        chooses the name it goes by here, and may choose that of one who was here before."""
        self._thread = threading.Thread(target=self._serve, name="penstock data", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(
        self,
        peer: bytes,
        header: FromRunner | ToFellow,
        buffers: Sequence[Any] = (),
        *,
        unsent: Callable[[], None] | None = None,
    ) -> None:
        """Send now, without waiting. If the peer is gone `unsent` is called soon, in another thread."""
        frame, following = pack(msgspec.msgpack.encode(header), buffers)
        sent = arrived = False
        with self._using:
            try:
                if not self._closed:
                    self._put(peer, frame, following)
                    sent = True
                    # Sending looks at what has arrived, too, and then the descriptor does not tell of it any more.
                    arrived = has_arrived(self._socket)
            except zmq.ContextTerminated:
                pass
            except zmq.ZMQError as error:
                if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                    raise
        if not sent:
            self._lost.append((peer, unsent))
        if arrived or not sent:
            self._bell.ring()

    def _put(self, peer: bytes, frame: bytes, following: Sequence[Any]) -> None:
        socket = self._socket
        socket.send(peer, _MORE)
        socket.send(frame, _LAST)
        for buffer in following:
            socket.send(peer, _MORE)
            socket.send(buffer, _LAST, copy=False)

    def send_all(self, header: FromRunner) -> bool:
        """Send the same to every trainer that reads here; False if none does."""
        peers = [peer for peer, (_, role) in list(self._peers.items()) if role != "runner"]
        for peer in peers:
            self.send(peer, header)
        return bool(peers)

    def key_of(self, peer: bytes) -> str:
        """Return the verifier of the key that a peer has shown; empty: it is gone."""
        known = self._peers.get(peer)
        return "" if known is None else known[0]

    def forget(self, peer: bytes) -> None:
        """A peer is known to be gone."""
        self._peers.pop(peer, None)
        self._assembler.drop(peer)
        self._listener.lose(peer)

    def ask_tick(self) -> None:
        """Have the listener's `tick` called now."""
        self._tick_asked = True
        self._bell.ring()

    @property
    def serving(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the thread and close the socket."""
        self._stopping = True
        self._bell.ring()
        self._thread.join(CLOSE_WAIT_S)

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(int(self._socket.getsockopt(zmq.FD)), select.POLLIN)
        poller.register(self._bell.descriptor, select.POLLIN)
        ticked = monotonic()
        try:
            while not self._stopping:
                # Its descriptor tells of what has arrived once: so all of it is taken, whatever woke us up.
                while self._receive():
                    pass
                self._tell_lost()
                now = monotonic()
                if now - ticked >= TICK_S or self._tick_asked:
                    ticked, self._tick_asked = now, False
                    self._tick(now)
                if any(woken == self._bell.descriptor for woken, _ in poller.poll(int(TICK_S * 1000))):
                    self._bell.quiet()
        except zmq.ContextTerminated:
            pass  # the context went first
        finally:
            with self._using:
                self._closed = True
                self._socket.close(linger=0)
            self._tell_lost()
            self._bell.close()

    def _tick(self, now: float) -> None:
        try:
            self._assembler.drop_idle(now)
            self._listener.tick(now)
        except Exception:  # without this thread the process would be deaf, and nobody would see why
            _log.exception("looking after the streams failed")

    def _receive(self) -> bool:
        """Take what has arrived; False: nothing has."""
        messages: list[list[zmq.Frame]] = []
        with self._using, suppress(zmq.Again):
            while len(messages) < RECEIVE_AT_ONCE and has_arrived(self._socket):
                messages.append(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
        now = monotonic()
        for route, *frames in messages:
            peer = route.bytes
            try:
                if len(frames) != 1:
                    raise ProtocolError(f"{len(frames)} frames where one is expected")
                key, role = key_of(frames[0]), sender_of(frames[0]).role
                if self._peers.setdefault(peer, (key, role)) != (key, role):
                    self.forget(peer)  # somebody else, who is nobody's successor
                    self._peers[peer] = key, role
                whole = self._assembler.add(peer, frames[0].bytes, principal=key, now=now)
                if whole is None:
                    continue
                told = self._understood(peer, role, whole)
            except (ProtocolError, CodecError) as error:
                self._complain(now, str(error))
                continue
            try:
                told()
            except Exception:  # one reader's nonsense must not keep the others from being served
                _log.exception("a message could not be dealt with", extra={"peer": peer.hex()})
        return len(messages) == RECEIVE_AT_ONCE

    def _understood(self, peer: bytes, role: Role, whole: bytes) -> Callable[[], None]:
        """Return what telling the listener of a message is: runners ask for what is kept, and trainers for all else."""
        if role == "runner":
            return partial(self._listener.take_from_fellow, peer, decode_message(_fellows, whole))
        header, buffers = unpack(memoryview(whole))
        if None in buffers:
            raise ProtocolError("a buffer of a message does not come with it")
        return partial(self._listener.take, peer, decode_message(_decoder, header), buffers)

    def _complain(self, now: float, reason: str) -> None:
        """Write down what was dropped, now and then: all readers are shown it, and one of them decides how often."""
        self._garbage += 1
        if now >= self._complain_at:
            self._complain_at = now + COMPLAIN_S
            _log.warning("dropped what is no message", extra={"reason": reason, "dropped": self._garbage})

    def _tell_lost(self) -> None:
        while self._lost:
            peer, unsent = self._lost.popleft()
            if unsent is not None:
                unsent()
            self.forget(peer)
