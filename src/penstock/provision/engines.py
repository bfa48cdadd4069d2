"""What an engine is: something that runs `penstock worker` processes on hosts of its own.

A *place* is one of them: a command that the engine keeps somewhere, with one worker in it, whose id is the place's
name; its threads fill what the place has of its host. Engines do not watch the service, and decide nothing: they start,
name and release. What they start is told apart from what others start by its name alone, so that a provisioner that
was killed finds its places again.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Protocol

import msgspec

from penstock.core.errors import PenstockError


class EngineError(PenstockError):
    """An engine (Ray, Slurm, Kubernetes) did not do what it was asked for; the message has its own words."""


class Engine(Protocol):
    """Runs places. Calls return when the engine has taken the order, not when it is carried out."""

    @property
    def kind(self) -> str:
        """What it calls itself to the service: `ray`, `slurm`, `kubernetes`."""
        ...

    def start(self, count: int) -> None:
        """Ask for so many more places."""
        ...

    def names(self) -> frozenset[str]:
        """Return the places there are, those that are still to begin included, those that were released not."""
        ...

    def release(self, names: Collection[str]) -> None:
        """Have places leave in peace: their workers hand over what they have, and end."""
        ...

    def close(self) -> None:
        """Release all places that nobody else would end."""
        ...


class PlaceCommand(msgspec.Struct, frozen=True, kw_only=True):
    """The command of a place, `penstock worker`, as engines start it.

    >>> PlaceCommand(dispatcher="tcp://head:5050", keys="agent.json").arguments("slurm-7")[-6:]
    ['--processes', '1', '--name', 'slurm-7', '--drain-seconds', '30']
    """

    dispatcher: str
    keys: str
    """The file with an agent's key, where the place is."""
    threads: int | None = None
    drain_s: float = 30.0
    tags: tuple[str, ...] = ()
    bind: str | None = None
    advertise: str | None = None
    python: str = sys.executable

    def arguments(self, name: str) -> list[str]:
        """Return the command's words for a place of this name."""
        words = [self.python, "-P", "-m", "penstock", "worker", "--dispatcher", self.dispatcher, "--keys", self.keys]
        if self.threads is not None:
            words += ["--threads", str(self.threads)]
        if self.tags:
            words += ["--tags", ",".join(self.tags)]
        if self.bind is not None:
            words += ["--bind", self.bind]
        if self.advertise is not None:
            words += ["--advertise", self.advertise]
        return [*words, "--processes", "1", "--name", name, "--drain-seconds", f"{self.drain_s:g}"]
