"""group_by_window and bucket_by_length: elements wait in a window per key until it is full.

At the end of the input the windows left over are given short, the one that waited longest first. With `keep_rest` they
go on waiting: the state at the end has them.

With coordinated reads a window holds a round: `members` outputs, one for each consumer, made of it as a list. At the
end, what fills no round of its bucket moves up into the next larger bucket. What is left in the last one is shared out
evenly; keys that are not buckets keep to themselves, and what cannot give each consumer an element is not given. Which
window comes next depends on nothing but what waits, so the end can be left and opened at every round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from penstock.core.element import Element
from penstock.core.errors import InvalidPipelineError
from penstock.runtime.blame import raise_blamed, wrong_row
from penstock.runtime.contract import Chunk, Fixed, Idents, Origin, RegroupingStage, Stage, State
from penstock.runtime.ops.pending import Moment, MomentMarks, OpenedAt, PendingInput, Waiting
from penstock.runtime.stats import StageMeter

INPUTS_PER_OUTPUT = 16  # how much is asked of the input at a time for each window wanted


class WindowRules(msgspec.Struct, frozen=True, kw_only=True):
    """What makes a window: its key, its size, and what is made of it."""

    label: str
    key: Callable[[Element], Any]
    size: Callable[[Any], int]
    finish: Callable[[Any, Sequence[Element]], Element]
    drop_last: bool
    max_pending: int | None = None
    members: int = 1
    """How many outputs `finish` makes, where it makes a list of them."""
    moves_up: bool = False
    """Keys are numbers of buckets, and each fits into all larger ones."""

    def of_rounds(self, members: int, *, moves_up: bool) -> WindowRules:
        """Return rules for windows that many times as large."""
        size = self.size
        return replace(self, size=lambda key: members * size(key), members=members, moves_up=moves_up)


class Torn(msgspec.Struct, frozen=True):
    """Rounds by other rules of which only some members were received, the first `given[i]` of member i."""

    rules: WindowRules
    given: Sequence[int]


def part_sizes(count: int, parts: int) -> list[int]:
    """Return how many of `count` each of so many parts gets, as evenly as can be; of fewer, each is a part.

    >>> part_sizes(7, 3), part_sizes(2, 3)
    ([3, 2, 2], [1, 1])
    """
    least, more = divmod(count, parts)
    return [size for i in range(parts) if (size := least + (i < more))]


class _Due(NamedTuple):
    """What is to be given now."""

    key: Any
    window: list[Waiting]


class _Given(msgspec.Struct):
    """The windows of one chunk. `moments` has one entry more: the moment before the first."""

    moments: list[Moment]
    elements: list[Element] = []
    origins: list[Origin | None] = []
    idents: list[Idents] = []

    def chunk(self) -> Chunk:
        idents = np.concatenate(self.idents) if self.idents else None
        return Chunk(self.elements, MomentMarks(self.moments, self.origins), idents)


class Windows(RegroupingStage):
    def __init__(
        self,
        meter: StageMeter,
        upstream: Stage,
        rules: WindowRules,
        *,
        keep_rest: bool = False,
        torn: Torn | None = None,
    ) -> None:
        super().__init__(meter, upstream)
        self._rules = rules
        self._keep_rest = keep_rest
        self._torn = torn
        self._input = PendingInput(upstream)

    def open(self, pass_: int, state: State) -> None:
        self._windows: dict[Any, list[Waiting]] = {}
        self._ended = False
        self._error: Exception | None = None
        for waiting in self._input.open(pass_, state):
            self._windows.setdefault(self._key_of(waiting), []).append(waiting)
        self._may_overflow = bool(self._windows)  # sizes may have been larger when the state was made
        self._now: Moment = OpenedAt(state)
        if self._torn is not None:
            self._take_back(self._torn)

    def _take_back(self, torn: Torn) -> None:
        """Make the torn rounds again; what was not received of them goes on waiting."""
        own, self._rules = self._rules, torn.rules
        back: list[Waiting] = []
        for number in range(max(torn.given)):
            due = self._next_due(1, only_at_hand=False)
            if due is None:
                break
            self._remove(due)
            first = 0
            for size, given in zip(part_sizes(len(due.window), torn.rules.members), torn.given):
                member = due.window[first : first + size]
                first += size
                if number < given:
                    for waiting in member:
                        self._input.give(waiting)
                else:
                    back += member
        for waiting in back:
            self._windows.setdefault(self._key_of(waiting), []).append(waiting)
        for window in self._windows.values():
            window.sort(key=lambda waiting: waiting.ordinal)
        self._rules, self._may_overflow = own, True
        self._now = self._input.moment()

    def _pull(self, want: int) -> Chunk:
        if self._error is not None:
            raise self._error
        given = _Given([self._now])
        while len(given.elements) < want:
            try:
                due = self._next_due(want, only_at_hand=bool(given.elements))
                if due is None:
                    break
                self._give(due, given)
            except Exception as error:
                if not given.elements:
                    raise
                self._error = error
                break
        if not given.elements:
            return Chunk((), Fixed(self._now.state()))
        return given.chunk()

    def _next_due(self, want: int, *, only_at_hand: bool) -> _Due | None:
        """Take elements until a window is to be given; None: there is none at hand, or none any more."""
        if self._may_overflow:
            self._input.look(want)
            full = [key for key, window in self._windows.items() if len(window) >= self._rules.size(key)]
            if full:
                key = min(full, key=self._age)
                return _Due(key, self._windows[key][: self._rules.size(key)])
            self._may_overflow = False
        while not self._ended and (self._input.at_hand or not only_at_hand):
            taken = self._input.take(want * self._rules.members * INPUTS_PER_OUTPUT)
            if taken is None:
                self._ended = True
            elif (due := self._arrived(taken)) is not None:
                return due
        if not self._ended:
            return None
        due = self._last()
        if due is None:
            self._now = self._input.moment()
        return due

    def _arrived(self, taken: Waiting) -> _Due | None:
        rules, key = self._rules, self._key_of(taken)
        window = self._windows.setdefault(key, [])
        window.append(taken)
        if len(window) >= rules.size(key):
            return _Due(key, window)
        if rules.max_pending is None or self._input.waiting <= rules.max_pending:
            return None
        due = self._longest_waiting()
        if due is None:
            raise InvalidPipelineError(
                f"{rules.label}: {self._input.waiting} elements wait and no {rules.members} of them have the same key, "
                "so that no round can be given; use fewer keys, or a larger max_pending"
            )
        return due

    def _last(self) -> _Due | None:
        """Return what is to be given next at the end of the input."""
        rules = self._rules
        if self._keep_rest or not self._windows:
            return None
        if rules.moves_up:
            return self._moved_up()
        return None if rules.drop_last else self._longest_waiting()

    def _longest_waiting(self) -> _Due | None:
        """Return the oldest window of which each consumer can get an element."""
        enough = [key for key, window in self._windows.items() if len(window) >= self._rules.members]
        if not enough:
            return None
        key = min(enough, key=self._age)
        return _Due(key, self._windows[key])

    def _moved_up(self) -> _Due | None:
        """Return the first window that elements of smaller buckets fill; the shortest are given first."""
        gathered: list[Waiting] = []
        largest = max(self._windows)
        for bucket in range(min(self._windows), largest + 1):
            gathered += self._windows.get(bucket, [])
            size = self._rules.size(bucket)
            if len(gathered) >= size:
                return _Due(bucket, gathered[:size])
        return None if self._rules.drop_last else _Due(largest, gathered)

    @property
    def has_rest(self) -> bool:
        return bool(self._windows)

    def _give(self, due: _Due, given: _Given) -> None:
        first = due.window[0]
        origin = first.origin
        try:
            element = self._rules.finish(due.key, [waiting.element for waiting in due.window])
        except Exception as error:
            raise_blamed(error, self._rules.label, due.window[wrong_row(error)].origin)
        self._remove(due)
        for waiting in due.window:
            self._input.give(waiting)
        self._now = self._input.moment()
        given.elements.append(element)
        given.moments.append(self._now)
        given.origins.append(origin)
        if first.ident is not None:
            given.idents.append(first.ident)

    def _remove(self, due: _Due) -> None:
        if self._windows.get(due.key) is due.window:
            del self._windows[due.key]
            return
        gone = {waiting.ordinal for waiting in due.window}
        rests = {key: [w for w in window if w.ordinal not in gone] for key, window in self._windows.items()}
        self._windows = {key: rest for key, rest in rests.items() if rest}

    def _age(self, key: Any) -> int:
        return self._windows[key][0].ordinal

    def _key_of(self, waiting: Waiting) -> Any:
        try:
            key = self._rules.key(waiting.element)
            hash(key)  # it names a window: what cannot is said of the element it came of
            return key
        except Exception as error:
            raise_blamed(error, self._rules.label, waiting.origin)
