"""What processes say to the dispatcher, and what it says to them.

Rules of evolution: new fields have defaults, old ones never change their type; a message of an unknown tag is refused.
Version N serves N - 1. Requests are imperative and idempotent: sent twice, they do and answer the same.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from penstock.core.ids import AgentId, AttemptId, BlobHash, ClientId, JobName, RunnerId, StreamId, WorkerId
from penstock.wire.admissions import ExpectRunner, KnownReader, WhoReads
from penstock.wire.caching import CachingJudged, JudgeCaching
from penstock.wire.fetching import FellowsFound, FindFellows
from penstock.wire.figures import JobFigures, RunnerFigures
from penstock.wire.jobs import Cut, JobSpec, JobView, Message, Ranges, Resume, Slot, ViewChange
from penstock.wire.scaling import (
    Decisions,
    GetDecisions,
    LearnMetric,
    Provide,
    Provided,
    RecalledMetric,
    RecallMetric,
    ScaleJob,
)

PROTOCOL = 5
OLDEST_PROTOCOL = 5


class OpenEpoch(Message, frozen=True, tag="open_epoch"):
    """A consumer wants to read an epoch of a job. `attempt` begins the attempt's id if this is what starts it.

    With `rejoin` it goes on in that attempt, at its own marks; with `resume` a new attempt starts from the checkpoint;
    with neither the epoch starts, or is joined if it has just started.
    """

    job: JobName
    client: ClientId
    consumer: int
    replica: int
    epoch: int
    spec: JobSpec
    attempt: AttemptId
    host: str
    rejoin: AttemptId | None = None
    resume: Resume | None = None
    trainer: str = ""
    """Whose rank reads, in a job with `sharing`."""
    after: AttemptId | None = None
    """The attempt that this reader has read to its end: its `CloseClient` may come later, or never."""
    reader: str = ""
    """Which process reads, for people: the one whose place it takes is told."""
    began_ns: int = 0
    """When it began to ask, by its host's clock since boot."""
    trust: tuple[str, ...] = ()
    """Whose code or data the reader takes, besides its own: a job that somebody else made is not joined unasked."""
    reading: str = ""
    """The verifier of the key that the reader shows to runners."""
    ahead: bool = False
    """The reader is still in the epoch before, which is about to end: it may come to this one, and has not yet."""

    @property
    def slot(self) -> Slot:
        return Slot(self.consumer, self.replica, self.trainer)


class EpochOpened(Message, frozen=True, tag="epoch_opened"):
    spec: JobSpec
    view: JobView
    done: tuple[Ranges, ...] = ()
    """What was done at the checkpoint the attempt began at: a consumer that begins where it says holds this too."""
    life: int = 0
    """How often this consumer's trainer had begun anew without its states, where trainers share the job."""


class NotYet(Message, frozen=True, tag="not_yet"):
    """Ask again: something is being waited for, by name."""

    waiting_for: str
    missing_blobs: tuple[BlobHash, ...] = ()


class PutBlob(Message, frozen=True, tag="put_blob"):
    """A piece of a blob; `offset` and `size` let pieces arrive in any order, and twice."""

    hash: BlobHash
    offset: int
    size: int
    piece: bytes


class Beat(Message, frozen=True, tag="beat"):
    """A consumer is alive. The answer is what changed since `version`, or the whole view where that is not known."""

    job: JobName
    client: ClientId
    consumer: int
    attempt: AttemptId
    version: int
    batches: int = 0
    nbytes: int = 0
    wait_s: float = 0.0
    run_s: float = 0.0
    trainer: str = ""
    skipped: int = 0
    shared: int = 0
    buffered_elements: int = 0
    """Arrived, and not taken by the trainer."""
    buffered_bytes: int = 0
    at_s: float = 0.0
    """When it was so, by the consumer's own clock."""


class Rebind(Message, frozen=True, tag="rebind"):
    """A stream cannot be read where it is bound. Ignored unless `binding` is still the present one."""

    job: JobName
    attempt: AttemptId
    stream: StreamId
    binding: int
    reason: str
    states: tuple[tuple[int, int], ...] = ()


class EndStream(Message, frozen=True, tag="end_stream"):
    """A consumer has received all rounds of a stream. `leftover` is what did not make a whole round, if anything."""

    job: JobName
    attempt: AttemptId
    stream: StreamId
    consumer: int
    rounds: int
    leftover: Cut | None = None


