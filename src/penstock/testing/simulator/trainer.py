"""A trainer: ranks in step with each other, that checkpoint after every step, die, and come back.

What a rank has is its history: the batches it was given, step by step. One that comes back from the checkpoint of step
t has a history of t steps again. So exactly-once "relative to the checkpoint" is plain: in the end the histories hold
every element once. Where the number of ranks changes, what was given before stays, and the new ranks begin at step 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.core.errors import StateMismatchError
from penstock.core.ids import AttemptId, BlobHash, Fingerprint, JobName
from penstock.stream.checkpoint import read_states
from penstock.testing.simulator.client import FakeClient, How, merged
from penstock.testing.simulator.dispatcher import Bug
from penstock.testing.simulator.engine import Batch, Shape
from penstock.testing.simulator.workers import TRAINER_TIMEOUT_S, Jobs
from penstock.testing.simulator.world import World
from penstock.wire.jobs import Feed, JobSpec
from penstock.wire.modes import Ranks, Sharding, Share, ShareKind

State = dict[str, Any]


class Read:
    """What was given in one epoch."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.before: list[Batch] = []
        """To ranks of another number, or before they came back without their states."""
        self.padded: list[int] = []
        """What was in the last batches of those: a round of theirs may have been filled up with it."""
        self.histories: list[list[Batch]] = [[] for _ in range(shape.consumers)]
        self.places: list[list[tuple[int, int]]] = [[] for _ in range(shape.consumers)]
        """Of each batch in the histories: its stream's number, and its round."""
        self.attempt: AttemptId | None = None
        self.joined_late = False
        """It began inside the window of others, or came back without its state."""

    def cut(self, rank: int, step: int) -> None:
        del self.histories[rank][step:]
        del self.places[rank][step:]

    def miss(self) -> None:
        self.joined_late = True

    def anew(self) -> Read:
        """Return what a trainer reads of the same epoch that has come back without its states."""
        again = Read(self.shape)
        again.before.extend([*self.before, *(batch for history in self.histories for batch in history)])
        if self.attempt is not None:
            again.enter(self.attempt)
        again.miss()
        return again

    def enter(self, attempt: AttemptId) -> bool:
        """A rank reads in that attempt; False: it is another one than that of the others."""
        same, self.attempt = self.attempt in (None, attempt), attempt
        return same


