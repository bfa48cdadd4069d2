"""A stranger: somebody with a socket and no key, who knows how the protocol begins."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from penstock.wire.addresses import split_tcp

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
WAIT_S = 10.0


def resident_mb(pid: int) -> float:
    """Return how much memory a process has at the moment."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / (1 << 20)


def connect(address: str) -> socket.socket:
    """Return a plain connection to a listener of either kind."""
    if address.startswith("ipc://"):
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        peer.settimeout(WAIT_S)
        peer.connect(address.removeprefix("ipc://"))
        return peer
    return socket.create_connection(split_tcp(address), timeout=WAIT_S)


def greet(peer: socket.socket) -> None:
    """Exchange ZMTP 3.1 greetings, claiming whatever mechanism the other side has."""
    peer.sendall(SIGNATURE + b"\x03\x01")
    theirs = b""
    while len(theirs) < 64:
        got = peer.recv(64 - len(theirs))
        if not got:
            raise ConnectionError("the other side hung up within the greeting")
        theirs += got
    peer.sendall(theirs[12:32] + bytes(32))


def frame(claimed_bytes: int, *, command: bool = True) -> bytes:
    """Return the head of a frame that claims to be so long."""
    return struct.pack(">BQ", 0x06 if command else 0x02, claimed_bytes)


@contextlib.contextmanager
def connections(address: str, count: int) -> Iterator[list[socket.socket]]:
    """Hold so many connections that have greeted."""
    held = []
    try:
        for _ in range(count):
            peer = connect(address)
            held.append(peer)
            greet(peer)
        yield held
    finally:
        for peer in held:
            peer.close()


def flood(peer: socket.socket, nbytes: int) -> int:
    """Send so many bytes; return how many the other side took before it hung up."""
    sent, block = 0, bytes(1 << 20)
    try:
        while sent < nbytes:
            sent += peer.send(block[: nbytes - sent])
    except OSError:
        pass
    return sent
