"""What is read in a simulation, and an engine that makes numbered batches of it.

Its states name places as the runtime's do, in passes that are numbered as the runtime numbers them, and its streams are
opened, cut, left over and regrouped by the worker's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast

from penstock.core.ids import BlobHash, Fingerprint, JobName
from penstock.runtime.streams import PASS_ENDED, PLACE, SplitFeed
from penstock.wire.jobs import FeedSpec, JobSpec, Leftover
from penstock.wire.modes import REACH, Ranks, Sharding, Share, ShareKind, Uneven
from penstock.wire.received import gaps_in, received
from penstock.worker.feeds import UNKNOWN, PassKey, StreamLedger, leftover_feed

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
            sharing=self._share(),
        )

    def _share(self) -> Share | None:
        if self.sharing is None:
            return None
        trainers = self.trainers if self.sharing == "wait" else None
        return Share(self.sharing, trainers=trainers, trainer_timeout_s=20.0)


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


def granted_splits(ledger: StreamLedger) -> NextSplit:
    return lambda key, after: ledger.of(key).following(after)


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
