"""The workers an agent looks after and their runners, each as far as the agent knows it, and what a runner uses."""

from __future__ import annotations

import os

import msgspec

from penstock.core.ids import JobName, RunnerId, WorkerId
from penstock.wire.credentials import Credentials
from penstock.wire.figures import RunnerFigures
from penstock.wire.messages import RunnerPlace, WorkerPlace

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class SupervisedWorker(msgspec.Struct):
    place: WorkerPlace
    leave_by_s: float | None = None
    """By when the worker has to be gone; None: it stays."""
    is_leave_known: bool = False
    """Whether the dispatcher knows that the worker leaves."""

    def leave(self, by_s: float) -> bool:
        """Begin to leave; False if it had begun before: the first deadline stands."""
        if self.leave_by_s is not None:
            return False
        self.leave_by_s = by_s
        return True

    def leave_was_heard(self) -> None:
        """The dispatcher has answered that it knows."""
        self.is_leave_known = True


class SupervisedRunner(msgspec.Struct):
    runner: RunnerId
    worker: WorkerId
    job: JobName
    started_s: float
    key: Credentials
    """What it proves itself with to the dispatcher."""
    threads: int = 0
    """That it may use."""
    memory_bytes: int = 0
    """That it may use."""
    pid: int = 0
    address: str = ""
    """Where the runner serves; empty: it is not ready."""
    stop_reason: str = ""
    """Why it was stopped; empty: it was not."""
    figures: RunnerFigures = msgspec.field(default_factory=RunnerFigures)
    """The newest figures that the runner reported, with what the agent has seen of it itself."""
    beaten: tuple[float, float] | None = None
    """When the last beat was made, and the processor time until then."""

    @property
    def child(self) -> str:
        """The id that its process has in the nursery."""
        return f"{self.worker}/{self.runner}"

    @property
    def place(self) -> RunnerPlace:
        return RunnerPlace(self.runner, self.worker, self.job, self.address, verifier=self.key.public)

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
        """Take a line over: it has all figures, and some of the stages."""
        stages = {(stage.node, stage.name): stage for stage in (*self.figures.stages, *figures.stages)}
        self.figures = msgspec.structs.replace(figures, stages=tuple(stages.values()))

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
        before, self.beaten = self.beaten, (now_s, usage.cpu_s)
        took_s = 0.0 if before is None else now_s - before[0]
        self.figures = msgspec.structs.replace(
            self.figures,
            cpu_s=usage.cpu_s,
            rss_bytes=usage.rss_bytes,
            cores=0.0 if before is None or took_s <= 0 else round((usage.cpu_s - before[1]) / took_s, 3),
            kind="inline" if self.pid == os.getpid() else "process",
            threads=self.threads,
            memory_bytes=self.memory_bytes,
        )
        return self.figures


class Usage(msgspec.Struct, frozen=True):
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
