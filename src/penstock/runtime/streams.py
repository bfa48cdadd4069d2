"""A pipeline as a stream of a job: the part of the data it reads, and what is asked of it there.

Rules:

1. In a stream a source reads the splits its feed names. Where it stands is `["@", source, pass, ordinal, index]` (and
   an offset), the end of a pass is ordinal -1. The tag makes places findable in a nested state.
2. A state has a place for every pass of a source that it has begun and still needs, and for the last it has finished.
   So, of what the feed named for (source, pass): without a place of that source, or with places of earlier passes
   only, all is still needed; with a place of that pass, what comes from the lowest one on; else nothing. `still_needed`
   says so in code.
3. A feed's answer for `after` never changes: opened at a place, a stream goes on with the same splits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import msgspec
import numpy as np

from penstock.core.errors import PenstockError
from penstock.runtime.contract import Origin, State

PLACE = "@"
PASS_ENDED = -1

Allocate: TypeAlias = Callable[[tuple[int, ...], "np.dtype[Any]"], "np.ndarray[Any, Any] | None"]


UnitRows: TypeAlias = Literal["whole", "thinned", "loose"]
"""whole: a unit is a batch, and has all its rows. thinned: a unit is a batch of what operators leave of it, and none
where nothing is left. loose: units say the order of elements, and batches are cut as ever."""


class StreamStopped(PenstockError):
    """The stream is being closed: whoever waits for a split, or for elements, gets this instead."""

    def __init__(self) -> None:
        super().__init__("the stream was closed; open it anew at the state it had")


class SplitFeed(Protocol):
    """Names the splits of a stream, one after the other, for each pass of each source."""

    def next_split(self, source: int, pass_: int, after: int | None) -> int | None:
        """Return the ordinal that follows `after` (None: the first); None: there is no more.

        May wait. Raises `StreamStopped` when the stream is being closed.
        """

    def known_split(self, source: int, pass_: int, after: int) -> int | None:
        """Return the same without waiting; None where it is not known yet, or there is no more."""

    def prefer(self, source: int, pass_: int, ordinals: Sequence[int]) -> None:
        """Hear which splits of a pass this host keeps the elements of. Where there is a choice, they come first."""

    def select(self, leftover: int) -> None:
        """Answer for that leftover from now on; only a tail calls it."""


@runtime_checkable
class UnitFeed(SplitFeed, Protocol):
    """Names elements by their index instead of splits: an ordinal is a unit, the elements of one output.

    Ordinals of a pass are 0, 1, 2, ...: that of the next unit is known before the unit is.
    """

    def unit(self, ordinal: int) -> Sequence[int]:
        """Return the indices of a unit that `next_split` or `known_split` has named."""

    def number(self, ordinal: int) -> int:
        """Return the unit's number in the whole epoch."""


class FlightRecorder(Protocol):
    """Writes down, outside of this process, what a user's function is working on."""

    def begin(self, origin: Origin | None, count: int) -> Any:
        """Note that work on `count` elements begins, the first of which came from `origin`."""

    def end(self, token: Any) -> None:
        """Note that the work `begin` gave the token for is done."""


class TornRounds(NamedTuple):
    """Rounds that follow a state and were made for another number of consumers, of which some have received more.

    Consumer c has received its outputs of the first `given[c]` rounds; nobody has any of those that follow.
    """

    consumers: int
    given: tuple[int, ...]


class Left(NamedTuple):
    """What is left of an ended stream: everything after `outputs` outputs from `state` on."""

    state: State
    outputs: int = 0
    shuffle_parts: int | None = None
    """Into how many parts the stream's shuffle was cut; None: into as many as the tail's."""
    keep: tuple[int, int] | None = None
    """Which elements were the stream's, as `StreamPart.keep` says it."""
    torn: TornRounds | None = None
    """The torn rounds that the stream was opened with, if it has given no round since."""


class StreamPart(msgspec.Struct, frozen=True, kw_only=True):
    """Which part of a job a run is."""

    feed: SplitFeed
    rest: Literal["keep", "give"] = "give"
    """keep: the last operator that regroups does not give its short rest at the end; it is left over."""
    shuffle_parts: int = 1
    """Block shuffles hold this part of their size."""
    keep: tuple[int, int] | None = None
    """(w, n): only elements number w of each n at the shard marker, or right after the source."""
    leftovers: tuple[Left | tuple[State, int], ...] = ()
    """Leftovers that a tail reads, in order; what is left of them is its input."""
    dropped: frozenset[tuple[int, int, int]] = frozenset()
    """(source, split, index) of elements to leave out."""
    suspects: frozenset[tuple[int, int, int, int]] = frozenset()
    """(source, split, index, count): from that element on, `count` are worked on one by one."""
    coordinated: int = 0
    """For so many consumers, each run of that many outputs is a round: of one bucket, padded alike. 0: not so.

    States of streams with and without are not each other's. The number itself may change at a state between rounds.
    """
    torn: TornRounds | None = None
    """With `coordinated`: rounds to take back when the stream opens; what nobody received of them comes again."""
    weights: tuple[float, ...] | None = None
    """The weights of the one mix in the graph, instead of its own. From a state made with other weights on, shares are
    counted anew."""
    units: UnitRows = "whole"
    """With a unit feed: what batches are made of."""
    allocate: Allocate | None = None
    """Gives memory for whole batches, or None where there is no room."""
    recorder: FlightRecorder | None = None


class SplitPlace(NamedTuple):
    source: int
    pass_: int
    ordinal: int


def places(state: State) -> list[SplitPlace]:
    """Return the places in a state, in the order they stand there.

    >>> places([0, [4, 4, [2, ["@", 0, 1, 19, 38]]], ["@", 1, 1, -1, 0]])
    [SplitPlace(source=0, pass_=1, ordinal=19), SplitPlace(source=1, pass_=1, ordinal=-1)]
    """
    found: list[SplitPlace] = []
    pending = [state]
    while pending:
        part = pending.pop()
        if isinstance(part, (list, tuple)):
            if len(part) >= 5 and part[0] == PLACE:
                found.append(SplitPlace(part[1], part[2], part[3]))
            else:
                pending.extend(reversed(part))
    return found


def still_needed(state: State, source: int, pass_: int, named: Sequence[int]) -> Sequence[int]:
    """Return those of the splits a feed `named` for a pass that reading on from `state` opens, in the same order.

    >>> still_needed([0, ["@", 0, 1, 7, 2]], 0, 1, [3, 7, 9]), still_needed(None, 0, 1, [3, 7])
    ([7, 9], [3, 7])
    """
    found = [place for place in places(state) if place.source == source]
    here = [place.ordinal for place in found if place.pass_ == pass_]
    if here:
        first = min((named.index(ordinal) for ordinal in here if ordinal != PASS_ENDED), default=len(named))
        return named[first:]
    return named[:0] if any(place.pass_ > pass_ for place in found) else named
