"""How a runner is started. Apart from the runner: an agent need not import what runs jobs."""

from __future__ import annotations

import msgspec

from penstock.core.ids import JobName, RunnerId, WorkerId
from penstock.wire.credentials import Credentials

RUNNER_ENTRY = "penstock.worker.runner:run"


class RunnerConfig(msgspec.Struct, frozen=True, kw_only=True):
    runner: RunnerId
    worker: WorkerId
    job: JobName
    dispatcher: str
    credentials: Credentials
    memory_bytes: int
    threads: int
    host: str = ""
    bind: str = "127.0.0.1"
    advertise: str | None = None
    port_range: tuple[int, int] | None = None
