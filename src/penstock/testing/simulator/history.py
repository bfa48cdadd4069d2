"""What a trainer was given, and what it saved.

A rank's history is the batches it was given, step by step. One that comes back from the checkpoint of step t has a
history of t steps again. So exactly-once "relative to the checkpoint" is plain: in the end the histories hold every
element once. Where the number of ranks changes, what was given before stays, and the new ranks begin at step 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from penstock.core.ids import AttemptId
from penstock.testing.simulator.engine import FakeBatch, Shape

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
