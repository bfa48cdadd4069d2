"""Workers on this host, as many as are wanted: `penstock serve --workers 1-8`, `LocalService(workers=(1, 8))`.

A thread asks the dispatcher every second how many workers are wanted (`Provide`), and has the service's agent join or
drain them. It is a peer like any other: with a key of its own role, and a lease. While the dispatcher is away nothing
changes, and a thread that ends leaves the workers there are.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref

from penstock.core.checks import check_whole
from penstock.core.errors import InvalidArgumentError, PenstockError
from penstock.core.ids import WorkerId
from penstock.processes.service_processes import ServiceProcesses
from penstock.runtime.budget import available_cores
from penstock.wire.scaling import Provide, Provided

ASK_EVERY_S = 1.0
ASK_TIMEOUT_S = 10.0
DRAIN_S = 30.0

_log = logging.getLogger("penstock")


def worker_range(workers: int | str | tuple[int, int]) -> tuple[int, int]:
    """Return the least and the most workers that are meant.

    >>> worker_range(4), worker_range((2, 8))
    ((4, 4), (2, 8))
    >>> worker_range((8, 2))
    Traceback (most recent call last):
        ...
    penstock.core.errors.InvalidArgumentError: workers=(8, 2) must be a number, (least, most) or 'auto'
    """
    if workers == "auto":
        return 1, available_cores()
    if isinstance(workers, tuple) and len(workers) == 2:
        least, most = workers
        check_whole("workers", least, 0)
        check_whole("workers", most, 1)
        if least <= most:
            return least, most
    elif isinstance(workers, int):
        check_whole("workers", workers, 0)
        return workers, workers
    raise InvalidArgumentError(f"workers={workers!r} must be a number, (least, most) or 'auto'")


class LocalProvisioner:
    """Keeps a service of this process's own at as many workers as are wanted, between the least and the most."""

    def __init__(self, processes: ServiceProcesses, least: int, most: int, tags: tuple[str, ...] = ()) -> None:
        # Not held: a service that nobody has any more ends, and so does this.
        self._processes = weakref.ref(processes)
        self._least, self._most, self._tags = least, most, tags
        self._id = f"local-{processes.address}"
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="penstock-provisioner", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ask no more. The workers stay."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(ASK_TIMEOUT_S + ASK_EVERY_S)

    def _serve(self) -> None:
        while not self._stopped.is_set():
            began = time.monotonic()
            processes = self._processes()
            if processes is None or processes.closed:
                return
            try:
                self._step(processes)
            except PenstockError as error:
                _log.debug("the dispatcher did not say how many workers are wanted", extra={"why": error})
            del processes
            self._stopped.wait(max(0.0, ASK_EVERY_S - (time.monotonic() - began)))

    def _step(self, processes: ServiceProcesses) -> None:
        have = processes.worker_ids()
        request = Provide(
            provisioner=self._id, kind="local", have=have, least=self._least, most=self._most, tags=self._tags
        )
        control = processes.provisioning()
        answer = control.ask(request, timeout_s=ASK_TIMEOUT_S, what="how many workers are wanted")
        if self._stopped.is_set() or not isinstance(answer, Provided):
            return
        for worker in answer.release[: max(0, len(have) - self._least)]:
            processes.remove_worker(WorkerId(worker), DRAIN_S)
            _log.info("a worker is let go", extra={"worker": worker, "why": answer.reason})
        for _ in range(min(answer.wanted, self._most) - len(have)):
            _log.info("a worker is added", extra={"worker": processes.add_worker(self._tags)})
