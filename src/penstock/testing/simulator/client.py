"""One simulated client: the hands of a real `Consumer`. It opens an epoch, reads it, and lives no longer than that."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from penstock.client.fed import Feeder
from penstock.client.sampling import Drawing, Feed
from penstock.core.ids import AttemptId, ClientId, RunnerId
from penstock.stream.checkpoint import Checkpoint, ConsumerState, Progress, begin_at, read_states, resume_from
from penstock.stream.consuming import Ask, Consumer, Seat, Tell
from penstock.stream.place import Serving
from penstock.testing.simulator.engine import Batch, Shape
from penstock.testing.simulator.world import Failed, Link, Peer
from penstock.wire.delivery import delivery_of
from penstock.wire.frames import OpenStream, Rounds, Units
from penstock.wire.jobs import Feed as SplitsFeed
from penstock.wire.jobs import Resume, ViewChange
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
from penstock.wire.views import HeldView

if TYPE_CHECKING:
    from penstock.testing.simulator.trainer import Trainer

How: TypeAlias = Literal["fresh", "rejoin", "resume"]
MEMORY_BYTES = 2 << 20  # the smallest windows: two or three rounds
LOOK_EVERY_S = 0.2
GIVE_UP_S = 6.0
"""Of a client that is told "not yet": then somebody starts all of them again."""
FED_AHEAD = 4


class FakeClient(Peer):
    """A rank's reading of one epoch, from a start to its end or its death."""

    def __init__(self, trainer: Trainer, rank: int, how: How) -> None:
        super().__init__(trainer.world, trainer.world.draw("client"))
        self.trainer, self.rank, self.shape = trainer, rank, trainer.shape
        self.attempt: AttemptId | None = None
        self.consumer: Consumer | None = None
        self._held: HeldView | None = None
        self.spec = trainer.spec
        self._state = trainer.saved[rank][-1]
        self._connections: dict[RunnerId, Link] = {}
        self._ready: deque[tuple[Batch, tuple[int, int]]] = deque()
        """(batch, (stream, round)) of what is being served and was not taken."""
        self._taken = 0
        self._waited_since = self.world.now
        self._closed = False
        self._feeder = self._feed() if self.shape.fed else None
        self._checkpoint: Checkpoint | None = None
        self._resumes = False
        request = OpenEpoch(
            job=trainer.job,
            client=ClientId(self.name),
            consumer=rank,
            replica=0,
            epoch=trainer.epoch,
            spec=self.spec,
            attempt=AttemptId(self.world.draw("attempt")),
            host="host",
            trainer=trainer.name,
            after=trainer.finished[rank],
        )
        if how != "fresh" and not self.shape.fed:
            states = trainer.states() if how == "resume" else self._state
            self._checkpoint = read_states(states, consumer=rank, consumers=self.shape.consumers)
            if how == "rejoin":
                own = self._checkpoint.own
                assert own is not None
                request = msgspec.structs.replace(request, rejoin=own.attempt)
            else:
                self._resumes = True
                resume = merged(self._checkpoint, self.trainer.epoch, self.shape)
                request = msgspec.structs.replace(request, resume=resume)
        self._open(request)

    def _feed(self) -> Feeder:
        """Return what feeds the job: batches of all elements, in order, from the step the trainer stands at."""
        count = len(self.shape.everything)
        units = [list(range(at, min(at + self.shape.batch, count))) for at in range(0, count, self.shape.batch)]
        drawing = Drawing(Feed(sampler=units, ahead=FED_AHEAD), epoch=self.trainer.epoch, grouping=None, count=count)
        for _ in range(self.trainer.step(self.rank)):
            drawing.draw()
        return Feeder(drawing, ahead=FED_AHEAD, consumer=0, consumers=1)

    # Opening

    def _open(self, request: OpenEpoch) -> None:
        self.ask(request, lambda answer: self._opened(request, answer))

    def _opened(self, request: OpenEpoch, answer: Answer) -> None:
        match answer:
            case EpochOpened():
                self._begin(answer)
            case NotYet():
                if self.world.now - self._waited_since > GIVE_UP_S:
                    # What an operator does when told "restart all consumers".
                    self.trainer.restart_all("rejoin", 0)
                else:
                    self.world.at(0.3, self, self._open, request)
            case NotKnown():
                self.trainer.start_over()
            case Refused(kind="superseded"):
                self._lose_place()
            case _:
                raise Failed(f"opening was answered with {answer}")

    def _begin(self, opened: EpochOpened) -> None:
        self.attempt = opened.view.attempt
        self._held = HeldView(opened.view)
        self._held.take_news()
        self.trainer.enter(self.attempt)
        progress = Progress(step=0 if self._feeder is None else self._feeder.begins_at)
        if self._checkpoint is not None:
            own = self._checkpoint.own
            progress = (
                own.progress
                if own is not None and not self._resumes
                else begin_at(self._checkpoint, consumers=self.shape.consumers, done=opened.done)
            )
        if self._feeder is not None:
            self._feeder.deal_to(self.shape.streams)
        self.consumer = Consumer(
            Seat(self.trainer.job, self.rank, self.trainer.number, self.trainer.name),
            delivery_of(opened.spec),
            progress,
            opened.view,
            memory_bytes=MEMORY_BYTES,
            shared_window_bytes=16 << 20,
            first_opening=1000 * self.trainer.next_opening(),
            resumed=self._resumes,
            life=opened.life,
            now=self.world.now,
        )
        self.save()
        self._carry_out()
        self.world.at(1.0, self, self._beat)
        self.world.at(0.05, self, self._step)
        self.world.at(LOOK_EVERY_S, self, self._look)

    def _lose_place(self) -> None:
        """A late message of a reader that is dead took the place: the trainer fails and is started again."""
        self.world.note(f"{self.trainer.name} rank {self.rank} lost its place")
        if self.shape.sharing and self.shape.consumers > 1:
            self.trainer.restart_all("rejoin", 0)  # the others may be without states
        else:
            self.trainer.restart_one(self.rank, 0)

    def save(self) -> None:
        """Have the state at this very step name the attempt: it can be rejoined from now on."""
        self.trainer.saved[self.rank][-1] = self.state()

    def state(self) -> dict[str, Any]:
        """Return what is saved, after a way through JSON."""
        consumer, spec = self.consumer, self.spec
        assert consumer is not None and self.attempt is not None
        state = ConsumerState(
            attempt=self.attempt,
            splits="",
            width=spec.sharding.streams or 0,
            order=spec.order,
            uneven=spec.ranks.uneven,
            coordinated=spec.ranks.coordinated,
            consumers=self.shape.consumers,
            consumer=self.rank,
            progress=consumer.place().progress(),
        )
        return state.plain()

    # The control plane

    def _beat(self) -> None:
        if not self._closed:
            self._ask_for_view()
            self.world.at(1.0, self, self._beat)

    def _ask_for_view(self) -> None:
        if self._held is None or self.attempt is None:
            return
        beat = Beat(
            job=self.trainer.job,
            client=ClientId(self.name),
            consumer=self.rank,
            attempt=self.attempt,
            version=self._held.version,
        )
        self.ask(beat, self._answered)

    def _answered(self, answer: Answer) -> None:
        match answer:
            case View() if self._held is not None and self._held.take_view(answer.view) == "taken":
                self._follow()
            case Changes():
                self._take_change(answer.change)
            case NotKnown() if not self._closed:
                self.trainer.start_over()
            case Refused() if not self._closed:
                self._lose_place()

    def pushed(self, push: Push) -> None:
        if isinstance(push, ViewMoved):
            self._take_change(push.change)

    def _take_change(self, change: ViewChange) -> None:
        fit = "known" if self._held is None else self._held.take_change(change)
        if fit == "taken":
            self._follow()
        elif fit == "missed":
            self._ask_for_view()

    def _follow(self) -> None:
        if self.consumer is not None and self._held is not None:
            self.consumer.follow(self._held.view, self.world.now, changed=self._held.take_news())
            self._carry_out()

    def _told_end(self, answer: Answer) -> None:
        if isinstance(answer, Refused):
            raise Failed(f"the end of a stream was refused: {answer.reason}")
        self._answered(answer)

    # The data plane

    def _carry_out(self) -> None:
        assert self.consumer is not None
        for instruction in self.consumer.instructions():
            match instruction:
                case Tell():
                    self._tell(instruction)
                case Ask(message):
                    self.ask(message, self._told_end if isinstance(message, EndStream) else self._answered)

    def _tell(self, tell: Tell) -> None:
        assert self.consumer is not None
        link = self._connections.get(tell.runner)
        if link is None and isinstance(tell.message, OpenStream):
            link = self.connect(tell.address)
            if link is None:
                self.world.at(0.01, self, self._refused, tell.runner)
                return
            self._connections[tell.runner] = link
        if link is not None:
            link.send(self, tell.message)
            if self._feeder is not None and isinstance(tell.message, OpenStream):
                self._send_units(self._feeder.opened(self.consumer.readers[tell.message.stream]))

    def _refused(self, runner: RunnerId) -> None:
        assert self.consumer is not None
        self.consumer.lose(runner, "no connection", self.world.now)
        self._carry_out()

    def _send_units(self, units: Units) -> None:
        assert self.consumer is not None
        runner = self.consumer.readers[units.stream].runner
        if runner in self._connections:
            self._connections[runner].send(self, units)

    def heard(self, link: Link, header: Any, payload: Any) -> None:
        runner = next((runner for runner, found in self._connections.items() if found is link), None)
        if self.consumer is None or runner is None:
            return
        self.consumer.receive(header, payload, runner, self.world.now)
        self._check_credit(header)
        self._carry_out()

    def _check_credit(self, header: Any) -> None:
        assert self.consumer is not None
        if isinstance(header, Rounds):
            held = self.consumer.readers[header.stream].queued_bytes
            if held > MEMORY_BYTES + header.nbytes:
                raise Failed(f"{held} bytes of {header.stream} came, with a window of {MEMORY_BYTES}")

    def lost(self, link: Link) -> None:
        for runner, found in list(self._connections.items()):
            if found is link:
                del self._connections[runner]
                if self.consumer is not None:
                    self.consumer.lose(runner, "the connection was lost", self.world.now)
                    self._carry_out()

    def _look(self) -> None:
        if self.consumer is not None and not self._closed:
            self.consumer.look_after(self.world.now)
            self._feed_streams()
            self._carry_out()
            self.world.at(LOOK_EVERY_S, self, self._look)

    def _feed_streams(self) -> None:
        assert self.consumer is not None
        if self._feeder is not None:
            for units in self._feeder.refill(self.consumer.step, self.consumer.readers.values()):
                self._send_units(units)

    # The training loop

    def _step(self) -> None:
        consumer = self.consumer
        if self._closed or consumer is None:
            return
        if self.trainer.may_step(self.rank):
            if not self._ready:
                self._serve(consumer)
            if self._ready:
                self._take(consumer)
            elif self.trainer.sits_out(self.rank):
                self.trainer.took(self.rank, (), (-1, -1), self.state())
        self._feed_streams()
        self._carry_out()
        if consumer.failure is not None:
            self._lose_place()
        elif self.is_at_end and self.trainer.may_end():
            self._close()
        else:
            self.world.at(self.world.rng.uniform(0.03, 0.15), self, self._step)

    def _serve(self, consumer: Consumer) -> None:
        serving = consumer.next(self.world.now)
        self._taken = 0
        if serving is not None:
            self._ready.extend(_elements(serving))

    def _take(self, consumer: Consumer) -> None:
        batch, place = self._ready.popleft()
        self._taken += 1
        consumer.settle(self._taken)
        state = self.state()
        if self.trainer.bug == "prefetched_in_state" and self._ready:
            consumer.settle(self._taken + len(self._ready))
            state = self.state()
            self._ready.clear()
        self.trainer.took(self.rank, batch, place, state)

    @property
    def is_at_end(self) -> bool:
        return self.consumer is not None and self.consumer.at_end and not self._ready

    @property
    def is_through(self) -> bool:
        """Nothing is left for it to take, though others may have something."""
        consumer = self.consumer
        return consumer is not None and not self._ready and all(r.exhausted for r in consumer.readers.values())

    def _close(self) -> None:
        self._closed = True
        assert self.attempt is not None
        self.ask(
            CloseClient(
                job=self.trainer.job,
                client=ClientId(self.name),
                consumer=self.rank,
                attempt=self.attempt,
                finished=True,
            )
        )
        self.trainer.finish(self.rank, self.attempt)


def merged(checkpoint: Checkpoint, epoch: int, shape: Shape) -> Resume:
    dealt = bool(shape.streams) and not shape.coordinated
    feeds = {n: SplitsFeed(kind="dealt", number=n, of=shape.streams) for n in range(shape.streams if dealt else 0)}
    return resume_from(checkpoint, epoch=epoch, consumers=shape.consumers, feeds=feeds)


def _elements(serving: Serving) -> list[tuple[Batch, tuple[int, int]]]:
    found = []
    for round_ in range(serving.rounds):
        for lane in serving.lanes:
            at = lane.start + round_
            found.append((tuple(lane.frame.payload[at]), (lane.number, lane.frame.header.seq + at)))
    return found
