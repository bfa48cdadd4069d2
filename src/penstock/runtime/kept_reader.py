"""Reads an entry as a source's reader reads a split, some windows ahead of what is asked for."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from penstock.caching.elsewhere import EntryKeeper
from penstock.caching.entries import DamagedEntryError, OpenEntry
from penstock.caching.memory import PIECE_BYTES
from penstock.caching.patience import PendingCall
from penstock.core.element import Element
from penstock.core.errors import CodecError
from penstock.sources.base import Records

WINDOW_BYTES = PIECE_BYTES  # of an entry, read in one go: what holds one element holds so much
IN_FLIGHT = 3  # windows that are read while one is worked on: a disk has something to do while sums are added up


class LostEntryError(Exception):
    """An entry that was begun cannot be read on."""


class KeptReader:
    """The next windows are read while the last one is worked on."""

    def __init__(self, keeper: EntryKeeper, name: str, entry: OpenEntry, index: int) -> None:
        self._keeper, self.name, self._entry = keeper, name, entry
        firsts = np.concatenate([[0], np.cumsum(entry.counts)])
        passed = int(np.searchsorted(entry.indices, index))
        self._frame = int(np.searchsorted(firsts, passed, side="right")) - 1
        self._element = int(firsts[self._frame])
        self._drop = passed - self._element
        self._rest: deque[Element] = deque()
        self._asked: deque[tuple[int, PendingCall[list[list[Element]]]]] = deque()
        """Numbers of bytes, and the windows that give them."""
        self._ask()

    def _ask(self) -> None:
        """Have the next windows read, unless storage is left alone now."""
        keeper, entry = self._keeper, self._entry
        while self._frame < len(entry.sizes) and len(self._asked) < IN_FLIGHT and not keeper.away:
            first, stop = self._frame, entry.window(self._frame, WINDOW_BYTES)
            nbytes, self._frame = int(entry.sizes[first:stop].sum()), stop
            self._asked.append((nbytes, keeper.ask(partial(_read, keeper, entry, first, stop))))

    def read(self, want: int) -> Records:
        while not self._rest and self._asked:
            self._take()
        if not self._rest and self._frame < len(self._entry.sizes):
            raise LostEntryError
        count = min(want, len(self._rest))
        elements = [self._rest.popleft() for _ in range(count)]
        indices: Any = self._entry.indices[self._element : self._element + count]
        self._element += count
        return Records(elements, None, indices)

    def _take(self) -> None:
        nbytes, asked = self._asked.popleft()
        try:
            frames = self._keeper.wait(asked)
        except DamagedEntryError as error:
            self._keeper.damaged(self.name)
            raise LostEntryError from error
        except CodecError as error:
            raise LostEntryError from error
        if frames is None:
            raise LostEntryError
        self._keeper.counts.count(got_bytes=nbytes)
        self._ask()
        for elements in frames:
            self._rest.extend(elements)
        for _ in range(min(self._drop, len(self._rest))):
            self._rest.popleft()
            self._drop -= 1
            self._element += 1

    def close(self) -> None:
        asked = [call for _, call in self._asked]
        self._asked.clear()
        if asked:
            self._keeper.ask(lambda: _close_after(asked, self._entry))
        else:
            self._entry.close()


def _read(keeper: EntryKeeper, entry: OpenEntry, first: int, stop: int) -> list[list[Element]]:
    began = perf_counter()
    found = entry.frames(first, stop)
    share = float(entry.counts[first:stop].sum()) / max(1.0, float(entry.counts.sum()))
    nbytes = int(entry.sizes[first:stop].sum())
    keeper.read_took(nbytes, perf_counter() - began, share * entry.footer.compute_s)
    return found


def _close_after(asked: list[PendingCall[Any]], entry: OpenEntry) -> None:
    for call in asked:
        with suppress(Exception):
            call.wait(60.0)
    entry.close()
