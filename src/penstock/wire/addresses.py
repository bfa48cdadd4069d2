"""Addresses: of sockets, of runners, of hosts."""

from __future__ import annotations

import functools
import hashlib
import ipaddress
import os
import socket

import msgspec

from penstock.core.errors import InvalidArgumentError

ANY_HOSTS = ("*", "0.0.0.0", "::", "[::]")


class Listening(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a process listens: at a Unix socket in a folder of its user's own, or, without one, at a TCP port.

    >>> Listening(folder="/tmp/penstock-0/ab").unix
    True
    """

    folder: str = ""
    bind: str = "127.0.0.1"
    advertise: str | None = None
    """The name or address others reach this host by, with a port if that is another, too."""
    port: int = 0
    """0: a free one, out of `port_range` (both ends included) if that is given."""
    port_range: tuple[int, int] | None = None

    @property
    def unix(self) -> bool:
        return bool(self.folder)


class RunnerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a runner serves: its socket, the public key it has there (TCP), and memory for its own host.

    >>> RunnerAddress.parse(RunnerAddress(socket="tcp://10.0.0.7:4001", slab="ab.cd", host="node7-12").text()).slab
    'ab.cd'
    """

    socket: str
    key: str = ""
    slab: str = ""
    """The name of its memory, and a secret."""
    host: str = ""

    def text(self) -> str:
        # A space: keys have all other signs, and a socket's path has none.
        return " ".join((self.socket, self.key or "-", self.slab or "-", self.host or "-"))

    @staticmethod
    def parse(text: str) -> RunnerAddress:
        parts = ["" if part == "-" else part for part in text.split(" ")]
        if len(parts) != 4 or not parts[0].startswith(("tcp://", "ipc://")):
            raise InvalidArgumentError(f"{text!r} is not a runner's address (socket key slab host)")
        return RunnerAddress(socket=parts[0], key=parts[1], slab=parts[2], host=parts[3])

    def __repr__(self) -> str:
        return f"RunnerAddress({self.socket}, host={self.host!r}, slab={'yes' if self.slab else 'no'})"


def is_unix(address: str) -> bool:
    return address.startswith("ipc://")


def unix_path(address: str) -> str:
    """
    >>> unix_path("ipc:///tmp/penstock-0/ab/dispatcher")
    '/tmp/penstock-0/ab/dispatcher'
    """
    return address.removeprefix("ipc://")


def check_address(address: str) -> None:
    """Raise unless this is the address of a dispatcher."""
    if not is_unix(address):
        split_tcp(address)


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
