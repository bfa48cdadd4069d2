"""Guest workers: processes on a trainer's host that join a service, for this trainer's jobs and no others.

They are in a nursery of the trainer's own, with an agent: so they end with the trainer, whatever ends it, and the
dispatcher sees them as workers like any other, whose tag says whose guests they are (`wire.modes.GUEST`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import threading
import weakref
from collections.abc import Sequence

import msgspec

from penstock.core.errors import NurseryGoneError
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
from penstock.processes.nursery_link import EndNursery, NurseryLink, Spawn, TellChild
from penstock.processes.nursery_start import StartedNursery, start_nursery
from penstock.processes.service_processes import share_of_budget
from penstock.wire.addresses import Listening, is_unix, unix_path
from penstock.wire.credentials import ServiceFile
from penstock.wire.modes import GUEST

AGENT = "agent"
END_S = 3.0
LEAVE_S = 5.0  # the trainer is still there and takes over where they stand


def new_guest_name() -> str:
    return f"{os.getpid()}-{secrets.token_hex(4)}"


class GuestWorkers:
    """Some workers of this host at a service. Safe to use from several threads.

    `name` is what the placement of a job calls them by (`Placement.guests`).
    """

    def __init__(self, service: ServiceFile, name: str, count: int) -> None:
        """`service` comes with the key of an agent."""
        self.name = name
        self._lock = threading.Lock()
        budget = share_of_budget(count, None, None)
        self._config = AgentConfig(
            dispatcher=service.address,
            credentials=service.credentials,
            agent=new_agent_id(),
            workers=new_places(count, (f"{GUEST}{self.name}",)),
            memory_bytes=budget.memory_bytes,
            threads=budget.threads,
            listening=_listening(service.address),
            drain_s=0.0,
        )
        nursery = start_nursery()
        self._link = NurseryLink(nursery.end)
        self._finalizer = weakref.finalize(self, _end, nursery, self._link, os.getpid())
        self._link.send(self._spawn())

    @property
    def count(self) -> int:
        return len(self._config.workers)

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        return tuple(place.worker for place in self._config.workers)

    def pids(self) -> list[int]:
        """Return their processes: the agent, and those that run a job."""
        return [child.pid for child in self._link.children() if child.pid]

    def resize(self, count: int) -> None:
        """Have so many of them from now on. Those that go are taken over where they stand."""
        with self._lock:
            there = self._config.workers
            if count > len(there):
                more = new_places(count - len(there), (f"{GUEST}{self.name}",))
                self._tell((*there, *more), JoinWorkers(workers=more))
            elif count < len(there):
                leaving = tuple(place.worker for place in there[count:])
                self._tell(there[:count], LeaveWorkers(workers=leaving, drain_s=LEAVE_S))

    def _tell(self, workers: Sequence[msgspec.Struct], order: AgentOrder) -> None:
        self._config = msgspec.structs.replace(self._config, workers=tuple(workers))
        with contextlib.suppress(NurseryGoneError):
            self._link.send(self._spawn())
            self._link.send(TellChild(id=AGENT, body=msgspec.msgpack.encode(order)))

    def _spawn(self) -> Spawn:
        config = msgspec.msgpack.encode(self._config)
        return Spawn(id=AGENT, entry=AGENT_ENTRY, config=config, restart=True, nursery=True)

    def close(self) -> None:
        """End them, and wait for that. Takes a few seconds at most."""
        self._finalizer()


def _listening(dispatcher: str) -> Listening:
    """Return where they listen: the trainer alone reads from them, so that loopback or a socket's folder will do."""
    return Listening(folder=os.path.dirname(unix_path(dispatcher))) if is_unix(dispatcher) else Listening()


def _end(nursery: StartedNursery, link: NurseryLink, owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork of the trainer: they are not its own
    process = nursery.process
    with contextlib.suppress(NurseryGoneError, OSError, subprocess.TimeoutExpired):
        link.send(EndNursery())
        process.wait(END_S)
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    link.close()
