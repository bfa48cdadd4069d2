"""The data plane: headers. Payloads are frames of their own."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from penstock.core.ids import AttemptId, RunnerId, StreamId, WorkerId
from penstock.wire.jobs import Cut, FeedSpec, Message, Named


class SourceStorageOptions(msgspec.Struct, frozen=True, array_like=True):
    """What a reader's sources open their storage with, in the order of `graph.traverse.walk`. Never shown, nor stored:
    it goes from the trainer to the process that reads, over a connection of this host or an encrypted one."""

    sources: tuple[dict[str, Any], ...] = ()

    def __repr__(self) -> str:
        return f"SourceStorageOptions({len(self.sources)} sources, hidden)"


NO_STORAGE_OPTIONS = SourceStorageOptions()


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
    feed: FeedSpec
    share: int
    attempt: AttemptId
    epoch: int
    runner: RunnerId
    credit: int
    slab: bool = False
    """The reader has mapped the runner's arena (`UseSlabs`): payloads need not cross the socket."""
    replica: int = 0
    """Replicas of a consumer each open the stream and receive the same rounds."""
    fresh: bool = False
    """The reader holds nothing of this stream: where others share it, it begins wherever they are."""
    life: int = 0
    """How often its trainer had begun anew without its states: of one life all ranks begin at the same round."""
    gaps: tuple[tuple[int, int], ...] = ()
    """Rounds that it skipped, as half-open ranges: the other ranks of its trainer skip them as well."""
    trainer: str = ""
    """The trainer whose rank the reader is, where trainers share the stream."""
    mixes: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """(round, weights): from that round on elements are mixed by these. All changes, in order."""
    storage: SourceStorageOptions = NO_STORAGE_OPTIONS


class Credit(Message, frozen=True, tag="credit"):
    """An absolute position: sent again, lost or doubled, it means the same."""

    stream: StreamId
    opening: int
    credit: int
    returned: tuple[int, ...] = ()
    """Slab ranges that are free again."""
    round: int = -1
    """The first the trainer has not taken, where it shares the stream; -1: not said."""


class ReturnLeases(Message, frozen=True, tag="return"):
    """Slab ranges are free again, and no credit is due that could say so."""

    leases: tuple[int, ...]


class UseSlabs(Message, frozen=True, tag="slabs"):
    """First and last on a connection of one that has mapped the runner's arena."""

    reader: str
    """Its process (`wire.neighbours.process_name`), whose end is the end of its leases, a slash, and a secret."""
    connection: int
    """The number of this connection among the reader's own."""
    live: tuple[int, ...] = ()
    """Earlier connections on which something may still arrive."""
    held: tuple[int, ...] = ()
    """The leases it has of all others: what else was sent on those never arrived."""
    over: bool = False
    """Whether nothing is read on this connection any more, so that `held` speaks of it too."""


class CloseStream(Message, frozen=True, tag="close"):
    stream: StreamId
    opening: int
    leaving: bool = False
    """The reader will not come back to it: nobody need wait for it. Answered by `StreamLeft`."""
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
    """Whether these are the last units."""
    taken: int = 0
    """So many units of the stream have arrived, as outputs, and will not be read again."""
    start: int = 0
    """How many units of the epoch came before this attempt's first."""


class Rounds(Message, frozen=True, tag="rounds"):
    """`count` rounds from `seq` on, each this consumer's one output; `cut` is the state after the last.

    `done` are splits that restoring at `cut` no longer needs. The elements are in `layout` and the buffers after it,
    or, if `slab` is given, in that memory: one by itself (`wire.elements`), several as a run (`wire.runs`).
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
    """Whether they were made for another reader."""
    had: int = 0
    """How many of them this trainer had before it came back without its state."""
    holes: tuple[tuple[int, int], ...] = ()
    """Rounds among them that other ranks of this trainer have skipped, and this one is to."""
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
    cause: RemoteFailure | None = None
    exceptions: tuple[RemoteFailure, ...] = ()
    """The exceptions that an exception group is made of."""


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
    superseded: bool = False
    """A newer reader has this one's place: asking again will not help."""


class StreamLeft(Message, frozen=True, tag="left"):
    """A reader's last word was heard, and nothing follows: closed before that, its connection might lose it."""

    stream: StreamId
    opening: int


# What a trainer reads for a runner: see `relays.asking`


class AskRows(Message, frozen=True, tag="ask_rows"):
    """A runner asks one who reads for it for a part of a source: a split from a place on, or elements by index."""

    ask: int
    """Its number: the runner uses none twice."""
    source: int
    """The source's number in the job's plan, in the order of `graph.traverse.walk`."""
    key: str
    """Of the source as it is read there: both ends have to mean the same."""
    most_bytes: int
    """The answer has no more, unless it is one element."""
    split: int = -1
    """The number of a split in the job's list; -1: elements by index."""
    index: int = 0
    offset: int | None = None
    """After how many of the split's elements to begin, and the source's own hint how to get there."""
    indices: tuple[int, ...] = ()


class OfferReading(Message, frozen=True, tag="offer"):
    """First on a connection of one who reads for the runner: asks may go there."""

    name: str
    """The same on every connection of this one: the newest counts."""


class BadRow(msgspec.Struct, frozen=True, array_like=True):
    """A record that could not be read, where such are left out."""

    index: int
    """In its split, or of the element."""
    path: str
    offset: int | None
    failure: RemoteFailure


class RelayRows(Message, frozen=True, tag="relay_rows"):
    """The elements that were asked for, in order: in `layout` and the buffers that come in the same message."""

    ask: int
    count: int
    layout: bytes = b""
    indices: tuple[int, ...] = ()
    """Of each in its split; empty: consecutive."""
    offsets: tuple[int, ...] = ()
    """The source's hint for the place after each; empty: it has none."""
    covers: int = 0
    """How many of the indices that were asked for these are all of; of those, `bad` ones are left out."""
    bad: tuple[BadRow, ...] = ()
    ended: bool = False
    """Nothing follows."""


class RelayFailed(Message, frozen=True, tag="relay_failed"):
    """It cannot be read; nothing follows."""

    ask: int
    failure: RemoteFailure


class Output(Message, frozen=True, tag="output"):
    """What the user's code printed or logged."""

    worker: WorkerId
    text: str


Relayed: TypeAlias = OfferReading | RelayRows | RelayFailed
ToRunner: TypeAlias = OpenStream | UseSlabs | Credit | ReturnLeases | CloseStream | Units | Relayed
FromRunner: TypeAlias = Rounds | StreamEnded | StreamFailed | StreamRefused | StreamLeft | Output | AskRows
