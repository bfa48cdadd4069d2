"""How processes are started: a nursery of this process's own, and the link over which it is asked.

A nursery (`processes.nursery`) is asked over a Unix socket that no other process has. It dies with its starter, and all
children die with the nursery: nothing survives, whatever is killed.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.core.errors import NurseryGoneError
from penstock.processes.nursery_messages import (
    MAX_PACKET_BYTES,
    ChildLine,
    Children,
    FromNursery,
    ListChildren,
    ToNursery,
)

ENVIRONMENT = {
    # Memory that is freed stays with the process: fresh pages cost more than they are worth to a worker.
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
    "MALLOC_ARENA_MAX": "1",
    # No threads in the nursery (it forks), and one pool of threads in a runner, its own.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
"""Read by libraries when they are loaded, so it is the environment the nursery starts in."""


class NurseryLink:
    """The asking end. Not thread-safe: one thread sends and receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.setblocking(False)
        self._decoder: msgspec.msgpack.Decoder[FromNursery] = msgspec.msgpack.Decoder(FromNursery)
        self._number = 0
        self._kept: list[FromNursery] = []

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, request: ToNursery, *, timeout_s: float = 10.0) -> None:
        packet = msgspec.msgpack.encode(request)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._socket.send(packet)
                return
            except BlockingIOError:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(f"the nursery took no request for {timeout_s:.0f} s; it is stopped") from None
                select.select([], [self._socket], [], left_s)
            except OSError:
                raise NurseryGoneError from None

    def receive(self, timeout_s: float) -> FromNursery | None:
        """Return the next event, or None if there was none in time."""
        if self._kept:
            return self._kept.pop(0)
        return self._receive(time.monotonic() + timeout_s)

    def children(self, *, timeout_s: float = 10.0) -> tuple[ChildLine, ...]:
        """Return all children, whoever spawned them. Events that come meanwhile are kept for `receive`."""
        self._number += 1
        self.send(ListChildren(number=self._number), timeout_s=timeout_s)
        deadline = time.monotonic() + timeout_s
        while True:
            event = self._receive(deadline)
            if event is None:
                raise TimeoutError(f"the nursery did not list its children in {timeout_s:.0f} s; it is stopped")
            if isinstance(event, Children):
                if event.number == self._number:
                    return event.children
                continue
            self._kept.append(event)

    def close(self) -> None:
        self._socket.close()

    def _receive(self, deadline: float) -> FromNursery | None:
        while True:
            try:
                packet = self._socket.recv(MAX_PACKET_BYTES)
            except BlockingIOError:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return None
                select.select([self._socket], [], [], left_s)
                continue
            except OSError:
                raise NurseryGoneError from None
            if not packet:
                raise NurseryGoneError
            return self._decoder.decode(packet)


class StartedNursery(NamedTuple):
    process: subprocess.Popen[bytes]
    link: NurseryLink

    def end(self) -> None:
        """End one that was told nothing yet."""
        self.link.close()
        self.process.kill()
        self.process.wait()


def start_nursery() -> StartedNursery:
    """Start a nursery of this process's own; return at once, while it still imports. What it is told waits for it.

    It has a session of its own: Ctrl-C in a terminal or a notebook is for the starter, who decides what ends.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        process = subprocess.Popen(
            # -P: a file of the working directory named like a module of ours or of Python's must not be taken for it.
            [sys.executable, "-P", "-m", "penstock.processes.nursery", str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            env=_environment(),
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return StartedNursery(process, NurseryLink(ours))


def _environment() -> dict[str, str]:
    environment = {**os.environ, **ENVIRONMENT}
    root = Path(__file__).parents[2]
    if root.name not in ("site-packages", "dist-packages"):  # run from a checkout: the nursery must find it too
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), environment.get("PYTHONPATH", "")]))
    return environment
