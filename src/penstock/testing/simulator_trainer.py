"""A trainer: consumers in step with each other, that checkpoint after every step, die, and come back.

What a consumer has is its history: the batches it was given, step by step. A consumer that comes back from the
checkpoint of step t has a history of t steps again. So exactly-once "relative to the checkpoint" is plain: in the end
the histories hold every element once.
"""

from __future__ import annotations

from penstock.core.ids import BlobHash, Fingerprint
from penstock.testing.simulator_consumer import Consumer, How
from penstock.testing.simulator_dispatcher import Bug
from penstock.testing.simulator_merge import Saved
from penstock.testing.simulator_workers import Shape
from penstock.testing.simulator_world import World
from penstock.wire.jobs import Feed, JobSpec


class Trainer:
    """All consumers, and the histories that outlive them."""

    def __init__(self, world: World, shape: Shape, bug: Bug) -> None:
        self.world, self.shape, self.bug = world, shape, bug
        self.saved = [[Saved()] for _ in range(shape.consumers)]
        """Of each consumer: the state after every step of the epoch."""
        self.histories: list[list[tuple[int, ...]]] = [[] for _ in range(shape.consumers)]
        self.places: list[list[tuple[int, int]]] = [[] for _ in range(shape.consumers)]
        """Of each batch in the histories: its stream's number, and its round."""
        self.epoch = 0
        self.done = [False] * shape.consumers
        self.consumers: list[Consumer] = []
        self.over = False
        self.epochs_read: list[list[list[tuple[int, ...]]]] = []
        self.places_read: list[list[list[tuple[int, int]]]] = []
        self.restarts = 0
        for c in range(shape.consumers):
            self.consumers.append(Consumer(self, c, "fresh"))

    def spec(self) -> JobSpec:
        shape = self.shape
        return JobSpec(
            fingerprint=Fingerprint("f"),
            graph=BlobHash("graph"),
            splits=BlobHash("splits"),
            split_counts=(len(shape.splits),),
            seed=0,
            consumers=shape.consumers,
            order="deterministic" if shape.streams and not shape.coordinated else "relaxed",
            coordinated=shape.coordinated,
            streams=shape.streams,
            uneven=shape.uneven,
            feeds=tuple(Feed(kind="fed", number=n, of=shape.streams) for n in range(shape.streams) if shape.fed),
        )

    def step(self, consumer: int) -> int:
        return len(self.histories[consumer])

    def may_step(self, consumer: int) -> bool:
        """Whether the others are as far: training is synchronous. Those that are through with the epoch sit out."""
        taking_part = (history for history, done in zip(self.histories, self.done, strict=True) if not done)
        return self.step(consumer) <= min(map(len, taking_part)) and self.are_together()

    def is_behind(self, consumer: int) -> bool:
        return self.step(consumer) < max(map(len, self.histories))

    def are_together(self) -> bool:
        """Whether all take part: a step, and the end of an epoch, is a barrier."""
        return len({consumer.attempt for consumer in self.consumers}) == 1

    def took(self, consumer: int, batch: tuple[int, ...], place: tuple[int, int], state: Saved) -> None:
        self.histories[consumer].append(batch)
        self.places[consumer].append(place)
        self.saved[consumer].append(state)

    def finish(self, consumer: int) -> None:
        self.done[consumer] = True
        if all(self.done):
            self.epochs_read.append(self.histories)
            self.places_read.append(self.places)
            self.over = self.epoch + 1 == self.shape.epochs
            if not self.over:
                self._start_epoch(self.epoch + 1)

    def _start_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.histories = [[] for _ in self.histories]
        self.places = [[] for _ in self.places]
        self.saved = [[Saved()] for _ in self.saved]
        self.done = [False] * self.shape.consumers
        self._start_all("fresh")

    def restart_one(self, consumer: int, back: int) -> None:
        """A consumer dies and comes back from an earlier step of its own; the others go on, or wait for it."""
        if self.over:
            return
        self.consumers[consumer].die()
        if self.saved[consumer][-1].attempt is None:
            how: How = "fresh"
        else:
            how = "rejoin"
            self._go_back(consumer, max(0, self.step(consumer) - back))
        self.done[consumer] = False
        self.world.note(f"consumer {consumer} comes back at step {self.step(consumer)} ({how})")
        self.consumers[consumer] = Consumer(self, consumer, how)

    def restart_all(self, how: How, back: int) -> None:
        """All die, and come back from the same step."""
        if self.over:
            return
        self.restarts += 1
        step = max(0, min(map(len, self.histories)) - back) if how != "fresh" else 0
        known = [self.saved[c][step] if step < len(self.saved[c]) else Saved() for c in range(self.shape.consumers)]
        attempts = {state.attempt for state in known}
        if how == "fresh" or None in attempts or len(attempts) > 1:
            # States from before and after the beginning of an attempt: none that a trainer would load together.
            how, step = "fresh", 0
            self.saved = [[Saved()] for _ in self.saved]
        for c in range(self.shape.consumers):
            self._go_back(c, step)
        self.done = [False] * self.shape.consumers
        self.world.note(f"all consumers come back at step {step} ({how})")
        self._start_all(how)

    def _go_back(self, consumer: int, step: int) -> None:
        del self.histories[consumer][step:]
        del self.places[consumer][step:]
        del self.saved[consumer][step + 1 :]

    def _start_all(self, how: How) -> None:
        for consumer in self.consumers:
            consumer.die()
        self.consumers = [Consumer(self, c, how) for c in range(self.shape.consumers)]

    def states(self) -> list[Saved]:
        step = min(map(len, self.histories))
        return [saved[step] for saved in self.saved]
