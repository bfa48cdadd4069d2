"""What is said about how many workers jobs have: by people, and by those who bring workers."""

from __future__ import annotations

import msgspec

from penstock.core.ids import JobName, WorkerId
from penstock.wire.caching import CachingLine
from penstock.wire.jobs import Message
from penstock.wire.modes import WorkersAsked


class ScaleJob(Message, frozen=True, tag="scale_job"):
    """Give a job so many workers from now on, whatever its placement says."""

    job: JobName
    workers: WorkersAsked


class GetDecisions(Message, frozen=True, tag="get_decisions"):
    """Why has the job the workers it has?"""

    job: JobName


class DecisionLine(msgspec.Struct, frozen=True, kw_only=True):
    """One decision about a job's workers."""

    ago_s: float
    """How long ago it was taken; -1: before the dispatcher's host was last started."""
    target: int
    allotted: int
    """How many workers it could be given."""
    reason: str
    shortage: str = ""
    """Why they are fewer; empty: they are not."""
    figures: dict[str, float] = {}
    """What was looked at, by name."""


class Decisions(Message, frozen=True, tag="decisions"):
    """The last ones, oldest first."""

    decisions: tuple[DecisionLine, ...]
    caching: tuple[CachingLine, ...] = ()
    """What the job keeps."""


class LearnMetric(Message, frozen=True, tag="learn_metric"):
    """Remember some numbers for the next run of the same, under a key of the asker's own."""

    key: str
    values: dict[str, float]


class RecallMetric(Message, frozen=True, tag="recall_metric"):
    """What was learned under that key, by the same principal?"""

    key: str


class RecalledMetric(Message, frozen=True, tag="recalled_metric"):
    """None: nothing is known."""

    values: dict[str, float] | None = None


class Provide(Message, frozen=True, tag="provide"):
    """A provisioner can bring workers of a kind. It is answered with what is wanted; saying it again is its lease."""

    provisioner: str
    """An id that it has again when it is started again."""
    kind: str
    """For people: where they come from, such as local or slurm."""
    have: tuple[WorkerId, ...]
    """Those it has brought, or is bringing."""
    most: int
    least: int = 0
    price_per_h: float = 0.0
    """Of a worker. The cheapest are wanted first."""
    tags: tuple[str, ...] = ()
    """Those its workers have."""


class Provided(Message, frozen=True, tag="provided"):
    """How many workers are wanted of a provisioner, and which of those it has may go."""

    wanted: int
    release: tuple[WorkerId, ...] = ()
    reason: str = ""