class CloseClient(Message, frozen=True, tag="close_client"):
    """A loader lets go of its epoch. `finished`: it has read all of it."""

    job: JobName
    client: ClientId
    consumer: int
    attempt: AttemptId
    finished: bool = False


class ListJobs(Message, frozen=True, tag="list_jobs"):
    pass


class GetFigures(Message, frozen=True, tag="get_figures"):
    """What has the job done, what do its workers use, and what do they wait for?"""

    job: JobName


class SteerJob(Message, frozen=True, tag="steer_job"):
    job: JobName
    action: Literal["cancel", "pause", "resume"]


class ListWorkers(Message, frozen=True, tag="list_workers"):
    pass


class DrainWorker(Message, frozen=True, tag="drain_worker"):
    worker: WorkerId


class PutPipeline(Message, frozen=True, tag="put_pipeline"):
    """Register a pipeline under an id, to be read without its code."""

    id: str
    spec: JobSpec


class GetPipeline(Message, frozen=True, tag="get_pipeline"):
    id: str
    trust: tuple[str, ...] = ()
    """Whose pipelines the reader takes, besides its own."""


class RunnerPlace(msgspec.Struct, frozen=True, array_like=True):
    runner: RunnerId
    worker: WorkerId
    job: JobName
    address: str
    streams: int = 0
    verifier: str = ""
    """Of the key that the runner shows to the dispatcher."""


class WorkerPlace(msgspec.Struct, frozen=True, array_like=True):
    worker: WorkerId
    tags: tuple[str, ...] = ()
    threads: int = 0
    """How many its processes use; 0: not said."""


