"""What readers say to a runner: one thread listens on its data socket, and any thread sends by itself.

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
from time import monotonic
from typing import Any

import msgspec
import zmq

from penstock.cluster_cache.fellows import KeptServer
from penstock.core.errors import CodecError, ProtocolError
from penstock.core.ids import StreamId
from penstock.processes.runner_config import RunnerConfig
from penstock.relays.runner_relays import RelayMessage, Relays
from penstock.runtime.streams import StreamStopped
from penstock.wire.allocation import OwnMemory
from penstock.wire.failures import describe_failure
from penstock.wire.fetching import FromFellow, ToFellow
from penstock.wire.frames import (
    CloseStream,
    Credit,
    FromRunner,
    OfferReading,
    OpenStream,
    Output,
    RelayFailed,
    RelayRows,
    RemoteFailure,
    ReturnLeases,
    StreamFailed,
    StreamLeft,
    StreamRefused,
    ToRunner,
    Units,
    UseSlabs,
)
from penstock.wire.framing import RequestAssembler, decode_message, has_arrived, key_of, pack, sender_of, unpack
from penstock.wire.guard import Socket
from penstock.wire.leases import Lending
from penstock.wire.principals import Principal, Role
from penstock.wire.slabs import Arena
from penstock.wire.sockets import Bell
from penstock.worker.host import MAKING_SHARE, WINDOWS_SHARE, AnyStream, Host
from penstock.worker.opening import MOST_STREAMS, RunnerJob, RunOpener, cache_scope
from penstock.worker.shared import SharedStream
from penstock.worker.streams import FORGET_S, DealtStream

TICK_S = 0.1
LOOK_S = 1.0
RECEIVE_AT_ONCE = 200
STOP_WAIT_S = 2.0
COMPLAIN_S = 10.0
_LAST = int(zmq.NOBLOCK)
_MORE = int(zmq.SNDMORE | zmq.NOBLOCK)

_log = logging.getLogger(__name__)
_decoder: msgspec.msgpack.Decoder[ToRunner] = msgspec.msgpack.Decoder(ToRunner)
_fellows: msgspec.msgpack.Decoder[FromFellow] = msgspec.msgpack.Decoder(FromFellow)


class DataSocket:
    """Serves one ROUTER from one thread. What happens at it is told to the listener there: nothing may block."""

    def __init__(self, socket: Socket, listener: HostedStreams) -> None:
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
        with self._using, suppress(zmq.ContextTerminated):
            try:
                if not self._closed:
                    self._put(peer, frame, following)
                    sent = True
                    # Sending looks at what has arrived, too, and then the descriptor does not tell of it any more.
                    arrived = has_arrived(self._socket)
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

    def forget(self, *peers: bytes) -> None:
        """Peers are known to be gone."""
        for peer in peers:
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
        self._thread.join(STOP_WAIT_S)

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


class HostedStreams:
    """The streams of a runner, and what readers say to them, as its data socket's thread hears it."""

    def __init__(
        self,
        config: RunnerConfig,
        socket: Socket,
        arena: Arena,
        job: RunnerJob,
        opener: RunOpener,
        principal_of: Callable[[str], Principal | None],
        *,
        owns_process: bool = False,
    ) -> None:
        self.data = DataSocket(socket, self)
        self._config = config
        self._lending = Lending(arena)
        self._job = job
        self._opener, self._principal_of = opener, principal_of
        self._streams: dict[StreamId, AnyStream] = {}
        self._host: Host | None = None
        """What the streams share of this process; None until the job is loaded."""
        self._kept: KeptServer | None = None
        """What gives other hosts what is kept here; None until one asks."""
        self._load_failure: RemoteFailure | None = None
        self._early: list[tuple[bytes, OpenStream | OfferReading]] = []
        """Openings and offers that came before the job was loaded, each with who sent it."""
        self._checked_at = self._swept_at = 0.0
        self._owns_process = owns_process
        self._own_memory: OwnMemory | None = None
        """What looks after memory beside the arena; None where windows do not bound it, or it is a trainer's."""

    def load(self, is_stopped: Callable[[], bool]) -> None:
        """Fetch the job, in a thread of its own: it may take a while."""
        try:
            config, job = self._config, self._job.load(is_stopped)
            # A trainer's guests reach what the trainer does.
            relayed = job.spec.placement.read_by == "trainer" and not config.guest
            host = Host(
                config=config,
                job=job,
                data=self.data,
                lending=self._lending,
                opener=self._opener,
                streams=self._streams,
                relays=Relays(self.data.send, config.memory_bytes) if relayed else None,
            )
            if host.job.spec.sharing:
                arena_bytes = int(host.window_bytes * (WINDOWS_SHARE + MAKING_SHARE))
                host.lending.arena.limit(arena_bytes)
                if self._owns_process:
                    self._own_memory = OwnMemory(host.window_bytes - arena_bytes)
            else:
                host.lending.arena.allow_writers()
            self._host = host
        except StreamStopped:
            return  # this runner is being ended: whoever opens a stream here is sent elsewhere
        except BaseException as error:
            self._load_failure = describe_failure(error)
        self.data.ask_tick()  # readers may have come before it

    def all(self) -> list[AnyStream]:
        return list(self._streams.values())

    def say(self, text: str) -> bool:
        """Send text to everybody who reads here; False if nobody does."""
        return self.data.send_all(Output(worker=self._config.worker, text=text))

    def take(self, peer: bytes, message: ToRunner, buffers: Sequence[Any]) -> None:
        """Hear a message of a trainer's; `buffers`: what came with it."""
        match message:
            case Credit():
                if message.returned:
                    self._lending.take_back(peer, message.returned)
                self._tell_stream(peer, message)
            case ReturnLeases():
                self._lending.take_back(peer, message.leases)
            case OpenStream():
                self._open(peer, message)
            case CloseStream():
                self._tell_stream(peer, message)
                if message.leaving:
                    self.data.send(peer, StreamLeft(stream=message.stream, opening=message.opening))
            case UseSlabs():
                self.data.forget(*self._lending.admit(peer, message))
            case Units():
                self._opener.take_units(message)
            case OfferReading() | RelayRows() | RelayFailed():
                self._hear_relayed(peer, message, buffers)

    def _tell_stream(self, peer: bytes, message: Credit | CloseStream) -> None:
        if (stream := self._streams.get(message.stream)) is not None:
            stream.hear(peer, message)

    def take_from_fellow(self, peer: bytes, message: FromFellow) -> None:
        if self._kept is None and self._host is not None:
            job = self._host.job
            self._kept = KeptServer(job.graph, cache_scope(job.spec.owner), self.data.send)
        if self._kept is not None:
            self._kept.take(peer, message)

    def _open(self, peer: bytes, message: OpenStream) -> None:
        if message.runner != self._config.runner:
            reason = f"this is runner {self._config.runner}, not {message.runner}"
            self.data.send(peer, StreamRefused(stream=message.stream, opening=message.opening, reason=reason))
        elif message.stream not in self._streams and len(self._streams) + len(self._early) >= MOST_STREAMS:
            reason = f"this runner has {MOST_STREAMS:,} streams, which is as many as one may have; use more workers"
            self.data.send(peer, StreamRefused(stream=message.stream, opening=message.opening, reason=reason))
        elif self._host is not None:
            if message.storage.sources:
                self._opener.lend(message)
            stream = self._streams.get(message.stream) or self._new_stream(message, self._host)
            stream.hear(peer, message)
        elif self._load_failure is not None:
            failed = StreamFailed(
                stream=message.stream,
                binding=message.binding,
                opening=message.opening,
                seq=message.round,
                failure=self._load_failure,
            )
            self.data.send(peer, failed)
        else:
            self._early.append((peer, message))

    def _hear_relayed(self, peer: bytes, message: RelayMessage, buffers: Sequence[Any]) -> None:
        """Let the job's owner read for it, and nobody else: what others make of the rows is the owner's.

        Rows of whom nothing was asked are dropped.
        """
        if self._host is None:
            if isinstance(message, OfferReading) and self._load_failure is None and len(self._early) < MOST_STREAMS:
                self._early.append((peer, message))
            return
        if self._host.relays is None or (isinstance(message, OfferReading) and not self._is_owner(peer, self._host)):
            return
        self._host.relays.hear(peer, message, buffers)

    def _is_owner(self, peer: bytes, host: Host) -> bool:
        reader = self._principal_of(self.data.key_of(peer))
        return reader is not None and reader.name == host.job.spec.owner

    def _new_stream(self, message: OpenStream, host: Host) -> AnyStream:
        others = self.all()
        for other in others:
            other.retire(message.attempt)
        kind: Callable[[StreamId, Host], AnyStream] = SharedStream if host.job.spec.sharing else DealtStream
        stream = self._streams[message.stream] = kind(message.stream, host)
        for other in others:
            other.trim()
        return stream

    def lose(self, peer: bytes) -> None:
        """A peer was not there when something was sent to it."""
        if self._host is not None and self._host.relays is not None:
            self._host.relays.lose(peer)
        for stream in self.all():
            stream.hear(peer, None)

    def tick(self, now: float) -> None:
        if self._host is not None or self._load_failure is not None:
            early, self._early = self._early, []
            for peer, message in early:
                self.take(peer, message, ())
        for stream in self.all():
            if now - stream.served.idle_since > stream.forget_after_s:
                stream.close()
                del self._streams[stream.served.id]
                self._opener.forget(stream.served.id)
                continue
            for peer in stream.tick(now):
                # Nothing to say, but the socket finds out whether there is still somebody to say it to.
                self.data.send(peer, Output(worker=self._config.worker, text=""))
        if self._host is not None and now - self._swept_at >= FORGET_S:
            self._swept_at = now
            self._opener.forget_unopened(self._streams)
        if self._own_memory is not None:
            self._own_memory.give_back(now)
        if now - self._checked_at >= LOOK_S:
            self._checked_at = now
            self.data.forget(*self._lending.release_ended())

    def close(self) -> None:
        """End all runs, and give them a moment."""
        pumps = [pump for stream in self.all() if (pump := stream.close()) is not None]
        deadline = monotonic() + STOP_WAIT_S / 2
        for pump in pumps:
            pump.join(max(0.0, deadline - monotonic()))
        self.data.stop()
