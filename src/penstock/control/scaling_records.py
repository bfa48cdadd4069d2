"""How many workers a job has and why: the part of the state that scaling keeps."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from penstock.control.scaling_rules import PolicyName
from penstock.core.ids import JobName, RunnerId, WorkerId
from penstock.policies.allotting import JobClaim
from penstock.policies.scaling.records import WorkerTarget
from penstock.wire.figures import RunnerFigures
from penstock.wire.jobs import Slot
from penstock.wire.messages import Beat
from penstock.wire.modes import WorkersAsked

KEPT_DECISIONS = 64


class ScaleDecision(msgspec.Struct, frozen=True, array_like=True):
    """A number of workers, and why."""

    at_s: float
    """By the dispatcher's clock, which goes on over its restarts."""
    target: int
    reason: str
    allotted: int = 0
    """How many workers it could be given."""
    shortage: str = ""
    """Why they are fewer; empty: they are not."""
    figures: dict[str, float] = {}


class JobScaling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is on disk of it."""

    asked: WorkersAsked = None
    """Somebody's later word on what the job's placement says; None: there is none."""
    decisions: tuple[ScaleDecision, ...] = ()
    """The last ones, oldest first."""

    def after(self, decision: ScaleDecision) -> JobScaling:
        return replace(self, decisions=(*self.decisions, decision)[-KEPT_DECISIONS:])

    @property
    def last(self) -> ScaleDecision | None:
        return self.decisions[-1] if self.decisions else None


class JobCounters(msgspec.Struct, frozen=True):
    """What all who read and serve a job had counted at a time."""

    at_s: float
    readers: dict[Slot, Beat] = {}
    """By rank: the sum over all its readers, those of earlier epochs too, as the last of them would say it."""
    runners: dict[RunnerId, RunnerFigures] = {}
    """Those that serve."""
    reading: frozenset[Slot] = frozenset()
    """The ranks that have a reader now."""
    sizes: dict[RunnerId, float] = {}
    """Of those that serve, in the unit of targets."""

    @property
    def making(self) -> set[RunnerId]:
        """Those that had made something: before, they start, import and open."""
        return {runner for runner, figures in self.runners.items() if figures.rounds}


class JobTracking(msgspec.Struct, frozen=True):
    """A job as it is measured: where the window began, and what its policy keeps in mind."""

    policy: PolicyName
    memory: Any
    target: WorkerTarget
    window: JobCounters
    serving: frozenset[RunnerId] = frozenset()
    """The processes that served at its beginning."""
    look_at: float = 0.0
    """When to see whether it has ended."""
    figures: dict[str, float] = {}
    """Of the last window that ended."""
    unit: int = 0
    """The threads of a worker of size 1, when the target was decided."""
    mode: str = ""
    """What workers did about caching meanwhile, as `JobCaching.mode` has it."""
    speed_up: float = 1.0
    """How much faster than computing that is."""


class WorkerSizes(msgspec.Struct, frozen=True):
    """How large workers are, in the unit of targets: the smallest there is. One that does not say counts as such.

    >>> WorkerSizes.of({WorkerId("a"): 8, WorkerId("b"): 2, WorkerId("c"): 0})
    WorkerSizes(unit=2, sizes={'a': 4.0})
    """

    unit: int = 1
    """Threads."""
    sizes: dict[WorkerId, float] = {}
    """Of those that are larger."""

    @classmethod
    def of(cls, threads: dict[WorkerId, int]) -> WorkerSizes:
        unit = min(filter(None, threads.values()), default=1)
        return cls(unit, {worker: count / unit for worker, count in threads.items() if count > unit})

    def size(self, worker: WorkerId) -> float:
        return self.sizes.get(worker, 1.0)


class Allotted(msgspec.Struct, frozen=True):
    """Which workers serve which job, and what that was decided on."""

    workers: dict[JobName, tuple[WorkerId, ...]] = {}
    shortages: dict[JobName, str] = {}
    claims: tuple[JobClaim, ...] = ()
    pool: Any = None
    """The table of workers: while it is the same object nobody came or went."""
    drained: frozenset[WorkerId] = frozenset()
    kinds: dict[WorkerId, str] = {}
    """Of the workers that could be given to somebody."""
    sizes: WorkerSizes = WorkerSizes()

    def spares(self, job: JobName, worker: WorkerId) -> bool:
        """Whether a process that is there stays: its worker is the job's, or has come since and was not dealt yet."""
        return job not in self.workers or worker in self.workers[job] or worker not in self.kinds


NOTHING_ALLOTTED = Allotted()


class Provisioner(msgspec.Struct, frozen=True, kw_only=True):
    """Who brings workers: a peer with a lease."""

    provisioner: str
    kind: str
    by: str
    """The name of its principal."""
    have: tuple[WorkerId, ...]
    least: int
    most: int
    price_per_h: float
    tags: tuple[str, ...]
    seen: float
    surplus_since: float | None = None
    """Since when it has more than are wanted; None: it has not."""
