"""The process that runs one job's streams in a worker's place, and serves their rounds.

Threads: one owns the data socket (`listening`), one the connection to the dispatcher, each stream has one (`streams`)
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
from collections.abc import Callable
from time import monotonic
from typing import Any

import msgspec
import zmq

from penstock.cluster_cache.fellow_links import FellowLinks
from penstock.cluster_cache.fellows import Fellows
from penstock.core.private_memory import let_memory_be_read
from penstock.processes.nursery_link import RECORD_BYTES
from penstock.processes.output import OutputCapture
from penstock.processes.runner_config import RunnerConfig
from penstock.runtime.flight_record import FlightRecord, HangWatch
from penstock.wire.addresses import RunnerAddress
from penstock.wire.control import ControlClient
from penstock.wire.credentials import Credentials
from penstock.wire.descriptor_limit import raise_descriptor_limit
from penstock.wire.figures import RunnerFigures, lines_of
from penstock.wire.slabs import Arena
from penstock.wire.sockets import Guard, bind_router
from penstock.worker.figures import Figures
from penstock.worker.host import ARENA_SHARE, KnownReaders
from penstock.worker.listening import LOOK_S, STOP_WAIT_S, HostedStreams
from penstock.worker.opening import RunnerJob, RunOpener

HANG_S = 60.0

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
        self._closed = threading.Event()
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
        self.streams = HostedStreams(
            config, socket, self._arena, job, opener, readers.principal_of, owns_process=owns_process
        )
        self._loading = threading.Thread(
            target=self.streams.load, args=(self._closed.is_set,), name="penstock load", daemon=True
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
        if self._closed.is_set():
            return
        self._closed.set()
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
