"""What an agent knows of its workers and their runners, and how it sees what a runner uses."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import msgspec

from penstock.core.ids import JobName, RunnerId, WorkerId
from penstock.wire.messages import RunnerFigures, RunnerPlace, WorkerPlace
from penstock.worker.processes_agent import runner_child

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class Worker:
    place: WorkerPlace
    leave_by_s: float | None = None
    told: bool = False
    """The dispatcher knows that it leaves."""


@dataclass(slots=True)
class Runner:
    runner: RunnerId
    worker: WorkerId
    job: JobName
    started_s: float
    pid: int = 0
    address: str = ""
    """Empty: it is not ready."""
    reason: str = ""
    """Why it was stopped; empty: it was not."""
    figures: RunnerFigures = field(default_factory=RunnerFigures)
    """The newest it reported, with what the agent has seen of it itself."""
    beaten: tuple[float, RunnerFigures] | None = None
    """When the last beat was made, and what it said."""

    @property
    def child(self) -> str:
        return runner_child(self.worker, self.runner)

    @property
    def place(self) -> RunnerPlace:
        return RunnerPlace(self.runner, self.worker, self.job, self.address)

    def beat(self, now_s: float) -> RunnerFigures | None:
        """Return what a beat says of it, with rates since the one before; None: it does not live."""
        usage = read_usage(self.pid)
        if usage is None:
            return None
        self.figures = msgspec.structs.replace(self.figures, cpu_s=usage.cpu_s, rss_bytes=usage.rss_bytes)
        before, self.beaten = self.beaten, (now_s, self.figures)
        return _with_rates(self.figures, before, now_s)


def _with_rates(figures: RunnerFigures, before: tuple[float, RunnerFigures] | None, now_s: float) -> RunnerFigures:
    if before is None or now_s <= before[0]:
        return figures
    took_s = now_s - before[0]
    return msgspec.structs.replace(
        figures,
        rounds_per_s=round((figures.rounds - before[1].rounds) / took_s, 2),
        cores=round((figures.cpu_s - before[1].cpu_s) / took_s, 3),
    )


@dataclass(frozen=True, slots=True)
class Usage:
    cpu_s: float
    rss_bytes: int


def read_usage(pid: int) -> Usage | None:
    """Return what a process has used, or None if it does not live (a stopped one does not: it serves nobody)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    if fields[0] in (b"T", b"Z", b"X"):
        return None
    return Usage(cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS_PER_S, rss_bytes=int(fields[21]) * _PAGE_BYTES)
