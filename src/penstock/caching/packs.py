"""Packs: entries of single elements, for sources that are read by index.

Under a full permutation a split is a range of positions, and holds other elements in every pass. So what is kept there
is the element by itself, known by 16 bytes that stand for its file as it is, and gathered with others in the order they
were made into files of some tens of megabytes: whoever makes elements fills packs of his own, and nobody waits for
anybody. An index in memory says which pack has an element.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

from penstock.caching.entries import ID_BYTES, Bytes, DamagedEntryError, OpenEntry
from penstock.core.element import Element
from penstock.core.errors import CodecError

if TYPE_CHECKING:
    from penstock.caching.store import CacheStore

PACK_BYTES = 32 << 20
OPEN_PACKS = 64

Found = TypeVar("Found")


class _HeldPack:
    """A pack that is open: closed when it was let go of and nobody reads it."""

    def __init__(self, entry: OpenEntry) -> None:
        self.entry = entry
        self.readers = 0
        self.let_go = False


class PackIndex:
    """Which pack has which element, of one prefix at one location.

    Storage may hang, so that nothing is asked of it under the lock: who ends a run takes that, too.
    """

    def __init__(self, store: CacheStore, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        self._lock = threading.Lock()
        self._refreshing = threading.Lock()
        """Of those that look for new packs, all of them threads of storage."""
        self._places: dict[bytes, tuple[str, int]] = {}
        self._open: OrderedDict[str, _HeldPack] = OrderedDict()
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
        with self._refreshing:
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
                pack.close()
                with self._lock:
                    for number, start in enumerate(range(0, len(ids), ID_BYTES)):
                        self._places[ids[start : start + ID_BYTES]] = (name, number)
                    self._known.add(name)
            with self._lock:
                gone = self._known - found
                if gone:
                    self._known -= gone
                    self._places = {key: place for key, place in self._places.items() if place[0] not in gone}
                    for name in gone & set(self._open):
                        self._let_go(self._open.pop(name))

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
        began, nbytes, compute_s, at = perf_counter(), 0, 0.0, 0
        while at < len(places):
            place = places[at]
            if place is None:
                return None
            name, first = place
            stop = at + 1
            while stop < len(places) and places[stop] == (name, first + stop - at):
                stop += 1  # neighbours in their pack are read in one go
            try:
                read = self._of_pack(name, partial(_elements, first=first, stop=first + stop - at))
            except CodecError:
                self._forget(name)
                return None
            if read is None:
                return None
            elements, size, made_s = read
            found.extend(elements)
            nbytes, compute_s, at = nbytes + size, compute_s + made_s, stop
        self._store.counts.count(got_bytes=nbytes)
        self._store.read_took(nbytes, perf_counter() - began, compute_s)
        return found

    def frames(self, keys: Sequence[bytes], most_bytes: int) -> list[tuple[int, Bytes, int]]:
        """Return (place of its key, frame, checksum) of elements that are here, in the calling thread.

        As many of the first ones as fit into some bytes, and one in any case.
        """
        found: list[tuple[int, Bytes, int]] = []
        nbytes = 0
        with self._lock:
            places = [self._places.get(key) for key in keys]
        for at, place in enumerate(places):
            if place is None:
                continue
            name, number = place
            room = most_bytes - nbytes if found else None
            read = self._of_pack(name, partial(_raw_frame, number=number, room=room))
            if read is None:
                continue
            frame, checksum = read
            if frame is None:
                break
            nbytes += len(frame)
            found.append((at, frame, checksum))
        return found

    def _of_pack(self, name: str, use: Callable[[OpenEntry], Found]) -> Found | None:
        """Return what is made of a pack, which stays open meanwhile; None: it is gone, or damaged, which is told of."""
        with self._lock:
            held = self._open.get(name)
            if held is not None:
                held.readers += 1
                self._open.move_to_end(name)
        try:
            if held is None:
                held = self._hold(name)
            return None if held is None else use(held.entry)
        except DamagedEntryError:
            self._forget(name)
            self._store.damaged(name)
            return None
        finally:
            if held is not None:
                with self._lock:
                    held.readers -= 1
                    self._close_if_done(held)

    def _hold(self, name: str) -> _HeldPack | None:
        entry = self._store.open_here(name)
        if entry is None:
            self._forget(name)
            return None
        held = _HeldPack(entry)
        held.readers = 1
        with self._lock:
            before = self._open.pop(name, None)  # another thread was as fast
            if before is not None:
                self._let_go(before)
            self._open[name] = held
            if len(self._open) > OPEN_PACKS:
                self._let_go(self._open.popitem(last=False)[1])
        return held

    def _forget(self, name: str) -> None:
        with self._lock:
            self._known.discard(name)
            self._places = {key: place for key, place in self._places.items() if place[0] != name}
            held = self._open.pop(name, None)
            if held is not None:
                self._let_go(held)

    def _let_go(self, held: _HeldPack) -> None:
        held.let_go = True
        self._close_if_done(held)

    def _close_if_done(self, held: _HeldPack) -> None:
        if held.let_go and not held.readers:
            with suppress(OSError):
                held.entry.close()

    def close(self) -> None:
        """Let go of open packs: what nobody reads may be evicted."""
        with self._lock:
            while self._open:
                self._let_go(self._open.popitem()[1])


def _elements(pack: OpenEntry, first: int, stop: int) -> tuple[list[Element], int, float]:
    """Return elements that lie one behind the other, their bytes, and how long it took to make them."""
    frames = pack.frames(first, stop)
    made_s = pack.footer.compute_s * (stop - first) / len(pack.sizes)
    return [elements[0] for elements in frames], int(pack.sizes[first:stop].sum()), made_s


def _raw_frame(pack: OpenEntry, number: int, room: int | None) -> tuple[Bytes | None, int]:
    """Return a frame and its checksum; None: there is no room for it."""
    if room is not None and int(pack.sizes[number]) > room:
        return None, 0
    (frame,) = pack.raw_frames(number, number + 1)
    return frame, int(pack.sums[number])


_indices: dict[tuple[int, str], PackIndex] = {}
_indices_lock = threading.Lock()


def pack_index(store: CacheStore, prefix: str) -> PackIndex:
    """Return the index of a prefix: one a store."""
    with _indices_lock:
        return _indices.setdefault((id(store), prefix), PackIndex(store, prefix))
