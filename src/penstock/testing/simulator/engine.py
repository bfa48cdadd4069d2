"""What is read in a simulation, and an engine that makes numbered batches of it.

Its states name places as the runtime's do, in passes that are numbered as the runtime numbers them, and its streams are
opened, cut, left over and regrouped by the worker's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.runtime.streams import PASS_ENDED, PLACE
from penstock.wire.jobs import Leftover
from penstock.wire.modes import ShareKind, Uneven
from penstock.wire.received import gaps_in, received
from penstock.worker.feeds import leftover_feed
from penstock.worker.ledger import UNKNOWN

Batch = tuple[int, ...]
PASS = 1_000_000
"""Element x of the p-th pass of an epoch is x + p * PASS: so that each is there once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is read, and how: `splits[ordinal]` are a split's elements."""

    splits: tuple[tuple[int, ...], ...]
    batch: int
    consumers: int
    streams: int
    """Read in turn, round by round, over so many streams; 0: relaxed, as they come."""
    epochs: int = 1
    repeat: int = 1
    coordinated: bool = False
    """In turn, splits are granted to streams; without it they are dealt, which is deterministic order."""
    uneven: Uneven = "drop"
    fed: bool = False
    """The one consumer says what is read: batches of all elements, in order, are units and dealt to streams in turn."""
    sharing: ShareKind | None = None
    trainers: int = 1

    def __str__(self) -> str:
        how = "relaxed order" if not self.streams else f"{self.streams} streams "
        if self.streams:
            how += (
                "fed by the consumer" if self.fed else "read in turn" if self.coordinated else "in deterministic order"
            )
        shared = f", {self.trainers} trainers share ({self.sharing})" if self.sharing else ""
        return (
            f"{self.consumers} consumers, batches of {self.batch}, splits of {[len(split) for split in self.splits]}, "
            f"{how}, uneven={self.uneven!r}, {self.epochs} epochs of {self.repeat} passes{shared}"
        )

    @property
    def width(self) -> int:
        """Batches in a round."""
        return 1 if self.uneven == "allow" else self.consumers

    @property
    def everything(self) -> list[int]:
        return [x + p * PASS for p in range(self.repeat) for split in self.splits for x in split]

    @property
    def units(self) -> list[Batch]:
        whole = [x for split in self.splits for x in split]
        return [tuple(whole[at : at + self.batch]) for at in range(0, len(whole), self.batch)]


@dataclass(slots=True)
class Made:
    """A chunk of one output."""

    elements: list[Batch]
    marks: StateAfter


@dataclass(frozen=True, slots=True)
class StateAfter:
    before: Any
    after: Any

    def at(self, k: int) -> Any:
        return self.after if k else self.before


class SplitNeeded(Exception):
    """The split after `after` is not known yet."""

    def __init__(self, pass_: int, after: int | None) -> None:
        super().__init__()
        self.pass_, self.after = pass_, after


NextSplit = Callable[[int, int | None], int | None]
"""(pass, after) -> the next ordinal, None at the end, `UNKNOWN`"""


class Elements:
    """All elements of a stream from a state on, one by one, each with the state after it."""

    def __init__(self, shape: Shape, epoch: int, next_split: NextSplit, state: Any) -> None:
        self._shape, self._next_split = shape, next_split
        self._first_pass = epoch * shape.repeat
        self._passes: int = 0 if state is None else state[0]
        place = None if state is None else state[1]
        self._ordinal: int | None = None if place is None else place[3]
        self._index = 0 if place is None else place[4]
        self._ended = place is not None and place[3] == PASS_ENDED

    def next(self) -> tuple[int, Any] | None:
        shape = self._shape
        while self._passes < shape.repeat:
            pass_ = self._first_pass + self._passes
            if self._ended:
                self._passes, self._ordinal, self._index, self._ended = self._passes + 1, None, 0, False
                continue
            if self._ordinal is not None and self._index < len(shape.splits[self._ordinal]):
                element = shape.splits[self._ordinal][self._index] + self._passes * PASS
                self._index += 1
                return element, [self._passes, [PLACE, 0, pass_, self._ordinal, self._index]]
            following = self._next_split(pass_, self._ordinal)
            if following == UNKNOWN:
                raise SplitNeeded(pass_, self._ordinal)
            if following is None:
                self._ended = True
            else:
                self._ordinal, self._index = following, 0
        return None


class Engine:
    """Makes batches of elements; what is not a whole batch at the end is given, or kept as the stream's rest."""

    def __init__(self, shape: Shape, epoch: int, next_split: NextSplit, state: Any, *, gives_rest: bool) -> None:
        self._elements = Elements(shape, epoch, next_split, state)
        self._batch, self._gives_rest = shape.batch, gives_rest
        self._pending: list[int] = []
        self._state = self._reached = state

    @property
    def has_rest(self) -> bool:
        return bool(self._pending)

    def pull(self) -> Made | None:
        """Return the next output; None: the end."""
        while len(self._pending) < self._batch:
            found = self._elements.next()
            if found is None:
                break
            element, self._reached = found
            self._pending.append(element)
        if len(self._pending) < self._batch and not (self._gives_rest and self._pending):
            return None
        before, self._state = self._state, self._reached
        output, self._pending = tuple(self._pending), []
        return Made([output], StateAfter(before, self._state))

    def left(self) -> list[int]:
        """Return all elements that follow, those that wait for a batch included."""
        found = list(self._pending)
        while (following := self._elements.next()) is not None:
            found.append(following[0])
        return found


class TailEngine:
    """What ended streams still had: outputs that lie in gaps as they are, then batches of the rest of each in turn."""

    def __init__(self, shape: Shape, epoch: int, leftovers: tuple[Leftover, ...], state: Any) -> None:
        outputs: list[Batch] = []
        rest: list[int] = []
        for leftover in leftovers:
            feed = leftover_feed(leftover, (len(shape.splits),))

            def next_split(pass_: int, after: int | None, feed: Any = feed) -> int | None:
                found: int | None = feed.next_split(0, pass_, after)
                return found

            engine = Engine(shape, epoch, next_split, leftover.cut.engine, gives_rest=False)
            flags = received(leftover.cut, shape.width)
            gaps = gaps_in(flags)
            for number in range(len(flags)):
                made = engine.pull()
                if made is not None and any(start <= number < stop for start, stop in gaps):
                    outputs += made.elements
            rest += engine.left()
        outputs += [tuple(rest[at : at + shape.batch]) for at in range(0, len(rest), shape.batch)]
        self._given = 0 if state is None else state[1]
        self._outputs = outputs
        self.has_rest = False

    def pull(self) -> Made | None:
        if self._given >= len(self._outputs):
            return None
        before = ["t", self._given] if self._given else None
        self._given += 1
        return Made([self._outputs[self._given - 1]], StateAfter(before, ["t", self._given]))


class FedEngine:
    """Units that the reader sent, each an output."""

    def __init__(
        self, shape: Shape, unit: Callable[[int], tuple[int, ...] | None], ends: Callable[[int], bool], state: Any
    ) -> None:
        self._shape, self._unit, self._ends = shape, unit, ends
        self._ordinal = 0 if state is None else state[1]
        self.has_rest = False

    def pull(self) -> Made | None:
        unit = self._unit(self._ordinal)
        if unit is None:
            if self._ends(self._ordinal):
                return None
            raise SplitNeeded(0, self._ordinal)
        before = ["f", self._ordinal] if self._ordinal else None
        self._ordinal += 1
        whole = [x for split in self._shape.splits for x in split]
        return Made([tuple(whole[index] for index in unit)], StateAfter(before, ["f", self._ordinal]))
