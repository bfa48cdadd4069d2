"""What processes say to each other: control messages, and the headers of data frames.

Rules of evolution: new fields have defaults, old ones never change their type; a message of an unknown tag is refused.
Version N serves N - 1. Requests are imperative and idempotent: sent twice, they do and answer the same.

The state that rides with the data is a `Cut`. Everything in it is plain (ints, strings, lists), so that it goes through
msgpack here and through JSON in a trainer's checkpoint.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from penstock.core.ids import AgentId, AttemptId, BlobHash, ClientId, Fingerprint, JobName, RunnerId, StreamId, WorkerId

PROTOCOL = 2
OLDEST_PROTOCOL = 1

Sharding: TypeAlias = Literal["dynamic", "off", "file", "data", "file_or_data", "hint", "custom"]
Guarantee: TypeAlias = Literal["exactly_once", "at_most_once", "zero_or_more"]
Order: TypeAlias = Literal["relaxed", "deterministic"]
Uneven: TypeAlias = Literal["drop", "pad", "allow"]
Target: TypeAlias = Literal["local", "remote", "any"]
Sharing: TypeAlias = Literal["", "skip", "wait"]


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of what travels."""


# Positions


class Named(msgspec.Struct, frozen=True, array_like=True):
    """Splits of one pass of one source, as ordinals of the pass's order."""

    source: int
    pass_: int
    ordinals: tuple[int, ...]


class Ranges(msgspec.Struct, frozen=True, array_like=True):
    """Splits of one pass of one source, as half-open ranges of ordinals."""

    source: int
    pass_: int
    ranges: tuple[tuple[int, int], ...]


class Cut(msgspec.Struct, frozen=True, array_like=True):
    """Where a stream stands after some rounds. Opened here, on any worker, it goes on with what followed.

    `engine` is the runtime's state (None: the beginning). `since` rounds made after it are to be made and discarded.
    `named` are the splits reading on from `engine` still needs, of those the stream has opened; `share` is into how
    many parts the job's shuffle was cut when the stream first opened. `regroup` is there only while rounds of another
    width, from before a change of the number of consumers, are given: see `Regroup`.
    """

    engine: Any = None
    since: int = 0
    named: tuple[Named, ...] = ()
    share: int = 1
    regroup: Regroup | None = None


class Regroup(msgspec.Struct, frozen=True, array_like=True):
    """Outputs after `engine` came in rounds of `width`; of consumer c's, the first `given[c]` rounds were received.

    What is left of those rounds, in order, makes the first rounds of the new width.
    """

    width: int
    given: tuple[int, ...]


class Feed(msgspec.Struct, frozen=True, array_like=True):
    """Where a stream's splits come from.

    granted: the dispatcher, one after the other. dealt: `number`, `number + of`, `number + 2 of`, ... of every pass.
    listed: `listed[source]`, the same in every pass. tail: what `leftovers` still hold, and nothing else. fed: the
    reader itself, see `Units`; unit u of its attempt is number u // of in stream u mod of.
    """

    kind: Literal["granted", "dealt", "listed", "tail", "fed"]
    number: int = 0
    of: int = 1
    listed: tuple[tuple[int, ...], ...] = ()
    leftovers: tuple[Leftover, ...] = ()
    keep: tuple[int, int] | None = None
    """(w, n): of the elements at the shard marker only number w of each n are this stream's."""


class Leftover(msgspec.Struct, frozen=True, array_like=True):
    """What an ended stream could not give as whole rounds: everything after `cut`."""

    number: int
    cut: Cut
    feed: Feed


# Jobs


