"""Which splits a stream was granted, and which of them a cut still needs.

A list for (source, pass) only grows, and is in the order in which the dispatcher granted. An engine state names places
in these lists. By rule 2 of `runtime.streams` what comes before the lowest place of a pass is done, a pass before one
that has a place is done, and everything else is still needed: a source without any place stands at its beginning.

What is done goes into a log. Each reader is told the part of the log that is new to it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

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


UNKNOWN = -2
"""Answer of `following`: the dispatcher must be asked."""


class Ledger:
    """One stream's lists, from a cut on. Engine threads ask for splits while the stream's thread accounts for cuts."""

    def __init__(self, named: Iterable[Named] = ()) -> None:
        self._lock = threading.Lock()
        self._lists: dict[PassKey, _List] = {}
        self._done: list[tuple[PassKey, int]] = []
        self.forgotten = 0
        """Entries of the log that are not kept any more."""
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
                found.handed = max(found.handed, at + 1)
                return found.ordinals[at]
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
            if found.last is not None and found.last != after:
                return
            if ordinals:
                found.ordinals.extend(ordinals)
                found.last = ordinals[-1]
            else:
                found.ended = True

    def settle(self, places: Iterable[Place]) -> tuple[Named, ...]:
        """Return what a cut with these places still needs; the rest goes to the log of what is done."""
        with self._lock:
            lowest: dict[PassKey, int] = {}
            for place in places:
                key = (place.source, place.pass_)
                lowest[key] = min(self._index(key, place.ordinal), lowest.get(key, 1 << 62))
            latest: dict[int, int] = {}
            for source, pass_ in lowest:
                latest[source] = max(pass_, latest.get(source, pass_))
            for key in list(self._lists):
                if key in lowest:
                    self._forget(key, lowest[key])
                elif key[1] < latest.get(key[0], key[1]):
                    self._forget(key, self._lists[key].handed)
                    del self._lists[key]
            return tuple(
                Named(source, pass_, tuple(found.ordinals[: found.handed]))
                for (source, pass_), found in sorted(self._lists.items())
                if found.handed
            )

    def settle_all(self) -> None:
        """The stream has ended and left nothing over: everything is done."""
        with self._lock:
            for key, found in self._lists.items():
                self._forget(key, found.handed)

    def _index(self, key: PassKey, ordinal: int) -> int:
        found = self._lists.setdefault(key, _List())
        if ordinal == PASS_ENDED:
            return found.handed
        try:
            return found.ordinals.index(ordinal)
        except ValueError:
            found.ordinals.insert(0, ordinal)  # opened at a place no list named: it is needed, and the first known
            found.handed += 1
            found.last = ordinal if found.last is None else found.last
            return 0

    def _forget(self, key: PassKey, count: int) -> None:
        found = self._lists[key]
        self._done.extend((key, ordinal) for ordinal in found.ordinals[:count])
        del found.ordinals[:count]
        found.handed -= count

    @property
    def done_count(self) -> int:
        """How many entries the log has had."""
        return self.forgotten + len(self._done)

    def done_since(self, count: int) -> tuple[Named, ...]:
        """Return what was done after the first `count` entries of the log."""
        with self._lock:
            entries = self._done[max(0, count - self.forgotten) :]
        by_pass: dict[PassKey, list[int]] = {}
        for key, ordinal in entries:
            by_pass.setdefault(key, []).append(ordinal)
        return tuple(Named(source, pass_, tuple(ordinals)) for (source, pass_), ordinals in by_pass.items())

    def forget_done(self, count: int) -> None:
        """Keep the first `count` entries of the log no longer."""
        with self._lock:
            if count > self.forgotten:
                del self._done[: count - self.forgotten]
                self.forgotten = count
