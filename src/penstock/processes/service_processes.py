"""Services of this process's own: a dispatcher and workers as processes beside it.

They are started before they are needed, and are not waited for here: a client waits for the dispatcher anyway. Where it
will be is known beforehand: a socket in the service's own folder, or a port, if it is to be reached by TCP. Somebody
else at that port would be noticed, and gets no secret: he has not the service's key.

What dies is started again: by the nursery, or, if that is what died, from here (`watched_nursery`). Nothing is left
when the service is closed, collected, or when this process ends in whatever way.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.control.scaling_rules import DEFAULT_RULES, ScalingRules
from penstock.core.checks import check_processes, check_whole
from penstock.core.errors import (
    CannotListenError,
    InvalidArgumentError,
    NurseryGoneError,
    ServiceClosedError,
    ServiceNotReadyError,
)
from penstock.core.ids import WorkerId
from penstock.processes.agent_messages import (
    AGENT_ENTRY,
    AgentConfig,
    AgentOrder,
    JoinWorkers,
    LeaveWorkers,
    new_agent_id,
    new_places,
)
from penstock.processes.nursery_link import (
    ChildLine,
    Died,
    FromNursery,
    Prepare,
    Ready,
    Spawn,
    TellChild,
    describe_exit,
)
from penstock.processes.nursery_start import StartedNursery, start_nursery
from penstock.processes.sandbox import Sandbox
from penstock.processes.service_folder import ServiceFolder
from penstock.processes.watched_nursery import WatchedNursery
from penstock.runtime.budget import Budget, default_budget
from penstock.wire.addresses import ANY_HOSTS, Listening, advertised, join_tcp
from penstock.wire.control import ControlClient
from penstock.wire.credentials import REGISTRY, Credentials, KnownKey, ServiceFile, ServiceKeys

if TYPE_CHECKING:  # a trainer need not have what looks after workers, unless some are its own threads
    from penstock.processes.inline_workers import MakeRunner

DISPATCHER_ENTRY = "penstock.dispatcher.main:run"
DISPATCHER, AGENT = "dispatcher", "agent"
DISPATCHER_GRACE_S = 1.0
LOOK_S = 0.02
MIN_MEMORY_BYTES = 64 << 20

_log = logging.getLogger("penstock")


class ServiceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a service on this host is set up."""

    workers: int
    keys: ServiceKeys = msgspec.field(default_factory=ServiceKeys.new)
    listening: Listening | None = None
    """None: at sockets in the service's folder."""
    named_after: Path | None = None
    """A path that only this service uses: started again, it listens at the same place."""
    journal: Path | None = None
    """The journal's folder; None: the service makes one, and removes it when it closes."""
    http_port: int | None = None
    http_bind: str = "127.0.0.1"
    http_token_file: str | None = None
    registry: str | None = None
    """The file that says who else is let in; None: one in the service's own folder, which is empty at first."""
    audit_log: str | None = None
    """Where to write who changed what and who was refused; None: nowhere."""
    threads: int | None = None
    memory_bytes: int | None = None
    tags: tuple[str, ...] = ()
    sandbox: Sandbox | None = None
    """What runners give up; None: nothing."""
    inline: int = 0
    """Workers inside this process, beside those that are processes."""
    scaling: ScalingRules = DEFAULT_RULES
    most_workers: int | None = None
    """How many workers there may be at a time; None: `workers`. Each has its share of the host by this."""


