"""Which splits a stream was granted, and which of them a cut still needs.

A list for (source, pass) only grows, and is in the order in which the dispatcher granted. An engine state names places
in these lists. By rule 2 of `runtime.streams` what comes before the lowest place of a pass is done, a pass before one
that has a place is done, and everything else is still needed: a source without any place stands at its beginning.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.runtime.streams import PASS_ENDED, Place
from penstock.wire.jobs import Named

PassKey = tuple[int, int]
"""(source, pass)"""


@dataclass(slots=True)
class _List:
    ordinals: list[int] = field(default_factory=list)
    handed: int = 0
    """How many of them, from the front, the engine has been given."""
    ended: bool = False
    last: int | None = None
    """The last ordinal ever known; it stays when the list is forgotten."""

    def hand(self, at: int) -> int:
        """Give the engine the one at that place."""
        self.handed = max(self.handed, at + 1)
        return self.ordinals[at]

    def extend(self, ordinals: Sequence[int]) -> None:
        """The dispatcher granted these; none: there are no more."""
        self.ordinals.extend(ordinals)
        self.last = ordinals[-1] if ordinals else self.last
        self.ended = not ordinals

    def begin_with(self, ordinal: int) -> None:
        """The stream was opened at a place that no list named: it is needed, and the first known."""
        self.ordinals.insert(0, ordinal)
        self.handed += 1
        self.last = ordinal if self.last is None else self.last

    def forget(self, count: int) -> tuple[int, ...]:
        """Return the first `count`, which are done, and keep them no longer."""
        gone = tuple(self.ordinals[:count])
        del self.ordinals[:count]
        self.handed -= count
        return gone


class Settled(NamedTuple):
    """What a cut still needs of what was handed to the engine, and what no cut from there on does."""

    named: tuple[Named, ...]
    done: tuple[Named, ...]


UNKNOWN = -2
"""Answer of `following`: the dispatcher must be asked."""


class Ledger:
    """One stream's lists, from a cut on. Engine threads ask for splits while the stream's thread accounts for cuts."""

    def __init__(self, named: Iterable[Named] = ()) -> None:
        self._lock = threading.Lock()
        self._lists: dict[PassKey, _List] = {}
        for entry in named:
            ordinals = list(entry.ordinals)
            self._lists[entry.source, entry.pass_] = _List(
                ordinals, handed=len(ordinals), last=ordinals[-1] if ordinals else None
            )

    def following(self, key: PassKey, after: int | None) -> int | None:
        """Return the ordinal after `after`, None at the end of the list, `UNKNOWN` if more may be granted."""
        with self._lock:
            found = self._lists.setdefault(key, _List())
            at = self._place_after(found, after)
            if at < len(found.ordinals):
                return found.hand(at)
            return None if found.ended else UNKNOWN

    def known_after(self, key: PassKey, after: int) -> int | None:
        """Return the same, but do not count the split as opened."""
        with self._lock:
            found = self._lists.setdefault(key, _List())
            at = self._place_after(found, after)
            return found.ordinals[at] if at < len(found.ordinals) else None if found.ended else UNKNOWN

    def _place_after(self, found: _List, after: int | None) -> int:
        if after is None or after not in found.ordinals:
            return 0  # what was done is forgotten, so that what is kept begins right after it
        return found.ordinals.index(after) + 1

    def last(self, key: PassKey, after: int | None) -> int | None:
        """Return the last ordinal known, else `after`: what the dispatcher is asked to go on from."""
        with self._lock:
            found = self._lists.setdefault(key, _List())
            return after if found.last is None else found.last

    def all_handed(self, key: PassKey) -> bool:
        """Say whether the next split of this pass has to be asked for."""
        with self._lock:
            found = self._lists.get(key)
            return found is not None and not found.ended and found.handed == len(found.ordinals)

    def granted(self, key: PassKey, after: int | None, ordinals: Sequence[int]) -> None:
        """Take an answer in; the same answer twice changes nothing."""
        with self._lock:
            found = self._lists.setdefault(key, _List())
            if found.last is None or found.last == after:
                found.extend(ordinals)

    def settle(self, places: Iterable[Place]) -> Settled:
        """Return what a cut with these places still needs, and what it does not need any more."""
        with self._lock:
            lowest: dict[PassKey, int] = {}
            for place in places:
                key = (place.source, place.pass_)
                lowest[key] = min(self._index(key, place.ordinal), lowest.get(key, 1 << 62))
            latest: dict[int, int] = {}
            for source, pass_ in lowest:
                latest[source] = max(pass_, latest.get(source, pass_))
            done: list[Named] = []
            for key in list(self._lists):
                if key in lowest:
                    done += self._forget(key, lowest[key])
                elif key[1] < latest.get(key[0], key[1]):
                    done += self._forget(key, self._lists[key].handed)
                    del self._lists[key]
            named = tuple(
                Named(source, pass_, tuple(found.ordinals[: found.handed]))
                for (source, pass_), found in sorted(self._lists.items())
                if found.handed
            )
            return Settled(named, tuple(done))

    def settle_all(self) -> tuple[Named, ...]:
        """The stream has ended and left nothing over: return all that is done by that."""
        with self._lock:
            return tuple(named for key, found in self._lists.items() for named in self._forget(key, found.handed))

    def _index(self, key: PassKey, ordinal: int) -> int:
        found = self._lists.setdefault(key, _List())
        if ordinal == PASS_ENDED:
            return found.handed
        try:
            return found.ordinals.index(ordinal)
        except ValueError:
            found.begin_with(ordinal)
            return 0

    def _forget(self, key: PassKey, count: int) -> list[Named]:
        found = self._lists[key]
        return [Named(*key, gone)] if (gone := found.forget(count)) else []
