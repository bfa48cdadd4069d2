"""Reads an entry as a source's reader reads a split, a window ahead of what is asked for."""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import Any

import numpy as np

from penstock.caching.elsewhere import EntryKeeper
from penstock.caching.entries import DamagedEntryError, OpenEntry
from penstock.caching.patience import PendingCall
from penstock.core.element import Element
from penstock.core.errors import CodecError
from penstock.sources.base import Records

WINDOW_BYTES = 1 << 20  # of an entry, read in one go: what holds one element holds so much
AHEAD_BYTES = 4 << 20  # that the disk is told of while a window is read: it has more than one request to work on


class LostEntryError(Exception):
    """An entry that was begun cannot be read on."""


class KeptReader:
    """The next window is read while the last one is worked on."""

    def __init__(self, keeper: EntryKeeper, name: str, entry: OpenEntry, index: int) -> None:
        self._keeper, self.name, self._entry = keeper, name, entry
        firsts = np.concatenate([[0], np.cumsum(entry.counts)])
        passed = int(np.searchsorted(entry.indices, index))
        self._frame = int(np.searchsorted(firsts, passed, side="right")) - 1
        self._element = int(firsts[self._frame])
        self._drop = passed - self._element
        self._rest: deque[Element] = deque()
        self._asked: PendingCall[list[list[Element]]] | None = None
        self._asked_bytes = 0
        self._left = False
        self._ask()

    def _ask(self) -> None:
        """Have the next window read, or leave the rest to be computed, where storage is left alone now."""
        keeper, entry, first = self._keeper, self._entry, self._frame
        self._frame = stop = entry.window(first, WINDOW_BYTES)
        self._left = stop > first and keeper.away
        if stop == first or self._left:
            self._asked = None
            return
        self._asked = keeper.ask(lambda: _read(keeper, entry, first, stop))
        self._asked_bytes = int(entry.sizes[first:stop].sum())

    def read(self, want: int) -> Records:
        while not self._rest and self._asked is not None:
            self._take()
        if not self._rest and self._left:
            raise LostEntryError
        count = min(want, len(self._rest))
        elements = [self._rest.popleft() for _ in range(count)]
        indices: Any = self._entry.indices[self._element : self._element + count]
        self._element += count
        return Records(elements, None, indices)

    def _take(self) -> None:
        assert self._asked is not None
        try:
            frames = self._keeper.wait(self._asked)
        except DamagedEntryError as error:
            self._keeper.damaged(self.name)
            raise LostEntryError from error
        except CodecError as error:
            raise LostEntryError from error
        if frames is None:
            raise LostEntryError
        self._keeper.counts.count(got_bytes=self._asked_bytes)
        self._ask()
        for elements in frames:
            self._rest.extend(elements)
        for _ in range(min(self._drop, len(self._rest))):
            self._rest.popleft()
            self._drop -= 1
            self._element += 1

    def close(self) -> None:
        asked, self._asked = self._asked, None
        if asked is None:
            self._entry.close()
        else:
            self._keeper.ask(lambda: _close_after(asked, self._entry))


def _read(keeper: EntryKeeper, entry: OpenEntry, first: int, stop: int) -> list[list[Element]]:
    began = perf_counter()
    if stop < len(entry.offsets):
        entry.will_read(int(entry.offsets[stop]), AHEAD_BYTES)
    found = entry.frames(first, stop)
    share = float(entry.counts[first:stop].sum()) / max(1.0, float(entry.counts.sum()))
    nbytes = int(entry.sizes[first:stop].sum())
    keeper.read_took(nbytes, perf_counter() - began, share * entry.footer.compute_s)
    return found


def _close_after(asked: PendingCall[Any], entry: OpenEntry) -> None:
    try:
        asked.wait(60.0)
    except Exception:
        pass
    entry.close()