class JobSpec(Message, frozen=True):
    """What all consumers of a job must agree on."""

    fingerprint: Fingerprint
    graph: BlobHash
    splits: BlobHash
    split_counts: tuple[int, ...]
    """Of each source, in the order of `graph.traverse.walk`."""
    seed: int
    sharding: Sharding = "dynamic"
    guarantee: Guarantee = "exactly_once"
    order: Order = "relaxed"
    consumers: int = 1
    uneven: Uneven = "drop"
    streams: int = 0
    """How many, where that is the job's to say (deterministic order, splits assigned up front, coordinated reads); 0:
    as workers join, or, for coordinated reads, as many as the workers there are when the job is made suggest."""
    feeds: tuple[Feed, ...] = ()
    """One a stream, where splits are assigned up front."""
    coordinated: bool = False
    """Each round is one group (the batches of one bucket), and consumers take rounds from the streams in turn."""
    shuffle_parts: int = 0
    """Into how many parts streams cut the shuffle; 0: as many as there are streams when each opens."""
    compression: Literal["none", "lz4", "zstd"] = "none"
    requires: tuple[str, ...] = ()
    target: Target = "any"
    host: str = ""
    """The creator's host, for `target`."""
    owner: str = ""
    weight: float = 1.0
    max_workers: int = 0
    max_bytes: int = 0
    collect_after_s: float = 600.0
    sharing: Sharing = ""
    """Trainers read the same outputs out of a window. "skip": what a slow one misses is gone. "wait": nothing is."""
    window_bytes: int = 0
    """Of each worker; 0: a worker decides."""
    trainer_timeout_s: float = 30.0
    trainers: int = 0
    """How many will read every epoch from its beginning (`sharing="wait"`); 0: whoever comes."""
    versions: tuple[tuple[str, str], ...] = ()
    """Python, numpy and the installed packages the functions refer to: a worker compares them with its own."""


class StreamResume(msgspec.Struct, frozen=True, array_like=True):
    """A stream as a checkpoint holds it. `marks[c]` is the next round of consumer c of the old number of consumers."""

    number: int
    cut: Cut
    round: int
    marks: tuple[int, ...]
    feed: Feed | None = None
    ended: bool = False


class Resume(Message, frozen=True):
    """A merged checkpoint: enough to go on without the journal and on another service."""

    epoch: int
    consumers: int
    streams: tuple[StreamResume, ...]
    done: tuple[Ranges, ...] = ()
    digest: str = ""
    """Of the merged state: consumers that load the same checkpoint send the same."""


class OpenEpoch(Message, frozen=True, tag="open_epoch"):
    """A consumer wants to read an epoch of a job. `attempt` is used if it is the one that starts it.

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
    """Who reads, in a job with `sharing`; `replica` is the number made of it."""


class EpochOpened(Message, frozen=True, tag="epoch_opened"):
    spec: JobSpec
    view: JobView
    done: tuple[Ranges, ...] = ()
    """What was done at the checkpoint the attempt began at: a consumer that begins where it says holds this too."""


class NotYet(Message, frozen=True, tag="not_yet"):
    """Ask again: something is being waited for, by name."""

    waiting_for: str
    missing_blobs: tuple[BlobHash, ...] = ()


class StreamView(Message, frozen=True):
    """A stream as a client needs it. `runner` is None while no process runs it. Compare `binding`: higher is newer."""

    stream: StreamId
    number: int
    binding: int
    feed: Feed
    share: int
    start: Cut = Cut()
    """Where it begins, for a client that holds no state of it."""
    first_round: int = 0
    marks: tuple[int, ...] = ()
    owner: int | None = None
    """The one consumer it is for (`uneven="allow"`); None: all."""
    runner: RunnerId | None = None
    address: str = ""
    worker: WorkerId | None = None
    ended: bool = False
    lost: bool = False
    """Given up for good (`at_most_once`)."""


class JobView(Message, frozen=True):
    """A consumer's picture of its epoch. `version` grows with every change."""

    job: JobName
    attempt: AttemptId
    epoch: int
    version: int
    streams: tuple[StreamView, ...]
    finished: bool = False
    failure: str = ""
    """Why the job cannot go on, for people; empty: it can."""
    waiting_for: str = ""
    """What keeps it from going on right now (no worker, paused); empty: nothing."""
    dropped: tuple[str, ...] = ()
    """Elements that killed three processes and are left out, by name."""


# From clients


class PutBlob(Message, frozen=True, tag="put_blob"):
    """A piece of a blob; `offset` and `size` let pieces arrive in any order, and twice."""

    hash: BlobHash
    offset: int
    size: int
    piece: bytes


class Beat(Message, frozen=True, tag="beat"):
    """A consumer is alive. The answer is the view if it is newer than `version`."""

    job: JobName
    client: ClientId
    consumer: int
    attempt: AttemptId
    version: int
    batches: int = 0
    nbytes: int = 0
    wait_s: float = 0.0
    run_s: float = 0.0
    buffered: int = 0
    trainer: str = ""
    skipped: int = 0
    shared: int = 0


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


