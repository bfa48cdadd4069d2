"""`LocalService`: a dispatcher and workers on this host, owned by this process; and what all such services have."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from penstock.control.scaling_rules import rules_of
from penstock.core.checks import check_names
from penstock.core.errors import InvalidArgumentError, ServiceClosedError, ServiceNotReadyError
from penstock.core.host_memory import HostMemory
from penstock.core.ids import JobName
from penstock.processes.agent_messages import DRAIN_S
from penstock.processes.service_processes import DISPATCHER, ServiceOptions, ServiceProcesses
from penstock.provision.bringing import Bringer
from penstock.provision.local import bring_local_workers, worker_range
from penstock.wire.caching import CachingLine
from penstock.wire.credentials import Credentials, ServiceFile
from penstock.wire.messages import JobLine, Jobs, ListJobs, ListWorkers, WorkerLine, Workers
from penstock.wire.modes import check_workers
from penstock.wire.scaling import DecisionLine, Decisions, GetDecisions, ScaleJob

if TYPE_CHECKING:
    from penstock.client.backend import ServiceBackend
    from penstock.processes.inline_workers import MakeRunner


class OwnedService:
    """A service whose dispatcher runs beside this process, and ends with it. What its workers are, its kind says."""

    def __init__(self, processes: ServiceProcesses, bringer: Bringer | None) -> None:
        self._processes, self._bringer = processes, bringer
        self._closed = False
        self._readers: weakref.WeakSet[ServiceBackend] = weakref.WeakSet()

    @property
    def address(self) -> str:
        """Where its dispatcher listens: a socket of this user's on this host (`ipc://...`), or a port (`tcp://...`)."""
        return self._processes.address

    @property
    def credentials(self) -> Credentials:
        """The key that trainers show it; `service_file` has it, too."""
        return self._processes.keys.trainer

    @property
    def service_file(self) -> Path:
        """A file that names this service to other processes of this user: `distribute(to=...)`, $PENSTOCK_SERVICE."""
        path = self._processes.scratch / "service.json"
        if not path.exists() and not self._processes.closed:
            self._processes.service_file().write(path)
        return path

    def jobs(self) -> list[JobLine]:
        """Return a line for each job that the service has."""
        answer = self._processes.control().ask(ListJobs(), timeout_s=30.0, what="the list of jobs")
        assert isinstance(answer, Jobs)
        return list(answer.jobs)

    def workers(self) -> list[WorkerLine]:
        """Return a line for each worker: where it is, and what it does."""
        answer = self._processes.control().ask(ListWorkers(), timeout_s=30.0, what="the list of workers")
        assert isinstance(answer, Workers)
        return list(answer.workers)

    def scale(self, job: str, workers: int | tuple[int, int] | Literal["auto"] | None) -> None:
        """Have a job keep so many workers from now on; None: as many as it asked for itself (`Placement.workers`)."""
        asked = check_workers("workers", workers)
        self._processes.control().ask(
            ScaleJob(job=JobName(job), workers=asked), timeout_s=30.0, what=f"scaling job {job!r}"
        )

    def why(self, job: str) -> list[DecisionLine]:
        """Return the last decisions about a job's workers, oldest first, with the numbers each rests on."""
        answer = self._processes.control().ask(
            GetDecisions(job=JobName(job)), timeout_s=30.0, what=f"decisions about job {job!r}"
        )
        return list(answer.decisions) if isinstance(answer, Decisions) else []

    def why_kept(self, job: str) -> list[CachingLine]:
        """Return the last decisions about what a job's workers keep, oldest first, with what each mode takes."""
        answer = self._processes.control().ask(
            GetDecisions(job=JobName(job)), timeout_s=30.0, what=f"decisions about job {job!r}"
        )
        return list(answer.caching) if isinstance(answer, Decisions) else []

    def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Return when the service runs. Not needed: loaders wait for it themselves."""
        self._processes.wait_ready(timeout_s)

    def _for_clients(self) -> ServiceFile:
        """Return what a client needs to reach it."""
        if self._closed:
            raise ServiceClosedError
        return self._processes.service_file().for_role("trainer")

    def _tell_when_closed(self, reader: ServiceBackend) -> None:
        """Have a loader's reading end with `ServiceClosedError` when this is closed: it would wait for ever."""
        self._readers.add(reader)

    def close(self) -> None:
        """End all processes of the service, and wait for them. Loaders that read it get a `ServiceClosedError`."""
        self._closed = True
        for reader in list(self._readers):
            reader.refuse(ServiceClosedError())
        if self._bringer is not None:
            self._bringer.close()
        self._processes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'closed' if self._processes.closed else self.address})"


