"""The dispatcher's process: opens the journal, binds, says where it is, serves until SIGTERM.

A dispatcher that starts again on its journal binds the port it had, so that nobody has to be told where it went.
"""

from __future__ import annotations

import logging
import secrets
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from penstock.control.scaling_rules import DEFAULT_RULES, ScalingRules
from penstock.core.errors import CannotListenError, JournalWriteError
from penstock.core.private_memory import keep_memory_private
from penstock.dispatcher.allowances import Allowance, Meter
from penstock.dispatcher.audit import AuditLog
from penstock.dispatcher.blobs import BlobStore
from penstock.dispatcher.doors import Doors
from penstock.dispatcher.journal import Journal
from penstock.dispatcher.journaled_state import JournaledState
from penstock.dispatcher.key_registry import KeyRegistry
from penstock.dispatcher.service import Service
from penstock.wire.addresses import Listening
from penstock.wire.credentials import Credentials, KnownKey
from penstock.wire.descriptor_limit import raise_descriptor_limit
from penstock.wire.positions import PositionSigner
from penstock.wire.sockets import Guard, bind_router

SOCKET = "dispatcher"  # its name in the service's folder
REBIND_DEADLINE_S = 2.0  # a predecessor that was killed may hold the port for a moment longer

_log = logging.getLogger(__name__)


class DispatcherConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to run a dispatcher. `journal` None: in memory, nothing survives the process."""

    server: Credentials
    """What it proves itself with over TCP."""
    known: tuple[KnownKey, ...]
    """Who is let in, beside those in the registry."""
    registry: str | None = None
    """The file that `penstock keys` changes; None: there are no other keys."""
    audit_log: str | None = None
    """The file to which is written who changed what and who was refused; None: nobody wants to know."""
    allowance: Allowance = Allowance()
    journal: str | None = None
    listening: Listening = Listening()
    http_port: int | None = None
    http_bind: str = "127.0.0.1"
    http_token_file: str | None = None
    """What to show for `/metrics`; None: nobody is shown them."""
    scaling: ScalingRules = DEFAULT_RULES


class Dispatcher:
    """A dispatcher in this process. The thread that makes it must be the one that serves and closes it."""

    def __init__(self, config: DispatcherConfig) -> None:
        self._closers: list[Callable[[], None]] = []
        try:
            self._open(config)
        except BaseException:
            self.close()
            raise

    def _open(self, config: DispatcherConfig) -> None:
        directory = None if config.journal is None else Path(config.journal)
        journal = Journal(directory)
        self._closers.append(journal.close)
        blobs = BlobStore(directory)
        self._closers.append(blobs.close)
        journaled = JournaledState(
            journal, blobs, draw=lambda: secrets.token_hex(8), now=time.monotonic(), rules=config.scaling
        )
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._closers.append(lambda: context.destroy(linger=0))
        registry = KeyRegistry(None if config.registry is None else Path(config.registry), config.known)
        audit = AuditLog(None if config.audit_log is None else Path(config.audit_log))
        self._closers.append(audit.close)
        guard = Guard(context, registry.principal_of)
        guard.start()
        self._closers.append(guard.close)
        socket, self.address = _bind(context, config, journal)
        self._closers.append(lambda: socket.close(linger=0))
        doors = Doors(registry, PositionSigner(config.server.secret), Meter(config.allowance), audit)
        doors.begin(journaled.state)
        self.service = Service(socket, journaled, doors)
        self.http_port: int | None = None
        if config.http_port is not None:
            # Not everybody wants it, and its imports take their time.
            from penstock.dispatcher.http import HttpOptions, HttpServer
            from penstock.dispatcher.room import JournalRoom

            http = HttpServer(
                HttpOptions(
                    bind=config.http_bind,
                    port=config.http_port,
                    token_file=config.http_token_file,
                    names=(config.listening.advertise,) if config.listening.advertise else (),
                ),
                self.service,
                JournalRoom(directory, clock=time.monotonic),
                refused=lambda: guard.refused,
                clock=time.monotonic,
            )
            self._closers.append(http.close)
            self.http_port = http.port
        told = {"address": self.address, "journal": config.journal, "position": journaled.position}
        _log.info("the dispatcher serves", extra=told)

    def serve(self, stopped: Callable[[], bool]) -> None:
        self.service.serve(stopped)

    def close(self) -> None:
        while self._closers:
            self._closers.pop()()


def run(config: DispatcherConfig, ready: Callable[[str], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT. `ready` is told the address once requests are served."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_WithValues("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    raise_descriptor_limit()
    keep_memory_private()
    ended: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _: ended.append(got))
    dispatcher = Dispatcher(config)
    try:
        if ready is not None:
            ready(dispatcher.address)
        dispatcher.serve(lambda: bool(ended))
    finally:
        dispatcher.close()


def _bind(
    context: zmq.Context[zmq.Socket[bytes]], config: DispatcherConfig, journal: Journal
) -> tuple[zmq.Socket[bytes], str]:
    listening = config.listening
    if listening.unix:
        return bind_router(context, listening, SOCKET, config.server, data=False)
    had = journal.recall("port")
    deadline = time.monotonic() + REBIND_DEADLINE_S
    while listening.port == 0 and had is not None and _allowed(int(had), listening.port_range):
        try:
            same = msgspec.structs.replace(listening, port=int(had))
            return bind_router(context, same, SOCKET, config.server, data=False)
        except CannotListenError as error:
            if time.monotonic() > deadline:
                _log.warning("the port we had is taken; clients have to be told of a new one", extra={"why": error})
                break
            time.sleep(0.05)
    socket, address = bind_router(context, listening, SOCKET, config.server, data=False)
    # Not from the address: what is advertised may be a forwarded port.
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    port = endpoint.rstrip(b"\0").rpartition(b":")[2].decode()
    if port != had:
        try:
            journal.remember("port", port)
        except JournalWriteError as error:
            _log.warning("the port could not be noted: another start may bind another", extra={"why": error})
    return socket, address


def _allowed(port: int, port_range: tuple[int, int] | None) -> bool:
    return port_range is None or port_range[0] <= port <= port_range[1]


class _WithValues(logging.Formatter):
    """Shows what came in `extra` behind the message."""

    _plain = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}

    def format(self, record: logging.LogRecord) -> str:
        values = {key: value for key, value in vars(record).items() if key not in self._plain}
        line = super().format(record)
        if not values:
            return line
        first, *rest = line.split("\n", 1)
        return "\n".join([f"{first} ({', '.join(f'{key}={value}' for key, value in values.items())})", *rest])
