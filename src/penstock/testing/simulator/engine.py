"""What is read in a simulation, an engine that makes numbered batches of it, and what must hold of what was given.

The engine's states name places as the runtime's do, in passes that are numbered as the runtime numbers them, and its
streams are opened, cut, left over and regrouped by the worker's own code.

What was given is checked knowing nothing of how it came about. A rank's history is the batches it was given, step by
step. One that comes back from the checkpoint of step t has a history of t steps again. So exactly-once "relative to the
checkpoint" is plain: in the end the histories hold every element once. Where the number of ranks changes, what was
given before stays, and the new ranks begin at step 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias, cast

from penstock.core.ids import AttemptId, BlobHash, Fingerprint, JobName
from penstock.runtime.streams import PASS_ENDED, PLACE, SplitFeed
from penstock.testing.simulator.world import Failed
from penstock.wire.jobs import FeedSpec, JobSpec, Leftover
from penstock.wire.modes import REACH, Ranks, Sharding, Share, ShareKind, Uneven
from penstock.wire.received import gaps_in, received
from penstock.worker.feeds import UNKNOWN, PassKey, leftover_feed

FakeBatch: TypeAlias = tuple[int, ...]
PASS = 1_000_000
"""Element x of the p-th pass of an epoch is x + p * PASS: so that each is there once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is read, and how: `splits[ordinal]` are a split's elements, which are numbered in order from 0 on."""

    splits: tuple[tuple[int, ...], ...]
    batch: int
    consumers: int
    streams: int
    """Read in turn, round by round, over so many streams; 0: relaxed, as they come."""
    epochs: int = 1
    repeat: int = 1
    concatenated: bool = False
    """What is repeated is read as so many sources, one after the other, instead of so many passes of one."""
    coordinated: bool = False
    """In turn, splits are granted to streams; without it they are dealt, which is deterministic order."""
    uneven: Uneven = "drop"
    fed: bool = False
    """The one consumer says what is read: batches of all elements, in order, are units and dealt to streams in turn."""
    sharing: ShareKind | None = None
    trainers: int = 1
    ahead: bool = False
    """Ranks open the next epoch while this one ends."""
    reach: int = REACH
    """With `uneven="allow"`: from about so many workers a rank reads."""
    keeps: bool = False
    """Hosts keep splits, and would rather be granted those."""

    @property
    def kind(self) -> str:
        if self.sharing:
            return f"shared ({self.sharing})"
        in_turn = "fed" if self.fed else "coordinated" if self.coordinated else "deterministic"
        relaxed = "relaxed" if self.reach == REACH else "relaxed in parts"
        return in_turn if self.streams else relaxed

    @property
    def width(self) -> int:
        """Batches in a round."""
        return 1 if self.uneven == "allow" else self.consumers

    @property
    def deals(self) -> bool:
        """Splits follow from a stream's number."""
        return self.streams > 0 and not self.coordinated

    @property
    def feeds(self) -> tuple[FeedSpec, ...]:
        """Of streams whose splits or units follow from their number."""
        numbers = range(self.streams if self.deals else 0)
        return tuple(FeedSpec(kind="fed" if self.fed else "dealt", number=n, of=self.streams) for n in numbers)

    @property
    def split_counts(self) -> tuple[int, ...]:
        return (len(self.splits),) * (self.repeat if self.concatenated else 1)

    def part(self, number: int, epoch: int) -> PassKey:
        """Return which pass of which source the repetition of that number is."""
        return (number, epoch) if self.concatenated else (0, epoch * self.repeat + number)

    @property
    def everything(self) -> list[int]:
        return [x + p * PASS for p in range(self.repeat) for split in self.splits for x in split]

    @property
    def units(self) -> list[FakeBatch]:
        return self.batches([x for split in self.splits for x in split])

    def batches(self, elements: list[int]) -> list[FakeBatch]:
        return [tuple(elements[at : at + self.batch]) for at in range(0, len(elements), self.batch)]

    @property
    def job(self) -> JobName:
        """Another number of consumers is another job."""
        return JobName(f"job{self.consumers}")

    def spec(self) -> JobSpec:
        awaited = self.trainers if self.sharing == "wait" else None
        return JobSpec(
            fingerprint=Fingerprint("f"),
            graph=BlobHash("graph"),
            splits=BlobHash("splits"),
            split_counts=self.split_counts,
            seed=0,
            ranks=Ranks(self.consumers, uneven=self.uneven, coordinated=self.coordinated, reach=self.reach),
            sharding=Sharding(streams=self.streams or None),
            order="deterministic" if self.deals else "relaxed",
            feeds=self.feeds if self.fed else (),
            sharing=Share(self.sharing, trainers=awaited, trainer_timeout_s=20.0) if self.sharing else None,
        )


