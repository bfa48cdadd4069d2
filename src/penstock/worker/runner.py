"""The process that runs one job's streams in a worker's place, and serves their rounds.

Threads: one owns the data socket (`sending`), one the connection to the dispatcher, two belong to each stream (`pump`)
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

import zmq

from penstock.core.ids import StreamId
from penstock.processes.flight_record import FlightRecord, HangWatch, InFlight
from penstock.processes.nursery_messages import RECORD_BYTES
from penstock.processes.runner_config import RunnerConfig
from penstock.runtime.budget import Budget
from penstock.stream.serving import Dealt, Terms
from penstock.wire.addresses import RunnerAddress
from penstock.wire.compression import compress
from penstock.wire.control import ControlClient
from penstock.wire.delivery import delivery_of
from penstock.wire.failures import describe_failure
from penstock.wire.frames import (
    CloseStream,
    Credit,
    FromRunner,
    OpenStream,
    Output,
    RemoteFailure,
    ReturnLeases,
    SlabPlaces,
    StreamFailed,
    StreamLeft,
    StreamRefused,
    ToRunner,
    Units,
    UseSlabs,
)
from penstock.wire.jobs import Cut, JobSpec
from penstock.wire.leases import Holder
from penstock.wire.liveness import is_gone
from penstock.wire.messages import RunnerFigures
from penstock.wire.slabs import Arena
from penstock.wire.sockets import Guard, bind_router
from penstock.worker.figures import Figures, line_of
from penstock.worker.job import Job, LoadedJob
from penstock.worker.opening import RunOpener
from penstock.worker.output import OutputCapture
from penstock.worker.pump import OpenedRun, Pump
from penstock.worker.sending import DataSocket
from penstock.worker.shared import SharedStream
from penstock.worker.streams import DealtStream

ENGINE_SHARE = 0.5  # of the memory, for what engines buffer; credits and slabs have the rest
ARENA_SHARE = 0.5
SHARING_SHARE = 1 / 4  # what sharing may take where nobody says
LEASES_SHARE = 3 / 8  # of that, for what readers hold in place: they may do so for ever. Beyond, they get it by socket
WINDOWS_SHARE = 5 / 8  # for windows, less what readers hold of rounds that have left them
MAKING_SHARE = 1 / 8  # for batches in the making, in the arena; what is left is for engines and connections
LEAST_ENGINE_BYTES = 16 << 20
HANG_S = 60.0
LOOK_S = 1.0
STOP_WAIT_S = 2.0
FORGET_S = 10.0  # a stream nobody reads: of an earlier epoch, or bound elsewhere. It opens anew where a reader stands
FORGET_SHARED_S = 600.0  # where trainers share it, it also knows what those had that left without a word

_log = logging.getLogger(__name__)


def run(
    config: RunnerConfig,
    ready: Callable[[str], None],
    record: mmap.mmap | None = None,
    report: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGTERM. `ready` is told the address, `report` the figures; `record` is memory that outlives us."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    runner = Runner(config, record)
    capture = OutputCapture(config.worker, runner.forward_output)
    faulthandler.enable(capture.own_stderr)

    def settle_and_report(figures: str) -> None:
        capture.settle()
        if report is not None:
            report(figures)

    runner.serve(stop, ready, settle_and_report)
    if not stop.is_set():
        os._exit(1)  # a deaf process would be waited for, another takes a dead one's place
    # A thread in the middle of a user's function cannot be ended: it has a moment, then the process goes without it.
    threading.Thread(target=_leave_anyway, name="penstock leave", daemon=True).start()
    capture.close()
    runner.close()
    os._exit(0)


def _leave_anyway() -> None:
    threading.Event().wait(STOP_WAIT_S)
    os._exit(0)


class Runner:
    """All of it but the process: tests run it in their own."""

    def __init__(self, config: RunnerConfig, record: Any = None) -> None:
        self.config = config
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._guard = Guard(self._context, config.credentials)
        self._guard.start()
        self._arena = Arena(int(config.memory_bytes * ARENA_SHARE))
        self._control = ControlClient(
            config.dispatcher, config.credentials, name=f"runner {config.runner}", context=self._context
        )
        self._job = Job(self._control, config.job)
        self._flight = FlightRecord(record if record is not None else bytearray(RECORD_BYTES))
        self._hangs = HangWatch(HANG_S)
        self._figures = Figures()
        self._streams: dict[StreamId, DealtStream | SharedStream] = {}
        self._early: list[tuple[bytes, OpenStream]] = []
        """Came before the job was loaded."""
        self._opener = RunOpener(
            config.job,
            self._job,
            control=self._control,
            arena=self._arena,
            flight=self._flight,
            figures=self._figures,
            budget=self._budget,
        )
        self._loaded: LoadedJob | None = None
        self._load_failure: RemoteFailure | None = None
        self._holders: dict[bytes, Holder] = {}
        """Of the peers that have mapped this process's memory."""
        self._checked_at = 0.0
        self._closed = False
        socket, tcp = bind_router(
            self._context,
            config.credentials,
            config.bind,
            port_range=config.port_range,
            advertise=config.advertise,
            data=True,
        )
        self.address = RunnerAddress(tcp=tcp, slab=self._arena.name, host=config.host)
        self._data = DataSocket(socket, on_message=self._take, on_lost=self._lost, on_tick=self._tick)
        self._loading = threading.Thread(target=self._load, name="penstock load", daemon=True)

    def start(self) -> None:
        self._data.start()
        self._loading.start()

    def serve(self, stop: threading.Event, ready: Callable[[str], None], report: Callable[[str], None]) -> None:
        """Run until `stop` is set, or until the data socket's thread died: nobody can be heard then."""
        self.start()
        ready(self.address.text())
        while not stop.wait(LOOK_S) and self._data.serving:
            self.look_after()
            report(line_of(self.statistics()))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        pumps = [pump for stream in list(self._streams.values()) if (pump := stream.close()) is not None]
        deadline = monotonic() + STOP_WAIT_S / 2
        for pump in pumps:
            pump.join(max(0.0, deadline - monotonic()))
        self._data.stop()
        self._control.close()
        self._loading.join(STOP_WAIT_S)
        self._arena.close()
        self._guard.close()
        self._context.destroy(linger=0)

    def _load(self) -> None:
        try:
            loaded = self._job.load(lambda: self._closed)
            if loaded.spec.sharing:
                self._arena.limit(int(self._window_bytes(loaded.spec) * (WINDOWS_SHARE + MAKING_SHARE)))
            else:
                self._arena.allow_writers()
            self._loaded = loaded
        except BaseException as error:
            self._load_failure = describe_failure(error)
        self._data.tick()  # readers may have come before it

    # What readers say: in the data socket's thread.

    def _take(self, peer: bytes, message: ToRunner) -> None:
        if isinstance(message, OpenStream):
            self._open(peer, message)
        elif isinstance(message, UseSlabs):
            self._hold(peer, message)
        elif isinstance(message, Units):
            self._opener.units_for(message.stream).take(message)
        elif isinstance(message, Credit):
            if message.returned:
                self._take_back(peer, message.returned)
            if (stream := self._streams.get(message.stream)) is not None:
                stream.take_credit(peer, message)
        elif isinstance(message, ReturnLeases):
            self._take_back(peer, message.leases)
        elif isinstance(message, CloseStream):
            if (stream := self._streams.get(message.stream)) is not None:
                stream.close_reader(peer, message.opening, leaving=message.leaving, taken=message.round)
            if message.leaving:
                self.send(peer, StreamLeft(stream=message.stream, opening=message.opening))

    def _take_back(self, peer: bytes, leases: tuple[int, ...]) -> None:
        if (holder := self._holders.get(peer)) is not None:
            self._arena.give_back(leases, holder.reader)

    def _open(self, peer: bytes, message: OpenStream) -> None:
        self._opener.lend(message)
        if message.runner != self.config.runner:
            reason = f"this is runner {self.config.runner}, not {message.runner}"
            self.send(peer, StreamRefused(stream=message.stream, opening=message.opening, reason=reason))
        elif self._loaded is not None:
            stream = self._streams.get(message.stream) or self._new_stream(message, self._loaded)
            stream.open(peer, message)
        elif self._load_failure is not None:
            self._tell_failure(peer, message, self._load_failure)
        else:
            self._early.append((peer, message))

    def _hold(self, peer: bytes, message: UseSlabs) -> None:
        """Let a peer have leases; what was sent on connections that are over, and never arrived, is free."""
        reader, first = message.reader, message.connection + message.over
        for other, known in list(self._holders.items()):
            if known.reader == reader and known.connection < first and known.connection not in message.live:
                self._forget_holder(other)
        if not message.over:
            self._holders[peer] = Holder(reader, message.connection)
        self._arena.keep_only(message.held, Holder(reader, first), message.live)

    def _forget_holder(self, peer: bytes) -> None:
        del self._holders[peer]
        self._data.peers.discard(peer)
        self._lost(peer)

    def _new_stream(self, message: OpenStream, job: LoadedJob) -> DealtStream | SharedStream:
        stream: DealtStream | SharedStream
        if job.spec.sharing:
            shared = [other for other in self._streams.values() if isinstance(other, SharedStream)]
            for other in shared:
                if other.attempt != message.attempt:
                    other.retire()
            stream = SharedStream(message.stream, self, job.spec, makes_rounds=job.makes_rounds)
            self._streams[message.stream] = stream
            for other in shared:
                other.trim()
            return stream
        served = Dealt(message.stream, delivery_of(job.spec), now=monotonic(), makes_rounds=job.makes_rounds)
        stream = self._streams[message.stream] = DealtStream(served, self, makes_rounds=job.makes_rounds)
        return stream

    def _tell_failure(self, peer: bytes, message: OpenStream, failure: RemoteFailure) -> None:
        self.send(
            peer,
            StreamFailed(
                stream=message.stream,
                binding=message.binding,
                opening=message.opening,
                seq=message.round,
                failure=failure,
            ),
        )

    def _lost(self, peer: bytes) -> None:
        for stream in list(self._streams.values()):
            stream.close_reader(peer)

    def _tick(self, now: float) -> None:
        if self._early and (self._loaded is not None or self._load_failure is not None):
            early, self._early = self._early, []
            for peer, message in early:
                self._open(peer, message)
        for stream in list(self._streams.values()):
            if now - stream.idle_since > (FORGET_SHARED_S if isinstance(stream, SharedStream) else FORGET_S):
                stream.close()
                del self._streams[stream.id]
                self._opener.forget(stream.id)
                continue
            for peer in stream.tick(now):
                # Nothing to say, but the socket finds out whether there is still somebody to say it to.
                self.send(peer, Output(worker=self.config.worker, text=""))
        if now - self._checked_at >= LOOK_S:
            self._checked_at = now
            self._take_back_memory()

    def _take_back_memory(self) -> None:
        """Release what ended processes held. A peer that is merely lost may have its arrays still."""
        for reader in {holder.reader for holder in self._holders.values()}:
            if is_gone(reader.partition("/")[0]):
                for peer in [peer for peer, holder in self._holders.items() if holder.reader == reader]:
                    self._forget_holder(peer)
                self._arena.release_all(reader)

    # What streams need: in their pumps' threads.

    def send(
        self, peer: bytes, header: FromRunner, buffers: Sequence[Any] = (), *, unsent: Callable[[], None] | None = None
    ) -> None:
        self._data.send(peer, header, buffers, unsent=unsent)

    def place(self, peer: bytes, buffers: Sequence[Any], *, exclusive: bool) -> SlabPlaces | None:
        # What a cache holds will be sent again: nobody may write to it.
        exclusive = exclusive and self._loaded is not None and not self._loaded.caches
        holder = self._holders.get(peer)
        return None if holder is None else self._arena.place(buffers, holder, exclusive=exclusive)

    def release(self, lease: int) -> None:
        self._arena.release((lease,))

    def array(self, shape: Sequence[int], dtype: Any) -> Any:
        return self._arena.array(shape, dtype)

    def keep(self, buffers: Sequence[Any]) -> tuple[SlabPlaces, Sequence[Any]] | None:
        places = self._arena.place(buffers)
        return None if places is None else (places, self._arena.views(places))

    def lease(self, peer: bytes, places: SlabPlaces) -> SlabPlaces | None:
        assert self._loaded is not None
        most_bytes = int(self._window_bytes(self._loaded.spec) * LEASES_SHARE)
        holder = self._holders.get(peer)
        return None if holder is None else self._arena.share(places, holder, most_bytes=most_bytes)

    def window_share(self) -> int:
        """Divide the windows' budget among the streams that have one; a part is left to batches in the making."""
        assert self._loaded is not None
        sharing = sum(
            isinstance(stream, SharedStream) and stream.holds_memory for stream in list(self._streams.values())
        )
        return int(self._window_bytes(self._loaded.spec) * WINDOWS_SHARE) // max(1, sharing)

    def _window_bytes(self, spec: JobSpec) -> int:
        memory_bytes = self.config.memory_bytes
        return min(delivery_of(spec).window_bytes or int(memory_bytes * SHARING_SHARE), int(memory_bytes * ARENA_SHARE))

    def compress(self, buffers: Sequence[Any]) -> tuple[str, Sequence[Any]]:
        assert self._loaded is not None
        kind = self._loaded.spec.transport
        return ("", buffers) if kind in ("auto", "sockets") else (kind, compress(kind, buffers))

    def open_run(self, stream: DealtStream | SharedStream, terms: Terms, start: Cut, pump: Pump) -> OpenedRun:
        return self._opener.open(stream, terms, start, pump)

    def _budget(self) -> Budget:
        """Share memory and threads among the streams that run now, the one that asks included."""
        reading = max(1, sum(stream.running for stream in list(self._streams.values())))
        memory = max(LEAST_ENGINE_BYTES, int(self.config.memory_bytes * ENGINE_SHARE) // reading)
        if self._loaded is not None and self._loaded.spec.sharing:
            memory = max(1 << 20, min(memory, int(self._window_bytes(self._loaded.spec) * MAKING_SHARE)) // reading)
        return Budget(threads=max(1, -(-self.config.threads // reading)), memory_bytes=memory)

    # Looking after

    def look_after(self) -> None:
        """Name what hangs, and let go of memory nobody needs; called about once a second."""
        now = monotonic()
        self._arena.cool(now)
        for work in self._hangs.overdue(self._flight.in_flight(), now):
            self.say(_hang_text(work, now))

    def say(self, text: str) -> None:
        if not self.forward_output(text):
            _log.warning(text)

    def forward_output(self, text: str) -> bool:
        """Send text to everybody who reads here; False if nobody does."""
        peers = list(self._data.peers)
        for peer in peers:
            self.send(peer, Output(worker=self.config.worker, text=text))
        return bool(peers)

    def statistics(self) -> RunnerFigures:
        """Return what the agent's heartbeat carries."""
        return self._figures.look(list(self._streams.values()), refused=self._guard.refused)


def _hang_text(work: InFlight, now: float) -> str:
    return (
        f"stream {work.stream}: {work.count} element(s) from element {work.index} of split {work.split} on have been "
        f"worked on for {now - work.began:.0f} s; the other streams go on"
    )
