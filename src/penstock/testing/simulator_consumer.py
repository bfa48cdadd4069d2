"""One simulated client: it opens an epoch, reads its streams, says where they end, and lives no longer than that."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from penstock.core.ids import AttemptId, ClientId, RunnerId, StreamId
from penstock.testing.simulator_merge import Mark, Saved, resume_from
from penstock.testing.simulator_workers import JOB
from penstock.testing.simulator_world import Data, Failed, Peer
from penstock.wire.frames import Credit, OpenStream, Rounds, StreamEnded, StreamRefused
from penstock.wire.jobs import Cut, JobView, StreamView, ViewChange
from penstock.wire.messages import (
    Answer,
    Beat,
    Changes,
    CloseClient,
    EndStream,
    EpochOpened,
    NotKnown,
    NotYet,
    OpenEpoch,
    Push,
    Rebind,
    Refused,
    Superseded,
    View,
    ViewMoved,
)
from penstock.wire.views import HeldView

if TYPE_CHECKING:
    from penstock.testing.simulator_trainer import Trainer

How: TypeAlias = Literal["fresh", "rejoin", "resume"]
WINDOW = 3
SILENCE_S = 1.0
GIVE_UP_S = 6.0
"""Of a consumer that is told "not yet": then somebody starts all of them again."""


@dataclass(slots=True)
class Open:
    """A stream as this consumer has it open."""

    view: StreamView
    opening: int = 0
    buffer: deque[tuple[int, tuple[int, ...], Cut, tuple[int, ...]]] = field(default_factory=deque)
    """(seq, batch, cut after it, splits done by it)"""
    ended: StreamEnded | None = None
    heard: float = 0.0
    complaints: int = 0
    credit: int = 0


class Consumer(Peer):
    """One client: a reading of one epoch, from a start to its end or its death."""

    def __init__(self, trainer: Trainer, number: int, how: How) -> None:
        super().__init__(trainer.world, trainer.world.draw("client"))
        self.trainer, self.number, self.shape, self.bug = trainer, number, trainer.shape, trainer.bug
        state = trainer.saved[number][-1]
        self.marks: dict[int, Mark] = dict(state.marks)
        self.done_splits: frozenset[int] = state.done
        self.fed_from = state.fed_from
        self.attempt: AttemptId | None = None
        self.held: HeldView | None = None
        self.streams: dict[StreamId, Open] = {}
        self._proposed = AttemptId(self.world.draw("attempt"))
        self._openings = 0
        self._waited_since = self.world.now
        self._closed = False
        request = OpenEpoch(
            job=JOB,
            client=ClientId(self.name),
            consumer=number,
            replica=0,
            epoch=trainer.epoch,
            spec=trainer.spec(),
            attempt=self._proposed,
            host="host",
        )
        if how == "rejoin" and state.attempt is not None:
            request = msgspec.structs.replace(request, rejoin=state.attempt)
        elif how == "resume" and self.shape.fed:
            # Where the sampler stands is all there is to go on from: a new attempt, whose units begin there.
            self.marks, self.fed_from = {}, trainer.step(number)
        elif how == "resume":
            resume = resume_from(trainer.states(), trainer.epoch, owned=self.shape.uneven == "allow")
            request = msgspec.structs.replace(request, resume=resume)
        self._open(request)

    # Opening

    def _open(self, request: OpenEpoch) -> None:
        self.ask(request, lambda answer: self._opened(request, answer))

    def _opened(self, request: OpenEpoch, answer: Answer) -> None:
        match answer:
            case EpochOpened():
                self.attempt = answer.view.attempt
                if request.resume is not None:
                    self._open_ended_again(answer.view)
                self._save()
                self.held = HeldView(answer.view)
                self._follow()
                self.world.at(1.0, self, self._beat)
                self.world.at(0.05, self, self._step)
            case NotYet():
                if self.world.now - self._waited_since > GIVE_UP_S:
                    # What an operator does when told "restart all consumers".
                    self.trainer.restart_all("rejoin", 0)
                else:
                    self.world.at(0.3, self, self._open, request)
            case NotKnown():
                self.trainer.restart_all("resume", 0)
            case Refused():
                self._lost_place()

    def _open_ended_again(self, view: JobView) -> None:
        """Forget what the new attempt does not go on with.

        A stream that has not ended for all has ended for nobody: it may be granted more splits. One that is not there,
        a tail of which nothing was given, is no more.
        """
        ended = {shown.number: shown.ended for shown in view.streams}
        self.marks = {
            number: mark if ended[number] else msgspec.structs.replace(mark, ended=False, leftover=False)
            for number, mark in self.marks.items()
            if number in ended
        }

    def _lost_place(self) -> None:
        """A late message of a reader that is dead took the place: the trainer fails and is started again."""
        self.world.note(f"consumer {self.number} lost its place")
        self.trainer.restart_one(self.number, 0)

    def _save(self) -> None:
        """Have the state at this very step name the attempt: it can be rejoined from now on."""
        saved = self.trainer.saved[self.number]
        saved[-1] = Saved(attempt=self.attempt, marks=dict(self.marks), done=self.done_splits, fed_from=self.fed_from)

    # The control plane

    def _beat(self) -> None:
        if self.attempt is not None and not self._closed:
            self._ask_for_view()
            self.world.at(1.0, self, self._beat)

    def _ask_for_view(self) -> None:
        if self.attempt is None:
            return
        version = 0 if self.held is None else self.held.version
        beat = Beat(job=JOB, client=ClientId(self.name), consumer=self.number, attempt=self.attempt, version=version)
        self.ask(beat, self._beaten)

    def _beaten(self, answer: Answer) -> None:
        match answer:
            case View() if self.held is not None and self.held.take_view(answer.view) == "taken":
                self._follow()
            case Changes():
                self._take_change(answer.change)
            case NotKnown() if not self._closed:
                self.trainer.restart_all("resume", 0)
            case Refused() if not self._closed:
                self._lost_place()

    def pushed(self, push: Push) -> None:
        match push:
            case ViewMoved():
                self._take_change(push.change)
            case Superseded() if not self._closed:
                self._lost_place()

    def _take_change(self, change: ViewChange) -> None:
        fit = "known" if self.held is None else self.held.take_change(change)
        if fit == "taken":
            self._follow()
        elif fit == "missed":
            self._ask_for_view()

    def _follow(self) -> None:
        if self.held is None:
            return
        for shown in self._own_streams(self.held.take_news()):
            held = self.streams.get(shown.stream)
            if held is None:
                held = self.streams[shown.stream] = Open(shown)
                if shown.number not in self.marks:
                    feed = shown.feed if shown.feed.kind != "granted" else None
                    self.marks[shown.number] = Mark(number=shown.number, cut=shown.start, feed=feed)
                if self.marks[shown.number].ended and not shown.ended:
                    self._tell_end(shown)  # the one who ended it may have died before it could say so
                self._open_stream(held)
            elif shown.binding > held.view.binding:
                held.view = shown
                self._open_stream(held)
            else:
                held.view = shown

    def _own_streams(self, streams: Iterable[StreamView]) -> list[StreamView]:
        return [shown for shown in streams if shown.owner in (None, self.number)]

    # The data plane

    def _open_stream(self, held: Open) -> None:
        mark = self.marks[held.view.number]
        held.buffer.clear()
        held.ended = None
        held.heard = self.world.now
        if mark.ended:
            return
        if held.view.runner is None:
            if held.view.ended:
                self._rebind(held, "an ended stream is read again")
            return
        self._openings += 1
        held.opening = self._openings
        held.credit = mark.round + WINDOW
        header = OpenStream(
            stream=held.view.stream,
            binding=held.view.binding,
            opening=held.opening,
            consumer=self.number,
            round=mark.round,
            cut=mark.cut,
            cut_round=mark.round,
            feed=held.view.feed,
            share=held.view.share,
            attempt=AttemptId(str(self.attempt)),
            epoch=self.trainer.epoch,
            runner=RunnerId(held.view.runner),
            credit=held.credit,
        )
        self.world.send(self.name, held.view.address, Data(header, self._units_for(mark)))

    def _units_for(self, mark: Mark) -> tuple[int, ...]:
        """Return what a stream is still to read, where that is this consumer's to say."""
        if not self.shape.fed:
            return ()
        own = self.shape.units[self.fed_from :][mark.number :: self.shape.streams]
        return tuple(x for unit in own[mark.round :] for x in unit)

    def _rebind(self, held: Open, reason: str) -> None:
        request = Rebind(
            job=JOB,
            attempt=AttemptId(str(self.attempt)),
            stream=held.view.stream,
            binding=held.view.binding,
            reason=reason,
        )
        self.ask(request, self._beaten)

    def data(self, sender: str, message: Data) -> None:
        header = message.header
        if not isinstance(header, Rounds | StreamEnded | StreamRefused):
            return
        held = self.streams.get(header.stream)
        if held is None or self.marks[held.view.number].ended:
            return
        if isinstance(header, StreamRefused):
            if header.opening == held.opening:
                self._rebind(held, header.reason)
            return
        if (header.binding, header.opening) != (held.view.binding, held.opening) and self.bug != "no_incarnation_check":
            return
        following = self.marks[held.view.number].round + len(held.buffer)
        if header.seq < following or held.ended is not None:
            return  # doubled on the way
        if header.seq > following:
            self._open_stream(held)  # a gap: something was lost
            return
        self._check_incarnation(held, header)
        held.heard, held.complaints = self.world.now, 0
        if isinstance(header, StreamEnded):
            held.ended = header
        else:
            done = tuple(o for named in header.done for o in named.ordinals)
            held.buffer.append((header.seq, message.elements, header.cut, done))
            if len(held.buffer) > WINDOW:
                raise Failed(f"{held.view.stream}: {len(held.buffer)} rounds came, with a credit of {WINDOW}")

    def _check_incarnation(self, held: Open, header: Rounds | StreamEnded) -> None:
        self.world.accepted += 1
        if (header.binding, header.opening) != (held.view.binding, held.opening):
            raise Failed(
                f"{header.stream}: data of incarnation {(header.binding, header.opening)} was taken after "
                f"{(held.view.binding, held.opening)}"
            )

    # The training loop

    def _step(self) -> None:
        if self._closed:
            return
        self._look_after_streams()
        for held in self.streams.values():
            self._take_end(held)
        if self.trainer.may_step(self.number):
            held_next = self._next_stream()
            if held_next is not None:
                self._take(held_next)
            elif self._sits_out():
                self._record((), (-1, -1))
        if self._is_through():
            self._close()
        else:
            self.world.at(self.world.rng.uniform(0.03, 0.15), self, self._step)

    def _sits_out(self) -> bool:
        """Whether others take a step for which this one has nothing: its streams have ended, and theirs have not."""
        return (
            self.shape.uneven == "allow"
            and self.trainer.is_behind(self.number)
            and all(self.marks[held.view.number].ended for held in self.streams.values())
        )

    def _next_stream(self) -> Open | None:
        if not self.shape.streams:
            ready = [held for held in self.streams.values() if held.buffer and self._is_due(held)]
            return self.world.rng.choice(ready) if ready else None
        there = sum(held.view.feed.kind != "tail" for held in self.streams.values())
        if there < self.shape.streams_of(self.number):
            return None  # which is first must not depend on which was seen first
        reading = [held for held in self.streams.values() if not self.marks[held.view.number].ended]
        turn = min(
            reading,
            key=lambda h: (h.view.feed.kind == "tail", self.marks[h.view.number].round, h.view.number),
            default=None,
        )
        return turn if turn is not None and turn.buffer else None

    def _is_due(self, held: Open) -> bool:
        """Whether it may be read: the tail comes after all others, for it is only as long as they were."""
        return held.view.feed.kind != "tail" or all(
            self.marks[other.view.number].ended for other in self.streams.values() if other is not held
        )

    def _take(self, held: Open) -> None:
        seq, batch, cut, done = held.buffer.popleft()
        mark = self.marks[held.view.number]
        if seq != mark.round:
            raise Failed(f"round {seq} of {held.view.stream} where {mark.round} was due")
        self.marks[mark.number] = mark.after(cut, done)
        self.done_splits |= set(done)
        held.credit = mark.round + 1 + WINDOW
        credit = Credit(stream=held.view.stream, opening=held.opening, credit=held.credit)
        if self.bug == "incremental_credits":
            credit = Credit(stream=held.view.stream, opening=held.opening, credit=1)
        self.world.send(self.name, held.view.address, Data(credit))
        self._record(batch, (mark.number, seq))
        self._take_end(held)

    def _record(self, batch: tuple[int, ...], place: tuple[int, int]) -> None:
        marks, done = dict(self.marks), self.done_splits
        if self.bug == "prefetched_in_state":
            for held in self.streams.values():
                for _, _, cut, ended in held.buffer:
                    marks[held.view.number] = marks[held.view.number].after(cut, ended)
                    done |= set(ended)
        saved = Saved(attempt=self.attempt, marks=marks, done=done, fed_from=self.fed_from)
        self.trainer.took(self.number, batch, place, saved)

    def _take_end(self, held: Open) -> None:
        if held.ended is None or held.buffer or not self._is_due(held):
            return
        mark, ended = self.marks[held.view.number], held.ended
        if mark.ended:
            return
        self.marks[mark.number] = mark.at_end(ended.cut, leftover=ended.leftover)
        self._save()
        self._tell_end(held.view)

    def _tell_end(self, stream: StreamView) -> None:
        mark = self.marks[stream.number]
        self.ask(
            EndStream(
                job=JOB,
                attempt=AttemptId(str(self.attempt)),
                stream=stream.stream,
                consumer=self.number,
                rounds=mark.round,
                leftover=mark.cut if mark.leftover else None,
            ),
            self._told_end,
        )

    def _told_end(self, answer: Answer) -> None:
        if isinstance(answer, Refused):
            raise Failed(f"the end of a stream was refused: {answer.reason}")
        self._beaten(answer)

    def _look_after_streams(self) -> None:
        for held in self.streams.values():
            mark = self.marks[held.view.number]
            if mark.ended or held.ended is not None or held.buffer:
                continue
            if self.world.now - held.heard > SILENCE_S:
                held.complaints += 1
                held.heard = self.world.now
                if held.complaints % 2 == 0 and (held.view.runner is not None or held.view.ended):
                    self._rebind(held, "silence")
                else:
                    self._open_stream(held)
            elif held.credit and self.world.rng.random() < 0.1 and self.bug != "incremental_credits":
                credit = Credit(stream=held.view.stream, opening=held.opening, credit=held.credit)
                self.world.send(self.name, held.view.address, Data(credit))  # sent again: it means the same

    def _is_through(self) -> bool:
        return (
            self.held is not None
            and self.held.view.finished
            and self.trainer.are_together()
            and all(self.marks[s.number].ended for s in self._own_streams(self.held.view.streams))
        )

    def _close(self) -> None:
        self._closed = True
        self.ask(
            CloseClient(
                job=JOB,
                client=ClientId(self.name),
                consumer=self.number,
                attempt=AttemptId(str(self.attempt)),
                finished=True,
            )
        )
        self.trainer.finish(self.number)