class ServiceProcesses:
    """A dispatcher and an agent, in a nursery of their own. Safe to use from several threads."""

    def __init__(
        self, options: ServiceOptions, nursery: StartedNursery | None = None, make_runner: MakeRunner | None = None
    ) -> None:
        """`nursery` is one that was started before; it is this service's once the service is there.

        `make_runner` makes what runs in the place of an inline worker.
        """
        check_processes("workers", options.workers, 0)
        check_whole("inline", options.inline, 0)
        most = max(options.workers, options.most_workers or 0)
        check_processes("workers", most, 0)
        budget = share_of_budget(most + options.inline, options.threads, options.memory_bytes)
        self.keys = options.keys
        self._provisioner = Credentials.new("provisioner", "local", server=options.keys.server.public)
        self._inline, self._most_workers = options.inline, options.most_workers or 0
        self._lock = threading.Lock()
        self._ready: dict[str, str] = {}
        self._failure = ""
        self._control: ControlClient | None = None
        self._provisioning: ControlClient | None = None
        folder = ServiceFolder(options.named_after)
        self.scratch = folder.path
        try:
            listening = _settled(options.listening or folder.listening())
            self.address, own = _addresses(listening)
            self._nursery = WatchedNursery(nursery or start_nursery(), folder)
        except BaseException:
            folder.remove()
            folder.close()
            raise
        self._finalizer = weakref.finalize(self, self._nursery.end)
        self._dispatcher = Spawn(
            id=DISPATCHER,
            entry=DISPATCHER_ENTRY,
            config=msgspec.msgpack.encode(_dispatcher_config(options, listening, self.scratch, self._provisioner)),
            restart=True,
            grace_s=DISPATCHER_GRACE_S,
        )
        self._agent = AgentConfig(
            dispatcher=own,
            credentials=options.keys.agent,
            agent=new_agent_id(),
            workers=new_places(options.workers, options.tags),
            memory_bytes=budget.memory_bytes,
            threads=budget.threads,
            listening=_for_runners(listening),
            sandbox=options.sandbox,
        )
        try:
            self._furnish()
            self._nursery.watch(weakref.WeakMethod(self._begin_again))
            if options.inline:
                assert make_runner is not None
                self._work_here(options, make_runner)
        except BaseException:
            self.close()
            raise

    def _furnish(self) -> None:
        """Tell a new nursery all there is to start."""
        link = self._nursery.link
        link.send(Prepare(path=tuple(os.path.abspath(each) for each in sys.path), scratch=str(self.scratch)))
        link.send(self._dispatcher)
        link.send(self._agent_spawn())

    def _work_here(self, options: ServiceOptions, make_runner: MakeRunner) -> None:
        from penstock.processes.inline_workers import InlineWorkers

        config = msgspec.structs.replace(
            self._agent, agent=new_agent_id(), workers=new_places(options.inline, options.tags), drain_s=0.0
        )
        self._nursery.close_first(InlineWorkers(config, make_runner))

    def _begin_again(self, how: str) -> None:
        """The nursery was killed, and all others with it. They have the same ids, journal and port as before."""
        with self._lock:
            if self.closed:
                return
            self._take_in()
            if not self.serves:
                self._failure = f"the process that starts the others was {how}"
            self._ready.clear()
            self._nursery.renew()
            self._furnish()
        _log.warning("the processes of the service at %s were lost (%s); they are started again", self.address, how)

    def service_file(self) -> ServiceFile:
        """Return what others need to reach it: those of this host's user everything, those elsewhere to read."""
        return self.keys.file(self.address, all_roles=self._agent.listening.unix)

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    @property
    def expected_workers(self) -> int:
        """How many workers there are, or will be when they are wanted and have been registered."""
        return max(self._most_workers, len(self._agent.workers)) + self._inline

    @property
    def nursery_pid(self) -> int:
        return self._nursery.nursery_pid

    @property
    def serves(self) -> bool:
        """Whether everything runs, as far as events were taken."""
        return {DISPATCHER, AGENT} <= self._ready.keys()

    def wait_ready(self, timeout_s: float) -> None:
        """Return when the dispatcher answers and the workers are registered; raise why they are not."""
        deadline = time.monotonic() + timeout_s
        while not self.ready():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                missing = sorted({DISPATCHER, AGENT} - self._ready.keys())
                raise ServiceNotReadyError(f"waited {timeout_s:.0f} s for the {' and the '.join(missing)}")
            if not self.take_events():
                time.sleep(min(left_s, LOOK_S))

    def ready(self) -> bool:
        """Return `serves`; raise if it will not."""
        if self._failure and not self.serves:
            raise ServiceNotReadyError(self._failure)
        return self.serves

    def children(self) -> tuple[ChildLine, ...]:
        """Return the processes the nursery looks after."""
        with self._lock:
            self._check_open()
            try:
                children = self._nursery.link.children()
            except NurseryGoneError:
                return ()  # all of them died with it; others are started
            self._take_in()
            return children

    def add_worker(self, tags: tuple[str, ...] = ()) -> WorkerId:
        (place,) = new_places(1, tags)
        with self._lock:
            self._check_open()
            self._agent = msgspec.structs.replace(self._agent, workers=(*self._agent.workers, place))
            self._tell_agent(JoinWorkers(workers=(place,)))
        return place.worker

    def remove_worker(self, worker: str | None, drain_s: float) -> WorkerId:
        with self._lock:
            self._check_open()
            known = [place.worker for place in self._agent.workers]
            if not known or (worker is not None and worker not in known):
                raise InvalidArgumentError(f"worker={worker!r} is not one of {', '.join(map(repr, known)) or 'none'}")
            leaving = known[-1] if worker is None else WorkerId(worker)
            staying = tuple(place for place in self._agent.workers if place.worker != leaving)
            self._agent = msgspec.structs.replace(self._agent, workers=staying)
            self._tell_agent(LeaveWorkers(workers=(leaving,), drain_s=drain_s))
        return leaving

    def _tell_agent(self, order: AgentOrder) -> None:
        """Tell it now, and have it started so from now on."""
        with contextlib.suppress(NurseryGoneError):  # another one starts it with all there is to know
            self._nursery.link.send(self._agent_spawn())
            self._nursery.link.send(TellChild(id=AGENT, body=msgspec.msgpack.encode(order)))

    def control(self) -> ControlClient:
        """Return a connection to the dispatcher, made when it is first needed."""
        with self._lock:
            self._check_open()
            if self._control is None:
                self._control = ControlClient(self._agent.dispatcher, self.keys.operator, name="service")
                self._nursery.close_first(self._control)
            return self._control

    def provisioning(self) -> ControlClient:
        """Return a connection in the name of who brings this service's workers."""
        with self._lock:
            self._check_open()
            if self._provisioning is None:
                self._provisioning = ControlClient(self._agent.dispatcher, self._provisioner, name="provisioner")
                self._nursery.close_first(self._provisioning)
            return self._provisioning

    def worker_ids(self) -> tuple[WorkerId, ...]:
        """Return the workers that are processes, those that are being started too."""
        with self._lock:
            self._check_open()
            return tuple(place.worker for place in self._agent.workers)

    def fileno(self) -> int:
        return self._nursery.link.fileno()

    def take_events(self) -> list[FromNursery]:
        """Return what has happened to the dispatcher and the agent since the last time."""
        with self._lock:
            self._check_open()
            return self._take_in()

    def close(self) -> None:
        """End all processes and remove what they left. Takes two seconds at most."""
        self._nursery.stop_watching()  # before the lock: the thread may be waiting for it
        with self._lock:
            self._finalizer()

    def _agent_spawn(self) -> Spawn:
        config = msgspec.msgpack.encode(self._agent)
        return Spawn(id=AGENT, entry=AGENT_ENTRY, config=config, restart=True, nursery=True)

    def _take_in(self) -> list[FromNursery]:
        events: list[FromNursery] = []
        with contextlib.suppress(NurseryGoneError):
            while (event := self._nursery.link.receive(0.0)) is not None:
                self._note(event)
                events.append(event)
        return events

    def _note(self, event: FromNursery) -> None:
        if isinstance(event, Ready):
            self._ready[event.id] = event.text
        elif isinstance(event, Died) and event.id not in self._ready:
            self._failure = f"the {event.id} {describe_exit(event.code, event.failure)}"

    def _check_open(self) -> None:
        if self.closed:
            raise ServiceClosedError