class Made(NamedTuple):
    """A chunk of one output, with the states before and after it: these are its marks."""

    elements: tuple[FakeBatch]
    before: Any
    after: Any

    @property
    def marks(self) -> Made:
        return self

    def at(self, k: int) -> Any:
        return self.after if k else self.before


class SplitNeeded(NamedTuple):
    """The split after `after` is not known yet."""

    key: PassKey
    after: int | None


FakeOutputs: TypeAlias = Iterator[Made | SplitNeeded]
"""In between them `SplitNeeded`, again and again, as long as the next split is not known."""
NextSplit: TypeAlias = Callable[[PassKey, int | None], int | None]
"""(key, after) -> the next ordinal, None at the end, `UNKNOWN`"""


def known_splits(feed: SplitFeed) -> NextSplit:
    return lambda key, after: feed.next_split(*key, after)


def batches_from(shape: Shape, epoch: int, next_split: NextSplit, state: Any, rest: list[int]) -> FakeOutputs:
    """Make batches of a stream's elements from a state on; what does not fill one is in `rest` at the end."""
    first, place, *ends = cast(list[Any], state or [0, None])
    for number in range(first, shape.repeat):
        key = shape.part(number, epoch)
        ordinal, index = (None, 0) if place is None else (place[3], place[4])
        place = None
        while ordinal != PASS_ENDED:
            split = () if ordinal is None else shape.splits[ordinal]
            for at in range(index, len(split)):
                rest.append(split[at] + number * PASS)
                if len(rest) == shape.batch:
                    before, state = state, [number, [PLACE, *key, ordinal, at + 1], *ends]
                    yield Made((tuple(rest),), before, state)
                    rest.clear()
            while (following := next_split(key, ordinal)) == UNKNOWN:
                yield SplitNeeded(key, ordinal)
            ordinal, index = PASS_ENDED if following is None else following, 0
        if shape.concatenated:
            ends.append([PLACE, *key, PASS_ENDED, 0])


def numbered(output: Callable[[int], FakeBatch | SplitNeeded | None], state: Any) -> FakeOutputs:
    """Give outputs that are known by their number, from a state on, until there is none."""
    number = 0 if state is None else state[0]
    while (found := output(number)) is not None:
        if isinstance(found, SplitNeeded):
            yield found
        else:
            number, before, state = number + 1, state, [number + 1]
            yield Made((found,), before, state)


def tail_outputs(shape: Shape, epoch: int, leftovers: tuple[Leftover, ...]) -> list[FakeBatch]:
    """Return what ended streams still had: outputs that lie in gaps as they are, then batches of the rest of each."""
    outputs: list[FakeBatch] = []
    rest: list[int] = []
    for leftover in leftovers:
        unmade: list[int] = []
        splits = known_splits(leftover_feed(leftover, shape.split_counts))
        found = batches_from(shape, epoch, splits, leftover.cut.engine, unmade)
        made = [made.elements[0] for made in found if isinstance(made, Made)]
        flags = received(leftover.cut, shape.width)
        outputs += [batch for start, stop in gaps_in(flags) for batch in made[start:stop]]
        rest += [x for batch in (*made[len(flags) :], unmade) for x in batch]
    return outputs + shape.batches(rest)


# What was given

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
