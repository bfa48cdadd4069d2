"""What happened: the only way the cluster's state changes.

Rules: events are past tense and hold everything `apply` needs, so that replaying them needs no clock and no decision. A
journaled event is on disk before anybody hears of it. The others (`JOURNALED = False`) are about leases and processes:
they are forgotten with the dispatcher's memory and learnt again from beats. New fields have defaults and come last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

import msgspec

from penstock.control.scaling_records import Allotted, JobTracking, Provisioner, ScaleDecision
from penstock.core.ids import AgentId, AttemptId, ClientId, JobName, RunnerId, StreamId, WorkerId
from penstock.policies.cache_judging import CacheVerdict
from penstock.wire.jobs import Cut, FeedSpec, JobSpec, Resume, Slot
from penstock.wire.messages import Beat, WorkerPlace
from penstock.wire.modes import WorkersAsked
from penstock.wire.principals import Principal

ElementKey: TypeAlias = tuple[int, int, int]
"""(source, split, index)"""
Suspect: TypeAlias = tuple[int, int, int, int]
"""(source, split, index, count)"""


class Journaled(msgspec.Struct, frozen=True, array_like=True):
    JOURNALED: ClassVar[bool] = True


class Soft(msgspec.Struct, frozen=True, array_like=True):
    JOURNALED: ClassVar[bool] = False


# On disk


class DispatcherBegan(Journaled, frozen=True, tag="began"):
    """A dispatcher took the journal up. Versions of views begin with its generation: they never go back."""

    generation: int


class PipelineRegistered(Journaled, frozen=True, tag="pipeline"):
    id: str
    spec: JobSpec


class WorkerDrained(Journaled, frozen=True, tag="drained"):
    """An operator's word: it holds across restarts, until the worker is gone."""

    worker: WorkerId


class WorkerForgotten(Journaled, frozen=True, tag="forgotten"):
    worker: WorkerId


class JobCreated(Journaled, frozen=True, tag="job"):
    job: JobName
    spec: JobSpec


class JobCollected(Journaled, frozen=True, tag="collected"):
    job: JobName
    reason: str


class JobSteered(Journaled, frozen=True, tag="steered"):
    job: JobName
    paused: bool
    failure: str


class IterationStarted(Journaled, frozen=True, tag="iteration"):
    job: JobName
    attempt: AttemptId
    epoch: int
    resume: Resume | None = None


class IterationDropped(Journaled, frozen=True, tag="dropped"):
    job: JobName
    attempt: AttemptId
    reason: str


class IterationFinished(Journaled, frozen=True, tag="finished"):
    job: JobName
    attempt: AttemptId


class ConsumerOpened(Journaled, frozen=True, tag="opened"):
    """From now on `client` is the one reader of this slot."""

    job: JobName
    attempt: AttemptId
    slot: Slot
    client: ClientId
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
    """It has not come to this epoch yet."""


class ConsumerClosed(Journaled, frozen=True, tag="closed"):
    job: JobName
    attempt: AttemptId
    slot: Slot
    client: ClientId
    finished: bool


class NewStream(msgspec.Struct, frozen=True, array_like=True):
    number: int
    feed: FeedSpec
    share: int
    owner: int | None = None
    home: WorkerId | None = None
    """The worker whose own run over everything this is (sharding "off")."""


class StreamsCreated(Journaled, frozen=True, tag="streams"):
    job: JobName
    attempt: AttemptId
    streams: tuple[NewStream, ...]


class NewBinding(msgspec.Struct, frozen=True, array_like=True):
    """`runner` is None while nobody may run the stream."""

    stream: StreamId
    binding: int
    runner: RunnerId | None = None
    worker: WorkerId | None = None
    address: str = ""
    verifier: str = ""
    """Of the key that the runner shows: a dispatcher that starts anew lets in whom streams are bound to."""


class StreamsBound(Journaled, frozen=True, tag="bound"):
    job: JobName
    attempt: AttemptId
    bindings: tuple[NewBinding, ...]


class StreamsLost(Journaled, frozen=True, tag="lost"):
    job: JobName
    attempt: AttemptId
    streams: tuple[StreamId, ...]
    reason: str


class StreamsRetired(Journaled, frozen=True, tag="retired"):
    """There are more streams than a job that shrank has use for: these get nothing more of the passes begun."""

    job: JobName
    attempt: AttemptId
    streams: tuple[StreamId, ...]
    passes: tuple[tuple[int, int], ...]
    """(source, the last pass of it that was begun)"""


class StreamReopened(Journaled, frozen=True, tag="reopened"):
    """A consumer that came back reads an ended stream again."""

    job: JobName
    attempt: AttemptId
    stream: StreamId


class ConsumerEnded(Journaled, frozen=True, tag="ended"):
    """A consumer has all rounds of a stream."""

    job: JobName
    attempt: AttemptId
    stream: StreamId
    consumer: int
    rounds: int
    leftover: Cut | None = None


class SplitsGranted(Journaled, frozen=True, tag="g"):
    """The one event of the hot path; named short, for there is one every few splits."""

    job: JobName
    attempt: AttemptId
    stream: StreamId
    source: int
    pass_: int
    ordinals: tuple[int, ...]


class ElementsBlamed(Journaled, frozen=True, tag="blamed"):
    """A process died over these. `exact` were alone in flight; one of `suspects` is to blame; `dropped` are out."""

    job: JobName
    runner: RunnerId
    exact: tuple[ElementKey, ...]
    suspects: tuple[Suspect, ...]
    dropped: tuple[ElementKey, ...]


class WorkersDecided(Journaled, frozen=True, tag="scaled"):
    """A job should have so many workers, for a reason; or could not be given them, for another."""

    job: JobName
    decision: ScaleDecision


