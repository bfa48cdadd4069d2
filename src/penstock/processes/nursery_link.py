"""What is said to a nursery (`processes.nursery`) and what it tells, and the link over which it is asked.

The link is a Unix socket that no other process has, and every message on it is one packet. A child's spawner hears of
it: `Spawned`, `Ready`, `Reported`, `Died`. A child that was given a link of its own may spawn others; they die with it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from typing import TypeAlias

import msgspec

from penstock.core.errors import NurseryGoneError

RECORD_BYTES = 64 << 10  # of the memory a child shares with the nursery, and leaves
MAX_PACKET_BYTES = 1 << 20


# Requests


class Prepare(msgspec.Struct, frozen=True, kw_only=True, tag="prepare"):
    """`path` is the starter's `sys.path`; `scratch` is a folder to be removed when the nursery ends."""

    path: tuple[str, ...] = ()
    scratch: str = ""


class Spawn(msgspec.Struct, frozen=True, kw_only=True, tag="spawn"):
    """Fork a child that calls `entry`, a `module:function`, and ends with it.

    The function's first parameter is `config`, decoded to the type it is annotated with. It may also take `ready` (a
    function of one text), `report` (the same, for what it has to say again and again), `record` (shared memory that
    outlives the child, if asked for here) and `nursery` (a link of its own, if asked for here). Asked again while the
    child is there, the new config is for its next start.
    """

    id: str
    entry: str
    config: bytes
    """Comes and stays apart from the rest: a descriptor that the child alone reads. It may hold a secret."""
    restart: bool = False
    """Whether the nursery forks it again when it ends."""
    record: bool = False
    nursery: bool = False
    grace_s: float = 0.0
    """How long it may take after SIGTERM when the nursery ends; 0: it is killed at once."""
    environment: dict[str, str] = {}


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """SIGTERM, and SIGKILL after `grace_s`. It is not started again."""

    id: str
    grace_s: float


class TellChild(msgspec.Struct, frozen=True, kw_only=True, tag="tell"):
    """Pass `body` to a child that has a link."""

    id: str
    body: bytes


class ListChildren(msgspec.Struct, frozen=True, kw_only=True, tag="list"):
    number: int


class EndNursery(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """End all children, then yourself."""


ToNursery: TypeAlias = Prepare | Spawn | Stop | TellChild | ListChildren | EndNursery


# Events


class Spawned(msgspec.Struct, frozen=True, kw_only=True, tag="spawned"):
    id: str
    pid: int


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The child called `ready(text)`."""

    id: str
    text: str


class Died(msgspec.Struct, frozen=True, kw_only=True, tag="died"):
    """`code` is negative for a signal. `record` is what the child left in its shared memory."""

    id: str
    pid: int
    code: int
    failure: str = ""
    """The exception that ended it, for people."""
    record: bytes = b""
    again: bool = False
    """Whether the nursery is going to start it again."""


class Reported(msgspec.Struct, frozen=True, kw_only=True, tag="reported"):
    """The child called `report(text)`. A reader that falls behind misses some: only the newest matters."""

    id: str
    text: str


class Told(msgspec.Struct, frozen=True, kw_only=True, tag="told"):
    body: bytes


class ChildLine(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    entry: str
    pid: int
    ready: str | None
    """What the child said when it was ready; None: it is not ready yet."""
    starts: int


class Children(msgspec.Struct, frozen=True, kw_only=True, tag="children"):
    number: int
    children: tuple[ChildLine, ...]


FromNursery: TypeAlias = Spawned | Ready | Reported | Died | Told | Children


def describe_exit(code: int, failure: str = "") -> str:
    """
    >>> describe_exit(-9)
    'killed by SIGKILL'
    >>> describe_exit(1, "ValueError: no")
    'exited with code 1 (ValueError: no)'
    """
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"killed by {name}"
    return f"exited with code {code}" + (f" ({failure})" if failure else "")


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
        deadline = time.monotonic() + timeout_s
        with contextlib.ExitStack() as undo:
            config: list[int] = []
            if isinstance(request, Spawn):
                config.append(_descriptor_of(request.config))
                undo.callback(os.close, config[0])
                request = msgspec.structs.replace(request, config=b"")
            packet = msgspec.msgpack.encode(request)
            while True:
                try:
                    socket.send_fds(self._socket, [packet], config)
                    return
                except BlockingIOError:
                    left_s = deadline - time.monotonic()
                    if left_s <= 0:
                        raise TimeoutError(
                            f"the nursery took no request for {timeout_s:.0f} s; it is stopped"
                        ) from None
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


def _descriptor_of(content: bytes) -> int:
    """Return a descriptor from which these bytes are read."""
    descriptor = os.memfd_create("penstock-config", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    return descriptor
