"""`penstock worker`: workers on this host, for a dispatcher anywhere."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess

import msgspec

from penstock.cli.foreground import StopSignals, sandbox_of, say
from penstock.cli.main import UsageError
from penstock.core.errors import NurseryGoneError, PenstockError, ServiceFileMissingError
from penstock.core.ids import WorkerId
from penstock.processes.agent_messages import AGENT_ENTRY, AgentConfig, new_agent_id, new_places
from penstock.processes.nursery_link import Died, EndNursery, NurseryLink, Ready, Spawn, Stop, describe_exit
from penstock.processes.nursery_start import start_nursery
from penstock.processes.service_processes import share_of_budget
from penstock.runtime.budget import available_cores
from penstock.wire.addresses import Listening, is_loopback, is_unix, split_tcp, unix_path
from penstock.wire.credentials import KEYS_VARIABLE, SERVICE_VARIABLE, Credentials, ServiceFile, find_service
from penstock.wire.messages import WorkerPlace

AGENT = "agent"
AFTER_DRAIN_S = 8.0  # stopping runners that were not taken over, and saying goodbye
END_S = 3.0
LOOK_AGAIN_S = 0.5


def run_worker(options: argparse.Namespace) -> int:
    with StopSignals() as signals:
        named = options.dispatcher or os.environ.get(SERVICE_VARIABLE)
        if not named:
            raise UsageError("which dispatcher? give --dispatcher an address or a service file")
        path = options.keys or os.environ.get(KEYS_VARIABLE)
        keys = Credentials.read(path) if path else None
        service = _wait_for_service(named, keys, signals)
        if service is None:
            return 0
        config = _agent_config(options, service)
        nursery = start_nursery()
        process, link = nursery.process, NurseryLink(nursery.end)
        try:
            link.send(_spawn(config))
            parent = os.getppid() if options.with_parent else 0
            return _watch(link, signals, config, _Whereabouts(named, keys, service), parent)
        except NurseryGoneError as error:
            say(str(error))
            return 1
        finally:
            _end(process, link)


def _wait_for_service(named: str, keys: Credentials | None, signals: StopSignals) -> ServiceFile | None:
    """Return the service, once its file is there; None: told to end before it was."""
    said = False
    with contextlib.closing(_Never()) as never:
        while not signals.count:
            try:
                return _find(named, keys)
            except ServiceFileMissingError as error:
                if not said:
                    say(f"waiting for the dispatcher: {error}")
                said = True
                signals.wait(never.fileno(), LOOK_AGAIN_S)
    return None


def _find(named: str, keys: Credentials | None) -> ServiceFile:
    if keys is not None and "://" in named:
        split_tcp(named)
        service = ServiceFile(address=named, credentials=keys)
    else:
        service = find_service(named, "agent")
        if keys is not None:
            service = ServiceFile(address=service.address, credentials=keys)
    if service.credentials.role != "agent":
        raise UsageError("workers need the key of an agent: give --keys agent.json, as `penstock keys` writes it")
    return service


def _agent_config(options: argparse.Namespace, service: ServiceFile) -> AgentConfig:
    count = available_cores() if options.processes == "auto" else options.processes
    budget = share_of_budget(count, options.threads, options.memory_bytes)
    listening = _listening(options, service.address)
    return AgentConfig(
        dispatcher=service.address,
        credentials=service.credentials,
        agent=new_agent_id(),
        workers=_places(count, options),
        memory_bytes=budget.memory_bytes,
        threads=budget.threads,
        listening=listening,
        sandbox=sandbox_of(options, listening),
        drain_s=options.drain_seconds,
    )


def _places(count: int, options: argparse.Namespace) -> tuple[WorkerPlace, ...]:
    if options.name is None:
        return new_places(count, options.tags)
    if count == 1:
        return (WorkerPlace(WorkerId(options.name), options.tags),)
    return tuple(WorkerPlace(WorkerId(f"{options.name}.{number}"), options.tags) for number in range(count))


def _listening(options: argparse.Namespace, dispatcher: str) -> Listening:
    """Return where runners listen: beside a dispatcher that is reached by a socket of this host, or by TCP as it is."""
    if is_unix(dispatcher):
        return Listening(folder=os.path.dirname(unix_path(dispatcher)))
    here = is_loopback(split_tcp(dispatcher)[0])
    return Listening(
        bind=options.bind or ("127.0.0.1" if here else "0.0.0.0"),
        advertise=options.advertise,
        port_range=options.port_range,
    )


def _spawn(config: AgentConfig) -> Spawn:
    return Spawn(id=AGENT, entry=AGENT_ENTRY, config=msgspec.msgpack.encode(config), restart=True, nursery=True)


class _Whereabouts:
    """Notices that the service file names another dispatcher: one that was started anew may have got another port."""

    def __init__(self, named: str, keys: Credentials | None, service: ServiceFile) -> None:
        self._named, self._keys, self._known = named, keys, service
        self._is_file = "://" not in named

    def look(self) -> ServiceFile | None:
        """Return the service if it is another than before."""
        if not self._is_file:
            return None
        try:
            found = _find(self._named, self._keys)
        except PenstockError:
            return None  # the file is gone or no service file: the dispatcher that was known may be back
        if found == self._known:
            return None
        self._known = found
        return found


def _move(link: NurseryLink, config: AgentConfig) -> None:
    """Have the agent start again with another config: its workers keep their names."""
    link.send(_spawn(config))
    for child in link.children():
        if child.id == AGENT and child.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)


def _watch(link: NurseryLink, signals: StopSignals, config: AgentConfig, whereabouts: _Whereabouts, parent: int) -> int:
    """`parent`: the process that this one is not to outlive; 0: it may."""
    registered = draining = False
    while True:
        moved = None if draining else whereabouts.look()
        if moved is not None:
            say(f"the dispatcher is at {moved.address} now: joining it there")
            config = msgspec.structs.replace(config, dispatcher=moved.address, credentials=moved.credentials)
            _move(link, config)
        while (event := link.receive(0.0)) is not None:
            if isinstance(event, Ready):
                registered = True
                names = ", ".join(place.worker for place in config.workers)
                say(f"registered at {config.dispatcher}: {names}")
            elif isinstance(event, Died):
                how = describe_exit(event.code, event.failure)
                if draining:
                    say("left")
                    return 0
                if not registered and event.failure:
                    raise PenstockError(f"the workers did not start: {how}")
                say(f"the agent {how}; it is started again")
        leave = bool(signals.count) or (parent != 0 and os.getppid() != parent)
        if signals.count > 1 or (leave and not registered):
            say("ended")
            return 0
        if leave and not draining:
            draining = True
            say("leaving: others take over; a second signal ends this at once")
            link.send(Stop(id=AGENT, grace_s=config.drain_s + AFTER_DRAIN_S))
        signals.wait(link.fileno(), LOOK_AGAIN_S)


def _end(process: subprocess.Popen[bytes], link: NurseryLink) -> None:
    try:
        link.send(EndNursery())
        process.wait(END_S)
    except (PenstockError, OSError, subprocess.TimeoutExpired):
        pass
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    link.close()


class _Never:
    """A descriptor on which nothing ever arrives."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def fileno(self) -> int:
        return self._read

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)
