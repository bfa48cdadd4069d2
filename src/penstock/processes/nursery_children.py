"""A nursery's children and those who ask for them, and its ways with descriptors and signals."""

from __future__ import annotations

import mmap
import os
import selectors
import signal
import socket
from collections import deque
from collections.abc import Iterator

import msgspec

from penstock.processes.nursery_link import ChildLine, Died, FromNursery, Ready, Reported, Spawn

FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 2.0
STEADY_S = 10.0  # a child that lived this long did not fail because of how it was started
FAILURE_CHARACTERS = 2000
KEPT_EVENTS = 512  # for a reader that does not read; the oldest are dropped, and `ListChildren` still tells the truth


class Starter:
    """The process at the other end of a link: the nursery's own starter, or a child that was given one."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.socket = end
        self._outgoing: deque[bytes] = deque(maxlen=KEPT_EVENTS)

    @property
    def is_behind(self) -> bool:
        """Whether it has not read all it was told."""
        return bool(self._outgoing)

    def tell(self, event: FromNursery) -> None:
        self._outgoing.append(msgspec.msgpack.encode(event))

    def flush(self) -> bool:
        """Send what can be sent; return whether something is left."""
        while self._outgoing:
            try:
                self.socket.send(self._outgoing[0])
            except BlockingIOError:
                return True
            except OSError:
                self._outgoing.clear()  # its end is seen by reading
                return False
            self._outgoing.popleft()
        return False


class Child:
    """A process the nursery forks, and forks again where its `spawn` says so. Its own methods alone change it."""

    def __init__(self, spawn: Spawn, config: int, owner: Starter, now_s: float) -> None:
        self.spawn = spawn
        self.config = config
        """The descriptor that its config is read from, by the child alone: there may be a secret in it."""
        self.owner = owner
        self.pid = 0
        """The child's process; 0: it does not run, but waits to be started."""
        self.starts = 0
        self.pipe = -1
        """The pipe that the child writes lines to; -1: it has none."""
        self.link: Starter | None = None
        self.stopping = False
        self.start_at_s: float | None = now_s
        self.kill_at_s: float | None = None
        self._started_s = 0.0
        self._backoff_s = FIRST_BACKOFF_S
        self._ready: str | None = None
        self._failure = ""
        self._said = bytearray()
        self._record: mmap.mmap | None = None

    def line(self) -> ChildLine:
        return ChildLine(id=self.spawn.id, entry=self.spawn.entry, pid=self.pid, ready=self._ready, starts=self.starts)

    def start_next_as(self, spawn: Spawn, config: int) -> None:
        """Take another config: it is for the next start."""
        os.close(self.config)
        self.spawn, self.config = spawn, config

    # Its life

    def begin(self, now_s: float) -> None:
        """It is started, as if for the first time."""
        self.start_at_s = self.kill_at_s = self._ready = None
        self._failure, self._said = "", bytearray()
        self._started_s = now_s
        self.starts += 1

    def run_as(self, pid: int, *, pipe: int, record: mmap.mmap | None, link: Starter | None) -> None:
        """It is forked, and this is the nursery's end of all they share."""
        self.pid, self.pipe, self._record, self.link = pid, pipe, record, link

    def fail(self, why: str) -> None:
        """Keep why it ended: its owner is told."""
        self._failure = why

    def stop(self, grace_s: float, now_s: float) -> None:
        """Have it end, and not begin again: by SIGTERM, and by SIGKILL when the grace is over."""
        self.stopping = True
        if not self.pid:
            self.start_at_s = None
        elif grace_s <= 0:
            self.kill()
        else:
            send_signal(self.pid, signal.SIGTERM)
            self.kill_at_s = now_s + grace_s

    def kill(self) -> None:
        self.kill_at_s = None
        send_signal(self.pid, signal.SIGKILL)

    def end(self, code: int, now_s: float) -> Died:
        """It has ended: let go of what they shared, and return what its owner is told."""
        record = b""
        if self._record is not None:
            record = bytes(self._record)
            self._record.close()
        again = self.spawn.restart and not self.stopping
        failure = self._failure[:FAILURE_CHARACTERS]
        died = Died(id=self.spawn.id, pid=self.pid, code=code, failure=failure, record=record, again=again)
        self.pid, self._record, self.link = 0, None, None
        if again:
            self._put_off(now_s)
        return died

    def _put_off(self, now_s: float) -> None:
        """Say when it is started again: later and later, while it fails soon."""
        if now_s - self._started_s >= STEADY_S:
            self._backoff_s = FIRST_BACKOFF_S
        self.start_at_s = now_s + self._backoff_s
        self._backoff_s = min(self._backoff_s * 2, LONGEST_BACKOFF_S)

    # What it says

    def read(self) -> bool:
        """Take what it wrote; return whether its pipe has ended."""
        try:
            while piece := os.read(self.pipe, 65536):
                self._said += piece
        except BlockingIOError:
            return False
        return True

    def events(self) -> Iterator[Ready | Reported]:
        """Give what the lines read so far say, each once: `+` it is ready, `*` it reports, `-` (kept) why it fails."""
        while (end := self._said.find(b"\n")) >= 0:
            line = self._said[:end].decode("utf-8", "replace")
            del self._said[: end + 1]
            kind, text = line[:1], line[1:]
            if kind == "+":
                self._ready = text
                yield Ready(id=self.spawn.id, text=text)
            elif kind == "*":
                yield Reported(id=self.spawn.id, text=text)
            elif kind == "-":
                self.fail(text)

    def close_pipe(self) -> None:
        os.close(self.pipe)
        self.pipe = -1

    def let_go(self) -> None:
        """Close the nursery's end of all they share, in a process forked later."""
        os.close(self.config)
        if self.pipe >= 0:
            os.close(self.pipe)
        if self.link is not None:
            self.link.socket.close()
        if self._record is not None:
            self._record.close()


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
