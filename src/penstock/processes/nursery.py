"""`python -m penstock.processes.nursery FD PARENT`: forks the processes of a service. See `nursery_start`.

Rules. One thread and no ZeroMQ context, so that forking is safe. It never blocks except in its selector. It ends with
its starter's process (seen by pidfd: a parent-death signal would follow the starter's *thread*), and its children die
with it by a parent-death signal, which is exact here because the one thread is the process. In a child every inherited
descriptor is closed by the object that owns it: a number closed twice may by then be somebody else's.
"""

from __future__ import annotations

import gc
import importlib
import mmap
import os
import selectors
import shutil
import signal
import socket
import sys
import time

import msgspec

from penstock.core.private_memory import keep_memory_private
from penstock.processes.forked_child import be_child
from penstock.processes.nursery_children import (
    Child,
    Starter,
    do_nothing,
    drain,
    open_pidfd,
    wait_for,
)
from penstock.processes.nursery_link import (
    MAX_PACKET_BYTES,
    RECORD_BYTES,
    Children,
    EndNursery,
    FromNursery,
    ListChildren,
    Prepare,
    Reported,
    Spawn,
    Spawned,
    Stop,
    TellChild,
    Told,
    ToNursery,
)
from penstock.processes.nursery_start import PRELOAD_VARIABLE

PRELOADED = (
    "penstock.dispatcher.main",
    "penstock.processes.agent",
    "numpy.random",
    "cloudpickle",
)
"""What children need, in the order they are needed: a child is forked as soon as its own module is there, and starts
while the others are still imported. pyarrow's Parquet and dataset modules, fsspec and rich are slow, and few children
need them."""
RUNNER = "penstock.worker.runner"
"""Comes last, after what $PENSTOCK_PRELOAD names: runners have that from the nursery."""
CANNOT_FORK = os.EX_OSERR  # as the exit code of a child that never was
PARENT_POLL_S = 0.5  # only where the kernel has no pidfd


