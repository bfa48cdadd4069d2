"""What the cluster's state is made of.

Rules: records are immutable, and so are the containers in them: a change makes a new record. So a decision can work on
a shallow copy of the state and throw it away, and what is the same object has not changed. What grows with the number
of workers is a `VersionedTable`. The one exception is the `Ledger`, which only `SplitsGranted` changes: copying it for
each grant would cost more than granting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain, takewhile
from typing import Any

import msgspec

from penstock.control.caching_records import JobCaching
from penstock.control.events import ElementKey, Suspect, ViewRaised
from penstock.control.ledger import Ledger
from penstock.control.scaling_records import JobScaling
from penstock.control.tables import ABSENT, Rows, VersionedTable
from penstock.core.ids import AgentId, AttemptId, ClientId, JobName, RunnerId, StreamId, WorkerId
from penstock.wire.jobs import Cut, FeedSpec, JobSpec, Ranges, Slot
from penstock.wire.messages import Beat
from penstock.wire.principals import Principal


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of what a snapshot holds: new fields have defaults."""


class Bound(Record, frozen=True):
    runner: RunnerId
    worker: WorkerId
    address: str
    verifier: str = ""
    """Of the key that the runner shows to the dispatcher."""


class Stream(Record, frozen=True):
    stream: StreamId
    number: int
    feed: FeedSpec
    share: int
    start: Cut = Cut()
    first_round: int = 0
    marks: tuple[int, ...] = ()
    owner: int | None = None
    home: WorkerId | None = None
    binding: int = 0
    """It is raised whenever another runner gets the stream: whatever carries a lower number is refused."""
    bound: Bound | None = None
    last_worker: WorkerId | None = None
    ended_by: dict[int, int] = {}
    """Which consumers have all of the stream, each with how many rounds it counted."""
    leftover: Cut | None = None
    ended: bool = False
    lost: bool = False
    reopened: bool = False
    retired: tuple[tuple[int, int], ...] = ()
    """(source, pass): up to that pass it is granted nothing more; empty: it is not retired."""

    @property
    def wanted(self) -> bool:
        """Whether somebody has to run it."""
        return not self.lost and (not self.ended or self.reopened)


class _StreamRows(Rows[StreamId, Stream]):
    """Streams, and what is asked of them all whenever one changes or a process comes or goes."""

    def __init__(self) -> None:
        super().__init__()
        self.on: dict[RunnerId, dict[StreamId, None]] = {}
        """The streams that are bound to each runner, whether they are wanted or not."""
        self.at: dict[WorkerId, dict[StreamId, None]] = {}
        self.loads: dict[RunnerId, int] = {}
        """How many wanted streams a runner has that are not retired; runners without any are not in it."""
        self.with_load: dict[int, dict[RunnerId, None]] = {}
        self.waiting: dict[StreamId, None] = {}
        self.homes: dict[WorkerId | None, int] = {}
        self.unfinished = self.reopened = 0
        self.highest: list[int] = [-1]
        """The highest number after each stream that was made. Streams go in the reverse order, if they go at all."""

    def change(self, key: StreamId, value: Stream) -> Stream:
        before = super().change(key, value)
        if before is not ABSENT:
            self._count(before, -1)
        if value is not ABSENT:
            self._count(value, 1)
        if before is ABSENT:
            self.highest.append(max(self.highest[-1], value.number))
        elif value is ABSENT:
            self.highest.pop()
        return before

    def _count(self, stream: Stream, by: int) -> None:
        self.unfinished += by * (not stream.ended and not stream.lost)
        self.reopened += by * stream.reopened
        _add(self.homes, stream.home, by)
        if stream.bound is None:
            if stream.wanted:
                _enter(self.waiting, stream.stream, by)
            return
        _enter_under(self.on, stream.bound.runner, stream.stream, by)
        _enter_under(self.at, stream.bound.worker, stream.stream, by)
        if stream.wanted and not stream.retired:
            runner = stream.bound.runner
            load = self.loads.get(runner, 0)
            if load:
                _enter_under(self.with_load, load, runner, -1)
            _add(self.loads, runner, by)
            if load + by:
                _enter_under(self.with_load, load + by, runner, 1)


