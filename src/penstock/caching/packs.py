"""Packs: entries of single elements, for sources that are read by index.

Under a full permutation a split is a range of positions, and holds other elements in every pass. So what is kept there
is the element by itself, known by 16 bytes that stand for its file as it is, and gathered with others in the order they
were made into files of some tens of megabytes: whoever makes elements fills packs of his own, and nobody waits for
anybody. An index in memory says which pack has an element.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.caching.entries import ID_BYTES, Bytes, DamagedEntryError, OpenEntry
from penstock.core.element import Element
from penstock.core.errors import CodecError

if TYPE_CHECKING:
    from penstock.caching.store import CacheStore

PACK_BYTES = 32 << 20
OPEN_PACKS = 64


class PackIndex:
    """Which pack has which element, of one prefix at one location."""

    def __init__(self, store: CacheStore, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        self._lock = threading.Lock()
        self._places: dict[bytes, tuple[str, int]] = {}
        self._open: OrderedDict[str, OpenEntry] = OrderedDict()
        self._known: set[str] = set()
        self._put_before = 0

    def refresh(self) -> None:
        """Learn of packs that were published since."""
        store = self._store
        if not store.away:
            self._put_before = store.counts.put
            store.wait(store.ask(self._refresh))

    @property
    def is_outdated(self) -> bool:
        """Whether this process has published something since."""
        return self._store.counts.put != self._put_before

    def _refresh(self) -> None:
        files = self._store.files
        with self._lock:
            found = {name for name, _ in files.names(self._prefix)}
            for name in found - self._known:
                try:
                    pack = files.open(name)
                except DamagedEntryError:
                    self._store.damaged(name)
                    continue
                if pack is None:
                    continue
                ids = pack.footer.ids
                for number, start in enumerate(range(0, len(ids), ID_BYTES)):
                    self._places[ids[start : start + ID_BYTES]] = (name, number)
                pack.close()
                self._known.add(name)
            gone = self._known - found
            if gone:
                self._known -= gone
                self._places = {key: place for key, place in self._places.items() if place[0] not in gone}
                for name in gone & set(self._open):
                    self._open.pop(name).close()

    def __len__(self) -> int:
        return len(self._places)

    def has(self, key: bytes) -> bool:
        return key in self._places

    def read(self, keys: Sequence[bytes]) -> list[Element] | None:
        """Return elements; None: one of them cannot be had, and its pack is forgotten."""
        store = self._store
        if store.away:
            return None
        return store.wait(store.ask(lambda: self._read(keys)))

    def _read(self, keys: Sequence[bytes]) -> list[Element] | None:
        found: list[Element] = []
        with self._lock:
            places = [self._places.get(key) for key in keys]
            at = 0
            while at < len(places):
                place = places[at]
                if place is None:
                    return None
                name, first = place
                stop = at + 1
                while stop < len(places) and places[stop] == (name, first + stop - at):
                    stop += 1  # neighbours in their pack are read in one go
                try:
                    pack = self._opened(name)
                    if pack is None:
                        self._forget(name)
                        return None
                    frames = pack.frames(first, first + stop - at)
                    found.extend(elements[0] for elements in frames)
                    self._store.counts.count(got_bytes=int(pack.sizes[first : first + stop - at].sum()))
                except CodecError:
                    self._forget(name)
                    return None
                except DamagedEntryError:
                    self._forget(name)
                    self._store.damaged(name)
                    return None
                at = stop
        return found

    def frames(self, keys: Sequence[bytes], most_bytes: int) -> list[tuple[int, Bytes, int]]:
        """Return (place of its key, frame, checksum) of elements that are here, in the calling thread.

        As many of the first ones as fit into some bytes, and one in any case.
        """
        found: list[tuple[int, Bytes, int]] = []
        nbytes = 0
        with self._lock:
            for at, key in enumerate(keys):
                if (place := self._places.get(key)) is None:
                    continue
                name, number = place
                try:
                    pack = self._opened(name)
                    if pack is None:
                        self._forget(name)
                        continue
                    if found and nbytes + int(pack.sizes[number]) > most_bytes:
                        break
                    (frame,) = pack.raw_frames(number, number + 1)
                except DamagedEntryError:
                    self._forget(name)
                    self._store.damaged(name)
                    continue
                nbytes += len(frame)
                found.append((at, frame, int(pack.sums[number])))
        return found

    def _opened(self, name: str) -> OpenEntry | None:
        pack = self._open.get(name)
        if pack is None:
            pack = self._store.open_here(name)
            if pack is None:
                return None
            self._open[name] = pack
            if len(self._open) > OPEN_PACKS:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(name)
        return pack

    def _forget(self, name: str) -> None:
        self._known.discard(name)
        self._places = {key: place for key, place in self._places.items() if place[0] != name}
        pack = self._open.pop(name, None)
        if pack is not None:
            with suppress(OSError):
                pack.close()

    def close(self) -> None:
        """Let go of open packs: what nobody reads may be evicted."""
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()


_indices: dict[tuple[int, str], PackIndex] = {}
_indices_lock = threading.Lock()


def pack_index(store: CacheStore, prefix: str) -> PackIndex:
    """Return the index of a prefix: one a store."""
    with _indices_lock:
        return _indices.setdefault((id(store), prefix), PackIndex(store, prefix))
