"""How a runner is started. Apart from the runner: an agent need not import what runs jobs."""

from __future__ import annotations

import msgspec

from penstock.core.ids import JobName, RunnerId, WorkerId
from penstock.processes.sandbox import Sandbox
from penstock.wire.addresses import Listening
from penstock.wire.credentials import Credentials

RUNNER_ENTRY = "penstock.worker.runner:run"


class RunnerConfig(msgspec.Struct, frozen=True, kw_only=True):
    runner: RunnerId
    worker: WorkerId
    job: JobName
    dispatcher: str
    credentials: Credentials
    """This runner's own key: it opens nothing but what its job needs."""
    memory_bytes: int
    threads: int
    host: str = ""
    listening: Listening = Listening()
    sandbox: Sandbox | None = None
    guest: bool = False
    """Whether its worker is a trainer's guest."""
