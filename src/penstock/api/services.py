"""Services of this process's own: a dispatcher and workers as processes beside it.

`LocalService` returns before they run: a client waits for the dispatcher anyway. Its port is known beforehand, because
this process holds it (bound, never listening) for as long as the service lives: nobody else takes it between two lives
of the dispatcher.

Nothing is left when the service is closed, collected, or when this process ends in whatever way.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import msgspec

from penstock.core.errors import (
    CannotListenError,
    InvalidArgumentError,
    PenstockError,
    ServiceClosedError,
    ServiceNotReadyError,
)
from penstock.core.ids import WorkerId
from penstock.runtime.budget import Budget, default_budget
from penstock.wire.addresses import ANY_HOSTS, advertised, is_loopback, join_tcp
from penstock.wire.control import ControlClient
from penstock.wire.credentials import Credentials, ServiceFile
from penstock.wire.messages import JobLine, Jobs, ListJobs, ListWorkers, WorkerLine, Workers
from penstock.worker.processes import (
    ChildLine,
    Died,
    End,
    FromNursery,
    NurseryLink,
    Prepare,
    Ready,
    Spawn,
    Tell,
    describe_exit,
    start_nursery,
)
from penstock.worker.processes_agent import (
    AGENT_ENTRY,
    DRAIN_S,
    AgentConfig,
    JoinWorkers,
    LeaveWorkers,
    new_agent_id,
    new_places,
)

DISPATCHER_ENTRY = "penstock.dispatcher.main:run"
DISPATCHER, AGENT = "dispatcher", "agent"
DISPATCHER_GRACE_S = 1.0
END_S = 2.0
MIN_MEMORY_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """How a service on this host is set up."""

    workers: int
    credentials: Credentials
    bind: str = "127.0.0.1"
    advertise: str | None = None
    port: int = 0
    port_range: tuple[int, int] | None = None
    journal: Path | None = None
    """None: a folder of its own, removed with the service."""
    http_port: int | None = None
    threads: int | None = None
    memory_bytes: int | None = None
    tags: tuple[str, ...] = ()


class ServiceProcesses:
    """A dispatcher and an agent, in a nursery of their own. Safe to use from several threads."""

    def __init__(
        self, options: ServiceOptions, nursery: tuple[subprocess.Popen[bytes], NurseryLink] | None = None
    ) -> None:
        """`nursery` is one that was started before; it is this service's once the service is there."""
        if options.workers < 0:
            raise InvalidArgumentError(f"workers={options.workers} must be at least 0")
        if not is_loopback(options.bind) and options.credentials.kind != "curve":
            raise InvalidArgumentError(
                f"will not listen at {options.bind!r} without keys: others on the network could read everything. "
                "Make keys with `penstock keys DIR` and give --keys DIR/server.json, or bind to 127.0.0.1"
            )
        self.credentials = options.credentials
        self._lock = threading.Lock()
        self._ready: dict[str, str] = {}
        self._failure = ""
        self._controls: list[ControlClient] = []
        """None or one."""
        with contextlib.ExitStack() as undo:
            held = hold_port(options.bind, options.port, options.port_range)
            undo.callback(held.close)
            port = int(held.getsockname()[1])
            self.address = advertised(options.bind, port, options.advertise)
            self.scratch = Path(tempfile.mkdtemp(prefix="penstock-"))
            undo.callback(shutil.rmtree, self.scratch, ignore_errors=True)
            process, link = nursery or start_nursery()
            undo.pop_all()
        self.nursery_pid = process.pid
        self._link = link
        self._finalizer = weakref.finalize(self, _end, os.getpid(), process, link, held, self.scratch, self._controls)
        budget = share_of_budget(options.workers, options.threads, options.memory_bytes)
        self._agent = AgentConfig(
            dispatcher=join_tcp(_own_host(options.bind), port),
            credentials=options.credentials,
            agent=new_agent_id(),
            workers=new_places(options.workers, options.tags),
            memory_bytes=budget.memory_bytes,
            threads=budget.threads,
            bind=options.bind,
            advertise=host_only(options.advertise),
            port_range=options.port_range,
        )
        try:
            self._send(Prepare(path=tuple(os.path.abspath(each) for each in sys.path), scratch=str(self.scratch)))
            self._send(
                Spawn(
                    id=DISPATCHER,
                    entry=DISPATCHER_ENTRY,
                    config=msgspec.msgpack.encode(_dispatcher_config(options, port, self.scratch)),
                    restart=True,
                    grace_s=DISPATCHER_GRACE_S,
                )
            )
            self._spawn_agent()
        except BaseException:
            self.close()
            raise

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def wait_ready(self, timeout_s: float) -> None:
        """Return when the dispatcher answers and the workers are registered; raise why they are not."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:  # for a moment only, so that the service can be closed meanwhile
                self._check_open()
                if self.ready():
                    return
                missing = {DISPATCHER, AGENT} - self._ready.keys()
                left_s = deadline - time.monotonic()
                event = self._link.receive(max(0.0, min(left_s, 0.2)))
                if event is not None:
                    self._note(event)
                elif left_s <= 0:
                    raise ServiceNotReadyError(f"waited {timeout_s:.0f} s for the {' and the '.join(sorted(missing))}")

    def ready(self) -> bool:
        """Return whether everything runs, as far as events were taken; raise if it will not."""
        if self._failure and not {DISPATCHER, AGENT} <= self._ready.keys():
            raise ServiceNotReadyError(self._failure)
        return {DISPATCHER, AGENT} <= self._ready.keys()

    def children(self) -> tuple[ChildLine, ...]:
        """Return the processes the nursery looks after."""
        with self._lock:
            self._check_open()
            children = self._link.children()
            while (event := self._link.receive(0.0)) is not None:
                self._note(event)
            return children

    def add_worker(self, tags: tuple[str, ...] = ()) -> WorkerId:
        (place,) = new_places(1, tags)
        with self._lock:
            self._agent = msgspec.structs.replace(self._agent, workers=(*self._agent.workers, place))
            self._spawn_agent()
            self._send(Tell(id=AGENT, body=msgspec.msgpack.encode(JoinWorkers(workers=(place,)))))
        return place.worker

    def remove_worker(self, worker: str | None, drain_s: float) -> WorkerId:
        with self._lock:
            known = [place.worker for place in self._agent.workers]
            if not known or (worker is not None and worker not in known):
                raise InvalidArgumentError(f"worker={worker!r} is not one of {', '.join(map(repr, known)) or 'none'}")
            leaving = known[-1] if worker is None else WorkerId(worker)
            staying = tuple(place for place in self._agent.workers if place.worker != leaving)
            self._agent = msgspec.structs.replace(self._agent, workers=staying)
            self._spawn_agent()
            order = LeaveWorkers(workers=(leaving,), drain_s=drain_s)
            self._send(Tell(id=AGENT, body=msgspec.msgpack.encode(order)))
        return leaving

    def control(self) -> ControlClient:
        """Return a connection to the dispatcher, made when it is first needed."""
        with self._lock:
            self._check_open()
            if not self._controls:
                self._controls.append(ControlClient(self.address, self.credentials.as_client(), name="service"))
            return self._controls[0]

    def fileno(self) -> int:
        return self._link.fileno()

    def take_events(self) -> list[FromNursery]:
        """Return what has happened to the dispatcher and the agent since the last time."""
        events: list[FromNursery] = []
        with self._lock:
            self._check_open()
            while (event := self._link.receive(0.0)) is not None:
                self._note(event)
                events.append(event)
        return events

    def close(self) -> None:
        """End all processes and remove what they left. Takes two seconds at most."""
        with self._lock:
            self._finalizer()

    def _spawn_agent(self) -> None:
        config = msgspec.msgpack.encode(self._agent)
        self._send(Spawn(id=AGENT, entry=AGENT_ENTRY, config=config, restart=True, nursery=True))

    def _send(self, request: Prepare | Spawn | Tell) -> None:
        self._check_open()
        self._link.send(request)

    def _note(self, event: FromNursery) -> None:
        if isinstance(event, Ready):
            self._ready[event.id] = event.text
        elif isinstance(event, Died) and event.id not in self._ready:
            self._failure = f"the {event.id} {describe_exit(event.code, event.failure)}"

    def _check_open(self) -> None:
        if self.closed:
            raise ServiceClosedError


class LocalService:
    """A dispatcher and worker processes on this host, for any number of loaders.

    It is closed at the end of the `with` block, by `close()`, when it is collected, and with this process.
    """

    def __init__(
        self,
        workers: int = 2,
        *,
        journal: str | os.PathLike[str] | None = None,
        threads: int | None = None,
        memory_bytes: int | None = None,
        tags: Iterable[str] = (),
    ) -> None:
        """`threads` and `memory_bytes` are each worker's; without them the workers share what this host allows.

        With `journal`, a folder, jobs outlive the service: another one with the same folder goes on with them.
        """
        self._processes = ServiceProcesses(
            ServiceOptions(
                workers=workers,
                credentials=Credentials.new_token(),
                journal=None if journal is None else Path(journal),
                threads=threads,
                memory_bytes=memory_bytes,
                tags=(tags,) if isinstance(tags, str) else tuple(tags),
            )
        )

    @property
    def address(self) -> str:
        return self._processes.address

    @property
    def credentials(self) -> Credentials:
        return self._processes.credentials

    @property
    def service_file(self) -> Path:
        """A file that names this service to other processes of this user: `distribute(to=...)`, $PENSTOCK_SERVICE."""
        path = self._processes.scratch / "service.json"
        if not path.exists() and not self._processes.closed:
            ServiceFile(address=self.address, credentials=self.credentials.as_client()).write(path)
        return path

    @property
    def dispatcher_pid(self) -> int:
        """The dispatcher's process; if it is just being started again, this waits for it."""
        deadline = time.monotonic() + 30.0
        while time.monotonic() < deadline:
            for child in self._processes.children():
                if child.id == DISPATCHER and child.pid:
                    return child.pid
            time.sleep(0.01)
        raise ServiceNotReadyError("waited 30 s for the dispatcher to be started again")

    def worker_pids(self) -> dict[str, int]:
        """Return the process in each worker's place. A worker that runs no job has none."""
        running = (child for child in self._processes.children() if "/" in child.id and child.pid)
        return {child.id.partition("/")[0]: child.pid for child in running}

    def pids(self) -> list[int]:
        """Return all processes of the service."""
        return [self._processes.nursery_pid, *(child.pid for child in self._processes.children() if child.pid)]

    def jobs(self) -> list[JobLine]:
        answer = self._processes.control().ask(ListJobs(), timeout_s=30.0, what="the list of jobs")
        assert isinstance(answer, Jobs)
        return list(answer.jobs)

    def workers(self) -> list[WorkerLine]:
        answer = self._processes.control().ask(ListWorkers(), timeout_s=30.0, what="the list of workers")
        assert isinstance(answer, Workers)
        return list(answer.workers)

    def add_worker(self, tags: Iterable[str] = ()) -> str:
        """Add a worker; return its id. Jobs that run use it at once."""
        return self._processes.add_worker((tags,) if isinstance(tags, str) else tuple(tags))

    def remove_worker(self, worker: str | None = None, *, drain_s: float = DRAIN_S) -> str:
        """Let a worker go (None: the one added last); return its id.

        It takes no new work, and its process ends when others have taken over, after `drain_s` at the latest.
        """
        return self._processes.remove_worker(worker, drain_s)

    def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Return when the service runs. Not needed: loaders wait for it themselves."""
        self._processes.wait_ready(timeout_s)

    def close(self) -> None:
        self._processes.close()

    def __enter__(self) -> LocalService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LocalService({'closed' if self._processes.closed else self.address})"


def share_of_budget(workers: int, threads: int | None, memory_bytes: int | None) -> Budget:
    """Return what each of so many workers may use."""
    whole = default_budget()
    count = max(1, workers)
    return default_budget(
        threads or max(1, whole.threads // count), memory_bytes or max(MIN_MEMORY_BYTES, whole.memory_bytes // count)
    )


def hold_port(bind: str, port: int, port_range: tuple[int, int] | None) -> socket.socket:
    """Bind a port without listening, so that only a listener of ours can have it."""
    family, host = (socket.AF_INET6, bind.strip("[]")) if ":" in bind else (socket.AF_INET, bind)
    if bind in ANY_HOSTS:
        family, host = socket.AF_INET, ""
    candidates = [port] if port or port_range is None else list(range(port_range[0], port_range[1] + 1))
    reason = "there is no port to choose"
    for candidate in candidates:
        held = socket.socket(family, socket.SOCK_STREAM)
        try:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind((host, candidate))
        except OSError as error:
            held.close()
            reason = os.strerror(error.errno) if error.errno else str(error)
            continue
        return held
    where = join_tcp(bind.strip("[]"), port) if port or port_range is None else f"tcp://{bind} in ports {port_range}"
    raise CannotListenError(where, reason)


def host_only(advertise: str | None) -> str | None:
    """Return the host of `--advertise`: its port is the dispatcher's, runners have their own.

    >>> host_only("node7:5050"), host_only("node7"), host_only("[fe80::1]:5050"), host_only(None)
    ('node7', 'node7', '[fe80::1]', None)
    """
    if advertise is None:
        return None
    text = advertise.removeprefix("tcp://")
    host, colon, port = text.rpartition(":")
    return host if colon and port.isdigit() and (":" not in host or host.startswith("[")) else text


def _own_host(bind: str) -> str:
    """Return how processes of this host reach a listener here."""
    return "127.0.0.1" if bind in ANY_HOSTS else bind.strip("[]")


def _dispatcher_config(options: ServiceOptions, port: int, scratch: Path) -> dict[str, object]:
    # As names and values: the dispatcher's modules are for its own process.
    return {
        "journal": str(options.journal if options.journal is not None else scratch / "journal"),
        "bind": options.bind,
        "port": port,
        "advertise": options.advertise,
        "http_port": options.http_port,
        "credentials": options.credentials,
    }


def _end(
    owner_pid: int,
    process: subprocess.Popen[bytes],
    link: NurseryLink,
    held: socket.socket,
    scratch: Path,
    controls: list[ControlClient],
) -> None:
    """Whatever happens here, nothing is left. A fork of the owner only lets go of its copies."""
    if os.getpid() == owner_pid:
        for control in controls:
            control.close()
        try:
            link.send(End(), timeout_s=0.1)
            process.wait(END_S)
        except (PenstockError, OSError, subprocess.TimeoutExpired):
            pass
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it leads its own session
            process.wait()
        shutil.rmtree(scratch, ignore_errors=True)
    link.close()
    held.close()
