"""Where a dataset is read: threads here, processes of the loader's own, or a service."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from penstock.api.dataset import Dataset
from penstock.api.epochs import FromService
from penstock.api.loader import Loader
from penstock.api.services import LocalService
from penstock.client.backend import ServiceBackend
from penstock.client.options import JobOptions
from penstock.core.errors import InvalidArgumentError, ServiceFileMissingError
from penstock.core.host_memory import HostMemory
from penstock.processes.nursery_start import StartedNursery
from penstock.processes.service_processes import ServiceOptions, ServiceProcesses
from penstock.wire.credentials import SERVICE_VARIABLE, ServiceFile, find_service

Destination: TypeAlias = int | str | os.PathLike[str] | LocalService | None


def make_loader(
    dataset: Dataset, to: Destination, options: JobOptions, nursery: StartedNursery | None = None
) -> Loader:
    """Return the loader. Processes of its own are children of `nursery`; nothing is sent before it is read."""
    if isinstance(to, bool) or not isinstance(to, (int, str, os.PathLike, LocalService, type(None))):
        raise InvalidArgumentError(
            f"to={to!r} must be an address or a service file, a number of worker processes, a LocalService, or None"
        )
    if reads_here(to):
        return _here(dataset, options)
    if isinstance(to, int):
        return _over_own(dataset, options, to, nursery)
    if isinstance(to, LocalService):
        find = partial(_described, to._for_clients(), to)
        expected = to._processes
        return _over(
            dataset, options, find, workers=lambda: expected.expected_workers, service=to, memory=to._host_memory
        )
    text = None if to is None else os.fspath(to)
    try:
        found = find_service(text)
    except ServiceFileMissingError:
        return _over(dataset, options, lambda: find_service(text))  # it may be written later
    return _over(dataset, options, lambda: found)


def reads_here(to: Destination) -> bool:
    """Say whether this process does the work itself."""
    return to is None and not os.environ.get(SERVICE_VARIABLE)


def _here(dataset: Dataset, options: JobOptions) -> Loader:
    if options.sharing is not None:
        raise InvalidArgumentError(
            f"sharing={options.sharing.kind!r} needs a service that other trainers read too: give to= its address, or "
            f"set ${SERVICE_VARIABLE}"
        )
    if options.ranks.count > 1 and options.feed is None:
        raise InvalidArgumentError(
            f"{options.ranks.count} ranks need a service to deal to them: give to= its address, or set "
            f"${SERVICE_VARIABLE}"
        )
    limits = options.limits
    return Loader(
        dataset.node,
        memory_bytes=limits.memory_bytes,
        seed=options.seed,
        drawn=dataset._plan.seed,
        fed=None if options.feed is None else options,
    )


def _over(
    dataset: Dataset,
    options: JobOptions,
    find: Callable[[], ServiceFile],
    on_close: Callable[[], None] | None = None,
    workers: Callable[[], int] = lambda: 1,
    service: LocalService | None = None,
    memory: HostMemory | None = None,
) -> Loader:
    backend = ServiceBackend(dataset._plan, options, find, on_close, workers, memory)
    if service is not None:
        service._tell_when_closed(backend)
    source = FromService(backend=backend, dataset=dataset)
    return Loader(source, memory_bytes=options.limits.memory_bytes, seed=options.seed)


def _described(service: ServiceFile, owner: LocalService) -> ServiceFile:
    """Return how to reach a service; whoever can ask holds its owner, so that it lives as long as its loaders."""
    return service


def _over_own(dataset: Dataset, options: JobOptions, workers: int, nursery: StartedNursery | None) -> Loader:
    processes = ServiceProcesses(ServiceOptions(workers=workers), nursery)
    service = processes.service_file().for_role("trainer")
    memory = HostMemory()

    def close() -> None:
        processes.close()
        memory.close()

    return _over(dataset, options, lambda: service, close, lambda: workers, memory=memory)
