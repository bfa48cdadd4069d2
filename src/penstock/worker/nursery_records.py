"""What a nursery knows of those it starts and those who ask it to, and its ways with descriptors and signals."""

from __future__ import annotations

import mmap
import os
import selectors
import signal
import socket
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.worker.processes import ChildLine, Spawn

FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 2.0
STEADY_S = 10.0  # a child that lived this long did not fail because of how it was started
KEPT_EVENTS = 512  # for a reader that does not read; the oldest are dropped, and `ListChildren` still tells the truth


class Starter:
    """Whoever holds the other end of a link."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.socket = end
        self.outgoing: deque[bytes] = deque(maxlen=KEPT_EVENTS)

    def flush(self) -> bool:
        """Send what can be sent; return whether something is left."""
        while self.outgoing:
            try:
                self.socket.send(self.outgoing[0])
            except BlockingIOError:
                return True
            except OSError:
                self.outgoing.clear()  # its end is seen by reading
                return False
            self.outgoing.popleft()
        return False


@dataclass(slots=True, eq=False)
class Child:
    spawn: Spawn
    owner: Starter
    pid: int = 0
    """0: it does not run (it is waiting to be started again)."""
    started_s: float = 0.0
    starts: int = 0
    backoff_s: float = FIRST_BACKOFF_S
    ready: str | None = None
    failure: str = ""
    pipe: int = -1
    said: bytearray = field(default_factory=bytearray)
    record: mmap.mmap | None = None
    link: Starter | None = None
    stopping: bool = False
    start_at_s: float | None = None
    kill_at_s: float | None = None

    def line(self) -> ChildLine:
        return ChildLine(id=self.spawn.id, entry=self.spawn.entry, pid=self.pid, ready=self.ready, starts=self.starts)

    def begin(self, now_s: float) -> None:
        """It is started, as if for the first time."""
        self.start_at_s = self.kill_at_s = self.ready = None
        self.failure, self.said = "", bytearray()
        self.started_s = now_s
        self.starts += 1

    def put_off(self, now_s: float) -> None:
        """Say when it is started again: later and later, while it fails soon."""
        if now_s - self.started_s >= STEADY_S:
            self.backoff_s = FIRST_BACKOFF_S
        self.start_at_s = now_s + self.backoff_s
        self.backoff_s = min(self.backoff_s * 2, LONGEST_BACKOFF_S)

    def read(self) -> bool:
        """Take what it wrote; return whether its pipe has ended."""
        try:
            while piece := os.read(self.pipe, 65536):
                self.said += piece
        except BlockingIOError:
            return False
        return True

    def lines(self) -> Iterator[str]:
        """Give the whole lines of what was read, each once."""
        while (end := self.said.find(b"\n")) >= 0:
            line = self.said[:end].decode("utf-8", "replace")
            del self.said[: end + 1]
            yield line


def wait_for(end: socket.socket, timeout_s: float) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(end, selectors.EVENT_READ)
        selector.select(timeout_s)


def send_signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def drain(end: socket.socket) -> None:
    try:
        while end.recv(4096):
            pass
    except BlockingIOError:
        pass


def open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None  # an old kernel or a sandbox: the parent is looked at now and then


def do_nothing(number: int, frame: object) -> None:
    """A handler, so that the signal wakes the selector."""
