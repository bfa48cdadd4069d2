"""What a trainer was given, what it saved, and what must hold of it, knowing nothing of how it came about.

A rank's history is the batches it was given, step by step. One that comes back from the checkpoint of step t has a
history of t steps again. So exactly-once "relative to the checkpoint" is plain: in the end the histories hold every
element once. Where the number of ranks changes, what was given before stays, and the new ranks begin at step 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from penstock.core.ids import AttemptId
from penstock.testing.simulator.engine import PASS, FakeBatch, Shape
from penstock.testing.simulator.world import Failed

FakeState: TypeAlias = dict[str, Any]
RoundPlace: TypeAlias = tuple[int, int]
"""(number of a stream, round)"""
NOWHERE: RoundPlace = (-1, -1)


class RankStep(NamedTuple):
    """What a rank was given, where that came from, and the state that was saved after it."""

    batch: FakeBatch
    place: RoundPlace
    state: FakeState


BEGINNING = RankStep((), NOWHERE, {})


@dataclass(slots=True)
class Read:
    """What was given in one epoch."""

    shape: Shape
    before: list[FakeBatch] = field(default_factory=list)
    """What was given to another number of ranks, or before ranks came back without their states."""
    padded: list[int] = field(default_factory=list)
    """What was in the last batches of those: a round of theirs may have been filled up with it."""
    base: list[FakeState] = field(default_factory=list)
    """The states that ranks of another number had saved, where these began with them."""
    joined_late: bool = False
    """It began inside the window of others, or came back without its state."""
    attempt: AttemptId | None = None
    ranks: list[list[RankStep]] = field(init=False)
    """The steps of each, after its beginning, which has no state until the rank has opened the epoch.

    A copy (`dataclasses.replace`) is at its beginning: what ranks read of the same epoch that have begun it anew.
    """

    def __post_init__(self) -> None:
        self.ranks = [[BEGINNING] for _ in range(self.shape.consumers)]

    def enter(self, attempt: AttemptId) -> None:
        self.attempt = attempt

    @property
    def histories(self) -> list[list[FakeBatch]]:
        return [[step.batch for step in steps[1:]] for steps in self.ranks]

    @property
    def places(self) -> list[list[RoundPlace]]:
        return [[step.place for step in steps[1:]] for steps in self.ranks]

    @property
    def given(self) -> list[FakeBatch]:
        """All batches, whoever had them."""
        return [*self.before, *(batch for history in self.histories for batch in history)]

    @property
    def steps(self) -> list[int]:
        """How many each rank has taken."""
        return [len(steps) - 1 for steps in self.ranks]

    def states(self, step: int) -> list[FakeState]:
        return [steps[step].state for steps in self.ranks]

    @property
    def last(self) -> list[int]:
        """What is in the last batches."""
        return [x for steps in self.ranks for x in steps[-1].batch]


def check(read: Read, *, streams_moved: bool) -> None:
    """Check what one trainer was given in an epoch. `streams_moved`: a process that served may have been lost."""
    shape, steps = read.shape, read.steps
    given = sorted(x for batch in read.given for x in batch)
    everything = set(shape.everything)
    strangers = sorted(set(given) - everything)
    if strangers:
        raise Failed(f"elements {strangers} came from nowhere")
    twice = _twice(read, given)
    # Of a trainer that comes back without a state the process that served it knows, and nobody else.
    if twice and not (shape.sharing and read.joined_late and streams_moved):
        raise Failed(f"elements {twice} were given more than once")
    missing = sorted(everything - set(given))
    # What does not fill a last round may be left over; a trainer that is not waited for, or came late, misses more.
    most = shape.batch * (shape.consumers - 1) if shape.uneven == "drop" else 0
    if len(missing) > most and shape.sharing != "skip" and not read.joined_late:
        raise Failed(f"elements {missing} were lost, where at most {most} may be left over")
    if shape.uneven != "allow" and len(set(steps)) > 1:
        raise Failed(f"ranks ended at different steps: {steps}")
    if shape.streams and shape.uneven != "allow":
        for step, taken in enumerate(zip(*read.places)):
            if len(set(taken)) > 1:
                raise Failed(f"step {step} was torn: ranks took (stream, round) {list(taken)}")
    if shape.deals and not read.before and read.histories != (expected := deterministic_histories(shape)):
        raise Failed(f"deterministic order gave {read.histories} instead of {expected}")


def _twice(read: Read, given: list[int]) -> list[int]:
    """Return what was given more than once, without what may fill up a last round."""
    twice = {a for a, b in pairwise(given) if a == b}
    if read.shape.uneven == "pad":
        last = set(read.last)
        earlier = {
            x for history in (read.before, *(h[:-1] for h in read.histories)) for batch in history for x in batch
        }
        twice = ((twice - last) | (last & earlier)) - set(read.padded)
    return sorted(twice)


def deterministic_histories(shape: Shape) -> list[list[FakeBatch]]:
    """Return what consumers must see in deterministic order, from the description alone."""
    if shape.fed:
        return [shape.units]
    size = shape.batch * shape.width
    rounds: list[tuple[int, int, list[int]]] = []
    tail: list[int] = []
    for number in range(shape.streams):
        own = shape.splits[number :: shape.streams]
        elements = [x + p * PASS for p in range(shape.repeat) for split in own for x in split]
        whole = len(elements) - len(elements) % size
        rounds += [(at, number, elements[at : at + size]) for at in range(0, whole, size)]
        tail += elements[whole:]
    in_order = [elements for _, _, elements in sorted(rounds)]
    in_order += [tail[at : at + size] for at in range(0, len(tail), size)]
    if shape.uneven == "drop" and in_order and len(shape.batches(in_order[-1])) < shape.consumers:
        in_order.pop()
    rounds_given = [shape.batches(elements) for elements in in_order]
    # A round that is not whole is filled up with its own batches.
    return [[batches[c % len(batches)] for batches in rounds_given] for c in range(shape.consumers)]
