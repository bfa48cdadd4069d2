"""One simulated client: the hands of a real `Consumer`. It opens an epoch, reads it, and lives no longer than that."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from msgspec.structs import replace

from penstock.core.ids import AttemptId, ClientId, RunnerId
from penstock.samplers.drawing import Drawing, Feed
from penstock.samplers.feeder import Feeder
from penstock.stream.checkpoint import Checkpoint, ConsumerState, Progress, begin_at, read_states, resume_from
from penstock.stream.consuming import Consumer, Memory, Seat, TellRunner
from penstock.testing.simulator.engine import NOWHERE, FakeBatch, FakeState, RankStep, RoundPlace, Shape
from penstock.testing.simulator.world import Failed, Link, Peer
from penstock.wire.frames import CloseStream, Credit, OpenStream, Rounds, Units
from penstock.wire.jobs import Fit, HeldView, Resume, delivery_of
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
    Refused,
    View,
    ViewMoved,
)

if TYPE_CHECKING:
    from penstock.testing.simulator.trainer import Trainer

How: TypeAlias = Literal["fresh", "rejoin", "resume"]
MEMORY_BYTES = 2 << 20  # the smallest windows: two or three rounds
LOOK_EVERY_S = 0.2
BEAT_EVERY_S = 1.0
GIVE_UP_S = 6.0
"""How long a client that is told "not yet" asks again, before all clients are started anew."""
FED_AHEAD = 4


class FakeClient(Peer):
    """A rank's reading of one epoch, from a start to its end or its death."""

    consumer: Consumer
    _held: HeldView
    """The view of the epoch; like the consumer, it is there once the epoch is open."""

    def __init__(
        self, trainer: Trainer, rank: int, how: How, after: AttemptId | None = None, *, ahead: bool = False
    ) -> None:
        """`after`: the attempt that the same process has read to its end. `ahead`: it reads the epoch before this."""
        super().__init__(trainer.world, trainer.world.draw("client"), trainer.principal)
        self.trainer, self.rank = trainer, rank
        self.is_open = self.closed = False
        self._shape, self._spec = trainer.shape, trainer.shape.spec()
        self._began_at = self.world.now
        self._ready: deque[tuple[FakeBatch, RoundPlace]] = deque()
        """What is being served and was not taken."""
        self._feeder = self._feed() if self._shape.fed else None
        self._checkpoint: Checkpoint | None = None
        self.ahead = ahead
        request = OpenEpoch(
            job=self._shape.job,
            client=ClientId(self.name),
            consumer=rank,
            replica=0,
            epoch=trainer.epoch + ahead,
            spec=self._spec,
            attempt=AttemptId(self.world.draw("attempt")),
            host="host",
            trainer=trainer.name,
            after=after,
            began_ns=int(1e9 * self.world.now),
            ahead=ahead,
        )
        self._request = request
        if how != "fresh" and not self._shape.fed:
            request = self._loaded(request, how)
        self.ask(request, partial(self._opened, request))

    def _feed(self) -> Feeder:
        """Return what feeds the job: batches of all elements, in order, from the step the trainer stands at."""
        drawing = Drawing(
            Feed(sampler=[list(unit) for unit in self._shape.units], ahead=FED_AHEAD),
            epoch=self.trainer.epoch,
            grouping=None,
            count=len(self._shape.everything),
        )
        for _ in range(self.trainer.read.steps[self.rank]):
            drawing.draw()
        return Feeder(drawing, ahead=FED_AHEAD, consumer=0, consumers=1)

    # Opening

    def _loaded(self, request: OpenEpoch, how: How) -> OpenEpoch:
        """Load the rank's own state, or those of all, and ask to go on from there."""
        states = self.trainer.states() if how == "resume" else self.trainer.read.ranks[self.rank][-1].state
        loaded = self._checkpoint = read_states(states, consumer=self.rank, consumers=self._shape.consumers)
        if how == "resume":
            return replace(request, resume=merged(loaded, self.trainer.epoch, self._shape))
        return replace(request, rejoin=loaded.first.attempt)

    def _opened(self, request: OpenEpoch, answer: Answer) -> None:
        match answer:
            case EpochOpened():
                self._begin(request, answer)
            case NotYet() if self.ahead and not self.closed:
                self.world.at(0.3, self, self.ask, request, partial(self._opened, request))
            case _ if self.ahead:
                self.leave_ahead()
            case NotYet() if self.world.now - self._began_at > GIVE_UP_S:
                self.trainer.restart_all("rejoin", 0)  # what an operator does when told "restart all consumers"
            case NotYet():
                self.world.at(0.3, self, self.ask, request, partial(self._opened, request))
            case NotKnown():
                self.trainer.restart_all("resume", 0)
            case Refused(kind="superseded"):
                self._lose_place()
            case _:
                raise Failed(f"opening was answered with {answer}")

    def _begin(self, request: OpenEpoch, opened: EpochOpened) -> None:
        trainer, now = self.trainer, self.world.now
        self._held = HeldView(opened.view)
        self._held.take_news()
        if self._feeder is not None:
            self._feeder.deal_to(self._shape.streams)
        self.consumer = Consumer(
            Seat(request.job, self.rank, trainer.number, trainer.name, opened.life),
            delivery_of(opened.spec),
            self._progress(request, opened),
            opened.view,
            memory=Memory(MEMORY_BYTES, shared_window_bytes=16 << 20),
            first_opening=int(1000 * now),  # milliseconds, as a client of a service takes them
            resumed=request.resume is not None,
            ahead=self.ahead,
            now=now,
        )
        self.is_open = True
        if self.ahead:
            self._carry_out()
        else:
            self._read()
        self.world.at(BEAT_EVERY_S, self, self._beat)
        self.world.at(LOOK_EVERY_S, self, self._look)

    def _read(self) -> None:
        trainer = self.trainer
        trainer.enter(self.consumer.view.attempt)
        # The state at this very step names the attempt: it can be rejoined from now on.
        steps = trainer.read.ranks[self.rank]
        steps[-1] = steps[-1]._replace(state=self._state())
        self._carry_out()
        self.world.at(0.05, self, self._step)

    def arrive(self, after: AttemptId | None) -> None:
        """The trainer has come to this epoch, which was opened ahead."""
        self.ahead = False
        self.consumer.arrive()
        attempt = self.consumer.view.attempt
        self.ask(replace(self._request, ahead=False, after=after, rejoin=attempt), self._answered)
        self._read()

    def leave_ahead(self) -> None:
        """It is not read after all."""
        if self.is_open and not self.closed:
            self._say_closed(finished=False)
        self.closed = True

    def _progress(self, request: OpenEpoch, opened: EpochOpened) -> Progress:
        loaded = self._checkpoint
        if loaded is None:
            return Progress(step=0 if self.ahead else self.trainer.read.steps[self.rank])
        if request.resume is None:
            return loaded.first.progress
        return begin_at(loaded, consumers=self._shape.consumers, done=opened.done)

    def _lose_place(self) -> None:
        """A late message of a reader that is dead took the place: the trainer fails and is started again."""
        self.world.note(f"{self.trainer.name} rank {self.rank} lost its place")
        if self._shape.sharing and self._shape.consumers > 1:
            self.trainer.restart_all("rejoin", 0)  # the others may be without states
        else:
            self.trainer.restart_one(self.rank, 0)

    @property
    def attempt(self) -> AttemptId | None:
        return self.consumer.view.attempt if self.is_open else None

    def _state(self) -> FakeState:
        """Return what is saved, after a way through JSON."""
        return ConsumerState(
            attempt=self.consumer.view.attempt,
            splits="",
            width=self._spec.sharding.streams or 0,
            order=self._spec.order,
            uneven=self._spec.ranks.uneven,
            coordinated=self._spec.ranks.coordinated,
            consumers=self._shape.consumers,
            consumer=self.rank,
            progress=self.consumer.place().progress(),
        ).plain()

    # The control plane

    def _beat(self) -> None:
        if not self.closed:
            self._ask_for_view()
            self.world.at(BEAT_EVERY_S, self, self._beat)

    def _ask_for_view(self) -> None:
        self.ask(
            Beat(
                job=self._shape.job,
                client=ClientId(self.name),
                consumer=self.rank,
                attempt=self.consumer.view.attempt,
                version=self._held.version,
            ),
            self._answered,
        )

    def _answered(self, answer: Answer) -> None:
        match answer:
            case View():
                self._follow(self._held.take_view(answer.view))
            case Changes():
                self._follow(self._held.take_change(answer.change))
            case NotKnown() | Refused() if self.ahead:
                self.leave_ahead()
            case NotKnown() if not self.closed:
                self.trainer.restart_all("resume", 0)
            case Refused() if not self.closed:
                self._lose_place()

    def pushed(self, push: Push) -> None:
        if isinstance(push, ViewMoved) and self.is_open:
            self._follow(self._held.take_change(push.change))

    def _follow(self, fit: Fit) -> None:
        """Have the consumer follow what the view has taken in."""
        if fit == "taken":
            self.consumer.follow(self._held.view, self.world.now, changed=self._held.take_news())
            self._carry_out()
        elif fit == "missed":
            self._ask_for_view()

    def _told_end(self, answer: Answer) -> None:
        if isinstance(answer, Refused):
            raise Failed(f"the end of a stream was refused: {answer.reason}")
        self._answered(answer)

    # The data plane

    def _carry_out(self) -> None:
        for instruction in self.consumer.instructions():
            match instruction:
                case TellRunner(runner, address, OpenStream() as opening):
                    self._tell(runner, opening, address)
                    if self._feeder is not None:
                        self._tell(runner, self._feeder.opened(self.consumer.readers[opening.stream]))
                case TellRunner(runner, _, message):
                    self._tell(runner, message)
                case request:
                    self.ask(request, self._told_end if isinstance(request, EndStream) else self._answered)

    def _tell(
        self, runner: RunnerId | None, message: OpenStream | Credit | CloseStream | Units, address: str = ""
    ) -> None:
        """Send something over the connection to a runner; with an address one is made, if there is none."""
        link = next((link for link in self.links.values() if link.to == runner), None)
        if link is None and address:
            link = self.connect(address)
        if link is not None:
            link.send(self, message)

    def heard(self, link: Link, header: Any, payload: Any) -> None:
        self.consumer.receive(header, payload, RunnerId(link.to), self.world.now)
        if isinstance(header, Rounds):
            held = self.consumer.readers[header.stream].queued_bytes
            if held > MEMORY_BYTES + header.nbytes:
                raise Failed(f"{held} bytes of {header.stream} came, with a window of {MEMORY_BYTES}")
        self._carry_out()

    def lost(self, link: Link) -> None:
        super().lost(link)
        self.consumer.lose(RunnerId(link.to), "the connection was lost", self.world.now)
        self._carry_out()

    def _look(self) -> None:
        if not self.closed:
            self.consumer.look_after(self.world.now)
            self._go_on()
            self.world.at(LOOK_EVERY_S, self, self._look)

    def _go_on(self) -> None:
        """Feed streams that need it, and carry out what there is to do."""
        if self._feeder is not None:
            for units in self._feeder.refill(self.consumer.step, self.consumer.readers.values()):
                self._tell(self.consumer.readers[units.stream].runner, units)
        self._carry_out()
        if self.consumer.ending and self._shape.ahead and not self.ahead:
            self.trainer.open_ahead(self.rank)

    # The training loop

    def _step(self) -> None:
        if self.closed:
            return
        if self.trainer.may_step(self.rank):
            self._take()
        self._go_on()
        if self.consumer.failure is not None:
            self._lose_place()
        elif self.is_at_end and self.trainer.may_end():
            self._close()
        else:
            self.world.at(self.world.rng.uniform(0.03, 0.15), self, self._step)

    def _take(self) -> None:
        consumer, steps = self.consumer, self.trainer.read.ranks[self.rank]
        if not self._ready and (serving := consumer.next(self.world.now)) is not None:
            self._ready.extend(
                (lane.frame.payload[lane.start + k], (lane.number, lane.frame.header.seq + lane.start + k))
                for k in range(serving.rounds)
                for lane in serving.lanes
            )
        if self._ready:
            batch, place = self._ready.popleft()
            assert consumer.serving is not None
            consumer.settle(consumer.serving.size - len(self._ready))
            steps.append(RankStep(batch, place, self._state()))
        elif self.trainer.sits_out(self.rank):
            steps.append(RankStep((), NOWHERE, self._state()))

    @property
    def is_at_end(self) -> bool:
        return self.is_open and self.consumer.at_end and not self._ready

    @property
    def is_through(self) -> bool:
        """Nothing is left for it to take, though others may have something."""
        return self.is_open and not self._ready and all(r.exhausted for r in self.consumer.readers.values())

    def _close(self) -> None:
        self.closed = True
        self._say_closed(finished=True)
        self.trainer.finish()

    def _say_closed(self, *, finished: bool) -> None:
        self.ask(
            CloseClient(
                job=self._shape.job,
                client=ClientId(self.name),
                consumer=self.rank,
                attempt=self.consumer.view.attempt,
                finished=finished,
            )
        )


def merged(checkpoint: Checkpoint, epoch: int, shape: Shape) -> Resume:
    return resume_from(checkpoint, epoch=epoch, consumers=shape.consumers, feeds=dict(enumerate(shape.feeds)))
