"""A stream that trainers share: the sliding window over its rounds, and the ranks of each trainer that reads them.

The **window** has rounds that were made once, in the order they were made. An entry holds the rounds of one frame.
Entries follow each other without a gap, the oldest goes first, and the end stays known when all of them are gone, so
that making can go on from it.

The ranks of a trainer are a **team**:

1. A trainer has **lives**: without its states it begins another; the dispatcher counts them. All ranks of one life
   begin at the same round: after what the trainer was sent in earlier ones, or where the window begins.
2. `front` is the first round that no rank was given. It moves when all ranks are there and have credit, so that ranks
   are given a round together. One behind it is given what it lacks. A missing rank is waited for a few seconds: then
   others go on, and it is given the same when it comes. But they skip nothing without it until it has been silent for
   `trainer_timeout_s`: as long as news of a new binding is late, an older one may still give it what is gone here.
3. What was gone from the window when the front moved is a **gap**: no rank is given that, also one that goes back to an
   older state. Ranks remember gaps, in their states too, and tell every process that serves them: it may know nothing
   yet. So a rank that is through with a stream opens it as well in a new binding.
"""

from __future__ import annotations

import bisect
from collections import deque
from math import inf
from operator import attrgetter
from typing import Any

import msgspec

from penstock.stream.position import Gaps, with_gap
from penstock.stream.serving import Key, ServedReader
from penstock.wire.frames import OpenStream
from penstock.wire.jobs import Cut

GATHER_RANKS_S = 5.0  # how long ranks wait for one of their trainer's that is missing, before they are given more


class Entry(msgspec.Struct, eq=False):
    """`count` rounds from `seq` on; `cut` is the state after them. `payload` is the caller's."""

    seq: int
    count: int
    cut: Cut
    nbytes: int
    payload: Any = None
    made_for: str | None = None
    """The trainer whose request caused it to be made."""

    @property
    def after(self) -> int:
        return self.seq + self.count

    def grow(self, nbytes: int) -> None:
        """It takes so much more: what it holds is kept in compressed form as well."""
        self.nbytes += nbytes


_after = attrgetter("after")


class Window:
    """
    >>> window = Window(Cut(), 0)
    >>> for seq in (0, 3, 5):
    ...     window.add(Entry(seq, 3 if seq == 0 else 2, Cut(), 10))
    >>> window.first, window.end, window.holding(4).seq, window.holding(7)
    (0, 7, 3, None)
    >>> window.evict().seq, window.first, window.holding(0).seq, window.nbytes
    (0, 3, 3, 20)
    >>> window.grow(window.oldest, 4); window.nbytes, window.evict().nbytes, window.nbytes
    (24, 14, 10)
    """

    def __init__(self, cut: Cut, round_: int) -> None:
        self._entries: deque[Entry] = deque()
        self.nbytes = 0
        self.end = round_
        """The first round that was not made yet."""
        self.end_cut = cut

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def first(self) -> int:
        """The oldest round here."""
        return self._entries[0].seq if self._entries else self.end

    @property
    def oldest(self) -> Entry:
        return self._entries[0]

    def holding(self, round_: int) -> Entry | None:
        """Return the first entry that has this round or a later one; None: they are yet to be made."""
        entries = self._entries
        if round_ >= self.end or not entries:
            return None
        if entries[-1].seq <= round_:
            return entries[-1]  # most readers are near the front
        return entries[bisect.bisect_right(entries, round_, key=_after)]

    def add(self, entry: Entry) -> None:
        if entry.seq != self.end:
            raise ValueError(f"round {entry.seq} after {self.end}")
        self._entries.append(entry)
        self.nbytes += entry.nbytes
        self.end, self.end_cut = entry.after, entry.cut

    def grow(self, entry: Entry, nbytes: int) -> None:
        entry.grow(nbytes)
        self.nbytes += nbytes

    def evict(self) -> Entry:
        """Let the oldest entry go, and return it."""
        entry = self._entries.popleft()
        self.nbytes -= entry.nbytes
        return entry