class JobRescaled(Journaled, frozen=True, tag="rescaled"):
    """Somebody's word on how many workers a job has: it holds instead of what the job's placement says."""

    job: JobName
    workers: WorkersAsked


class CachingDecided(Journaled, frozen=True, tag="caching"):
    """What a job keeps of a source from now on, and what that rests on."""

    job: JobName
    at_s: float
    source: int
    verdict: CacheVerdict


class MetricLearned(Journaled, frozen=True, tag="metric"):
    """Something that the next run of the same is to know: see `metric_store`."""

    key: str
    values: dict[str, float]


# In memory


class LeasesBegan(Soft, frozen=True, tag="leases"):
    """All leases begin anew: after a start, and after the dispatcher itself was stopped for a while."""

    now: float


class Ticked(Soft, frozen=True, tag="ticked"):
    now: float


class AgentRegistered(Soft, frozen=True, tag="agent"):
    agent: AgentId
    peer: str
    host: str
    workers: tuple[WorkerPlace, ...]
    versions: tuple[tuple[str, str], ...]
    now: float
    principal: Principal


class AgentSeen(Soft, frozen=True, tag="agent_seen"):
    agent: AgentId
    peer: str
    now: float
    statistics: dict[str, Any] = {}
    runners: tuple[RunnerId, ...] = ()
    """The processes it sees alive."""


class AgentDoubted(Soft, frozen=True, tag="agent_doubted"):
    """A process of this agent could not be read from, and the agent has not been heard since."""

    agent: AgentId


class AgentRemoved(Soft, frozen=True, tag="agent_removed"):
    agent: AgentId
    reason: str


class WorkersLeft(Soft, frozen=True, tag="workers_left"):
    """`gone`: they are no more; else they take no new streams."""

    workers: tuple[WorkerId, ...]
    gone: bool


class RunnerAsked(Soft, frozen=True, tag="runner_asked"):
    job: JobName
    worker: WorkerId
    runner: RunnerId
    now: float


class RunnerServes(Soft, frozen=True, tag="runner_serves"):
    job: JobName
    worker: WorkerId
    runner: RunnerId
    address: str
    now: float
    verifier: str = ""


class RunnerExpected(Soft, frozen=True, tag="runner_expected"):
    """A process that starts will show the key of this verifier."""

    job: JobName
    runner: RunnerId
    verifier: str


class RunnerRemoved(Soft, frozen=True, tag="runner_removed"):
    job: JobName
    runner: RunnerId
    reason: str


class StartFailed(Soft, frozen=True, tag="start_failed"):
    """A runner ended before it served: the next try waits until `not_before`."""

    job: JobName
    worker: WorkerId
    reason: str
    not_before: float


class ClientSeen(Soft, frozen=True, tag="client_seen"):
    job: JobName
    attempt: AttemptId
    slot: Slot
    client: ClientId
    peer: str
    now: float
    beat: Beat | None = None
    key: str = ""
    """The verifier of the key that the client showed last."""


class ClientGone(Soft, frozen=True, tag="client_gone"):
    job: JobName
    client: ClientId
    now: float


class RestartAsked(Soft, frozen=True, tag="restart_asked"):
    """A consumer came back without a state that fits: the attempt starts over when all of them ask so."""

    job: JobName
    attempt: AttemptId
    slot: Slot
    client: ClientId
    now: float


class JobTracked(Soft, frozen=True, tag="tracked"):
    """A window of a job's figures has begun or ended."""

    job: JobName
    tracking: JobTracking


class WorkersAllotted(Soft, frozen=True, tag="allotted"):
    """From now on these workers serve these jobs."""

    allotted: Allotted


class ProvisionerSeen(Soft, frozen=True, tag="provisioner_seen"):
    provisioner: Provisioner


class ProvisionerLost(Soft, frozen=True, tag="provisioner_lost"):
    provisioner: str


class ViewRaised(Soft, frozen=True, tag="view"):
    """What consumers see of an attempt has changed: streams that were made, streams that moved, something else."""

    attempt: AttemptId
    version: int
    made: tuple[StreamId, ...] = ()
    moved: tuple[StreamId, ...] = ()
    dropped: bool = False
    """Whether elements were dropped."""


AnyEvent: TypeAlias = (
    DispatcherBegan
    | PipelineRegistered
    | WorkerDrained
    | WorkerForgotten
    | JobCreated
    | JobCollected
    | JobSteered
    | IterationStarted
    | IterationDropped
    | IterationFinished
    | ConsumerOpened
    | ConsumerClosed
    | StreamsCreated
    | StreamsBound
    | StreamsLost
    | StreamsRetired
    | StreamReopened
    | ConsumerEnded
    | SplitsGranted
    | ElementsBlamed
    | WorkersDecided
    | JobRescaled
    | CachingDecided
    | MetricLearned
    | LeasesBegan
    | Ticked
    | AgentRegistered
    | AgentSeen
    | AgentDoubted
    | AgentRemoved
    | WorkersLeft
    | RunnerAsked
    | RunnerServes
    | RunnerExpected
    | RunnerRemoved
    | StartFailed
    | ClientSeen
    | ClientGone
    | RestartAsked
    | JobTracked
    | WorkersAllotted
    | ProvisionerSeen
    | ProvisionerLost
    | ViewRaised
)

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[AnyEvent])


def encode(events: Sequence[AnyEvent]) -> bytes:
    """Return a journal record.

    >>> decode(encode([DispatcherBegan(3)]))
    [DispatcherBegan(generation=3)]
    """
    return _ENCODER.encode(events)


def decode(record: bytes) -> list[AnyEvent]:
    return _DECODER.decode(record)
