"""The process that runs one job's streams in a worker's place, and serves their rounds.

Threads: one owns the data socket (`sending`), one the connection to the dispatcher, each stream has one (`streams`)
beside the engine's own, and the main one looks after the rest once a second. A user's function runs in the engine's and
the streams' threads only: it may hang, raise or print without keeping the others from their work.

The process ends with SIGTERM. Nothing that matters is lost by that: what readers have received they hold, and the rest
is made again elsewhere.
"""

from __future__ import annotations

import faulthandler
import logging
import mmap
import os
import signal
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import msgspec
import zmq

from penstock.cluster_cache.fellow_links import FellowLinks
from penstock.cluster_cache.fellows import Fellows, KeptServer
from penstock.core.ids import StreamId
from penstock.core.private_memory import let_memory_be_read
from penstock.processes.nursery_link import RECORD_BYTES
from penstock.processes.output import OutputCapture
from penstock.processes.runner_config import RunnerConfig
from penstock.relays.runner_relays import RelayMessage, Relays
from penstock.runtime.flight_record import FlightRecord, HangWatch
from penstock.runtime.streams import StreamStopped
from penstock.wire.addresses import RunnerAddress
from penstock.wire.allocation import OwnMemory
from penstock.wire.control import ControlClient
from penstock.wire.credentials import Credentials
from penstock.wire.descriptor_limit import raise_descriptor_limit
from penstock.wire.failures import describe_failure
from penstock.wire.fetching import FromFellow
from penstock.wire.figures import RunnerFigures, lines_of
from penstock.wire.frames import (
    CloseStream,
    Credit,
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
from penstock.wire.guard import Socket
from penstock.wire.leases import Lending
from penstock.wire.slabs import Arena
from penstock.wire.sockets import Guard, bind_router
from penstock.worker.figures import Figures
from penstock.worker.host import ARENA_SHARE, MAKING_SHARE, WINDOWS_SHARE, AnyStream, Host
from penstock.worker.opening import MOST_STREAMS, RunnerJob, RunOpener, cache_scope
from penstock.worker.sending import DataSocket, KnownReaders
from penstock.worker.shared import SharedStream
from penstock.worker.streams import FORGET_S, DealtStream

HANG_S = 60.0
LOOK_S = 1.0
STOP_WAIT_S = 2.0

_log = logging.getLogger(__name__)


def run(
    config: RunnerConfig,
    ready: Callable[[str], None],
    record: mmap.mmap | None = None,
    report: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGTERM. `ready` is told the address, `report` the figures; `record` is memory that outlives us."""
    raise_descriptor_limit()
    if config.sandbox is not None:
        config = msgspec.structs.replace(config, listening=config.sandbox.enter(config.listening))
    let_memory_be_read()  # what it holds is its user's: the nursery and the agent keep theirs private
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    runner = JobRunner(config, record, owns_process=True)
    capture = OutputCapture(config.worker, runner.streams.say)
    faulthandler.enable(capture.own_stderr)

    def settle_and_report(figures: str) -> None:
        capture.settle()
        if report is not None:
            report(figures)

    runner.serve(stop, ready, settle_and_report)
    if not stop.is_set():
        os._exit(1)  # a deaf process would be waited for, another takes a dead one's place
    # A thread in the middle of a user's function cannot be ended: it has a moment, then the process goes without it.
    threading.Timer(STOP_WAIT_S, os._exit, (0,)).start()
    capture.close()
    runner.close()
    os._exit(0)


class HostedStreams:
    """The streams of a runner, and what readers say to them, as its data socket's thread hears it."""

    def __init__(
        self,
        config: RunnerConfig,
        socket: Socket,
        arena: Arena,
        job: RunnerJob,
        opener: RunOpener,
        readers: KnownReaders,
        *,
        owns_process: bool = False,
    ) -> None:
        self.data = DataSocket(socket, self)
        self._config = config
        self._lending = Lending(arena)
        self._job = job
        self._opener, self._readers = opener, readers
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
        if isinstance(message, OpenStream):
            self._open(peer, message)
        elif isinstance(message, UseSlabs):
            self._forget_peers(self._lending.admit(peer, message))
        elif isinstance(message, Units):
            self._opener.take_units(message)
        elif isinstance(message, Credit):
            if message.returned:
                self._lending.take_back(peer, message.returned)
            self._tell_stream(peer, message)
        elif isinstance(message, ReturnLeases):
            self._lending.take_back(peer, message.leases)
        elif isinstance(message, (OfferReading, RelayRows, RelayFailed)):
            self._hear_relayed(peer, message, buffers)
        elif isinstance(message, CloseStream):
            self._tell_stream(peer, message)
            if message.leaving:
                self.data.send(peer, StreamLeft(stream=message.stream, opening=message.opening))

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
        reader = self._readers.principal_of(self.data.key_of(peer))
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
        if self._host is not None and self._host.relays is not None:
            self._host.relays.lose(peer)
        for stream in self.all():
            stream.hear(peer, None)

    def _forget_peers(self, peers: list[bytes]) -> None:
        for peer in peers:
            self.data.forget(peer)

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
            self._forget_peers(self._lending.release_ended())

    def close(self) -> None:
        """End all runs, and give them a moment."""
        pumps = [pump for stream in self.all() if (pump := stream.close()) is not None]
        deadline = monotonic() + STOP_WAIT_S / 2
        for pump in pumps:
            pump.join(max(0.0, deadline - monotonic()))
        self.data.stop()


class JobRunner:
    """All of it but the process: tests run it in their own."""

    def __init__(self, config: RunnerConfig, record: Any = None, *, owns_process: bool = False) -> None:
        """`owns_process`: nothing else runs in this process, and so its memory is this runner's."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._control = ControlClient(
            config.dispatcher,
            config.credentials,
            name=f"runner {config.runner}",
            context=self._context,
            known_soon=True,
        )
        server, readers = Credentials.new("runner", config.runner), KnownReaders(self._control, config.job)
        self._guard = Guard(self._context, readers.principal_of, readers.inquire)
        self._guard.start()
        self._arena = Arena(int(config.memory_bytes * ARENA_SHARE))
        self._flight = FlightRecord(record if record is not None else bytearray(RECORD_BYTES))
        self._hangs = HangWatch(HANG_S)
        self._figures = Figures()
        self._closed = False
        socket, address = bind_router(self._context, config.listening, f"runner-{config.runner}", server, data=True)
        self.address = RunnerAddress(
            socket=address,
            key="" if config.listening.unix else server.public,
            slab=self._arena.name,
            host=config.host,
        )
        job = RunnerJob(self._control, config.job)
        self._links = FellowLinks(self._context, self._control, config.credentials, config.job)
        opener = RunOpener(job, self._control, self._flight, self._figures, Fellows(self._links))
        self.streams = HostedStreams(config, socket, self._arena, job, opener, readers, owns_process=owns_process)
        self._loading = threading.Thread(
            target=self.streams.load, args=(lambda: self._closed,), name="penstock load", daemon=True
        )

    def start(self) -> None:
        self.streams.data.start()
        self._loading.start()

    def serve(self, stop: threading.Event, ready: Callable[[str], None], report: Callable[[str], None]) -> None:
        """Run until `stop` is set, or until the data socket's thread died: nobody can be heard then."""
        self.start()
        ready(self.address.text())
        while not stop.wait(LOOK_S) and self.streams.data.serving:
            self._look_after()
            self._report(report)
        self._report(report)

    def _report(self, report: Callable[[str], None]) -> None:
        for line in lines_of(self.statistics()):
            report(line)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.streams.close()
        self._links.close()
        self._control.close()
        self._loading.join(STOP_WAIT_S)
        self._arena.close()
        self._guard.close()
        self._context.destroy(linger=0)

    def _look_after(self) -> None:
        """Name what hangs, and let go of memory nobody needs; called about once a second."""
        now = monotonic()
        self._arena.cool(now)
        for work in self._hangs.overdue(self._flight.in_flight(), now):
            text = (
                f"stream {work.stream}: {work.count} element(s) from element {work.index} of split {work.split} on "
                f"have been worked on for {now - work.began:.0f} s; the other streams go on"
            )
            if not self.streams.say(text):
                _log.warning(text)

    def statistics(self) -> RunnerFigures:
        """Return what the agent's heartbeat carries."""
        return self._figures.look(self.streams.all(), refused=self._guard.refused)
