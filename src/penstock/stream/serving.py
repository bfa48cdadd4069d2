"""One stream as its runner serves it: who may read it, the run that works for it, and who is given which rounds.

`Served` is what every stream has; `Dealt` gives each consumer its output of every round. (`stream.sharing` keeps rounds
in a window instead, for trainers that all read all of them.)

| state of the run | how it is left |
|---|---|
| none | readers have come, from the beginning or all of them, or a moment has passed: a run starts |
| running | a reader needs earlier rounds: another run starts lower; the last reader leaves: none; its end; a failure |
| ended | a reader opens again: it is told the end, or another run starts lower |
| failed | a reader opens again: another run starts |

Rules:

1. An incarnation is (binding, opening). A lower binding is refused; a higher one ends the run and all older readers. Of
   one reader's openings the highest counts, and who had the place is told.
2. What an abandoned run still makes is not given to anybody.
3. A stream starts at the lowest cut: so it knows of every split that was opened or done since any reader's cut. Whoever
   opens later at a lower round, or with a lower cut, makes it start again, lower.
4. A reader is sent the rounds from its own on, each once, in order, and nothing twice within an opening.
5. A round is made only while every reader that needs it has credit left. One frame may exceed it.

Everything is called under the stream's lock. Instructions are carried out in the order given; a reader gets frames by
`wanted` and `give`, so that what they hold is made between the two, without the lock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from msgspec.structs import replace

from penstock.core.errors import InvalidArgumentError
from penstock.core.ids import StreamId
from penstock.stream.checkpoint import Mixes
from penstock.stream.rounds import End, Instruction, Send, StartRun, StopRun, Terms, Wanted
from penstock.wire.failures import describe_failure
from penstock.wire.frames import (
    CloseStream,
    Credit,
    OpenStream,
    RemoteFailure,
    Rounds,
    StreamEnded,
    StreamFailed,
    StreamRefused,
)
from penstock.wire.jobs import Cut, Delivery, Named

GATHER_S = 1.0  # how long the first of several consumers waits for the others to open a stream
GATHER_IN_STEP_S = 0.1  # those read in step: one that waits for this stream is not ahead of one that is still training
PROBE_S = 2.0  # how often a reader that keeps others waiting is looked after
PROBE_ALONE_S = 10.0  # and one that keeps only a run waiting, or is given nothing
LONG_LOG = 4_096  # entries that every reader knows, kept for one that may open with an older cut
UNBOUNDED = 1 << 20  # nobody waits for the next rounds: so much is made ahead


class ServedRun(NamedTuple):
    """The run of a stream as far as its readers depend on it."""

    number: int
    next_round: int
    """The first round not given to the readers yet."""
    remembers_from: int
    """The oldest round whose cut can be read on from: of it and later ones it is known which splits were done since."""
    end: End | None = None
    failed: bool = False


class ServedReader:
    """One opening of the stream."""

    def __init__(self, peer: bytes, message: OpenStream, seat: int) -> None:
        self.peer, self.opening, self.seat = peer, message.opening, seat
        self.slab = message.slab
        self.cut, self.cut_round = message.cut, message.cut_round
        self.due = message.round
        """The round it takes for the next: all before were sent to it, or skipped."""
        self.credit = message.credit
        self.sent_bytes = 0
        self._looked_at_bytes = -1

    def was_silent(self) -> bool:
        """Say whether nothing was sent to it since this was last asked: then nothing has told whether it is there."""
        before, self._looked_at_bytes = self._looked_at_bytes, self.sent_bytes
        return before == self.sent_bytes

    @property
    def hungry(self) -> bool:
        return self.sent_bytes < self.credit

    def hear(self, credit: int, taken: int, now: float) -> None:
        """It has credit for more. `taken`: the first round that its trainer has not taken."""
        self.credit = max(credit, self.credit)

    def give(self, after: int, nbytes: int) -> None:
        """Rounds up to that one are sent."""
        self.due = after
        self.sent_bytes += nbytes


Key: TypeAlias = tuple[str, int]
"""Whose opening it is, a replica's or, where trainers share, a trainer's; and its seat in the round."""
ReaderKind = TypeVar("ReaderKind", bound=ServedReader)
ReaderSays: TypeAlias = OpenStream | Credit | CloseStream | None


class Served(ABC, Generic[ReaderKind]):
    def __init__(self, stream: StreamId, delivery: Delivery, *, now: float) -> None:
        self.id = stream
        self.delivery = delivery
        self.idle_since = now
        """When the stream last had a reader."""
        self.readers: dict[Key, ReaderKind] = {}
        self.runs = 0
        """How often a run began."""
        self._terms: Terms | None = None
        self._run: ServedRun | None = None
        self._start_at: float | None = None
        """When a run starts though not all readers have come."""
        self._probed_at = 0.0
        self._closed = False
        self._instructions: list[Instruction] = []

    def instructions(self) -> list[Instruction]:
        """Return what is to be done, and forget it."""
        found, self._instructions = self._instructions, []
        return found

    @property
    def running(self) -> bool:
        return self._run is not None and self._run.end is None and not self._run.failed

    @property
    def holds_memory(self) -> bool:
        """It makes rounds, or keeps some."""
        return self.running

    @property
    def binding(self) -> int:
        return -1 if self._terms is None else self._terms.binding

    def current(self, run: int) -> ServedRun | None:
        """Return the run of that number, unless it was abandoned."""
        return self._run if self._run is not None and self._run.number == run else None

    # What readers say

    def hear(self, peer: bytes, message: ReaderSays, now: float) -> list[ReaderKind]:
        """Take in what a peer says, or (None) that it is gone; return the readers that have credit for more."""
        match message:
            case OpenStream():
                self.open(peer, message, now)
            case Credit():
                heard = [reader for _, reader in self._of(peer, message.opening)]
                for reader in heard:
                    reader.hear(message.credit, message.round, now)
                return heard
            case CloseStream():
                self.close_reader(peer, message.opening, now, leaving=message.leaving, taken=message.round)
            case None:
                self.close_reader(peer, None, now)
        return []

    def open(self, peer: bytes, message: OpenStream, now: float) -> None:
        """Take a reader in, or refuse it."""
        refusal = self._refusal(message)
        if refusal:
            self._refuse(peer, message.opening, refusal)
            return
        if message.binding > self.binding:
            self._stop()
            self._refuse_all(f"the stream has binding {message.binding} by now")
            self._forget_readers(now)
            self._terms = Terms(
                attempt=message.attempt,
                epoch=message.epoch,
                feed=message.feed,
                share=message.share,
                binding=message.binding,
            )
        present = self.readers.get(self._key(message))
        if present is not None:
            if present.opening == message.opening and present.peer == peer:
                return  # said twice
            if present.peer != peer:
                reason = f"a newer reader has taken the place of consumer {message.consumer}"
                self._refuse(present.peer, present.opening, reason, superseded=True)
        self._let_in(peer, message, now)

    def _refusal(self, message: OpenStream) -> str:
        """Return why a reader is not taken in; empty: it is."""
        width, binding, consumer = self.delivery.width, message.binding, message.consumer
        present = self.readers.get(self._key(message))
        newest = -1 if present is None or binding != self.binding else present.opening
        rules = (
            (self._closed, "this worker is closing"),
            (consumer < 0 or consumer >= width > 1, f"there is no consumer {consumer}: the job has {width}"),
            (binding < 0, f"there is no binding {binding}"),
            (binding < self.binding, f"binding {binding} is over, the stream has binding {self.binding} by now"),
            (
                message.cut_round > message.round,
                f"the cut is that of round {message.cut_round}, after round {message.round}",
            ),
            (message.opening < newest, f"opening {message.opening} is over, opening {newest} has come since"),
        )
        return next((reason for broken, reason in rules if broken), "")

    @abstractmethod
    def _key(self, message: OpenStream) -> Key: ...

    @abstractmethod
    def _let_in(self, peer: bytes, message: OpenStream, now: float) -> None: ...

    @abstractmethod
    def _forget(self, key: Key, reader: ReaderKind, now: float, *, leaving: bool = False, taken: int = -1) -> None:
        """Let a reader go."""

    def _forget_readers(self, now: float) -> None:
        """Let go of all readers: those of a newer binding come."""
        for key, reader in list(self.readers.items()):
            self._forget(key, reader, now)

    def _forget_all(self, now: float) -> None:
        """Let go of all readers, and of what is kept for them."""
        self._forget_readers(now)

    def close_reader(
        self, peer: bytes, opening: int | None, now: float, *, leaving: bool = False, taken: int = -1
    ) -> None:
        """Forget a reader that closed the stream, or (no opening given) is gone.

        `leaving`: it does not come back. `taken`: the first round it has not taken, if it says so.
        """
        for key, reader in self._of(peer, opening):
            self._forget(key, reader, now, leaving=leaving, taken=taken)

    def tick(self, now: float) -> list[bytes]:
        """Start what has waited long enough. Return peers to be probed: others wait for them, or they got nothing."""
        if self.readers:
            self.idle_since = now
            if self._start_at is not None and now >= self._start_at:
                self._begin()
        if now - self._probed_at < (PROBE_ALONE_S if len(self.readers) < 2 else PROBE_S):
            return []
        self._probed_at = now
        blocking = self._blocking()
        return [reader.peer for reader in self.readers.values() if reader.was_silent() or reader in blocking]

    @abstractmethod
    def _begin(self) -> None:
        """Start for the readers that have come."""

    @abstractmethod
    def _blocking(self) -> list[ReaderKind]:
        """Return the readers without whose credit the next round may not be made."""

    def close(self, now: float) -> None:
        """Serve nobody any more."""
        self._closed = True
        self._stop()
        self._forget_all(now)

    def _of(self, peer: bytes, opening: int | None) -> list[tuple[Key, ReaderKind]]:
        """Return the readers of a peer: of this opening, or all."""
        return [
            (key, reader)
            for key, reader in self.readers.items()
            if reader.peer == peer and (opening is None or reader.opening == opening)
        ]

    # The run

    def _start(self, start: Cut, start_round: int, mixes: Mixes = ()) -> None:
        """Begin to make rounds there; who did so until now is abandoned."""
        self._stop()
        assert self._terms is not None, "nobody has opened the stream yet"
        self.runs += 1
        self._run = ServedRun(self.runs, start_round, start_round)
        self._instructions.append(StartRun(self.runs, self._terms, start, start_round, mixes))

    def _stop(self) -> None:
        if self._run is not None:
            self._instructions.append(StopRun(self._run.number))
        self._run = self._start_at = None

    def ended(self, run: int, end: End, done: Iterable[Named]) -> None:
        """All rounds were given. `done`: what the last cut does not need any more."""
        if (found := self.current(run)) is not None:
            self._run = found._replace(end=end)
            self._tell_ends(end, done)

    @abstractmethod
    def _tell_ends(self, end: End, done: Iterable[Named]) -> None: ...

    def failed(self, run: int, failure: RemoteFailure) -> None:
        if (found := self.current(run)) is not None:
            self._run = found._replace(failed=True)
            for reader in self.readers.values():
                self._tell_failure(reader.peer, reader.opening, reader.due, failure)

    def stale(self, run: int, reason: str, now: float) -> None:
        """The dispatcher grants nothing to this binding any more."""
        if self.current(run) is not None:
            self._stop()
            self._refuse_all(reason)
            self._forget_all(now)

    # What readers are told

    def _refuse(self, peer: bytes, opening: int, reason: str, *, superseded: bool = False) -> None:
        message = StreamRefused(stream=self.id, opening=opening, reason=reason, superseded=superseded)
        self._instructions.append(Send(peer, message))

    def _refuse_all(self, reason: str) -> None:
        for reader in self.readers.values():
            self._refuse(reader.peer, reader.opening, reason)

    def _tell_failure(self, peer: bytes, opening: int, seq: int, failure: RemoteFailure) -> None:
        failed = StreamFailed(stream=self.id, binding=self.binding, opening=opening, seq=seq, failure=failure)
        self._instructions.append(Send(peer, failed))

    def _tell_end(self, reader: ServedReader, end: End, *, done: tuple[Named, ...] = (), skipped: int = 0) -> None:
        message = StreamEnded(
            stream=self.id,
            binding=self.binding,
            opening=reader.opening,
            seq=end.seq,
            cut=end.cut,
            done=done,
            leftover=end.leftover,
            skipped=skipped,
        )
        self._instructions.append(Send(reader.peer, message))


class DealtReader(ServedReader):
    """A consumer's reading, or a replica's of it."""

    def __init__(self, peer: bytes, message: OpenStream, seat: int) -> None:
        super().__init__(peer, message, seat)
        self.mixes: Mixes = message.mixes
        """Changes of weights that this reader knows of."""
        self.told = 0
        """Entries of the log of done splits that this reader knows."""

    def tell(self, entries: int) -> int:
        """It knows so many entries from now on; return how many it knew."""
        told, self.told = self.told, entries
        return told

    def give_cut(self, after: int, cut: Cut, nbytes: int) -> None:
        self.give(after, nbytes)
        self.cut, self.cut_round = cut, after


class Dealt(Served[DealtReader]):
    def __init__(self, stream: StreamId, delivery: Delivery, *, now: float, makes_rounds: bool = False) -> None:
        """`makes_rounds`: the engine itself groups outputs into rounds, of which consumers read the same in a step."""
        super().__init__(stream, delivery, now=now)
        self._gather_s = GATHER_IN_STEP_S if makes_rounds else GATHER_S
        self._mixes: Mixes = ()
        """All changes of weights that any reader of this binding knew of."""
        self._done: list[Named] = []
        """Splits that cuts of the run do not need any more, in the order that was found out."""
        self._forgotten = 0
        """How many entries before them are not kept any more."""

    def _key(self, message: OpenStream) -> Key:
        return str(message.replica), self.delivery.seat_of(message.consumer)

    def _let_in(self, peer: bytes, message: OpenStream, now: float) -> None:
        both = min(len(message.mixes), len(self._mixes))
        if self.delivery.width > 1 and message.mixes[:both] != self._mixes[:both]:
            self._refuse_weights(peer, message)
            return
        key = self._key(message)
        reader = self.readers[key] = DealtReader(peer, message, key[1])
        changed = reader.mixes != self._mixes and (self.delivery.width == 1 or len(reader.mixes) > both)
        self._mixes = reader.mixes if changed else self._mixes
        run = self._run
        if run is None:
            seats = {seat for _, seat in self.readers}
            from_beginning = reader.cut.engine is None and reader.cut_round == 0 and reader.due == 0
            if from_beginning or len(seats) >= self.delivery.width:
                self._begin()
            elif self._start_at is None:
                self._start_at = now + self._gather_s
        elif changed or run.failed or reader.due < run.next_round or reader.cut_round < run.remembers_from:
            self._begin()
        elif run.end is not None:
            self._tell_end(reader, run.end, done=self._newly_done(reader))

    def _refuse_weights(self, peer: bytes, message: OpenStream) -> None:
        one, other = next((one, other) for one, other in zip(message.mixes, self._mixes) if one != other)
        error = InvalidArgumentError(
            f"consumers changed weights differently: to {list(one[1])} at round {one[0]} of a stream here, to "
            f"{list(other[1])} at round {other[0]} elsewhere; call set_weights() with the same at the same step on all"
        )
        self._tell_failure(peer, message.opening, message.round, describe_failure(error))

    def _knows_mixes(self, reader: DealtReader) -> bool:
        """Whether the reader's cut was made with all changes of weights before it: one may not have been told yet."""
        made_until = reader.cut_round - reader.cut.since
        return self.delivery.width == 1 or all(at >= made_until for at, _ in self._mixes[len(reader.mixes) :])

    def _forget(self, key: Key, reader: DealtReader, now: float, *, leaving: bool = False, taken: int = -1) -> None:
        """The last reader takes the run along: a reader that comes back is not waited for here."""
        del self.readers[key]
        if not self.readers:
            self._stop()
            self._mixes = ()  # should they all come back from an older state, they may change weights otherwise

    @property
    def uses_slabs(self) -> bool:
        return any(reader.slab for reader in list(self.readers.values()))

    def _begin(self) -> None:
        readers = list(self.readers.values())
        knowing = [reader for reader in readers if self._knows_mixes(reader)] or readers
        lowest = min(knowing, key=lambda reader: reader.cut_round)
        self._done, self._forgotten = [], 0
        for reader in readers:
            reader.tell(0)
        self._start(lowest.cut, lowest.cut_round, self._mixes)

    def _blocking(self) -> list[DealtReader]:
        return [reader for reader in self._due() if not reader.hungry]

    def _due(self) -> list[DealtReader]:
        """Return the readers that need the next round."""
        next_round = -1 if self._run is None else self._run.next_round
        return [reader for reader in self.readers.values() if reader.due <= next_round]

    def room(self, run: int) -> int | None:
        """Return how many bytes may be made and sent now; None: none yet."""
        if self.current(run) is None or self._blocking():
            return None
        return min((reader.credit - reader.sent_bytes for reader in self._due()), default=UNBOUNDED)

    def wanted(self, run: int, seq: int, count: int) -> list[Wanted]:
        """Return who needs which of the rounds that were just made; of an abandoned run nobody needs any."""
        if self.current(run) is None:
            return []
        seats = [reader.seat for reader in self.readers.values()]
        return [
            Wanted(reader.peer, reader.opening, reader.seat, reader.due, reader.slab, seats.count(reader.seat) == 1)
            for reader in self.readers.values()
            if seq <= reader.due < seq + count
        ]

    def give(
        self, run: int, after: int, cut: Cut, done: Iterable[Named], headers: Mapping[tuple[bytes, int], Rounds]
    ) -> dict[tuple[bytes, int], Rounds]:
        """Count rounds as sent to all who want them; return the headers, by (peer, opening), of those who still do.

        `done`: splits that `cut` does not need any more. `headers` say all but what each reader does not know yet.
        """
        given: dict[tuple[bytes, int], Rounds] = {}
        if (found := self.current(run)) is None:
            return given
        self._done.extend(done)
        self._run = found._replace(next_round=after)
        for reader in self.readers.values():
            key = (reader.peer, reader.opening)
            if (header := headers.get(key)) is not None:
                mixes = sum(at <= reader.due for at, _ in self._mixes)
                given[key] = replace(header, binding=self.binding, done=self._newly_done(reader), mixes=mixes)
                reader.give_cut(after, cut, header.nbytes)
        return given

    def _newly_done(self, reader: DealtReader) -> tuple[Named, ...]:
        """Return what is new to a reader in the log; what every reader knows is forgotten when it is long."""
        known = reader.tell(self._forgotten + len(self._done))
        done = tuple(self._done[max(0, known - self._forgotten) :])
        everybody = min(other.told for other in self.readers.values())
        if everybody - self._forgotten >= LONG_LOG and self._run is not None:
            del self._done[: everybody - self._forgotten]
            self._forgotten = everybody
            self._run = self._run._replace(remembers_from=self._run.next_round)
        return done

    def _tell_ends(self, end: End, done: Iterable[Named]) -> None:
        self._done.extend(done)
        for reader in self.readers.values():
            self._tell_end(reader, end, done=self._newly_done(reader))