class Trainer:
    """All ranks of one trainer, and the histories that outlive them. `number` is that of a trainer that shares."""

    def __init__(self, world: World, jobs: Jobs, shape: Shape, bug: Bug, number: int = 0) -> None:
        self.world, self.bug, self.number = world, bug, number
        self.name = f"t{number}" if number else ""
        self.epoch = 0
        self.over = False
        self.restarts = 0
        self.epochs_read: list[Read] = []
        self._jobs = jobs
        self._openings = 0
        self.clients: list[FakeClient] = []
        self._use(shape)
        world.begin_reading()
        self._begin_epoch("fresh")

    def _use(self, shape: Shape) -> None:
        self.shape = shape
        self.job = JobName(f"job{shape.consumers}")
        self.spec = spec_of(shape)
        self._jobs[self.job] = (self.spec, shape)
        self.finished: list[AttemptId | None] = [None] * shape.consumers
        """Of each rank: the attempt it read to its end last."""

    def _begin_epoch(self, how: How) -> None:
        self.read = Read(self.shape)
        self._base: list[State] = []
        """The states that ranks of another number had saved, where this epoch began with those."""
        self.saved: list[list[State]] = [[{}] for _ in range(self.shape.consumers)]
        """Of each rank: the state after every step of the epoch; nothing until it has opened it."""
        self.done = [False] * self.shape.consumers
        self._start_all(how)

    def next_opening(self) -> int:
        self._openings += 1
        return self._openings

    def enter(self, attempt: AttemptId) -> None:
        """A rank reads in that attempt. One that came back without its state may be in a later epoch than before."""
        if not self.read.enter(attempt) and self.shape.sharing:
            self.read = Read(self.shape)
            self.read.miss()
            self.read.enter(attempt)
            self.saved = [[{}] for _ in self.saved]

    def step(self, rank: int) -> int:
        return len(self.read.histories[rank])

    def may_step(self, rank: int) -> bool:
        """Whether the others are as far: training is synchronous."""
        reading = [len(history) for history, done in zip(self.read.histories, self.done) if not done]
        return self.step(rank) <= min(reading) and self.are_together()

    def sits_out(self, rank: int) -> bool:
        """Whether others take a step for which this one has nothing: its streams have ended, and theirs have not."""
        behind = self.step(rank) < max(map(len, self.read.histories))
        return self.shape.uneven == "allow" and behind and self.clients[rank].is_through

    def are_together(self) -> bool:
        """Whether all take part: a step, and the end of an epoch, is a barrier."""
        return len({client.attempt for client in self.clients}) == 1

    def may_end(self) -> bool:
        """Whether a rank may leave the epoch; where trainers share it, its ranks end it together."""
        together = not self.shape.sharing or all(client.is_at_end for client in self.clients)
        return together and self.are_together()

    def took(self, rank: int, batch: Batch, place: tuple[int, int], state: State) -> None:
        self.read.histories[rank].append(batch)
        self.read.places[rank].append(place)
        self.saved[rank].append(state)

    def finish(self, rank: int, attempt: AttemptId) -> None:
        self.done[rank] = True
        self.finished[rank] = attempt
        if all(self.done):
            self.epochs_read.append(self.read)
            self.epoch += 1
            self.over = self.epoch == self.shape.epochs
            if self.over:
                self.world.end_reading()
            else:
                self._begin_epoch("fresh")

    def restart_one(self, rank: int, back: int) -> None:
        """A rank dies and comes back from an earlier step of its own; the others go on, or wait for it."""
        if self.over:
            return
        self.clients[rank].die()
        if not self.saved[rank][-1]:
            how: How = "resume" if self._base else "fresh"
        else:
            how = "rejoin"
            self._go_back(rank, max(0, self.step(rank) - back))
        self.done[rank] = False
        self.finished[rank] = None
        self.world.note(f"{self.name} rank {rank} comes back at step {self.step(rank)} ({how})")
        self.clients[rank] = FakeClient(self, rank, how)

    def start_over(self) -> None:
        """The service does not know what this trainer reads: it goes on from its states, or joins the others anew."""
        if self.shape.sharing:
            self.read = Read(self.shape)
            self.saved = [[{}] for _ in self.saved]
        self.restart_all("resume", 0)

    def restart_all(self, how: How, back: int, consumers: int | None = None) -> None:
        """All die, and come back from the same step; `consumers`: as another number."""
        if self.over:
            return
        self.restarts += 1
        step = max(0, min(map(len, self.read.histories)) - back) if how != "fresh" else 0
        known = [saved[step] if step < len(saved) else {} for saved in self.saved]
        attempts = sorted({str(state.get("attempt", "")) for state in known})
        # States from before and after the beginning of an attempt: none that a trainer would load together.
        apart = "" in attempts or len(attempts) > 1
        if self.shape.sharing:
            if how != "rejoin" or apart:
                how, step = "fresh", 0  # the service does not know what it stood in: whatever the others read now
                self.read = self.read.anew()
        elif how == "fresh" or (apart and not self._base):
            how, step, self._base = "fresh", 0, []
            self.read = Read(self.shape)
        elif apart:
            how, step = "resume", 0
        if how == "fresh" or (apart and not self.shape.sharing):
            self.saved = [[{}] for _ in self.saved]
        for rank in range(self.shape.consumers):
            self._go_back(rank, step)
        if how == "resume" and consumers is not None and not self.shape.fed:
            self._resize(consumers)
        self.done = [False] * self.shape.consumers
        self.finished = [None] * self.shape.consumers  # these processes have read nothing
        self.world.note(f"{self.name} all ranks come back at step {step} ({how}), {self.shape.consumers} of them")
        self._start_all(how)

    def _resize(self, consumers: int) -> None:
        states = self.states()
        shape = replace(self.shape, consumers=consumers)
        try:
            merged(read_states(states, consumer=0, consumers=consumers), self.epoch, shape)
        except StateMismatchError:
            return  # only a little later: it says so
        read = Read(shape)
        read.before.extend(self.read.before)
        read.before.extend(batch for history in self.read.histories for batch in history)
        read.padded.extend(self.read.padded)
        read.padded.extend(x for history in self.read.histories for x in (history[-1] if history else ()))
        for client in self.clients:
            client.die()
        self._use(shape)
        self.read, self.clients = read, []
        self.saved, self._base = [[{}] for _ in range(consumers)], states

    def _go_back(self, rank: int, step: int) -> None:
        self.read.cut(rank, step)
        del self.saved[rank][step + 1 :]

    def _start_all(self, how: How) -> None:
        for client in self.clients:
            client.die()
        self.clients = [FakeClient(self, rank, how) for rank in range(self.shape.consumers)]

    def states(self) -> list[State]:
        """Return the checkpoint that all ranks load: of the last step they all took, or what they began at."""
        step = min(map(len, self.read.histories))
        found = [saved[step] for saved in self.saved]
        return found if all(found) else self._base


def spec_of(shape: Shape) -> JobSpec:
    return JobSpec(
        fingerprint=Fingerprint("f"),
        graph=BlobHash("graph"),
        splits=BlobHash("splits"),
        split_counts=(len(shape.splits),),
        seed=0,
        ranks=Ranks(shape.consumers, uneven=shape.uneven, coordinated=shape.coordinated),
        sharding=Sharding(streams=shape.streams or None),
        order="deterministic" if shape.streams and not shape.coordinated else "relaxed",
        feeds=tuple(Feed(kind="fed", number=n, of=shape.streams) for n in range(shape.streams) if shape.fed),
        sharing=None if shape.sharing is None else _share_of(shape.sharing, shape.trainers),
    )


def _share_of(kind: ShareKind, trainers: int) -> Share:
    return Share(kind, trainer_timeout_s=TRAINER_TIMEOUT_S, trainers=trainers if kind == "wait" else None)
