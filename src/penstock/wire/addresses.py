"""Addresses: of sockets, of runners, of hosts."""

from __future__ import annotations

import functools
import hashlib
import ipaddress
import os
import socket
from dataclasses import dataclass

from penstock.core.errors import InvalidArgumentError

ANY_HOSTS = ("*", "0.0.0.0", "::", "[::]")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerAddress:
    """Where a runner serves: a TCP address for everybody, a slab name (with its secret) for its own host.

    >>> RunnerAddress.parse(RunnerAddress(tcp="tcp://10.0.0.7:4001", slab="ab.cd", host="node7-12").text()).slab
    'ab.cd'
    """

    tcp: str
    slab: str = ""
    host: str = ""

    def text(self) -> str:
        return "|".join((self.tcp, self.slab, self.host))

    @staticmethod
    def parse(text: str) -> RunnerAddress:
        parts = text.split("|")
        if len(parts) != 3 or not parts[0].startswith("tcp://"):
            raise InvalidArgumentError(f"{text!r} is not a runner's address (tcp|slab|host)")
        return RunnerAddress(tcp=parts[0], slab=parts[1], host=parts[2])

    def __repr__(self) -> str:
        return f"RunnerAddress({self.tcp}, host={self.host!r}, slab={'yes' if self.slab else 'no'})"


@functools.cache
def host_id() -> str:
    """Return a name of this host and network namespace: two processes with the same one can share memory.

    It only says that trying is worth while; what proves it is a descriptor that arrives (`wire.slabs`).
    """
    parts = [socket.gethostname()]
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts.append(file.read().strip())
        parts.append(str(os.stat("/proc/self/ns/net").st_ino))
    except OSError:
        parts.append(f"{os.uname().machine}-{os.uname().release}")
    return f"{parts[0]}-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:12]}"


def split_tcp(address: str) -> tuple[str, int]:
    """
    >>> split_tcp("tcp://[::1]:5050")
    ('::1', 5050)
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidArgumentError(f"{address!r} is not an address: it should be tcp://host:port")
    return host.strip("[]"), int(port)


def join_tcp(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def advertised(bind: str, port: int, advertise: str | None) -> str:
    """Return the address others should use: `advertise` (host or host:port) if given, else what was bound."""
    if advertise:
        text = advertise.removeprefix("tcp://")
        host, colon, given_port = text.rpartition(":")
        if colon and given_port.isdigit() and (":" not in host or host.startswith("[")):
            return join_tcp(host.strip("[]"), int(given_port))
        return join_tcp(text.strip("[]"), port)
    return join_tcp(_outward_host() if bind in ANY_HOSTS else bind.strip("[]"), port)


def _outward_host() -> str:
    # Connecting a datagram socket sends nothing; it only asks the routing table for the address others would see.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()
