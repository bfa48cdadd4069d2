"""What a served stream says to its hands (whom to tell what, when to run), and how a run's outputs become rounds.

It is decided in `stream.serving` and `stream.sharing`, and done in `worker.streams` and `worker.shared`. Of the outputs
of the engine, in order, round r is outputs r·m to r·m + m - 1. Rules:

1. Only whole rounds are taken; the outputs of an incomplete one wait for the next chunk.
2. `Cut.since` rounds after the cut's engine state are made and dropped: they were received before.
3. With `Cut.regroup` the outputs right after the engine state came in rounds of another width, and some consumers had
   received more of them than others. What they received is dropped, one by one; the rest makes the first rounds. As
   long as a round ends inside that stretch no engine state alone describes it, so its cut counts from the old one.
   In coordinated reads the engine itself takes those rounds back when it opens, and all its outputs are new.
4. A state is asked of the marks once for all rounds taken together, not once a round.

How many outputs to ask for at a time follows from how long the last took, and how large they were (`PullSizer`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec

from penstock.core.element import Element
from penstock.core.ids import AttemptId
from penstock.stream.checkpoint import Mixes
from penstock.wire.frames import StreamEnded, StreamFailed, StreamRefused
from penstock.wire.jobs import Cut, FeedSpec

PULL_S = 0.004  # how long a pull should take: what it returns is sent no earlier
MAX_ROUNDS = 4_096  # in one frame
FRAME_BYTES = 1 << 20


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What all openings of one binding have in common."""

    attempt: AttemptId
    epoch: int
    feed: FeedSpec
    share: int
    binding: int


class End(NamedTuple):
    """How many rounds there were, where the stream stands after them, and whether there is more than they took."""

    seq: int
    cut: Cut
    leftover: bool


class Send(NamedTuple):
    """A message to a reader."""

    peer: bytes
    message: StreamRefused | StreamEnded | StreamFailed


class StartRun(NamedTuple):
    """Begin to make rounds; who did so until now has been stopped."""

    number: int
    terms: Terms
    start: Cut
    start_round: int
    mixes: Mixes = ()
    frame_bytes: int = FRAME_BYTES


class StopRun(NamedTuple):
    number: int


Instruction: TypeAlias = Send | StartRun | StopRun


class Wanted(NamedTuple):
    """A reader needs rounds from `first` on, as its seat's output of each."""

    peer: bytes
    opening: int
    seat: int
    first: int
    slab: bool
    alone: bool
    """Whether no other reader gets the same rounds."""


# Rounds


class OutputMarks(Protocol):
    """What the engine says of a chunk: its state after the first k outputs."""

    def at(self, k: int, /) -> Any: ...


class Outputs(Protocol):
    """A chunk of the engine's outputs, in order."""

    @property
    def elements(self) -> Sequence[Element]: ...

    @property
    def marks(self) -> OutputMarks: ...


class Taken(msgspec.Struct, frozen=True):
    """`count` whole rounds from `seq` on, and where the stream stands after them."""

    seq: int
    count: int
    outputs: Sequence[Element]
    after: Cut
    """The cut after the last of the rounds. It names no splits: the caller adds them, who knows them."""
    repeated: bool = False
    """Whether some outputs go to more than one consumer."""

    def of(self, consumer: int, *, skip: int = 0) -> list[Element]:
        """Return the outputs of one consumer, without its first `skip` rounds."""
        width = len(self.outputs) // self.count
        return list(self.outputs[skip * width + consumer :: width])


class _Piece(msgspec.Struct, frozen=True):
    """Outputs that follow each other in one chunk."""

    elements: Sequence[Element]
    marks: OutputMarks
    first: int
    """The place in the chunk of the first of them."""
    number: int
    """The number of the first among the outputs after the engine state that the stream was opened at."""

    def rest(self, count: int) -> _Piece:
        return _Piece(self.elements[count:], self.marks, self.first + count, self.number + count)


