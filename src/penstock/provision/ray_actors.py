"""Ray: a place is an actor that looks after one `penstock worker`.

The actor starts the worker as a process of its own (it is never forked, and no user code runs in the actor), and ends
with it. Actors are named and belong to a namespace of the service's own, so that a provisioner finds them again. They
ask for the processors of their place, so that Ray's scheduler places them and Ray's autoscaler brings nodes for them.
The agent's key reaches them as an argument of their constructor, and the worker as a file of mode 0600.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from penstock.core.errors import MissingExtraError
from penstock.provision.engines import PlaceCommand
from penstock.wire.credentials import Credentials

KIND = "ray"
AFTER_DRAIN_S = 10.0


class RayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How places are asked of Ray."""

    namespace: str
    """Of the service's own: its actors are found there again."""
    cpus: float = 1.0
    """How many processors a place asks for."""
    resources: Mapping[str, float] = {}
    """Further resources that a place asks for."""


class PlaceActor:
    """One `penstock worker` and whether it lives. Runs in a process of Ray's."""

    def __init__(self, command: PlaceCommand, name: str, credentials: Credentials) -> None:
        import ray

        self._folder = tempfile.TemporaryDirectory(prefix="penstock-ray-")
        keys = os.path.join(self._folder.name, "agent.json")
        credentials.write(keys)
        command = replace(command, keys=keys, advertise=command.advertise or ray.util.get_node_ip_address())
        # Its own group: what Ray sends to the actor's is not for the worker, which leaves in peace or with the actor.
        self._process = subprocess.Popen(
            [*command.arguments(name), "--with-parent"], stdin=subprocess.DEVNULL, start_new_session=True
        )
        self._drain_s = command.drain_s

    def watch(self) -> int:
        """Return how the worker ended, once it did. The provisioner holds this call: it fails if the node is lost."""
        return self._process.wait()

    def pid(self) -> int:
        return self._process.pid

    def leave(self) -> None:
        """Have the worker hand over what it has, and end with it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(self._drain_s + AFTER_DRAIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        import ray

        ray.actor.exit_actor()


class RayEngine(msgspec.Struct):
    """Runs places as Ray's actors. See `engines.Engine`."""

    command: PlaceCommand
    credentials: Credentials
    options: RayOptions
    _actors: dict[str, Any] = {}
    _watched: dict[Any, str] = {}
    """Names of places by the reference of what `PlaceActor.watch` will return."""
    _leaving: dict[Any, Any] = {}
    """Actors that were released, by what their `leave` will return: an actor without a handle is killed by Ray."""

    @property
    def kind(self) -> str:
        return KIND

    def start(self, count: int) -> None:
        ray = imported_ray()
        make = ray.remote(PlaceActor)
        options: dict[str, Any] = {
            "num_cpus": self.options.cpus,
            "resources": dict(self.options.resources) or None,
            "namespace": self.options.namespace,
            "max_concurrency": 3,  # watch() waits while leave() is called
            "max_restarts": 0,  # whether another one is wanted, and where, is decided anew
        }
        for _ in range(count):
            name = f"{KIND}-{secrets.token_hex(4)}"
            actor = make.options(name=name, **options).remote(self.command, name, self.credentials)
            self._actors[name] = actor
            self._watched[actor.watch.remote()] = name

    def names(self) -> frozenset[str]:
        for reference in _ended(self._watched):
            self._forget(self._watched[reference])
        for reference in _ended(self._leaving):
            del self._leaving[reference]
        return frozenset(self._actors)

    def release(self, names: Collection[str]) -> None:
        for name in set(names) & self._actors.keys():
            actor = self._actors[name]
            self._forget(name)
            self._leaving[actor.leave.remote()] = actor

    def close(self) -> None:
        self.release(self.names())
        if self._leaving:
            limit_s = self.command.drain_s + 2 * AFTER_DRAIN_S
            imported_ray().wait(list(self._leaving), num_returns=len(self._leaving), timeout=limit_s)
            self._leaving.clear()

    def _forget(self, name: str) -> None:
        del self._actors[name]
        self._watched = {reference: watched for reference, watched in self._watched.items() if watched != name}


def _ended(references: Mapping[Any, Any]) -> list[Any]:
    """Return those of the calls that returned or failed; not those of actors that are still to begin."""
    if not references:
        return []
    return list(imported_ray().wait(list(references), num_returns=len(references), timeout=0)[0])


def imported_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise MissingExtraError("ray", "ray") from None
    return ray
