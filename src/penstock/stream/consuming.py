"""One consumer's reading of one epoch: from the dispatcher's view to open streams, and which of them it takes from.

The view says which streams there are and which runner each is bound to. Each is opened there at the cut that arrived
last, and granted credit; rounds arrive by themselves. Whatever goes wrong with a stream (a lost connection, a gap, a
refusal) has one answer: tell the dispatcher that this binding does not work, and open it where the next one is. Nothing
is lost by that, and nothing comes twice.

What is to be done about it is collected as instructions, `TellRunner` and requests to the dispatcher, to be carried out
in the order given. Nothing here has a socket, a clock or an element; a payload that is given up is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from msgspec.structs import replace

from penstock.core.errors import InvalidArgumentError, SupersededError
from penstock.core.ids import JobName, RunnerId, StreamId
from penstock.stream.checkpoint import Mixes, Place, Progress, Weights
from penstock.stream.position import Serving, Standing, with_done
from penstock.stream.reading import ByArrival, InTurns, StreamReader, describe_streams
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
from penstock.wire.jobs import Delivery, JobView, Named, Position, StreamView
from penstock.wire.messages import EndStream, Rebind

SMALLEST_WINDOW_BYTES = 1 << 20
FEWEST_WINDOWS = 2  # one stream alone does not take the whole memory: another may join
CREDIT_EVERY_S = 1.0  # a credit that was lost is said again
MOST_AHEAD_BYTES = 4 << 20
EPOCH_AHEAD_PART = 4  # of its memory is what an epoch takes while the one before it is still read
WINDOWS_AHEAD = 8  # a trainer receives ahead what is a small part of the window: its place there is where it reads


class TellRunner(NamedTuple):
    """Send a message to a runner, connecting to it first if need be."""

    runner: RunnerId
    address: str
    message: OpenStream | Credit | CloseStream


ConsumerInstruction: TypeAlias = TellRunner | Rebind | EndStream


class Seat(NamedTuple):
    """Which reader of the job this is. `life`: how often its trainer began anew, without states."""

    job: JobName
    consumer: int
    replica: int = 0
    trainer: str = ""
    life: int = 0


class Memory(NamedTuple):
    """How much may have arrived, or be on its way, of all streams together; and how large a shared job's window is."""

    nbytes: int
    shared_window_bytes: int = 0

    def window_bytes(self, active: int, *, shared: bool) -> int:
        """Return how much that is of one of so many streams."""
        window = max(SMALLEST_WINDOW_BYTES, self.nbytes // max(FEWEST_WINDOWS, active))
        if shared:
            window = min(window, MOST_AHEAD_BYTES, max(1, self.shared_window_bytes // WINDOWS_AHEAD // active))
        return window


class Consumer:
    def __init__(
        self,
        seat: Seat,
        delivery: Delivery,
        progress: Progress,
        view: JobView,
        *,
        memory: Memory,
        first_opening: int,
        resumed: bool = False,
        ahead: bool = False,
        now: float,
    ) -> None:
        """`first_opening` is above those of an earlier life of this consumer.

        `resumed`: the attempt began at a checkpoint. `ahead`: the epoch before is still read, and nothing of this one.
        """
        self.seat, self.delivery = seat, delivery
        self.view = view
        self.readers: dict[StreamId, StreamReader] = {}
        self.step = progress.step
        """How many elements the trainer has received."""
        self.reconnects = 0
        self.began_at = progress.step
        self.taken_bytes = 0
        """Of the frames that the trainer has begun."""
        self.made_for_others = 0
        """Elements taken that another trainer had caused to be made."""
        self.failure: RemoteFailure | Exception | None = None
        """Reading cannot go on."""
        self.ahead = ahead
        self.ending = False
        """Whether a stream's end has arrived: of an epoch whose splits are granted no more are left then."""
        self.serving: Serving | None = None
        self.settled = 0
        """How many elements of what is being served are counted as received."""
        self._received = Place.at(progress)
        """Without `step`; its standings are those of streams that the view has not shown yet."""
        self._to_open: dict[StreamId, StreamReader] = {}
        """Those that may have to be opened: few, where thousands are open."""
        self._memory, self._resumed = memory, resumed
        self._opening = first_opening
        self._order = InTurns(delivery.streams or 0) if delivery.in_turn else ByArrival(progress.next)
        self._instructions: list[ConsumerInstruction] = []
        self._credited_at = now
        self.follow(view, now)

    def instructions(self) -> list[ConsumerInstruction]:
        """Return what is to be done, and forget it."""
        found, self._instructions = self._instructions, []
        return found

    def arrive(self) -> None:
        """The trainer has come to this epoch, which was opened ahead."""
        self.ahead = False

    # The view

    def follow(self, view: JobView, now: float, changed: Sequence[StreamView] | None = None) -> None:
        """Take over a view: new streams, new bindings, ends. `changed` are its new and changed streams, if known."""
        self.view = view
        for shown in view.streams if changed is None else changed:
            if shown.owner in (None, self.seat.consumer):
                self._show(shown)
        self._open_due(now)

    def _show(self, shown: StreamView) -> None:
        reader = self.readers.get(shown.stream)
        if reader is None:
            shared = self.delivery.shared
            fresh = shared and shown.number not in self._received.standings
            reader = StreamReader(shown, self._standing(shown), shared=shared, fresh=fresh)
            self.readers[shown.stream] = reader
        self._to_open[shown.stream] = reader
        reader.show(shown)
        if reader.standing.ended and not shown.ended and not reader.told_end:
            self._tell_end(reader)
        if shown.ended and shown.runner is None and not reader.exhausted and not reader.complete:
            if reader.fresh and self.delivery.skips and self.delivery.width == 1:
                reader.pass_by()  # others have read it; of several ranks, some of this trainer's own may have
            elif reader.ask_again():
                self._rebind(reader, shown.binding, "a consumer came back and needs its rounds again")

    def _standing(self, shown: StreamView) -> Standing:
        """Return where this consumer stands in a stream that it is shown for the first time."""
        received, delivery = self._received, self.delivery
        standings = dict(received.standings)
        held = standings.pop(shown.number, None)
        if held is None:
            mine = self.seat.consumer
            first = shown.marks[mine] if mine < len(shown.marks) else shown.first_round
            feed = shown.feed if shown.feed.kind == "tail" else None
            standing = Standing.at(Position(shown.number, shown.first_round, shown.start, feed=feed)).moved(first)
            if shown.ended and self._resumed:
                standing = standing.at_end(leftover=True)  # the checkpoint was taken after its end
        elif held.ended and self._resumed and not shown.ended:
            standing = replace(held, ended=False, leftover=False)  # others go on with it, and it may be granted more
        else:
            standing = held
        mixes = received.mixes
        if received.weights is not None and shown.number not in mixes:
            mixes = {**mixes, shown.number: ((standing.round, received.weights),)}
        self._received = replace(received, standings=standings, mixes=mixes)
        trails = delivery.trails and shown.feed.kind == "granted"
        return standing.noting(trail=trails, gaps=delivery.shared and delivery.width > 1)

    # Opening

    def look_after(self, now: float) -> None:
        """Open what could not be opened before, and say credit again now and then."""
        self._open_due(now)
        if now - self._credited_at >= CREDIT_EVERY_S:
            self._credited_at = now
            for reader in self.readers.values():
                if reader.credit.was_quiet() and reader.is_open:
                    self._send_credit(reader)

    def _open_due(self, now: float) -> None:
        waiting = [reader for reader in self._to_open.values() if reader.wants_opening(now) and self._may_open(reader)]
        if waiting:
            active = max(1, sum(not reader.standing.ended for reader in self.readers.values()))
            window = self._memory.window_bytes(active, shared=self.delivery.shared)
            for reader in waiting:
                self._open(reader, window, now)
        self._to_open = {stream: reader for stream, reader in self._to_open.items() if reader.may_be_opened}

    def _may_open(self, reader: StreamReader) -> bool:
        """Where trainers read the same they read it in the same order: the tail last, though others are through."""
        if not (self.delivery.shared and reader.is_tail):
            return True
        return all(other.exhausted for other in self.readers.values() if other is not reader)

    def _open(self, reader: StreamReader, window: int, now: float) -> None:
        view, seat = reader.view, self.seat
        assert view.runner is not None
        self._close(reader)  # it moved without a word from us
        self._opening += 1
        depth = window // EPOCH_AHEAD_PART if self.ahead else None
        credit = reader.open(self._opening, window, now, depth=depth)
        message = OpenStream(
            stream=view.stream,
            binding=view.binding,
            opening=self._opening,
            consumer=seat.consumer,
            replica=seat.replica,
            round=reader.head.round,
            cut=reader.head.cut,
            cut_round=reader.head.cut_round,
            feed=view.feed,
            share=view.share,
            attempt=self.view.attempt,
            epoch=self.view.epoch,
            runner=view.runner,
            credit=credit,
            fresh=reader.fresh,
            life=seat.life,
            gaps=reader.head.gaps or (),
            trainer=seat.trainer,
            mixes=self._received.mixes.get(reader.number, ()),
        )
        self._instructions.append(TellRunner(view.runner, view.address, message))

    def _close(self, reader: StreamReader) -> None:
        if reader.runner is not None:
            self._tell(reader, CloseStream(stream=reader.stream, opening=reader.opening))
            reader.close()

    def _tell(self, reader: StreamReader, message: Credit | CloseStream) -> None:
        assert reader.runner is not None
        self._instructions.append(TellRunner(reader.runner, reader.view.address, message))

    # What arrives

    def receive(
        self, message: Rounds | StreamEnded | StreamFailed | StreamRefused, payload: Any, runner: RunnerId, now: float
    ) -> None:
        reader = self.readers.get(message.stream)
        if reader is None or reader.runner != runner:
            return
        if isinstance(message, StreamRefused):
            if message.opening == reader.opening:
                if message.superseded:
                    self.failure = SupersededError(message.reason)
                self._give_up(reader, f"refused: {message.reason}", now)
            return
        verdict = reader.receive(message, payload, now)
        if verdict == "taken":
            self._order.arrived(reader)
            self.ending |= isinstance(message, StreamEnded)
        elif verdict == "gap":
            self._give_up(reader, f"round {message.seq} came where {reader.due} was due", now)

    def lose(self, runner: RunnerId, reason: str, now: float) -> None:
        """The connection to a runner is gone; what came over it before counts."""
        for reader in self.readers.values():
            if reader.runner == runner:
                reader.close()
                if not reader.complete:
                    self._give_up(reader, reason, now)

    def _give_up(self, reader: StreamReader, reason: str, now: float) -> None:
        """This binding does not work: ask for another, and open there."""
        self._close(reader)
        binding = reader.give_up(now)
        self._to_open[reader.stream] = reader
        if binding is not None:
            self.reconnects += 1
            self._rebind(reader, binding, reason)

    def _rebind(self, reader: StreamReader, binding: int, reason: str) -> None:
        request = Rebind(
            job=self.seat.job, attempt=self.view.attempt, stream=reader.stream, binding=binding, reason=reason
        )
        self._instructions.append(request)

    # Taking

    def settle(self, taken: int) -> int:
        """The trainer has taken the first `taken` of the elements being served; return how many more those are."""
        serving, before = self.serving, self.settled
        if serving is None or taken <= before:
            return 0
        for number, lane in enumerate(serving.lanes):
            at = lane.start + serving.taken_of(number, taken)
            if at > lane.frame.at:
                header = lane.frame.header
                rounds = self.readers[header.stream].took(lane.frame, at)
                self.made_for_others += rounds if header.shared else 0
                if not lane.frame.left:
                    self._add_done(header.done)
        self.step += taken - before
        self.settled = taken
        return taken - before

    def _add_done(self, done: Sequence[Named]) -> None:
        if done:
            self._received = replace(self._received, done=with_done(self._received.done, done))

    def next(self, now: float) -> Serving | None:
        """Return what comes next, having settled what came before; None: nothing yet, the end, or `failure`."""
        self.serving, self.settled = None, 0
        while self.failure is None and (chosen := self._order.choose(self.readers.values())) is not None:
            if isinstance(chosen, Serving):
                self._begin(chosen, now)
                return self.serving
            if isinstance(chosen.last, StreamFailed):
                self.failure = chosen.last.failure
            else:
                self._end(chosen)
        return None

    def _begin(self, serving: Serving, now: float) -> None:
        for lane in serving.lanes:
            header = lane.frame.header
            reader = self.readers[header.stream]
            if header.mixes and self._missed_weights(reader, header):
                return
            if not lane.frame.begun:
                reader.begin(now)
                self.taken_bytes += header.nbytes
                if reader.is_open and reader.credit.is_due:
                    self._send_credit(reader)
        self.serving = serving

    def _send_credit(self, reader: StreamReader) -> None:
        taken = reader.standing.round if reader.shared else -1
        credit = reader.credit.grant()
        self._tell(reader, Credit(stream=reader.stream, opening=reader.opening, credit=credit, round=taken))

    def _end(self, reader: StreamReader) -> None:
        """All rounds of a stream were taken: say so."""
        self._add_done(reader.took_end().done)
        self._tell_end(reader)
        self._close(reader)

    def _tell_end(self, reader: StreamReader) -> None:
        reader.told()
        standing = reader.standing
        request = EndStream(
            job=self.seat.job,
            attempt=self.view.attempt,
            stream=reader.stream,
            consumer=self.seat.consumer,
            rounds=standing.round,
            leftover=standing.cut_here if standing.leftover else None,
        )
        self._instructions.append(request)

    @property
    def at_end(self) -> bool:
        return self.view.finished and all(reader.exhausted for reader in self.readers.values())

    # Weights

    def _missed_weights(self, reader: StreamReader, header: Rounds) -> bool:
        known = self._received.mixes.get(reader.number, ())
        if self.delivery.consumers == 1 or header.mixes <= sum(at <= header.seq for at, _ in known):
            return False
        self.failure = InvalidArgumentError(
            f"another consumer of job {self.seat.job!r} changed the weights, and consumer {self.seat.consumer} did "
            "not; call set_weights() with the same weights at the same step on all ranks"
        )
        return True

    def set_weights(self, weights: Weights, *, reading: bool, now: float) -> None:
        """Mix by others from the next element on; what has arrived beyond it is given up."""
        if reading and self.delivery.consumers > 1 and not self.delivery.in_turn:
            raise InvalidArgumentError(
                f"set_weights() in the middle of an epoch with {self.delivery.consumers} consumers in relaxed order: "
                "they stand at different places, so none of them can say from where on. Set weights between epochs, or "
                "use order='deterministic' or coordinated=True"
            )
        mixes = dict(self._received.mixes)
        for reader in self.readers.values():
            standing = reader.standing
            if reading and not standing.ended:
                changes: Mixes = (*mixes.get(reader.number, ()), (standing.round, weights))
                # Several consumers keep all changes: one of them may go back further than this one.
                counted = [number for number, (at, _) in enumerate(changes) if at <= standing.made_until]
                mixes[reader.number] = changes[counted[-1] if counted and self.delivery.consumers == 1 else 0 :]
        self._received = replace(self._received, weights=weights, mixes=mixes)
        if not reading:
            return
        for reader in self.readers.values():
            if not reader.exhausted:
                self._close(reader)
                self._to_open[reader.stream] = reader
        self.forget()
        self._open_due(now)

    # State

    def place(self) -> Place:
        """Return what the trainer has received; what it took of the frame being served is to be settled before."""
        standings = {**self._received.standings, **{each.number: each.standing for each in self.readers.values()}}
        return replace(self._received, step=self.step, standings=standings, next=self._order.next_stream)

    def forget(self) -> None:
        """Reading is over: let go of what arrived and was not taken."""
        self.serving = None
        self._order.forget()
        for reader in self.readers.values():
            reader.take_back()

    def restart(self, view: JobView, now: float) -> None:
        """Another attempt goes on from here: what was not taken is forgotten, and all streams are opened anew."""
        self._received = self.place()
        self.forget()
        self.readers.clear()
        self._to_open.clear()
        self._resumed = True
        self.follow(view, now)

    @property
    def has_ready(self) -> bool:
        """Something has arrived that was not taken."""
        return any(reader.frames for reader in self.readers.values())

    @property
    def buffered(self) -> tuple[int, int]:
        """Elements and bytes that have arrived and are not settled. Any thread may ask."""
        waiting = [reader.buffered for reader in list(self.readers.values())]
        return sum(elements for elements, _ in waiting), sum(nbytes for _, nbytes in waiting)

    @property
    def skipped(self) -> int:
        """Rounds that were gone before this consumer was given them. Any thread may ask."""
        return sum(reader.skipped for reader in list(self.readers.values()))

    def waiting_for(self, now: float) -> list[str]:
        """Say what it is that is waited for, for people."""
        parts = [self.view.waiting_for] if self.view.waiting_for else []
        parts += describe_streams([reader for reader in self.readers.values() if not reader.exhausted], now)
        if not parts:
            parts.append("the epoch's end, which the other consumers have not reached" if self.readers else "streams")
        return parts
