"""Where a trainer stands: in one stream, in a frame of it, and in what it is handed at once.

Rules: only what `next()` returned counts. A frame's cut is reached when its last round is taken; inside a frame the
place is the cut before it and the number of rounds since. `Position` is what is saved and sent, `Standing` the same
while a frame is being taken.

A `Serving` is elements that the trainer is handed without a choice in between: all rounds left of a frame, or, where
streams take turns, rounds of several of them dealt in turn. Inside it `next()` is an index and an addition, and now and
then elements are made. What was received is settled when all of them were given, or when somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import msgspec
from msgspec.structs import replace

from penstock.core.intervals import Intervals
from penstock.wire.frames import Rounds
from penstock.wire.jobs import Cut, FeedSpec, Named, Position, Ranges, Stride

TRAIL = 64
"""How many finished splits of a stream are remembered by name, where several consumers read it in relaxed order: one
that lags behind needs them named. Consumers are at most a window and a runner's buffer apart: a few splits."""

KEPT_GAPS = 64
"""How many stretches of skipped rounds are remembered: ranks of one trainer are a few frames apart."""

Gaps: TypeAlias = tuple[tuple[int, int], ...]
"""Rounds as half-open ranges, in order."""

SplitKey = tuple[int, int, int]
"""(source, pass, ordinal)"""

DoneSplits: TypeAlias = Mapping[tuple[int, int], Intervals]
"""(source, pass) -> ordinals of splits"""

_NOTHING = Intervals()


class Standing(msgspec.Struct, frozen=True):
    """`cut` is the state before `cut_round`, which is not after `round`, the next one to be taken.

    It is replaced, never changed: what is noted down of it stays true.
    """

    number: int
    round: int
    cut: Cut
    cut_round: int
    ended: bool = False
    leftover: bool = False
    feed: FeedSpec | None = None
    opened: tuple[Named, ...] = ()
    """Splits that the rounds after `cut` are made of, inside a frame: a state names all it needs."""
    trail: tuple[SplitKey, ...] | None = None
    """The last splits behind it, oldest first; None: nobody needs them named."""
    trail_lost: bool = False
    gaps: Gaps | None = None
    """The last rounds that were skipped; None: no other rank needs to know."""

    @staticmethod
    def at(position: Position) -> Standing:
        trail = tuple(splits_of(position.trail)) if position.trail else None
        return Standing(
            position.number,
            position.round,
            position.cut,
            position.round,
            position.ended,
            position.leftover,
            position.feed,
            (),
            trail,
            position.trail_lost,
            position.gaps or None,
        )

    @property
    def position(self) -> Position:
        return Position(
            self.number,
            self.round,
            self.cut_here,
            tuple(strides_of(self.trail or ())),
            self.trail_lost,
            self.ended,
            self.leftover,
            self.feed,
            gaps=self.gaps or (),
        )

    @property
    def cut_here(self) -> Cut:
        ahead = self.round - self.cut_round
        if not ahead and not self.opened:
            return self.cut
        named = joined((*self.cut.named, *self.opened)) if self.opened else self.cut.named
        return replace(self.cut, since=self.cut.since + ahead, named=named)

    @property
    def made_until(self) -> int:
        """The round up to which the engine's state at `cut` has made things."""
        return self.cut_round - self.cut.since

    def noting(self, *, trail: bool, gaps: bool) -> Standing:
        """Return the same, with the splits behind it, or skipped rounds, remembered from here on."""
        return replace(
            self,
            trail=() if trail and self.trail is None else self.trail,
            gaps=() if gaps and self.gaps is None else self.gaps,
        )

    def taken(self, header: Rounds, at: int, rounds: int) -> Standing:
        """Return where one stands after `rounds` more rounds of a frame, of which `at` are taken then."""
        if at == header.count:
            return replace(self, round=self.round + rounds).moved(header.seq + at).reached(header.cut, header.done)
        there = replace(self, round=self.round + rounds, opened=(*header.done, *header.cut.named))
        return there.moved(header.seq + at)

    def before(self, header: Rounds) -> Standing:
        """Return the same place where the next round must be that frame's: the splits it is made of are named."""
        return self if self.opened else replace(self, opened=(*header.done, *header.cut.named))

    def reached(self, cut: Cut, done: Iterable[Named]) -> Standing:
        """Return the same place at the cut that stands just here; `done` are splits that it does not need any more."""
        trail, lost = self.trail, self.trail_lost
        if trail is not None and done:
            whole = (*trail, *splits_in(done))
            trail, lost = whole[-TRAIL:], lost or len(whole) > TRAIL
        return replace(self, cut=cut, cut_round=self.round, opened=(), trail=trail, trail_lost=lost)

    def moved(self, round_: int) -> Standing:
        """Return where one stands when rounds before that one are gone."""
        if round_ <= self.round:
            return self
        gaps = None if self.gaps is None else with_gap(self.gaps, self.round, round_)
        return replace(self, round=round_, gaps=gaps)

    def at_end(self, *, leftover: bool) -> Standing:
        """Return the end. `leftover`: there is more after `cut` than whole rounds could take."""
        return replace(self, ended=True, leftover=leftover)


