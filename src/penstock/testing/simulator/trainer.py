"""A trainer: ranks in step with each other, that checkpoint after every step, die, and come back."""

from __future__ import annotations

from dataclasses import replace

from penstock.core.errors import StateMismatchError
from penstock.core.ids import AttemptId, JobName
from penstock.stream.checkpoint import read_states
from penstock.testing.simulator.client import FakeClient, How, merged
from penstock.testing.simulator.engine import FakeState, Read, Shape
from penstock.testing.simulator.world import World
from penstock.wire.principals import Principal


class Trainer:
    """All ranks of one trainer, and the histories that outlive them. `number` is that of a trainer that shares."""

    def __init__(self, world: World, jobs: dict[JobName, Shape], shape: Shape, number: int = 0) -> None:
        self.world, self.number = world, number
        self.name = f"t{number}" if number else ""
        self.principal = Principal("trainer", "team")
        self.epochs_read: list[Read] = []
        self.read = Read(shape)
        self.clients: list[FakeClient] = []
        self._ahead: dict[int, FakeClient] = {}
        """The ranks' readers of the next epoch, in the same processes."""
        self._jobs = jobs
        self._start("fresh")

    @property
    def shape(self) -> Shape:
        return self.read.shape

    @property
    def epoch(self) -> int:
        return len(self.epochs_read)

    @property
    def over(self) -> bool:
        return self.epoch == self.shape.epochs

    def _start(self, how: How) -> None:
        """Begin with new clients."""
        for client in (*self.clients, *self._ahead.values()):
            client.die()
        self._ahead.clear()
        self._jobs[self.shape.job] = self.shape
        self.clients = [FakeClient(self, rank, how) for rank in range(self.shape.consumers)]

    def _go_on(self) -> None:
        """Begin the next epoch in the same processes: with what they opened ahead, where they have it and want it."""
        left, self.clients, ahead, self._ahead = self.clients, [], self._ahead, {}
        for before in left:
            before.die()
            ready = ahead.get(before.rank)
            if ready is not None and not (ready.is_open and not ready.closed and self.world.rng.random() < 0.8):
                ready.leave_ahead()
                ready.die()
                ready = None
            self.clients.append(ready or FakeClient(self, before.rank, "fresh", before.attempt))
        for before, client in zip(left, self.clients):
            if client.ahead:
                client.arrive(before.attempt)

    def open_ahead(self, rank: int) -> None:
        """A rank's epoch is about to end: open the next one, if there is one."""
        if rank not in self._ahead and self.epoch + 1 < self.shape.epochs:
            self._ahead[rank] = FakeClient(self, rank, "fresh", ahead=True)

    # What its clients say

    def enter(self, attempt: AttemptId) -> None:
        """A rank reads in that attempt. One that came back without its state may be in a later epoch than before.

        Or in one that it was through with when it was killed, and had not said so: nothing is left for it there.
        """
        before = self.read.attempt not in (None, attempt) or any(each.attempt == attempt for each in self.epochs_read)
        if self.shape.sharing and before:
            self.read = Read(self.shape, joined_late=True)
        self.read.enter(attempt)

    def may_step(self, rank: int) -> bool:
        """Whether the others are as far: training is synchronous."""
        steps = self.read.steps
        return self._are_together() and all(steps[rank] <= steps[c.rank] for c in self.clients if not c.closed)

    def sits_out(self, rank: int) -> bool:
        """Whether others take a step for which this one has nothing: its streams have ended, and theirs have not."""
        steps = self.read.steps
        return self.shape.uneven == "allow" and steps[rank] < max(steps) and self.clients[rank].is_through

    def may_end(self) -> bool:
        """Whether a rank may leave the epoch; where trainers share it, its ranks end it together."""
        return self._are_together() and (not self.shape.sharing or all(client.is_at_end for client in self.clients))

    def _are_together(self) -> bool:
        """Whether all take part: a step, and the end of an epoch, is a barrier."""
        return len({client.attempt for client in self.clients}) == 1

    def finish(self) -> None:
        """A rank is through; the last one begins the next epoch."""
        if all(client.closed for client in self.clients):
            self.epochs_read.append(self.read)
            if self.over:
                self.world.end_reading()
            else:
                self.read = Read(self.shape)
                self._go_on()

    def states(self) -> list[FakeState]:
        """Return the checkpoint that all ranks load: of the last step they all took, or what they began at."""
        found = self.read.states(min(self.read.steps))
        return found if all(found) else self.read.base

    # What becomes of it

    def restart_one(self, rank: int, back: int) -> None:
        """A rank dies and comes back from an earlier step of its own; the others go on, or wait for it."""
        self.clients[rank].die()
        if rank in self._ahead:
            self._ahead.pop(rank).die()
        how: How = "resume" if self.read.base else "fresh"
        steps = self.read.ranks[rank]
        if steps[-1].state:
            how = "rejoin"
            del steps[max(1, len(steps) - back) :]
        self.world.note(f"{self.name} rank {rank} comes back at step {self.read.steps[rank]} ({how})")
        self.clients[rank] = FakeClient(self, rank, how)

    def restart_all(self, how: How, back: int, consumers: int | None = None) -> None:
        """All die, and come back from the same step; `consumers`: as another number."""
        step = max(0, min(self.read.steps) - back) if how != "fresh" else 0
        states = self.read.states(step)
        # States from before and after the beginning of an attempt: none that a trainer would load together.
        apart = not all(states) or len({state["attempt"] for state in states}) > 1
        if self.shape.sharing:
            if how != "rejoin" or apart:  # the service does not know what it stood in: whatever the others read now
                how, self.read = "fresh", replace(self.read, before=self.read.given, joined_late=True)
        elif how == "fresh" or (apart and not self.read.base):
            how, self.read = "fresh", Read(self.shape)
        elif apart:
            how, self.read = "resume", replace(self.read)
        self._forget_after(step)
        while how == "resume" and step and self._is_refused(self.states()):
            step -= 1  # what a user does who is told to load states of one step
            self._forget_after(step)
        if how == "resume" and consumers is not None and not self.shape.fed:
            self._resize(consumers)
        self.world.note(f"{self.name} all ranks come back at {self.read.steps} ({how})")
        self._start(how)

    def _forget_after(self, step: int) -> None:
        for steps in self.read.ranks:
            del steps[step + 1 :]

    def _is_refused(self, states: list[FakeState], shape: Shape | None = None) -> bool:
        """Whether the states do not go together, for that many ranks."""
        shape = shape or self.shape
        try:
            merged(read_states(states, consumer=0, consumers=shape.consumers), self.epoch, shape)
        except StateMismatchError:
            return True
        return False

    def _resize(self, consumers: int) -> None:
        read, states, shape = self.read, self.states(), replace(self.shape, consumers=consumers)
        if self._is_refused(states, shape):
            return  # only a little later: it says so
        self.read = replace(read, shape=shape, before=read.given, padded=[*read.padded, *read.last], base=states)
