"""Hosts of a test: network namespaces of this machine, joined by a bridge. Each has addresses and a cache of its own.

Two processes in two namespaces are on two hosts as far as Penstock can tell: they share no memory and reach each other
by TCP alone. Making namespaces takes root; tests that need them are skipped without.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest


class Host(NamedTuple):
    """One namespace."""

    name: str
    address: str
    cache: Path

    @property
    def prefix(self) -> tuple[str, ...]:
        """What stands before a command that runs there."""
        return "ip", "netns", "exec", self.name, "env", f"PENSTOCK_CACHE={self.cache}"


class HostNetwork(NamedTuple):
    address: str
    """Of the host that the test runs on, as the others reach it."""
    hosts: list[Host]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def network_of(count: int, folder: Path) -> Iterator[HostNetwork]:
    """Make so many hosts, and remove them."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces take root and `ip`")
    mark = secrets.token_hex(2)
    bridge, net = f"pb{mark}", f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(250)}"
    hosts = [Host(f"pn{mark}{n}", f"{net}.{n + 2}", folder / f"cache{n}") for n in range(count)]
    try:
        try:
            ip("link", "add", bridge, "type", "bridge")
            ip("addr", "add", f"{net}.1/24", "dev", bridge)
            ip("link", "set", bridge, "up")
            for n, host in enumerate(hosts):
                here, there = f"pv{mark}{n}", f"pw{mark}{n}"
                ip("netns", "add", host.name)
                ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", host.name)
                ip("link", "set", here, "master", bridge, "up")
                ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", there)
                ip("-n", host.name, "link", "set", there, "up")
                ip("-n", host.name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode()}")
        yield HostNetwork(f"{net}.1", hosts)
    finally:
        for host in hosts:
            with suppress(subprocess.CalledProcessError):
                ip("netns", "del", host.name)
        with suppress(subprocess.CalledProcessError):
            ip("link", "del", bridge)