class RoundMaker:
    """Groups outputs from a cut on; `next_round` is the number of the next round to be taken."""

    def __init__(self, *, width: int, cut: Cut, next_round: int, coordinated: bool = False) -> None:
        self.width = width
        self.next_round = next_round
        self._start = cut
        self._given = 0  # whole rounds taken since the start
        self.to_drop = cut.since * width
        """How many outputs are still to be made and dropped, at least, before a round can begin."""
        self._pieces: deque[_Piece] = deque()
        self._waiting = 0
        self._made = 0  # outputs seen since the engine state
        self.counted = 0
        """How many of them belong to rounds, those that were received before included."""
        regroup = cut.regroup
        self._stretch_end = 0 if regroup is None or coordinated else max(regroup.given, default=0) * regroup.width
        self.standing = Cut(cut.engine, cut.since, regroup=cut.regroup)
        """The cut after the last round that was taken."""

    @property
    def ready(self) -> int:
        """How many whole rounds wait."""
        return self._waiting // self.width

    def add(self, chunk: Outputs) -> None:
        elements, first = chunk.elements, 0
        if self._made < self._stretch_end:
            first = min(len(elements), self._stretch_end - self._made)
            for k in range(first):
                if not self._was_received(self._made + k):
                    self._keep(_Piece(elements[k : k + 1], chunk.marks, k, self._made + k))
        if first < len(elements):
            self._keep(_Piece(elements[first:] if first else elements, chunk.marks, first, self._made + first))
        self._made += len(elements)

    def _was_received(self, number: int) -> bool:
        regroup = self._start.regroup
        assert regroup is not None
        round_, consumer = divmod(number, regroup.width)
        return round_ < regroup.given[consumer]

    def _keep(self, piece: _Piece) -> None:
        self.counted += len(piece.elements)
        if self.to_drop:
            dropped = min(self.to_drop, len(piece.elements))
            self.to_drop -= dropped
            if not self.to_drop and piece.number + dropped >= self._stretch_end:
                self.standing = Cut(piece.marks.at(piece.first + dropped))  # here nothing is to be made again
            piece = piece.rest(dropped)
        if len(piece.elements):
            self._pieces.append(piece)
            self._waiting += len(piece.elements)

    def take(self, most: int = 1 << 62) -> Taken | None:
        """Return the whole rounds that wait, at most so many."""
        count = min(self.ready, most)
        if not count:
            return None
        outputs: list[Element] = []
        want = count * self.width
        while len(outputs) < want:
            piece = self._pieces.popleft()
            room = want - len(outputs)
            outputs.extend(piece.elements[:room])
            last, at = piece, min(room, len(piece.elements))
        if at < len(last.elements):
            self._pieces.appendleft(last.rest(at))
        self._waiting -= want
        self._given += count
        if last.number + at >= self._stretch_end:
            self.standing = Cut(last.marks.at(last.first + at))
        else:
            start = self._start
            self.standing = Cut(start.engine, start.since + self._given, regroup=start.regroup)
        taken = Taken(self.next_round, count, outputs, self.standing)
        self.next_round += count
        return taken

    def take_rest(self, *, pad: bool) -> Taken | None:
        """At the end of everything: return the incomplete round filled up with its own outputs, or drop it."""
        outputs = [element for piece in self._pieces for element in piece.elements]
        self._pieces.clear()
        self._waiting = 0
        if not outputs or not pad:
            return None
        filled = [outputs[k % len(outputs)] for k in range(self.width)]
        # No engine state lies after repeated outputs: opened here again, the round is made up and dropped.
        last = self.standing
        self.standing = Cut(last.engine, last.since + 1, regroup=last.regroup)
        taken = Taken(self.next_round, 1, filled, self.standing, repeated=True)
        self.next_round += 1
        return taken

    @property
    def incomplete(self) -> int:
        """How many outputs wait for a round to be whole."""
        return self._waiting % self.width


class PullSizer:
    """How many outputs to ask the engine for: as many as lately fitted into time and frame, at most twice the most yet.

    An answer with fewer than were asked for says where the engine's own chunk ended, and nothing of how many fit.

    >>> sizer = PullSizer(width=1)
    >>> [(sizer.want(), sizer.made(sizer.want(), 1e-5, 1000.0))[0] for _ in range(4)]
    [1, 2, 4, 8]
    >>> sizer.made(3, 3e-5, 1000.0); sizer.want()
    16
    """

    def __init__(self, width: int, frame_bytes: int = FRAME_BYTES) -> None:
        self._width = width
        self._frame_bytes = frame_bytes
        self._most = 0
        self._seconds = 0.0  # an output, lately
        self.bytes_each = 0.0

    def want(self) -> int:
        if not self._most:
            return self._width
        fits = [2.0 * self._most, float(MAX_ROUNDS * self._width)]
        if self.bytes_each:
            fits.append(self._frame_bytes * self._width / self.bytes_each)
        if self._seconds:
            fits.append(PULL_S / self._seconds)
        return max(self._width, int(min(fits)))

    def made(self, count: int, seconds: float, bytes_each: float) -> None:
        self._most = max(count, self._most, self._width)
        share = seconds / count
        self._seconds = share if not self._seconds else 0.5 * (self._seconds + share)
        self.bytes_each = bytes_each if not self.bytes_each else 0.5 * (self.bytes_each + bytes_each)