class Streams(VersionedTable[StreamId, Stream]):
    """An epoch's streams, in the order they were made."""

    __slots__ = ()

    def _new_rows(self) -> Rows[StreamId, Stream]:
        return _StreamRows()

    def _index(self) -> _StreamRows:
        rows = self.rows()
        assert isinstance(rows, _StreamRows)
        return rows

    def on(self, runner: RunnerId) -> list[Stream]:
        """Return the streams that are bound to a process, by number."""
        rows = self._index()
        return _by_number(rows.values[stream] for stream in rows.on.get(runner, ()))

    def at(self, worker: WorkerId) -> list[Stream]:
        rows = self._index()
        return _by_number(rows.values[stream] for stream in rows.at.get(worker, ()))

    def bound_beside(self, known: Runners | None) -> list[Stream]:
        """Return the streams that are bound to other processes than the known ones."""
        rows = self._index()
        others = rows.on.keys() - known.rows().values.keys() if known is not None else rows.on.keys()
        return _by_number(rows.values[stream] for runner in others for stream in rows.on[runner])

    @property
    def waiting(self) -> list[Stream]:
        """Those that somebody has to run and nobody does, by number."""
        rows = self._index()
        return _by_number(rows.values[stream] for stream in rows.waiting)

    def has_some(self, runner: RunnerId) -> bool:
        """Say whether a process was ever given a stream and has not been parted from it."""
        return runner in self._index().on

    def load(self, runner: RunnerId) -> int:
        """Return how many streams a process has to run, without those that are about to end by themselves."""
        return self._index().loads.get(runner, 0)

    def busiest(self, may: Callable[[RunnerId], bool]) -> tuple[int, RunnerId | None]:
        """Return the most streams that one of the processes that `may` has to run, and that process."""
        with_load = self._index().with_load
        for load in sorted(with_load, reverse=True):
            for runner in with_load[load]:
                if may(runner):
                    return load, runner
        return 0, None

    def own_runs(self, worker: WorkerId | None) -> int:
        """Return how many are a worker's own runs over everything; None: no worker's in particular."""
        return self._index().homes.get(worker, 0)

    @property
    def unfinished(self) -> int:
        """How many have neither ended nor been lost."""
        return self._index().unfinished

    @property
    def reopened(self) -> int:
        return self._index().reopened

    @property
    def highest_number(self) -> int:
        return self._index().highest[-1]


def _by_number(streams: Iterable[Stream]) -> list[Stream]:
    return sorted(streams, key=lambda stream: stream.number)


def _enter(found: dict[Any, None], key: Any, by: int) -> None:
    if by > 0:
        found[key] = None
    else:
        del found[key]


def _enter_under(found: dict[Any, dict[Any, None]], group: Any, key: Any, by: int) -> None:
    if by > 0:
        found.setdefault(group, {})[key] = None
    else:
        del found[group][key]
        if not found[group]:
            del found[group]


def _add(counts: dict[Any, int], key: Any, by: int) -> None:
    counts[key] = counts.get(key, 0) + by
    if not counts[key]:
        del counts[key]


class Opened(Record, frozen=True):
    """Who reads a slot, or was the last to."""

    client: ClientId
    closed: bool = False
    finished: bool = False
    reader: str = ""
    """The process that reads, as people know it."""
    life: int = 0
    """How often its trainer had begun anew without its states, where trainers share the job."""
    host: str = ""
    began_ns: int = 0
    """When the reader began to ask, by the clock of `host`."""
    by: str = ""
    """The name of the principal that reads."""
    reading: str = ""
    """The verifier of the key that it shows to runners."""
    ahead: bool = False
    """Whether it is still in the epoch before, and has received nothing of this one. Closed so, it was never here."""

    def is_later_than(self, client: ClientId, host: str, began_ns: int) -> bool:
        """Whether another reader is known to have begun before this one: on one host clocks can be compared."""
        return client != self.client and host == self.host and began_ns < self.began_ns


class Iteration(Record, frozen=True):
    """One attempt at one epoch."""

    attempt: AttemptId
    epoch: int
    ledger: Ledger
    digest: str | None = None
    """The digest of the checkpoint that the attempt started from."""
    done_before: tuple[Ranges, ...] = ()
    """The splits that were done at that checkpoint."""
    width: int = 0
    """How many streams took turns at that checkpoint; 0: as many as the job has."""
    streams: Streams = msgspec.field(default_factory=Streams)
    first_number: int = 0
    """The lowest number of a new stream. The checkpoint's streams have lower ones, and must not be taken for new
    ones."""
    opened: dict[Slot, Opened] = {}
    tail: StreamId | None = None
    finished: bool = False

    @property
    def next_number(self) -> int:
        return max(self.first_number, 1 + self.streams.highest_number)

    @property
    def needs_runners(self) -> bool:
        return not self.finished or self.streams.reopened > 0

    def has_come(self, slot: Slot) -> bool:
        """Say whether a reader that opened the epoch ahead has read it all the same, and its word of that was lost."""
        alone = all(other == slot or other.consumer != slot.consumer for other in self.opened)  # no replica said it
        return alone and any(slot.consumer in stream.ended_by for stream in self.streams.values())


