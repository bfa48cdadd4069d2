"""The processes of a service as their starter holds them: a nursery that is watched, and a folder.

A nursery that is killed takes all processes of its service with it. What the dispatcher had said is in its journal, and
what trainers have received they know themselves: so everything is started again, after a pause that grows if that does
not help.

Rules. It does not hold the service it is for, which is collected like anything else and ends it. Only the watching
thread starts another nursery. Links of dead nurseries are closed at the end only: a thread may be waiting for their
descriptors.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Protocol
from weakref import WeakMethod

from penstock.core.errors import PenstockError
from penstock.processes.nursery_link import EndNursery, NurseryLink, describe_exit
from penstock.processes.nursery_start import StartedNursery, start_nursery
from penstock.processes.service_folder import ServiceFolder

END_S = 2.0
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 5.0
STEADY_S = 10.0  # a nursery that lived this long did not die of how it was started
JOIN_S = 10.0  # the thread is at most in the middle of starting a process

_log = logging.getLogger("penstock")


class Closable(Protocol):
    def close(self) -> None: ...


class WatchedNursery:
    """See the module. `link` is the present nursery's; its user sees to it that only one thread uses it."""

    def __init__(self, nursery: StartedNursery, folder: ServiceFolder) -> None:
        self._folder = folder
        self._closables: list[Closable] = []
        self._process, self.link = nursery.process, NurseryLink(nursery.end)
        self._links = [self.link]
        self._owner_pid = os.getpid()
        self._bell, self._ringer = socket.socketpair()
        self._watching: threading.Thread | None = None
        self._ended = False

    @property
    def nursery_pid(self) -> int:
        return self._process.pid

    def watch(self, begin_again: WeakMethod[Callable[[str], None]]) -> None:
        """Have `begin_again` called, with how the nursery ended, whenever it has; it is to call `renew`."""
        self._watching = threading.Thread(
            target=self._watch, args=(begin_again,), name="penstock-nursery-watch", daemon=True
        )
        self._watching.start()

    def close_first(self, closable: Closable) -> None:
        """Have something closed before the processes end."""
        self._closables.append(closable)

    def renew(self) -> None:
        """Start another nursery in the place of one that has ended."""
        nursery = start_nursery()
        self._process, self.link = nursery.process, NurseryLink(nursery.end)
        self._links.append(self.link)

    def stop_watching(self) -> None:
        """Return when no other nursery will be started."""
        watching = self._watching
        if os.getpid() != self._owner_pid:
            return  # the bell is the owner's too
        if watching is not None and watching is not threading.current_thread():
            with contextlib.suppress(OSError):  # it has ended before
                self._ringer.send(b"!")
            watching.join(JOIN_S)

    def end(self) -> None:
        """Whatever happens here, nothing is left. A fork of the owner only lets go of its copies."""
        self._ended = True
        self.stop_watching()
        if os.getpid() == self._owner_pid:
            for closable in self._closables:
                closable.close()
            try:
                self.link.send(EndNursery(), timeout_s=0.1)
                self._process.wait(END_S)
            except (PenstockError, OSError, subprocess.TimeoutExpired):
                pass
            if self._process.poll() is None:
                self._kill_group()
                self._process.wait()
            self._folder.remove()
        for link in self._links:
            link.close()
        for end in (self._folder, self._bell, self._ringer):
            end.close()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # it leads its own session

    # What follows runs in the watching thread.

    def _watch(self, begin_again: WeakMethod[Callable[[str], None]]) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            began_s = time.monotonic()
            if self._rung(self.link.fileno()):
                return
            if self._process.returncode is None:  # once it was waited for, its number may be somebody else's
                self._kill_group()  # whatever its children started
            how = describe_exit(self._process.wait())
            pause_s = FIRST_PAUSE_S if time.monotonic() - began_s >= STEADY_S else pause_s
            if self._rung(timeout_s=pause_s):
                return
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
            begin = begin_again()
            if begin is None:
                return
            try:
                begin(how)
            except (PenstockError, OSError) as error:
                _log.warning("the service's processes could not be started again: %s", error)
            del begin  # the service may have no other holder by now: then it ends here
            if self._ended:
                return

    def _rung(self, link: int | None = None, *, timeout_s: float | None = None) -> bool:
        """Wait for the link's other end to go, or for the time; return whether watching is to stop instead."""
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        if link is not None:
            poll.register(link, 0)  # the other end's closing is told unasked
        found = poll.poll(None if timeout_s is None else timeout_s * 1000)
        return any(descriptor == self._bell.fileno() for descriptor, _ in found)
