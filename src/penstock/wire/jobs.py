"""What a job is, where its streams stand, and a consumer's picture of it: the records messages are made of.

Rules of evolution: new fields have defaults, old ones never change their type.

The state that rides with the data is a `Cut`. Everything in it is plain (ints, strings, lists), so that it goes through
msgpack here and through JSON in a trainer's checkpoint.

Two things are made of the records. How a job's outputs reach its readers (`Delivery`) is derived once from what the job
is:

| | who reads a stream | which stream a consumer takes from next |
|---|---|---|
| by arrival | all consumers, each its output of a round | whichever has something |
| in turns | the same | the one with the lowest round; the tail comes last |
| owned | one consumer | whichever of its own has something |
| shared | trainers, each all of it, out of a window | either of the first two |

And a view as a consumer holds it (`HeldView`) is begun with a whole one, and kept up with changes.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec.structs import replace

from penstock.core.errors import InvalidArgumentError
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

    def __post_init__(self) -> None:
        # Whoever counts what was received divides by the width: with one below 1 the count would not come to an end.
        if self.width < 1 or len(self.given) != self.width or min(self.given) < 0:
            raise InvalidArgumentError(
                f"rounds of {self.width} outputs, of which {len(self.given)} consumers received some: each output must "
                "have one, and none received fewer than 0; load a state that was saved by this loader"
            )


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

    first: int
    count: int = 1
    step: int = 1
    pass_: int = 0
    source: int = 0


class Position(msgspec.Struct, frozen=True, array_like=True):
    """Where readers stand in a stream: the next round, and the state there.

    A consumer's own has the last splits behind it (`trail`), where one that lags needs them named. A merged one has
    the lowest round, and `marks`: the next round of each consumer.
    """

    number: int
    round: int = 0
    cut: Cut = Cut()
    trail: tuple[Stride, ...] = ()
    trail_lost: bool = False
    """The trail was longer than is remembered."""
    ended: bool = False
    leftover: bool = False
    """It ended with more after `cut` than whole rounds could take."""
    feed: FeedSpec | None = None
    """Where its splits come from; None in a consumer's own, but for the tail: other feeds follow from the job."""
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


# How outputs reach readers