class Nursery:
    """The loop. Children are known by the id their spawner chose."""

    def __init__(self, starter: socket.socket, parent_pid: int) -> None:
        self._pid = os.getpid()
        self._parent_pid = parent_pid
        self._decoder: msgspec.msgpack.Decoder[ToNursery] = msgspec.msgpack.Decoder(ToNursery)
        self._selector = selectors.DefaultSelector()
        self._starter = Starter(starter)
        self._children: dict[str, Child] = {}
        self._path: tuple[str, ...] = ()
        self._scratch = ""
        self._preloaded = False
        self._ending = False
        self._selector.register(starter, selectors.EVENT_READ, self._starter)
        self._parent_pidfd = open_pidfd(parent_pid)
        if self._parent_pidfd is not None:
            self._selector.register(self._parent_pidfd, selectors.EVENT_READ, "parent")
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ, "signal")
        signal.signal(signal.SIGCHLD, do_nothing)
        # Sent to everything of a terminal or of a cluster's job: what ends, and how, its starter decides.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)

    def run(self) -> None:
        """Serve until the starter ends or asks to end; then nothing is left."""
        try:
            self._preload()
            while not self._ending:
                self._turn(self._timeout_s())
            if os.getppid() == self._parent_pid:
                self._end_gracefully()
        finally:
            self._kill_all()
            if self._scratch:
                shutil.rmtree(self._scratch, ignore_errors=True)
            if os.getpgrp() == self._pid:
                os.killpg(self._pid, signal.SIGKILL)  # whatever the children started, and this process

    def _preload(self) -> None:
        """Import what children need. What does not import fails in the child that needs it, with its own message."""
        gc.disable()
        asked = [name.strip() for name in os.environ.get(PRELOAD_VARIABLE, "").split(",")]
        for name in (*PRELOADED, *filter(None, asked), RUNNER):
            try:
                importlib.import_module(name)
            except Exception:
                pass
            self._turn(0.0)
            if self._ending:
                return
        gc.enable()
        gc.freeze()  # collections in children leave these pages shared
        self._preloaded = True
        self._use_path()  # not before: a file of the user's must not be taken for a module of ours

    def _turn(self, timeout_s: float | None) -> None:
        for key, events in self._selector.select(timeout_s):
            self._handle(key, events)
            if self._ending:
                return
        if os.getppid() != self._parent_pid:
            self._ending = True
            return
        self._reap()
        self._act_on_time()

    def _use_path(self) -> None:
        if self._path:
            sys.path[:] = self._path

    # What arrives

    def _handle(self, key: selectors.SelectorKey, events: int) -> None:
        match key.data:
            case "parent":
                self._ending = True
            case "signal":
                drain(self._wake)
            case Starter() as starter:
                if events & selectors.EVENT_WRITE:
                    self._flush(starter)
                if events & selectors.EVENT_READ:
                    self._hear(starter)
            case Child() as child:
                self._listen(child)

    def _hear(self, starter: Starter) -> None:
        while starter.socket.fileno() >= 0:
            try:
                packet, configs, _, _ = socket.recv_fds(starter.socket, MAX_PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError:
                packet, configs = b"", []
            if not packet:
                self._drop(starter)
                return
            self._obey(starter, self._decoder.decode(packet), configs)

    def _obey(self, starter: Starter, request: ToNursery, configs: list[int]) -> None:
        match request:
            case Prepare():
                self._path = request.path or self._path
                if self._preloaded:
                    self._use_path()
                self._scratch = request.scratch or self._scratch
            case Spawn():
                known = self._children.get(request.id)
                if known is not None:
                    known.start_next_as(request, configs[0])
                else:
                    self._children[request.id] = Child(request, configs[0], starter, time.monotonic())
                    self._act_on_time()
            case Stop():
                if (stopped := self._children.get(request.id)) is not None:
                    self._stop(stopped, request.grace_s)
            case TellChild():
                told = self._children.get(request.id)
                if told is not None and told.link is not None:
                    self._push(told.link, Told(body=request.body))
            case ListChildren():
                lines = tuple(each.line() for each in self._children.values())
                self._push(starter, Children(number=request.number, children=lines))
            case EndNursery():
                self._ending = True

    def _drop(self, starter: Starter) -> None:
        """A link has ended: so do the children spawned over it."""
        if starter is self._starter:
            self._ending = True
            return
        if starter.socket.fileno() >= 0:
            self._selector.unregister(starter.socket)
            starter.socket.close()
        for child in list(self._children.values()):
            if child.owner is starter:
                self._stop(child, 0.0)

    def _listen(self, child: Child) -> None:
        """Pass on what a child wrote."""
        if child.read():
            self._close_pipe(child)
        for event in child.events():
            if not (isinstance(event, Reported) and child.owner.is_behind):  # to one that is behind, only what matters
                self._push(child.owner, event)

    def _close_pipe(self, child: Child) -> None:
        self._selector.unregister(child.pipe)
        child.close_pipe()

    # What is sent

    def _push(self, starter: Starter, event: FromNursery) -> None:
        if starter.socket.fileno() < 0:
            return
        starter.tell(event)
        self._flush(starter)

    def _flush(self, starter: Starter) -> None:
        waiting = selectors.EVENT_READ | selectors.EVENT_WRITE
        self._selector.modify(starter.socket, waiting if starter.flush() else selectors.EVENT_READ, starter)

    # Children

    def _fork(self, child: Child) -> None:
        spawn = child.spawn
        child.begin(time.monotonic())
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        os.set_blocking(write_end, False)  # a nursery that is stopped does not stop its children
        record = mmap.mmap(-1, RECORD_BYTES) if spawn.record else None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) if spawn.nursery else (None, None)
        if not self._preloaded:
            gc.freeze()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(read_end)
            os.close(write_end)
            for end in (ours, theirs):
                if end is not None:
                    end.close()
            child.fail(f"it could not be forked: {error}")
            self._after_death(child, CANNOT_FORK)
            return
        if pid == 0:
            os.close(read_end)
            if ours is not None:
                ours.close()
            be_child(spawn, child.config, self._pid, self._let_go, pipe=write_end, record=record, link=theirs)
        os.close(write_end)
        link = None
        if ours is not None and theirs is not None:
            theirs.close()
            link = Starter(ours)
            self._selector.register(ours, selectors.EVENT_READ, link)
        child.run_as(pid, pipe=read_end, record=record, link=link)
        self._selector.register(read_end, selectors.EVENT_READ, child)
        self._push(child.owner, Spawned(id=spawn.id, pid=pid))

    def _let_go(self) -> None:
        """Close, in a child, what belongs to the nursery and to other children."""
        self._selector.close()
        self._wake.close()
        self._waker.close()
        self._starter.socket.close()
        if self._parent_pidfd is not None:
            os.close(self._parent_pidfd)
        for other in self._children.values():
            other.let_go()

    def _stop(self, child: Child, grace_s: float) -> None:
        now_s = time.monotonic()
        child.stop(grace_s, now_s)
        if not child.pid:
            self._forget(child)
            if not child.starts:  # it never ran, and its owner waits for its end
                self._push(child.owner, child.end(-signal.SIGTERM, now_s))

    def _forget(self, child: Child) -> None:
        del self._children[child.spawn.id]
        os.close(child.config)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            for child in list(self._children.values()):
                if child.pid == pid:
                    self._after_death(child, os.waitstatus_to_exitcode(status))

    def _after_death(self, child: Child, code: int) -> None:
        if child.pipe >= 0:
            self._listen(child)  # what it wrote before it died
        if child.pipe >= 0:
            self._close_pipe(child)
        link = child.link
        died = child.end(code, time.monotonic())
        if not died.again:
            self._forget(child)
        self._push(child.owner, died)
        if link is not None:
            self._drop(link)

    def _act_on_time(self) -> None:
        now_s = time.monotonic()
        for child in list(self._children.values()):
            if child.start_at_s is not None and child.start_at_s <= now_s and self._has_code(child):
                self._fork(child)
            elif child.kill_at_s is not None and child.kill_at_s <= now_s:
                child.kill()

    def _has_code(self, child: Child) -> bool:
        return self._preloaded or child.spawn.entry.partition(":")[0] in sys.modules

    def _timeout_s(self) -> float | None:
        times = [each.start_at_s for each in self._children.values() if each.start_at_s is not None]
        times += [each.kill_at_s for each in self._children.values() if each.kill_at_s is not None]
        timeout_s = max(0.0, min(times) - time.monotonic()) if times else None
        if self._parent_pidfd is None:
            timeout_s = PARENT_POLL_S if timeout_s is None else min(timeout_s, PARENT_POLL_S)
        return timeout_s

    # The end

    def _end_gracefully(self) -> None:
        """Ask those with a grace to end, kill the others, and wait no longer than the longest grace."""
        for child in list(self._children.values()):
            self._stop(child, child.spawn.grace_s)
        deadline_s = time.monotonic() + max((each.spawn.grace_s for each in self._children.values()), default=0.0)
        while self._children and (left_s := deadline_s - time.monotonic()) > 0:
            drain(self._wake)
            self._reap()
            if self._children:
                wait_for(self._wake, left_s)

    def _kill_all(self) -> None:
        running = [each for each in self._children.values() if each.pid]
        for child in running:
            child.kill()
        for child in running:
            try:
                os.waitpid(child.pid, 0)
            except ChildProcessError:
                pass


def main(arguments: list[str]) -> None:
    descriptor, parent_pid = map(int, arguments)
    starter = socket.socket(fileno=descriptor)
    starter.set_inheritable(False)
    if os.getppid() != parent_pid:
        return
    keep_memory_private()
    Nursery(starter, parent_pid).run()


if __name__ == "__main__":
    main(sys.argv[1:])
