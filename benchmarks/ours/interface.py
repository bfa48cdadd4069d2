"""`distribute`, said in the words of whichever Penstock is imported: this one's, or those of before modes were values.

The one place that knows two interfaces, so that every bench runs `--against` a checkout of either kind.
"""

from __future__ import annotations

import atexit
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import penstock as ps

MODES_ARE_VALUES = hasattr(ps, "Ranks")
LISTEN_ANYWHERE: tuple[str, ...] = () if MODES_ARE_VALUES else ("--port", "0")
"""What has `penstock dispatcher` listen where nobody else does: without it at a Unix socket, before at a free port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a job is read, as far as a bench says it; None is left to Penstock."""

    job: str | None = None
    ranks: int = 1
    rank: int | None = None
    coordinated: bool = False
    order: str = "relaxed"
    streams: int | None = None
    sharing: str | None = None
    trainer: str | None = None
    trainers: int | None = None
    timeout_s: float | None = None
    memory_bytes: int | None = None

    def options(self) -> dict[str, Any]:
        """Return the arguments of `distribute`."""
        common = {"job": self.job, "order": self.order}
        if not MODES_ARE_VALUES:
            return common | {
                "consumers": self.ranks,
                "consumer": self.rank,
                "coordinated": self.coordinated,
                "streams": self.streams,
                "sharing": self.sharing,
                "trainer": self.trainer,
                "trainers": self.trainers,
                "timeout": self.timeout_s,
                "memory_bytes": self.memory_bytes,
            }
        share: Any = self.sharing  # one of the words that `Share` knows, which it checks itself
        return common | {
            "ranks": ps.Ranks(self.ranks, self.rank, coordinated=self.coordinated),
            "sharding": ps.Sharding(streams=self.streams),
            "sharing": None if share is None else ps.Share(share, self.trainer, trainers=self.trainers),
            "limits": ps.Limits(timeout_s=self.timeout_s, memory_bytes=self.memory_bytes),
        }


def distribute(dataset: Any, to: Any, reading: Reading) -> Any:
    """Return the loader."""
    return dataset.distribute(to, **reading.options())


def encrypted_service(threads: int | None) -> str:
    """Start a service of one worker process behind encrypted TCP; return the file that names it."""
    processes: Any
    if MODES_ARE_VALUES:
        from penstock.processes.service_processes import ServiceOptions, ServiceProcesses
        from penstock.wire.addresses import Listening

        processes = ServiceProcesses(ServiceOptions(workers=1, threads=threads, listening=Listening()))
        service = processes.service_file()
    else:
        processes, service = _service_with_keys(threads)
    atexit.register(processes.close)
    file: Path = processes.scratch / "service.json"
    service.write(file)
    return str(file)


def _service_with_keys(threads: int | None) -> tuple[Any, Any]:
    import importlib

    # By name: these modules are not where this checkout has them.
    before: Any = importlib.import_module("penstock.api.service_processes")
    credentials: Any = importlib.import_module("penstock.wire.credentials")
    keys = credentials.Credentials.new_keys()
    processes = before.ServiceProcesses(before.ServiceOptions(workers=1, threads=threads, credentials=keys))
    return processes, credentials.ServiceFile(address=processes.address, credentials=keys.as_client())