DeliveryKind: TypeAlias = Literal["by arrival", "in turns", "owned", "shared"]


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    kind: DeliveryKind
    consumers: int
    width: int
    """Outputs in a round: one for each consumer, or one where a stream has an owner."""
    in_turn: bool
    """Consumers take rounds from the streams in turn, so that all of them read the same round in the same step."""
    sharing: Share | None
    streams: int | None
    """How many there are, where that is the job's to say; None: as workers join."""
    reach: int
    """From how many workers a consumer with streams of its own reads, about, where there are more."""

    @property
    def owned(self) -> bool:
        return self.kind == "owned"

    @property
    def shared(self) -> bool:
        return self.kind == "shared"

    @property
    def skips(self) -> bool:
        """What a reader is too late for is gone."""
        return self.sharing is not None and not self.sharing.waits

    @property
    def window_bytes(self) -> int | None:
        """Of what trainers share, on each worker; None: it is left to the worker."""
        return None if self.sharing is None else self.sharing.window_bytes

    @property
    def alike(self) -> bool:
        """After the same number of steps all consumers stand at the same place: one state stands for all."""
        return self.in_turn

    @property
    def trails(self) -> bool:
        """Consumers of one stream stand apart, so that a state has to name splits that one of them is through with."""
        return self.kind == "by arrival" and self.consumers > 1

    def owner_of(self, number: int, feed: FeedSpec) -> int | None:
        """Return the one consumer of a stream, or None: all of them.

        By number, so that a checkpoint need not say. Relaxed streams are made one a consumer, with numbers in a row.
        """
        if not self.owned:
            return None
        return 0 if feed.kind == "tail" else number % self.consumers

    def streams_on(self, processes: int) -> int:
        """Return how many streams each of so many processes is given, where they come as workers join.

        Where streams have owners that is one for each consumer, until a consumer would read from more processes than
        its reach: then each serves a part of the consumers, whose streams are dealt by their numbers, so that all have
        as many. The streams are never fewer than the consumers.

        >>> owned = Delivery(
        ...     kind="owned", consumers=512, width=1, in_turn=False, sharing=None, streams=None, reach=32
        ... )
        >>> owned.streams_on(32), owned.streams_on(5000), 5000 * owned.streams_on(5000) // 512
        (512, 4, 39)
        """
        if not self.owned or self.streams is not None:
            return 1
        return min(self.consumers, -(-self.consumers * self.reach // max(1, processes)))

    def seat_of(self, consumer: int) -> int:
        """Return which output of a round is that consumer's."""
        return consumer if self.width > 1 else 0


def delivery_of(spec: JobSpec) -> Delivery:
    ranks, shared = spec.ranks, spec.sharing is not None
    in_turn = spec.order == "deterministic" or ranks.coordinated
    owned = ranks.uneven == "allow" and not shared
    return Delivery(
        kind="shared" if shared else "owned" if owned else "in turns" if in_turn else "by arrival",
        consumers=ranks.count,
        width=1 if owned else ranks.count,
        in_turn=in_turn,
        sharing=spec.sharing,
        streams=_fixed_streams(spec, in_turn=in_turn),
        reach=ranks.reach,
    )


def _fixed_streams(spec: JobSpec, *, in_turn: bool) -> int | None:
    if spec.sharding.off:
        return None
    if spec.feeds:
        return len(spec.feeds)
    return (spec.sharding.streams or 1) if in_turn else None


# A view, kept up

Fit: TypeAlias = Literal["taken", "known", "missed"]
"""taken: the view is newer now. known: it says nothing new. missed: something before it did not come; ask for it."""


class HeldView:
    """Takes what comes over, whatever comes twice, late or not at all.

    A change costs what changed. `view` is whole, and is put together only when it is asked for.
    """

    def __init__(self, view: JobView) -> None:
        self._view = view
        self._streams = {stream.number: stream for stream in view.streams}
        self._news: dict[int, None] = dict.fromkeys(self._streams)
        self._whole = True

    @property
    def version(self) -> int:
        return self._view.version

    @property
    def view(self) -> JobView:
        if not self._whole:
            self._view = replace(self._view, streams=tuple(self._streams.values()))
            self._whole = True
        return self._view

    def take_news(self) -> tuple[StreamView, ...]:
        """Return the streams that are new or changed since the last call, in the order they came."""
        news, self._news = self._news, {}
        return tuple(self._streams[number] for number in news)

    def take_view(self, view: JobView) -> Fit:
        if view.attempt != self._view.attempt or view.version <= self.version:
            return "known"
        for stream in view.streams:
            if stream != self._streams.get(stream.number):
                self._news[stream.number] = None
        self._view, self._whole = view, True
        self._streams = {stream.number: stream for stream in view.streams}
        return "taken"

    def take_change(self, change: ViewChange) -> Fit:
        if change.attempt != self._view.attempt or change.version <= self.version:
            return "known"
        if change.since > self.version or any(move.number not in self._streams for move in change.moved):
            return "missed"
        for stream in change.made:
            self._put(stream)
        for move in change.moved:
            self._put(_moved(self._streams[move.number], move))
        self._whole = False
        self._view = replace(
            self._view,
            version=change.version,
            finished=change.finished,
            failure=change.failure,
            waiting_for=change.waiting_for,
            dropped=self._view.dropped if change.dropped is None else change.dropped,
        )
        return "taken"

    def _put(self, stream: StreamView) -> None:
        self._streams[stream.number] = stream
        self._news[stream.number] = None


def _moved(stream: StreamView, move: StreamMove) -> StreamView:
    return replace(
        stream,
        binding=move.binding,
        runner=move.runner,
        worker=move.worker,
        address=move.address,
        ended=move.ended,
        lost=move.lost,
    )