class RankReader(ServedReader):
    """One rank of a trainer."""

    def __init__(self, peer: bytes, message: OpenStream, key: Key, now: float) -> None:
        super().__init__(peer, message, key[1])
        self.trainer = key[0]
        self.fresh = message.fresh
        self.next_round = self.taken = message.round
        """What it is sent next; the first that its trainer has not taken."""
        self.heard_at = now
        self.passed_over = False

    @property
    def hungry(self) -> bool:
        return self.sent_bytes < self.credit and not self.passed_over

    def hear(self, credit: int, taken: int, now: float) -> None:
        super().hear(credit, taken, now)
        self.taken = max(self.taken, taken, self.next_round if taken >= self.due else 0)
        self.heard_at = now
        self.passed_over = False

    def move_to(self, round_: int) -> None:
        """Rounds before that one are not its to have."""
        if round_ > self.next_round:
            self.taken = round_ if self.taken == self.next_round else self.taken
            self.next_round = round_

    def give(self, after: int, nbytes: int) -> None:
        super().give(after, nbytes)
        self.next_round = after

    def pass_over(self) -> None:
        self.passed_over = True


class Team:
    """The ranks of a trainer, in one life of it: what they were given together, and what they skip together."""

    def __init__(self, life: int, *, before: int | None, begun: bool) -> None:
        self.life = life
        self.before = before
        """The first round that the trainer was not given here in the lives before; None: it had none."""
        self.begun = begun
        """Whether it is known where the team begins; if not, it begins after `before`, or where the window does."""
        self.ended: set[int] = set()
        """Seats whose readers were told that the stream has ended."""
        self.alone_since = inf
        """Since when some rank has been missing."""
        self.impatient, self.skips_alone = False, False
        """Whether the ranks that are there go on without those that are missing; and also skip rounds without them."""
        self.had: int | None = None
        """The first round that no rank was sent, or that none has taken, where they left and said so; None: nothing."""
        self._begins = 0
        self._next: dict[int, int] = {}
        """By seat: what the rank was to be given next, when it was last heard of."""
        self._gaps: Gaps = ()
        self.gaps_end = 0
        """Where the last of them ends: from there on nothing is skipped."""
        self._left = 0
        """Where ranks stood when they left."""

    def hear(self, seat: int, message: OpenStream) -> None:
        """A rank says where it stands. If it has been given something, this life of its trainer began elsewhere."""
        self.ended.discard(seat)
        for start, stop in message.gaps:
            self.skip(start, stop)
        self.begun = self.begun or bool(message.gaps) or not message.fresh
        self._next[seat] = 0 if message.fresh else message.round

    @property
    def front(self) -> int:
        """The first round that no rank was given. It goes back when all of them do."""
        return max(self._begins, *self._next.values()) if self._next else self._begins

    def past_gaps(self, round_: int) -> int:
        """Return the first round from that one on that is not skipped."""
        return next((stop for start, stop in self._gaps if start <= round_ < stop), round_)

    def gaps_in(self, start: int, stop: int) -> Gaps:
        return tuple((max(a, start), min(b, stop)) for a, b in self._gaps if a < stop and b > start)

    def begin_at(self, round_: int) -> None:
        self.begun, self._begins = True, round_
        self.skip(0, round_)

    def skip(self, start: int, stop: int) -> None:
        """Rounds are gone before any rank was given them."""
        self._gaps = with_gap(self._gaps, start, stop)
        self.gaps_end = max(self.gaps_end, stop if start < stop else 0)

    def give(self, seat: int, after: int) -> None:
        self.begun = True
        self._next[seat] = after
        self.had = max(after, self.had or 0)

    def end(self, seat: int) -> None:
        self.ended.add(seat)

    def leave(self, taken: int) -> None:
        """A rank leaves; the one that is furthest has taken the rounds before that one."""
        self._left = self.had = max(self._left, taken)

    def await_ranks(self, now: float, timeout_s: float, *, complete: bool) -> bool:
        """Note since when a rank has been missing; say whether it is not waited for from now on."""
        before = self.impatient
        self.alone_since = inf if complete else min(self.alone_since, now)
        self.impatient, self.skips_alone = (
            now - self.alone_since >= each_s for each_s in (GATHER_RANKS_S, max(timeout_s, GATHER_RANKS_S))
        )
        return self.impatient and not before
