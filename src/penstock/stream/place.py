"""What a consumer is given next, and what it has received after any part of it.

A `Serving` is the elements handed to the trainer as one list: all rounds left of a frame, or, where streams take turns,
rounds of several of them dealt in turn. Inside it `next()` is an index and an addition. What was received is settled
when the list is used up, or when somebody asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from penstock.core.intervals import Intervals
from penstock.stream.checkpoint import Mixes, Progress, Weights
from penstock.stream.position import Standing
from penstock.stream.reading import Arrived
from penstock.wire.jobs import Named, Ranges

Done: TypeAlias = Mapping[tuple[int, int], Intervals]
"""(source, pass) -> ordinals of splits"""


class Lane(NamedTuple):
    """Rounds of one stream's frame, from `start` on."""

    number: int
    frame: Arrived
    start: int


class Serving(NamedTuple):
    """`rounds` rounds of each lane: element i is round i // n of lane i mod n."""

    lanes: tuple[Lane, ...]
    rounds: int

    @property
    def size(self) -> int:
        return len(self.lanes) * self.rounds

    def taken_of(self, lane: int, taken: int) -> int:
        """Return how many of the first `taken` elements are that lane's.

        >>> serving = Serving((Lane(0, None, 0), Lane(1, None, 4)), 3)
        >>> serving.size, [serving.taken_of(0, k) for k in range(7)], [serving.taken_of(1, k) for k in range(7)]
        (6, [0, 1, 1, 2, 2, 3, 3], [0, 0, 1, 1, 2, 2, 3])
        """
        return -(-(taken - lane) // len(self.lanes)) if taken > lane else 0


def with_done(before: Done, done: Sequence[Named]) -> Done:
    """Return it with more splits. Neither is changed afterwards, so that what was noted down stays true."""
    after = dict(before)
    for each in done:
        key = (each.source, each.pass_)
        after[key] = Intervals([*after.get(key, Intervals()).ranges(), *((o, o + 1) for o in each.ordinals)])
    return after


@dataclass(frozen=True, slots=True)
class Place:
    """What a consumer has received, noted down at little cost and made a `Progress` of when somebody asks."""

    step: int
    standings: Mapping[int, Standing]
    """By stream."""
    done: Done
    next: int | None
    weights: Weights | None
    mixes: Mapping[int, Mixes]

    def after(self, serving: Serving, taken: int, *, before: int = 0) -> Place:
        """Return the place after the first `taken` of the elements being served, the first `before` counted in here.

        It says which stream the next of them comes from.
        """
        standings, done = dict(self.standings), self.done
        for number, lane in enumerate(serving.lanes):
            at, header = lane.start + serving.taken_of(number, taken), lane.frame.header
            rounds = at - lane.start - serving.taken_of(number, before)
            if rounds:
                standings[lane.number] = standings[lane.number].taken(header, at, rounds)
                if at == header.count and header.done:
                    done = with_done(done, header.done)
        following = serving.lanes[taken % len(serving.lanes)].number if taken < serving.size else None
        return replace(self, step=self.step + taken - before, standings=standings, done=done, next=following)

    def progress(self) -> Progress:
        return Progress(
            step=self.step,
            streams=tuple(standing.position for _, standing in sorted(self.standings.items())),
            done=tuple(Ranges(*key, tuple(found.ranges())) for key, found in sorted(self.done.items()) if len(found)),
            next=self.next,
            weights=self.weights,
            mixes=tuple(sorted(self.mixes.items())),
        )