class RegisterAgent(Message, frozen=True, tag="register_agent"):
    """An agent and all it has: sent at the start, after a dispatcher's restart, and when told `NotKnown`."""

    agent: AgentId
    host: str
    workers: tuple[WorkerPlace, ...]
    runners: tuple[RunnerPlace, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    pid: int = 0


class AgentBeat(Message, frozen=True, tag="agent_beat"):
    """The agent and these runners are alive."""

    agent: AgentId
    runners: tuple[RunnerId, ...]
    statistics: dict[str, Any] = {}
    """`RunnerFigures` of each."""


class RunnerReady(Message, frozen=True, tag="runner_ready"):
    agent: AgentId
    place: RunnerPlace


class RunnerGone(Message, frozen=True, tag="runner_gone"):
    """A runner's process ended. `in_flight` is what it was working on: (stream, source, split, index, count)."""

    agent: AgentId
    runner: RunnerId
    worker: WorkerId
    job: JobName
    reason: str
    in_flight: tuple[tuple[str, int, int, int, int], ...] = ()
    figures: RunnerFigures | None = None
    """The last it reported."""


class AgentLeaving(Message, frozen=True, tag="agent_leaving"):
    """These workers take no new streams and will end; their streams are to be bound elsewhere."""

    agent: AgentId
    workers: tuple[WorkerId, ...]
    gone: bool = False


class GrantSplits(Message, frozen=True, tag="grant_splits"):
    """Which splits follow `after` in this stream's list for a pass of a source (None: from its beginning)?"""

    job: JobName
    attempt: AttemptId
    stream: StreamId
    binding: int
    source: int
    pass_: int
    after: int | None
    seconds_per_split: float = 0.0
    """How long the last ones took: short ones are granted several at a time."""
    preferred: tuple[int, ...] = ()
    """Splits that the runner's host keeps the elements of: they are granted first, if nobody has them."""


class GetBlob(Message, frozen=True, tag="get_blob"):
    hash: BlobHash
    offset: int = 0


class GetSpec(Message, frozen=True, tag="get_spec"):
    job: JobName
    attempt: AttemptId | None = None
    """As it is run in that attempt; None: in the newest."""


class Done(Message, frozen=True, tag="done"):
    pass


class View(Message, frozen=True, tag="view"):
    view: JobView


class Changes(Message, frozen=True, tag="changes"):
    change: ViewChange


class Granted(Message, frozen=True, tag="granted"):
    """The next ordinals, at least one; none: the pass has no more for this stream."""

    ordinals: tuple[int, ...]
    plenty: bool = False
    """Enough are left to ask for the next before these are read. Toward the end a slow worker must not hold more."""


class BlobPiece(Message, frozen=True, tag="blob_piece"):
    size: int
    piece: bytes


class Spec(Message, frozen=True, tag="spec"):
    spec: JobSpec
    dropped: tuple[tuple[int, int, int], ...] = ()
    """(source, split, index) of elements to leave out."""
    suspects: tuple[tuple[int, int, int, int], ...] = ()
    """(source, split, index, count): elements in flight when a process died; to be worked on one by one."""


class JobLine(msgspec.Struct, frozen=True, kw_only=True):
    """A job as its service lists it. `status` is for people."""

    job: str
    owner: str
    epoch: int
    ranks: int
    clients: int
    workers: int
    streams: int
    splits_left: int
    status: str
    trainers: tuple[TrainerLine, ...] = ()
    """Of a job with `sharing`."""
    target: int | None = None
    """How many workers it should have; None: all that fit, as nobody said."""
    reason: str = ""
    """Why so many, and why it has fewer."""
    cost: float | None = None
    """What it has cost so far; None: the dispatcher was told no prices."""


class TrainerLine(msgspec.Struct, frozen=True, kw_only=True):
    """A trainer that reads a job with others: `shared` of what it read had been made for somebody else."""

    trainer: str
    epoch: int
    read: int
    skipped: int
    shared: int


class WorkerLine(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as its service lists it. `status` is for people."""

    worker: str
    host: str
    tags: tuple[str, ...]
    jobs: tuple[str, ...]
    streams: int
    status: str
    rounds_per_s: float = 0.0
    cores: float = 0.0
    """Processor seconds a second, of its processes."""
    rss_bytes: int = 0


class Jobs(Message, frozen=True, tag="jobs"):
    jobs: tuple[JobLine, ...]


class Workers(Message, frozen=True, tag="workers"):
    workers: tuple[WorkerLine, ...]


class FiguresAnswer(Message, frozen=True, tag="figures"):
    figures: JobFigures


class NotKnown(Message, frozen=True, tag="not_known"):
    """The dispatcher does not know who asks (it restarted): register, or open, again."""

    what: str


class Refused(Message, frozen=True, tag="refused"):
    """No, and asking again will not help. `kind` is the error class the caller raises."""

    reason: str
    kind: str = "refused"


class TryAgain(Message, frozen=True, tag="try_again"):
    """Not now (the journal cannot be written, a tail was lost): ask again."""

    reason: str


class StartRunner(Message, frozen=True, tag="start_runner"):
    worker: WorkerId
    job: JobName
    runner: RunnerId


class StopRunner(Message, frozen=True, tag="stop_runner"):
    runner: RunnerId
    reason: str


class Superseded(Message, frozen=True, tag="superseded"):
    """Another reader has taken this client's place. `reason` is for people."""

    client: ClientId
    reason: str


class ViewMoved(Message, frozen=True, tag="view_moved"):
    change: ViewChange


Request: TypeAlias = (
    OpenEpoch
    | PutBlob
    | Beat
    | Rebind
    | EndStream
    | CloseClient
    | ListJobs
    | GetFigures
    | SteerJob
    | ListWorkers
    | DrainWorker
    | PutPipeline
    | GetPipeline
    | RegisterAgent
    | AgentBeat
    | RunnerReady
    | RunnerGone
    | AgentLeaving
    | GrantSplits
    | GetBlob
    | GetSpec
    | ExpectRunner
    | WhoReads
    | ScaleJob
    | GetDecisions
    | JudgeCaching
    | FindFellows
    | Provide
    | LearnMetric
    | RecallMetric
)
Answer: TypeAlias = (
    Done
    | View
    | Changes
    | EpochOpened
    | NotYet
    | Granted
    | BlobPiece
    | Spec
    | Jobs
    | Workers
    | FiguresAnswer
    | KnownReader
    | Decisions
    | CachingJudged
    | FellowsFound
    | Provided
    | RecalledMetric
    | NotKnown
    | Refused
    | TryAgain
)
Push: TypeAlias = StartRunner | StopRunner | ViewMoved | Superseded


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """A request on its way: `number` pairs it with its answer, `seen` is the highest journal position known.

    `proof` is what the dispatcher signed that position with.
    """

    protocol: int
    number: int
    seen: int
    body: Request
    proof: bytes = b""


class Tell(msgspec.Struct, frozen=True, array_like=True):
    """An answer (`number` > 0) or a push (`number` = 0), with the journal's position."""

    protocol: int
    number: int
    position: int
    body: Answer | Push
    proof: bytes = b""
