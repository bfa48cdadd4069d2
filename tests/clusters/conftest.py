"""A service without workers of its own, listening by TCP, for engines to bring some."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.processes.service_processes import ServiceOptions, ServiceProcesses
from penstock.wire.addresses import Listening


@dataclass(frozen=True)
class Head:
    """The dispatcher's host, as engines and trainers know it."""

    processes: ServiceProcesses
    folder: Path

    @property
    def address(self) -> str:
        return self.processes.address

    @property
    def agent_key(self) -> str:
        return str(self.folder / "agent.json")

    @property
    def service_file(self) -> str:
        return str(self.folder / "service.json")


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    processes = ServiceProcesses(ServiceOptions(workers=0, listening=Listening(bind="0.0.0.0")))
    head = Head(processes, tmp_path)
    processes.keys.agent.write(head.agent_key)
    processes.service_file().write(head.service_file)
    yield head
    processes.close()