# From agents and runners


class RunnerPlace(msgspec.Struct, frozen=True, array_like=True):
    runner: RunnerId
    worker: WorkerId
    job: JobName
    address: str
    streams: int = 0


class WorkerPlace(msgspec.Struct, frozen=True, array_like=True):
    worker: WorkerId
    tags: tuple[str, ...] = ()


class RegisterAgent(Message, frozen=True, tag="register_agent"):
    """An agent and all it has: sent at the start, after a dispatcher's restart, and when told `NotKnown`."""

    agent: AgentId
    host: str
    workers: tuple[WorkerPlace, ...]
    runners: tuple[RunnerPlace, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    pid: int = 0


class StageFigures(msgspec.Struct, frozen=True, array_like=True):
    elements: int = 0
    busy_s: float = 0.0
    nbytes: int = 0
    values: int = 0
    """In arrays that it padded, without the padding."""
    padding: int = 0


class RunnerFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a runner has done and used since its process began, and how fast it is now."""

    streams: int = 0
    """That run now."""
    rounds: int = 0
    nbytes: int = 0
    runs: int = 0
    """How often a stream began or began again."""
    busy_s: float = 0.0
    """Making outputs, summed over streams."""
    credit_wait_s: float = 0.0
    """Waiting for readers to make room."""
    refused: int = 0
    """Connections that were not let in."""
    stages: dict[str, StageFigures] = {}
    cpu_s: float = 0.0
    rss_bytes: int = 0
    rounds_per_s: float = 0.0
    """Of the last second or so, as the next."""
    cores: float = 0.0
    """Processor seconds a second."""


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


class GetBlob(Message, frozen=True, tag="get_blob"):
    hash: BlobHash
    offset: int = 0


class GetSpec(Message, frozen=True, tag="get_spec"):
    job: JobName


# Answers


class Done(Message, frozen=True, tag="done"):
    pass


class View(Message, frozen=True, tag="view"):
    view: JobView


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
    job: str
    owner: str
    epoch: int
    consumers: int
    clients: int
    workers: int
    streams: int
    splits_left: int
    status: str
    trainers: tuple[TrainerLine, ...] = ()
    """Of a job with `sharing`."""


class TrainerLine(msgspec.Struct, frozen=True, kw_only=True):
    """A trainer that reads a job with others: `shared` of what it read had been made for somebody else."""

    trainer: str
    epoch: int
    read: int
    skipped: int
    shared: int


class WorkerLine(msgspec.Struct, frozen=True, kw_only=True):
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


# From the dispatcher, unasked


class StartRunner(Message, frozen=True, tag="start_runner"):
    worker: WorkerId
    job: JobName
    runner: RunnerId


class StopRunner(Message, frozen=True, tag="stop_runner"):
    runner: RunnerId
    reason: str


class ViewChanged(Message, frozen=True, tag="view_changed"):
    view: JobView


Request: TypeAlias = (
    OpenEpoch
    | PutBlob
    | Beat
    | Rebind
    | EndStream
    | CloseClient
    | ListJobs
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
)
Answer: TypeAlias = (
    Done | View | EpochOpened | NotYet | Granted | BlobPiece | Spec | Jobs | Workers | NotKnown | Refused | TryAgain
)
Push: TypeAlias = StartRunner | StopRunner | ViewChanged


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """A request on its way: `number` pairs it with its answer, `seen` is the highest journal position known."""

    protocol: int
    number: int
    seen: int
    body: Request


class Tell(msgspec.Struct, frozen=True, array_like=True):
    """An answer (`number` > 0) or a push (`number` = 0), with the journal's position."""

    protocol: int
    number: int
    position: int
    body: Answer | Push


# The data plane: headers. Payloads are frames of their own.


class OpenStream(Message, frozen=True, tag="open"):
    """A consumer reads a stream from `round` on; `cut` is the state before some round at or before it.

    `credit` is how many bytes may be sent in all within this opening.
    """

    stream: StreamId
    binding: int
    opening: int
    consumer: int
    round: int
    cut: Cut
    cut_round: int
    feed: Feed
    share: int
    attempt: AttemptId
    epoch: int
    runner: RunnerId
    credit: int
    slab: bool = False
    """The reader has mapped the runner's arena: payloads need not cross the socket."""
    replica: int = 0
    """Replicas of a consumer each open the stream and receive the same rounds."""
    process: str = ""
    """The reader's (`wire.liveness.process_name`), for one that uses slabs: its leases end with it."""
    fresh: bool = False
    """The reader holds nothing of this stream: where others share it, it begins wherever they are."""
    trainer: str = ""
    """Its id, for messages."""
    mixes: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """(round, weights): from that round on elements are mixed by these. All changes, in order."""


class Credit(Message, frozen=True, tag="credit"):
    """An absolute position: sent again, lost or doubled, it means the same."""

    stream: StreamId
    opening: int
    credit: int
    returned: tuple[int, ...] = ()
    """Slab ranges that are free again."""
    round: int = -1
    """The first the trainer has not taken, where it shares the stream; -1: not said."""


class CloseStream(Message, frozen=True, tag="close"):
    stream: StreamId
    opening: int
    leaving: bool = False
    """The reader will not come back to it: nobody need wait for it."""
    round: int = -1
    """The first its trainer has not taken, where it shares the stream; -1: not said."""


class Units(Message, frozen=True, tag="units"):
    """What a stream that its reader feeds is to read: elements by their index, and each unit makes one output.

    Unit n of a stream is always the same: sent again, it means the same.
    """

    stream: StreamId
    opening: int
    first: int
    """The number of the first of these in the stream."""
    units: tuple[tuple[int, ...], ...]
    ended: bool = False
    """None follows these."""
    taken: int = 0
    """So many units of the stream have arrived, as outputs, and will not be read again."""
    start: int = 0
    """How many units of the epoch came before this attempt's first."""


class Rounds(Message, frozen=True, tag="rounds"):
    """`count` rounds from `seq` on, each this consumer's one output; `cut` is the state after the last.

    `done` are splits that restoring at `cut` no longer needs. The elements are in `layout` and the buffers after it,
    or, if `slab` is given, in that memory.
    """

    stream: StreamId
    binding: int
    opening: int
    seq: int
    count: int
    cut: Cut
    nbytes: int
    layout: bytes
    done: tuple[Named, ...] = ()
    slab: SlabPlaces | None = None
    compression: str = ""
    skipped: int = 0
    """Rounds before `seq` that are gone from the window this reader shares; without them a gap is a loss."""
    shared: bool = False
    """They were made for another reader."""
    had: int = 0
    """How many of them this trainer had before it came back without its state."""
    mixes: int = 0
    """How often weights had changed before round `seq`: a consumer that knows of fewer has missed a change."""


class SlabPlaces(msgspec.Struct, frozen=True, array_like=True):
    """Buffers that lie in the sender's arena: `lease` is given back when the reader is through with them."""

    lease: int
    places: tuple[tuple[int, int], ...]
    """(offset, size) of each buffer, in order."""


class StreamEnded(Message, frozen=True, tag="ended"):
    """The stream has `seq` rounds. `leftover`: there is more after `cut` than whole rounds could take."""

    stream: StreamId
    binding: int
    opening: int
    seq: int
    cut: Cut
    done: tuple[Named, ...] = ()
    leftover: bool = False
    skipped: int = 0


class RemoteFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A user function's exception as plain text: rebuilt by name, never unpickled."""

    module: str
    qualname: str
    args: tuple[Any, ...]
    message: str
    traceback: str
    notes: tuple[str, ...] = ()


class StreamFailed(Message, frozen=True, tag="failed"):
    stream: StreamId
    binding: int
    opening: int
    seq: int
    failure: RemoteFailure


class StreamRefused(Message, frozen=True, tag="refused"):
    """It cannot be read here (an older binding, another runner): ask the dispatcher where it is."""

    stream: StreamId
    opening: int
    reason: str


class Output(Message, frozen=True, tag="output"):
    """What the user's code printed or logged."""

    worker: WorkerId
    text: str


ToRunner: TypeAlias = OpenStream | Credit | CloseStream | Units
FromRunner: TypeAlias = Rounds | StreamEnded | StreamFailed | StreamRefused | Output
