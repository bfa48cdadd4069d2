"""What the cluster's state is made of.

Rules: records are immutable, and so are the containers in them: a change makes a new record. So a decision can work on
a shallow copy of the state and throw it away. The one exception is the `Ledger`, which only `SplitsGranted` changes:
copying it for each grant would cost more than granting.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from penstock.control.events import Element, Suspect
from penstock.core.ids import AgentId, AttemptId, ClientId, JobName, RunnerId, StreamId, WorkerId
from penstock.wire.jobs import Cut, Feed, JobSpec, Ranges
from penstock.wire.messages import Beat

Slot: TypeAlias = tuple[int, int]
"""(consumer, replica)"""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of what a snapshot holds: new fields have defaults."""


class Cursor(msgspec.Struct, omit_defaults=True):
    """Which ordinals of one pass are still to be granted: those from `next` on that no checkpoint has taken."""

    count: int
    left: int
    next: int = 0
    taken: list[tuple[int, int]] = []
    """Disjoint half-open ranges, sorted."""

    def peek(self, many: int) -> tuple[int, ...]:
        """Return the next ordinals to grant, at most `many`.

        >>> Cursor(count=9, left=5, taken=[(0, 1), (3, 6)]).peek(4)
        (1, 2, 6, 7)
        """
        if not self.taken:
            return tuple(range(self.next, min(self.next + many, self.count)))
        found: list[int] = []
        at = self.next
        for start, stop in [*self.taken, (self.count, self.count)]:
            found.extend(range(at, min(start, at + many - len(found))))
            at = max(at, stop)
            if len(found) == many:
                break
        return tuple(found)

    def advance(self, ordinals: tuple[int, ...]) -> None:
        self.next = ordinals[-1] + 1
        self.left -= len(ordinals)
        if self.taken:
            self.taken = [gap for gap in self.taken if gap[1] > self.next]


class Ledger(msgspec.Struct, omit_defaults=True):
    """Which stream got which splits, in which order."""

    counts: tuple[int, ...]
    lists: dict[tuple[StreamId, int, int], list[int]] = {}
    """(stream, source, pass) -> ordinals"""
    cursors: dict[tuple[int, int], Cursor] = {}
    """(source, pass); absent: nothing of the pass was granted or taken."""

    def cursor(self, source: int, pass_: int) -> Cursor:
        found = self.cursors.get((source, pass_))
        return Cursor(count=self.counts[source], left=self.counts[source]) if found is None else found

    def grant(self, stream: StreamId, source: int, pass_: int, ordinals: tuple[int, ...]) -> None:
        cursor = self.cursor(source, pass_)
        if ordinals[0] < cursor.next or ordinals[-1] >= cursor.count:
            raise ValueError(f"ordinals {ordinals} of {cursor.count}, but the next one is {cursor.next}")
        cursor.advance(ordinals)
        self.cursors[source, pass_] = cursor
        granted = self.lists.get((stream, source, pass_))
        if granted is None:
            self.lists[stream, source, pass_] = list(ordinals)
        else:
            granted.extend(ordinals)


class Bound(Record, frozen=True):
    runner: RunnerId
    worker: WorkerId
    address: str


class Stream(Record, frozen=True):
    stream: StreamId
    number: int
    feed: Feed
    share: int
    start: Cut = Cut()
    first_round: int = 0
    marks: tuple[int, ...] = ()
    owner: int | None = None
    home: WorkerId | None = None
    binding: int = 0
    """Raised with every change of who runs it: whatever carries a lower one is refused."""
    bound: Bound | None = None
    last_worker: WorkerId | None = None
    ended_by: dict[int, int] = {}
    """consumer -> rounds"""
    leftover: Cut | None = None
    ended: bool = False
    lost: bool = False
    reopened: bool = False

    @property
    def wanted(self) -> bool:
        """Whether somebody has to run it."""
        return not self.lost and (not self.ended or self.reopened)


class Opened(Record, frozen=True):
    """Who reads a slot, or was the last to."""

    client: ClientId
    closed: bool = False
    finished: bool = False


class Iteration(Record, frozen=True):
    """One attempt at one epoch."""

    attempt: AttemptId
    epoch: int
    ledger: Ledger
    digest: str | None = None
    """Of the checkpoint it started from."""
    done_before: tuple[Ranges, ...] = ()
    """What was done there."""
    width: int = 0
    """How many streams took turns there; 0: as many as the job has."""
    streams: dict[StreamId, Stream] = {}
    first_number: int = 0
    """Lower ones were the checkpoint's: a stream of this attempt must not be taken for one of those."""
    opened: dict[Slot, Opened] = {}
    tail: StreamId | None = None
    finished: bool = False

    @property
    def next_number(self) -> int:
        return max(self.first_number, 1 + max((stream.number for stream in self.streams.values()), default=-1))

    @property
    def needs_runners(self) -> bool:
        return not self.finished or any(stream.reopened for stream in self.streams.values())


class Job(Record, frozen=True):
    name: JobName
    spec: JobSpec
    iterations: dict[AttemptId, Iteration] = {}
    """In the order they started; two at most: consumers may be an epoch apart."""
    paused: bool = False
    failure: str = ""
    deaths: dict[Element, int] = {}
    suspects: tuple[Suspect, ...] = ()
    dropped: tuple[Element, ...] = ()
    blamed: tuple[RunnerId, ...] = ()
    """Runners whose deaths are counted: a report that comes twice counts once."""
    past_clients: tuple[ClientId, ...] = ()
    """Those that closed or were superseded: a late duplicate of their opening must not open anything."""


PAST_CLIENTS = 256  # far more than can have messages under way
BLAMED_RUNNERS = 64


# In memory


class Agent(Record, frozen=True):
    agent: AgentId
    peer: str
    host: str
    versions: dict[str, str]
    """Of Python and of everything installed there."""
    seen: float
    workers: tuple[WorkerId, ...] = ()
    """As it registered them."""
    statistics: dict[str, Any] = {}


class Worker(Record, frozen=True):
    worker: WorkerId
    agent: AgentId
    tags: tuple[str, ...]
    leaving: bool = False


class Runner(Record, frozen=True):
    runner: RunnerId
    worker: WorkerId
    job: JobName
    address: str = ""
    ready: bool = False
    since: float = 0.0


class Lease(Record, frozen=True):
    client: ClientId
    attempt: AttemptId
    consumer: int
    replica: int
    peer: str
    seen: float
    beat: Beat | None = None


class FailedStart(Record, frozen=True):
    count: int
    reason: str
    not_before: float


class RestartWish(Record, frozen=True):
    client: ClientId
    seen: float
    since: float = 0.0
