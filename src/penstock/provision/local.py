"""Workers on this host, as many as are wanted: `penstock serve --workers 1-8`, `LocalService(workers=(1, 8))`.

They are the service's own, and end with it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection

from penstock.core.checks import check_whole
from penstock.core.errors import InvalidArgumentError, ServiceClosedError
from penstock.processes.service_processes import ServiceProcesses
from penstock.provision.bringing import Bringer, WorkerOffer
from penstock.runtime.budget import available_cores
from penstock.wire.control import ControlClient

DRAIN_S = 30.0

_log = logging.getLogger("penstock")


def worker_range(workers: int | str | tuple[int, int]) -> tuple[int, int]:
    """Return the least and the most workers that are meant.

    >>> worker_range(4), worker_range((2, 8))
    ((4, 4), (2, 8))
    >>> worker_range((8, 2))
    Traceback (most recent call last):
        ...
    penstock.core.errors.InvalidArgumentError: workers=(8, 2) must be a whole number, (least, most) or 'auto'
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
    raise InvalidArgumentError(f"workers={workers!r} must be a whole number, (least, most) or 'auto'")


class LocalEngine:
    """Workers of a service of this process's own. See `engines.Engine`: a place is a worker of the service's agent."""

    def __init__(self, processes: ServiceProcesses, tags: tuple[str, ...] = ()) -> None:
        # Not held: a service that nobody has any more ends, and so does who brings workers for it.
        self._processes = weakref.ref(processes)
        self._tags = tags

    @property
    def kind(self) -> str:
        return "local"

    def start(self, count: int) -> None:
        for _ in range(count):
            self._service().add_worker(self._tags)

    def names(self) -> frozenset[str]:
        return frozenset(self._service().worker_ids())

    def release(self, names: Collection[str]) -> None:
        for worker in names:
            self._service().remove_worker(worker, DRAIN_S)

    def close(self) -> None:
        """Nothing: they end with the service."""

    def control(self) -> ControlClient:
        return self._service().provisioning()

    def _service(self) -> ServiceProcesses:
        found = self._processes()
        if found is None:
            raise ServiceClosedError
        return found


def bring_local_workers(processes: ServiceProcesses, least: int, most: int, tags: tuple[str, ...] = ()) -> Bringer:
    """Keep a service at as many workers of this host as are wanted, between the least and the most."""
    engine = LocalEngine(processes, tags)
    offer = WorkerOffer(provisioner=f"local-{processes.address}", least=least, most=most, tags=tags)
    return Bringer(engine.control, engine, offer, _log.info)