class LocalService(OwnedService):
    """A dispatcher and worker processes on this host, for any number of loaders.

    It is closed at the end of the `with` block, by `close()`, when it is collected, and with this process.
    """

    def __init__(
        self,
        workers: int | tuple[int, int] | Literal["auto"] = 2,
        *,
        inline: int = 0,
        journal: str | os.PathLike[str] | None = None,
        threads: int | None = None,
        memory_bytes: int | None = None,
        tags: Iterable[str] = (),
        scaling: Mapping[str, Any] | None = None,
    ) -> None:
        """`workers` is their number, or (least, most): then they come and go as jobs want them; "auto": to one a core.

        `threads` and `memory_bytes` are each worker's; without them the workers share what this host allows.

        `inline` workers are in this process, as threads: what reads the service's jobs runs their functions here too.
        With `journal`, a folder, jobs outlive the service: another one with the same folder goes on with them.
        `scaling` says how jobs are scaled where that is not as usual, as the file of `penstock serve --scaling` does.
        """
        least, most = worker_range(workers)
        processes = ServiceProcesses(
            ServiceOptions(
                workers=least,
                most_workers=most,
                inline=inline,
                journal=_folder(journal),
                threads=threads,
                memory_bytes=memory_bytes,
                tags=_tags(tags),
                scaling=rules_of(scaling or {}),
            ),
            make_runner=_runner_class() if inline else None,
        )
        super().__init__(processes, bring_local_workers(processes, least, most, _tags(tags)) if least < most else None)
        # With a journal jobs outlive this process, and what they need must not be in its memory.
        self._host_memory = HostMemory() if journal is None else None

    def close(self) -> None:
        """End all processes of the service, and wait for them. Loaders that read it get a `ServiceClosedError`."""
        super().close()
        if self._host_memory is not None:
            self._host_memory.close()

    @property
    def dispatcher_pid(self) -> int:
        """The dispatcher's process; if it is just being started again, this waits for it."""
        deadline = time.monotonic() + 30.0
        while time.monotonic() < deadline:
            for child in self._processes.children():
                if child.id == DISPATCHER and child.pid:
                    return child.pid
            time.sleep(0.01)
        raise ServiceNotReadyError("waited 30 s for the dispatcher to be started again")

    def worker_pids(self) -> dict[str, int]:
        """Return the process in each worker's place. A worker that runs no job has none."""
        running = (child for child in self._processes.children() if "/" in child.id and child.pid)
        return {child.id.partition("/")[0]: child.pid for child in running}

    def pids(self) -> list[int]:
        """Return all processes of the service."""
        return [self._processes.nursery_pid, *(child.pid for child in self._processes.children() if child.pid)]

    def add_worker(self, tags: Iterable[str] = ()) -> str:
        """Add a worker; return its id. Jobs that run use it at once."""
        return self._processes.add_worker(_tags(tags))

    def remove_worker(self, worker: str | None = None, *, drain_s: float = DRAIN_S) -> str:
        """Let a worker go (None: the one added last); return its id.

        It takes no new work, and its process ends when others have taken over, after `drain_s` at the latest.
        """
        return self._processes.remove_worker(worker, drain_s)


def _tags(tags: object) -> tuple[str, ...]:
    names = check_names("tags", tags, "names, without commas")
    if any("," in name for name in names):
        raise InvalidArgumentError(f"tags={tags!r} must be names, without commas")
    return names


def _folder(path: object) -> Path | None:
    if path is None or isinstance(path, (str, os.PathLike)):
        return None if path is None else Path(path)
    raise InvalidArgumentError(f"journal={path!r} must be a folder, or left out")


def _runner_class() -> MakeRunner:
    # Imported here: a trainer need not have what runs jobs, unless it does so itself.
    from penstock.worker.runner import JobRunner

    return JobRunner
