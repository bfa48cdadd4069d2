"""What a job is, where its streams stand, and a consumer's picture of it: the records messages are made of.

Rules of evolution: new fields have defaults, old ones never change their type.

The state that rides with the data is a `Cut`. Everything in it is plain (ints, strings, lists), so that it goes through
msgpack here and through JSON in a trainer's checkpoint.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from penstock.core.ids import AttemptId, BlobHash, Fingerprint, JobName, RunnerId, StreamId, WorkerId
from penstock.wire.modes import Order, Placement, Ranks, Sharding, Share, Transport


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of what travels."""


class Named(msgspec.Struct, frozen=True, array_like=True):
    """Splits of one pass of one source, as ordinals of the pass's order."""

    source: int
    pass_: int
    ordinals: tuple[int, ...]
    ended: bool = False
    """The stream was told that there is no more of the pass for it."""


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


class FeedSpec(msgspec.Struct, frozen=True, array_like=True):
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
    feed: FeedSpec


class JobSpec(Message, frozen=True):
    """What all consumers of a job must agree on."""

    fingerprint: Fingerprint
    graph: BlobHash
    splits: BlobHash
    split_counts: tuple[int, ...]
    """How many splits each source has, in the order of `graph.traverse.walk`."""
    seed: int
    ranks: Ranks
    sharding: Sharding
    order: Order = "relaxed"
    sharing: Share | None = None
    placement: Placement = Placement()
    transport: Transport = "auto"
    feeds: tuple[FeedSpec, ...] = ()
    """The feed of each stream, where splits are assigned up front."""
    host: str = ""
    """The host that created the job, which `placement` refers to."""
    owner: str = ""
    """The name of the principal that made the job, as the dispatcher knows it."""
    share_with: tuple[str, ...] = ()
    """The names of others who may read and steer it."""
    collect_after_s: float = 600.0
    versions: tuple[tuple[str, str], ...] = ()
    """Python, numpy and the installed packages the functions refer to: a worker compares them with its own."""

    @property
    def awaited_trainers(self) -> int:
        """How many trainers will read every epoch from its beginning; 0: those who come."""
        return 0 if self.sharing is None else self.sharing.trainers or 0

    def with_streams(self, streams: int | None) -> JobSpec:
        """Return the spec with so many streams, which were left to others to say or are another epoch's."""
        return replace(self, sharding=replace(self.sharding, streams=streams))


class Slot(NamedTuple):
    """Whose reading it is. A slot has one reader: the newest wins."""

    consumer: int
    replica: int = 0
    """Replicas of a consumer read the same."""
    trainer: str = ""
    """The trainer whose consumer it is, where trainers share the job."""


class Stride(msgspec.Struct, frozen=True, array_like=True):
    """Splits of one pass of one source: `count` ordinals from `first` on, `step` apart."""

    source: int
    pass_: int
    first: int
    count: int = 1
    step: int = 1


class Position(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where readers stand in a stream: the next round, and the state there.

    A consumer's own has the last splits behind it (`trail`), where one that lags needs them named. A merged one has
    the lowest round, and `marks`: the next round of each consumer.
    """

    number: int
    round: int = 0
    cut: Cut = Cut()
    ended: bool = False
    leftover: bool = False
    """It ended with more after `cut` than whole rounds could take."""
    feed: FeedSpec | None = None
    """Where its splits come from; None in a consumer's own, but for the tail: other feeds follow from the job."""
    trail: tuple[Stride, ...] = ()
    trail_lost: bool = False
    """The trail was longer than is remembered."""
    marks: tuple[int, ...] = ()
    gaps: tuple[tuple[int, int], ...] = ()
    """The last rounds that were skipped, as half-open ranges, where trainers of several ranks share the stream."""


class Resume(Message, frozen=True):
    """A merged checkpoint: enough to go on without the journal and on another service."""

    epoch: int
    consumers: int
    streams: tuple[Position, ...]
    done: tuple[Ranges, ...] = ()
    digest: str = ""
    """The digest of the merged state: consumers that load the same checkpoint send the same."""
    width: int = 0
    """How many streams take turns in the epoch; 0: as many as the job has. Epochs that begin have as many as it has."""


class StreamView(Message, frozen=True):
    """A stream as a client needs it. `runner` is None while no process runs it. Compare `binding`: higher is newer."""

    stream: StreamId
    number: int
    binding: int
    feed: FeedSpec
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
    """Whether the stream is given up for good (`at_most_once`)."""


class StreamMove(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What changes of a stream in its life, as it is now. The rest of its view is sent once, when it is made."""

    number: int
    binding: int
    runner: RunnerId | None = None
    worker: WorkerId | None = None
    address: str = ""
    ended: bool = False
    lost: bool = False


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


class ViewChange(Message, frozen=True):
    """What is different in a view since version `since`, each as it is at `version`.

    It fits every version from `since` on: what changed before that is in it once more, and is the same.
    """

    job: JobName
    attempt: AttemptId
    since: int
    version: int
    made: tuple[StreamView, ...] = ()
    """Streams that were not there."""
    moved: tuple[StreamMove, ...] = ()
    """Streams that were, and are bound otherwise, have ended or are lost."""
    finished: bool = False
    failure: str = ""
    waiting_for: str = ""
    dropped: tuple[str, ...] | None = None
    """Elements that are left out, by name; None: they are as before."""