class Job(Record, frozen=True):
    name: JobName
    spec: JobSpec
    iterations: dict[AttemptId, Iteration] = {}
    """The iterations in the order they started; there are two at most, since consumers may be an epoch apart."""
    paused: bool = False
    failure: str = ""
    deaths: dict[ElementKey, int] = {}
    suspects: tuple[Suspect, ...] = ()
    dropped: tuple[ElementKey, ...] = ()
    blamed: tuple[RunnerId, ...] = ()
    """Runners whose deaths are counted: a report that comes twice counts once."""
    past_clients: tuple[ClientId, ...] = ()
    """Clients that closed or were superseded: a late duplicate of their opening must not open anything."""
    scaling: JobScaling = JobScaling()
    caching: JobCaching = JobCaching()


KEPT_BEATS = 8  # of each agent and client: enough for a rate
PAST_CLIENTS = 256  # far more than can have messages under way
BLAMED_RUNNERS = 64


# In memory


class Agent(Record, frozen=True):
    agent: AgentId
    peer: str
    host: str
    versions: dict[str, str]
    """The versions of Python and of everything that is installed on the agent's host."""
    seen: float
    principal: Principal
    workers: tuple[WorkerId, ...] = ()
    """The agent's workers, as it registered them."""
    told: tuple[dict[str, Any], ...] = ()
    """What its last beats said of its processes, oldest first: `RunnerFigures` by runner."""
    doubted: bool = False
    """Whether its host may be gone: one of its processes could not be read from, and the agent has not been heard
    since."""


class Worker(Record, frozen=True):
    worker: WorkerId
    agent: AgentId
    tags: tuple[str, ...]
    leaving: bool = False
    threads: int = 0
    """How many its processes use; 0: its agent does not say."""


class Runner(Record, frozen=True):
    runner: RunnerId
    worker: WorkerId
    job: JobName
    address: str = ""
    ready: bool = False
    since: float = 0.0
    verifier: str = ""
    """Of the key that it shows to the dispatcher; empty: its agent has not said."""


class _RunnerRows(Rows[RunnerId, Runner]):
    def __init__(self) -> None:
        super().__init__()
        self.on: dict[WorkerId, dict[RunnerId, None]] = {}
        self.ready: dict[RunnerId, None] = {}
        self.starting: dict[RunnerId, None] = {}

    def change(self, key: RunnerId, value: Runner) -> Runner:
        before = super().change(key, value)
        for runner, by in ((before, -1), (value, 1)):
            if runner is not ABSENT:
                _enter_under(self.on, runner.worker, key, by)
                _enter(self.ready if runner.ready else self.starting, key, by)
        return before


class Runners(VersionedTable[RunnerId, Runner]):
    """A job's processes."""

    __slots__ = ()

    def _new_rows(self) -> Rows[RunnerId, Runner]:
        return _RunnerRows()

    def _index(self) -> _RunnerRows:
        rows = self.rows()
        assert isinstance(rows, _RunnerRows)
        return rows

    def on(self, worker: WorkerId) -> list[Runner]:
        """Return the processes in a worker's place: one, but for a moment."""
        rows = self._index()
        return [rows.values[runner] for runner in rows.on.get(worker, ())]

    def ready(self) -> Iterable[Runner]:
        """Go over the processes that serve. No other version may be looked at meanwhile."""
        rows = self._index()
        return map(rows.values.__getitem__, rows.ready)

    def starting(self) -> list[Runner]:
        rows = self._index()
        return [rows.values[runner] for runner in rows.starting]


class Lease(Record, frozen=True):
    client: ClientId
    attempt: AttemptId
    slot: Slot
    peer: str
    seen: float
    beats: tuple[Beat, ...] = ()
    """The last ones, oldest first."""
    key: str = ""
    """The verifier of the key that the client showed last."""


class FailedStart(Record, frozen=True):
    count: int
    reason: str
    not_before: float


class RestartWish(Record, frozen=True):
    client: ClientId
    seen: float
    since: float = 0.0


KEPT_RAISES = 256  # a client that misses one asks at the next; one that was away for longer gets the whole view


class ViewLog(Record, frozen=True):
    """The last changes of what consumers see of an attempt."""

    base: int
    """The version before the first change it has."""
    older: tuple[ViewRaised, ...] = ()
    recent: tuple[ViewRaised, ...] = ()

    @property
    def version(self) -> int:
        return self.recent[-1].version

    def add(self, raised: ViewRaised) -> ViewLog:
        if len(self.recent) < KEPT_RAISES:
            return ViewLog(base=self.base, older=self.older, recent=(*self.recent, raised))
        base = self.older[-1].version if self.older else self.base
        return ViewLog(base=base, older=self.recent, recent=(raised,))

    def since(self, version: int) -> list[ViewRaised] | None:
        """Return the changes after a version, oldest first; None: they are not known any more."""
        if version < self.base:
            return None
        newest_first = chain(reversed(self.recent), reversed(self.older))
        return list(takewhile(lambda raised: raised.version > version, newest_first))[::-1]