class Arrived:
    """A frame of rounds that has arrived. `payload` is the caller's: what the rounds are decoded from."""

    __slots__ = ("at", "begun", "header", "payload")

    def __init__(self, header: Rounds, payload: Any, at: int) -> None:
        self.header, self.payload = header, payload
        self.at = at
        """How many of its rounds were taken, or are not this reader's to take."""
        self.begun = False

    @property
    def left(self) -> int:
        """How many rounds can be taken in a row."""
        header = self.header
        if not header.holes:
            return header.count - self.at
        ahead = (start - header.seq - self.at for start, _ in header.holes)
        return min((left for left in ahead if left > 0), default=header.count - self.at)

    @property
    def round_bytes(self) -> float:
        return self.header.nbytes / self.header.count

    def begin(self) -> None:
        self.begun = True

    def take_until(self, at: int) -> int:
        """Count rounds as taken; return how many more they are. Those that are to be skipped then, are."""
        more, seq, holes = at - self.at, self.header.seq, self.header.holes
        self.at = next((stop - seq for start, stop in holes if start - seq == at), at) if holes else at
        return more


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


def done_of(ranges: Iterable[Ranges]) -> DoneSplits:
    return {(each.source, each.pass_): Intervals(each.ranges) for each in ranges}


def ranges_of(done: DoneSplits) -> tuple[Ranges, ...]:
    return tuple(Ranges(*key, tuple(found.ranges())) for key, found in sorted(done.items()) if len(found))


def with_done(before: DoneSplits, done: Iterable[Named]) -> DoneSplits:
    """Return it with more splits. Neither is changed afterwards, so that what was noted down stays true."""
    after = dict(before)
    for each in done:
        key = (each.source, each.pass_)
        after[key] = after.get(key, _NOTHING).with_numbers(each.ordinals)
    return after


def with_gap(gaps: Gaps, start: int, stop: int) -> Gaps:
    """Return the ranges with one more, the last of them if they are many.

    >>> with_gap(((0, 3), (6, 8)), 3, 5), with_gap(((0, 3), (6, 8)), 2, 7)
    (((0, 5), (6, 8)), ((0, 8),))
    """
    return tuple(Intervals([*gaps, (start, stop)]).ranges())[-KEPT_GAPS:]


def splits_in(named: Iterable[Named]) -> Iterator[SplitKey]:
    return ((each.source, each.pass_, ordinal) for each in named for ordinal in each.ordinals)


def joined(named: Iterable[Named]) -> tuple[Named, ...]:
    """Return the splits of each source and pass together, each once, in the order they come.

    >>> joined([Named(0, 0, (4, 7)), Named(0, 1, (2,)), Named(0, 0, (7, 9), True), Named(0, 2, ())])
    (Named(source=0, pass_=0, ordinals=(4, 7, 9), ended=True), Named(source=0, pass_=1, ordinals=(2,), ended=False))
    """
    lists: dict[tuple[int, int], dict[int, None]] = {}
    ended: set[tuple[int, int]] = set()
    for each in named:
        key = (each.source, each.pass_)
        lists.setdefault(key, {}).update(dict.fromkeys(each.ordinals))
        if each.ended:
            ended.add(key)
    return tuple(
        Named(*key, tuple(ordinals), key in ended) for key, ordinals in lists.items() if ordinals or key in ended
    )


def strides_of(splits: Iterable[SplitKey]) -> list[Stride]:
    """Return runs of splits that follow each other at one distance.

    >>> strides_of([(0, 0, 2), (0, 0, 6), (0, 0, 10), (0, 0, 11), (0, 1, 4)])
    [Stride(first=2, count=3, step=4, pass_=0, source=0), Stride(first=11, count=1, step=1, pass_=0, source=0), \
Stride(first=4, count=1, step=1, pass_=1, source=0)]
    """
    runs: list[Stride] = []
    for source, pass_, ordinal in splits:
        last = runs[-1] if runs else Stride(ordinal, 1, 1, pass_, source)
        step = ordinal - last.first if last.count == 1 else last.step
        follows = step > 0 and ordinal == last.first + last.count * step
        if follows and (last.source, last.pass_) == (source, pass_):
            runs[-1] = Stride(last.first, last.count + 1, step, pass_, source)
        else:
            runs.append(Stride(ordinal, 1, 1, pass_, source))
    return runs


def splits_of(strides: Iterable[Stride]) -> Iterator[SplitKey]:
    for run in strides:
        yield from ((run.source, run.pass_, run.first + k * run.step) for k in range(run.count))