def share_of_budget(workers: int, threads: int | None, memory_bytes: int | None) -> Budget:
    """Return what each of so many workers may use."""
    whole = default_budget()
    count = max(1, workers)
    return default_budget(
        max(1, whole.threads // count) if threads is None else threads,
        max(MIN_MEMORY_BYTES, whole.memory_bytes // count) if memory_bytes is None else memory_bytes,
    )


def _settled(listening: Listening) -> Listening:
    """Return where the dispatcher listens in all its lives: a port that is free now, where it may choose one."""
    if listening.unix or listening.port:
        return listening
    with free_port(listening.bind, listening.port_range) as probe:
        return msgspec.structs.replace(listening, port=int(probe.getsockname()[1]))


def free_port(bind: str, port_range: tuple[int, int] | None = None) -> socket.socket:
    """Return a socket that is bound to a free port, and does not listen."""
    family, host = (socket.AF_INET6, bind.strip("[]")) if ":" in bind else (socket.AF_INET, bind)
    if bind in ANY_HOSTS:
        family, host = socket.AF_INET, ""
    candidates = [0] if port_range is None else list(range(port_range[0], port_range[1] + 1))
    reason = "there is no port to choose"
    for candidate in candidates:
        probe = socket.socket(family, socket.SOCK_STREAM)
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what was served there a moment ago is over
            probe.bind((host, candidate))
        except OSError as error:
            probe.close()
            reason = os.strerror(error.errno) if error.errno else str(error)
            continue
        return probe
    where = join_tcp(bind.strip("[]"), 0) if port_range is None else f"tcp://{bind} in ports {port_range}"
    raise CannotListenError(where, reason)


def _addresses(listening: Listening) -> tuple[str, str]:
    """Return how others reach the dispatcher, and how processes of this host do."""
    if listening.unix:
        own = f"ipc://{listening.folder}/{DISPATCHER}"
        return own, own
    host = "127.0.0.1" if listening.bind in ANY_HOSTS else listening.bind.strip("[]")
    return advertised(listening.bind, listening.port, listening.advertise), join_tcp(host, listening.port)


def _for_runners(listening: Listening) -> Listening:
    return msgspec.structs.replace(listening, port=0, advertise=host_only(listening.advertise))


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


def _dispatcher_config(
    options: ServiceOptions, listening: Listening, scratch: Path, provisioner: Credentials
) -> dict[str, object]:
    # As names and values: the dispatcher's modules are for its own process.
    return {
        "journal": str(options.journal if options.journal is not None else scratch / "journal"),
        "listening": listening,
        "http_port": options.http_port,
        "http_bind": options.http_bind,
        "http_token_file": options.http_token_file,
        "server": options.keys.server,
        "known": (*options.keys.known, KnownKey(provisioner.public, provisioner.principal)),
        "registry": options.registry or str(scratch / REGISTRY),
        "audit_log": options.audit_log,
        "scaling": options.scaling,
    }
