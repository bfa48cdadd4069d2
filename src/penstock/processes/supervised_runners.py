"""The workers an agent looks after and their runners, each as far as the agent knows it, and what a runner uses."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import msgspec

from penstock.core.ids import JobName, RunnerId, WorkerId
from penstock.processes.agent_messages import runner_child
from penstock.wire.messages import RunnerFigures, RunnerPlace, WorkerPlace

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class SupervisedWorker:
    place: WorkerPlace
    leave_by_s: float | None = None
    """None: it stays."""
    is_leave_known: bool = False
    """The dispatcher knows that it leaves."""

    def leave(self, by_s: float) -> bool:
        """Begin to leave; False if it had begun before: the first deadline stands."""
        if self.leave_by_s is not None:
            return False
        self.leave_by_s = by_s
        return True

    def leave_was_heard(self) -> None:
        """The dispatcher has answered that it knows."""
        self.is_leave_known = True


@dataclass(slots=True)
class SupervisedRunner:
    runner: RunnerId
    worker: WorkerId
    job: JobName
    started_s: float
    pid: int = 0
    address: str = ""
    """Empty: it is not ready."""
    stop_reason: str = ""
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

    @property
    def serves(self) -> bool:
        return bool(self.address) and not self.stop_reason

    def was_spawned(self, pid: int) -> None:
        self.pid = pid

    def became_ready(self, address: str) -> bool:
        """It listens; False if that is too late, since it was stopped."""
        if self.stop_reason:
            return False
        self.address = address
        return True

    def reported(self, figures: RunnerFigures) -> None:
        self.figures = figures

    def stop(self, reason: str) -> bool:
        """Say why it is stopped; False if it was before: the first reason stands."""
        if self.stop_reason:
            return False
        self.stop_reason = reason or "it was stopped"
        return True

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
