"""Hosts that are not: network namespaces of this machine, each with its own address, joined by cables that can be cut.

Every namespace has one end of a veth pair; the other ends are ports of a bridge, which has a namespace too, so that
nothing of this machine's own network is touched. Cutting takes the port down: packets vanish, as from a pulled plug.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from types import TracebackType

from harness import BenchError

NETWORK = "10.213.77"
PREFIX = "pst"


class Network:
    """A bridge and hosts around it; nothing of it is left when the block ends."""

    def __init__(self, names: list[str]) -> None:
        self._tag = f"{PREFIX}{os.getpid()}-{secrets.token_hex(2)}"
        self._switch = f"{self._tag}-switch"
        self.addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(names, 1)}
        self._made: list[str] = []

    def __enter__(self) -> Network:
        if os.geteuid() != 0:
            raise BenchError("hosts needs root, to make network namespaces: run it as root, or in a container")
        if shutil.which("ip") is None:
            raise BenchError("hosts needs `ip`, to make network namespaces: apt-get install iproute2")
        _sweep()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._remove()

    def within(self, name: str) -> list[str]:
        """Return what goes before a command that is to run on that host."""
        return ["ip", "netns", "exec", self._namespace(name)]

    def pids(self, name: str) -> list[int]:
        """Return the processes of a host."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self._namespace(name)], capture_output=True, text=True, check=True
        )
        return list(map(int, listed.stdout.split()))

    def cut(self, name: str) -> None:
        self._ip("-n", self._switch, "link", "set", f"to-{name}", "down")

    def heal(self, name: str) -> None:
        self._ip("-n", self._switch, "link", "set", f"to-{name}", "up")

    def _namespace(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def _make(self) -> None:
        for namespace in (self._switch, *map(self._namespace, self.addresses)):
            self._ip("netns", "add", namespace)
            self._made.append(namespace)
            self._ip("-n", namespace, "link", "set", "lo", "up")
        self._ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        self._ip("-n", self._switch, "link", "set", "bridge", "up")
        for name, address in self.addresses.items():
            there = self._namespace(name)
            port = f"to-{name}"
            self._ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", there)
            self._ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
            self._ip("-n", there, "address", "add", f"{address}/24", "dev", "eth0")
            self._ip("-n", there, "link", "set", "eth0", "up")

    def _remove(self) -> None:
        while self._made:
            subprocess.run(["ip", "netns", "delete", self._made.pop()], capture_output=True, check=False)

    @staticmethod
    def _ip(*arguments: str) -> None:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            why = done.stderr.strip()
            raise BenchError(f"`ip {' '.join(arguments)}` failed: {why}; network namespaces are not allowed here")


def _sweep() -> None:
    """Delete the namespaces of processes that were killed before they could."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    for line in listed.stdout.splitlines():
        name = line.partition(" ")[0]
        owner = name.removeprefix(PREFIX).partition("-")[0]
        if name.startswith(PREFIX) and owner.isdigit() and not os.path.exists(f"/proc/{owner}"):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
