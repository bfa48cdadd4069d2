"""What the streams of one runner share: its job, its memory and how that is divided, its data socket, and who reads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from time import sleep
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from penstock.core.errors import PenstockError
from penstock.core.ids import JobName, StreamId
from penstock.processes.runner_config import RunnerConfig
from penstock.relays.runner_relays import Relays
from penstock.runtime.budget import Budget
from penstock.stream.serving import Served
from penstock.wire.admissions import KnownReader, WhoReads
from penstock.wire.compression import compress
from penstock.wire.control import ControlClient
from penstock.wire.frames import Output
from penstock.wire.jobs import delivery_of
from penstock.wire.leases import Lending
from penstock.wire.messages import Answer, NotKnown
from penstock.wire.principals import Principal
from penstock.worker.opening import LoadedJob, RunOpener

if TYPE_CHECKING:
    from penstock.worker.listening import DataSocket
    from penstock.worker.streams import HostedStream

ENGINE_SHARE = 0.5  # of the memory, for what engines buffer; credits and slabs have the rest
ARENA_SHARE = 0.5
SHARING_SHARE = 1 / 4  # what sharing may take where nobody says
LEASES_SHARE = 3 / 8  # of that, for what readers hold in place: they may do so for ever. Beyond, they get it by socket
WINDOWS_SHARE = 5 / 8  # for windows, less what readers hold of rounds that have left them
MAKING_SHARE = 1 / 8  # for batches in the making, in the arena; what is left is for engines and connections
LEAST_ENGINE_BYTES = 16 << 20
MAX_KNOWN = 10_000  # of readers of one job; the oldest are asked about again
TRIES, AGAIN_S = 10, 0.2  # a dispatcher that has just begun again hears of its readers one by one

AnyStream: TypeAlias = "HostedStream[Served[Any]]"

_log = logging.getLogger(__name__)


class Host(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What the streams of a process work with, and share."""

    config: RunnerConfig
    job: LoadedJob
    data: DataSocket
    lending: Lending
    opener: RunOpener
    streams: dict[StreamId, AnyStream]
    relays: Relays | None = None
    """What a trainer reads for the runs; None: they read by themselves."""

    @cached_property
    def window_bytes(self) -> int:
        """What sharing may take."""
        asked, memory_bytes = delivery_of(self.job.spec).window_bytes, self.config.memory_bytes
        return min(asked or int(memory_bytes * SHARING_SHARE), int(memory_bytes * ARENA_SHARE))

    def window_share(self) -> int:
        """Return how many bytes the window of one stream may have now: those that have one share the budget."""
        windows = sum(stream.served.holds_memory for stream in list(self.streams.values()))
        return int(self.window_bytes * WINDOWS_SHARE) // max(1, windows)

    def budget(self) -> Budget:
        """Share memory and threads among the streams that run now, the one that asks included."""
        reading = max(1, sum(stream.served.running for stream in list(self.streams.values())))
        memory = max(LEAST_ENGINE_BYTES, int(self.config.memory_bytes * ENGINE_SHARE) // reading)
        if self.job.spec.sharing:
            memory = max(1 << 20, min(memory, int(self.window_bytes * MAKING_SHARE)) // reading)
        return Budget(threads=max(1, -(-self.config.threads // reading)), memory_bytes=memory)

    def compress(self, buffers: Sequence[Any]) -> tuple[str, Sequence[Any]]:
        kind = self.job.spec.transport
        return ("", buffers) if kind in ("auto", "sockets") else (kind, compress(kind, buffers))

    def say(self, text: str) -> None:
        """Tell whoever reads here."""
        if not self.data.send_all(Output(worker=self.config.worker, text=text)):
            _log.warning(text)


class KnownReaders:
    """Who reads from a runner: trainers, known by the reading keys that they made and told the dispatcher, and other
    runners of its job, known by the keys that their agents made for them.

    A key that was not met before is asked about while its handshake waits; what the dispatcher says is kept, so that a
    reader whose connection was lost is known while the dispatcher is away. Any thread may ask.
    """

    def __init__(self, control: ControlClient, job: JobName) -> None:
        self._control, self._job = control, job
        self._known: dict[str, Principal] = {}

    def principal_of(self, verifier: str) -> Principal | None:
        return self._known.get(verifier)

    def inquire(
        self, verifier: str, tell: Callable[[Principal | None], None], tries: int = TRIES, wait_s: float = 0.0
    ) -> None:
        """Ask the dispatcher whose key this is. While it is away the handshake waits, and ends by its own deadline."""

        def heard(answer: Answer) -> None:
            if isinstance(answer, KnownReader):
                principal = self._known[verifier] = Principal.parse(answer.principal)
                while len(self._known) > MAX_KNOWN:
                    del self._known[next(iter(self._known))]
                tell(principal)
            elif isinstance(answer, NotKnown) and tries > 1:
                again = (verifier, tell, tries - 1, AGAIN_S)
                threading.Thread(target=self.inquire, args=again, name="penstock again", daemon=True).start()
            else:
                tell(None)

        sleep(wait_s)
        try:
            self._control.post(WhoReads(job=self._job, verifier=verifier), heard)
        except PenstockError:
            tell(None)  # this runner ends
