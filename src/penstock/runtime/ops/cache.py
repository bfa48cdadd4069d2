"""cache: elements of the first whole pass, kept in memory or in files, and read back in every pass after it.

The state is `[elements given, input's state]`, the latter None while reading back. So a state restores without the
cache too: directly, or by passing over what was given, where the input gives the same again. The input is always opened
at pass 0: a cache holds one pass.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from penstock.core.element import Element, copied, element_bytes
from penstock.core.errors import StateMismatchError
from penstock.graph import ops
from penstock.graph.fingerprint import fingerprint
from penstock.graph.ops import MemorySlot
from penstock.graph.randomized import draws
from penstock.graph.traverse import walk
from penstock.runtime.building import Site, builds
from penstock.runtime.contract import Chunk, Marks, Origin, Stage, State
from penstock.runtime.ops.cache_files import FileStore
from penstock.runtime.ops.source import make_idents
from penstock.runtime.randomness import derive_word
from penstock.runtime.stats import StageMeter
from penstock.sources.registry import source_digest


class Store(Protocol):
    """Where elements are kept. One pipeline fills it, others pass by until it is complete."""

    @property
    def complete(self) -> bool: ...

    def begin(self) -> bool:
        """Claim the filling; False if somebody else has."""

    def add(self, elements: Sequence[Element]) -> bool:
        """Keep elements; False gives up (they do not fit)."""

    def finish(self) -> None: ...

    def abandon(self) -> None: ...

    def read(self, start: int, want: int) -> list[Element]: ...


class MemoryStore:
    """Elements as they are; given out as copies, so that a reader may write into what it gets."""

    def __init__(self, max_bytes: int | None) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._filling = False
        self.complete = False
        self._clear()

    def _clear(self) -> None:
        self._elements: list[Element] = []
        self._bytes = 0

    def begin(self) -> bool:
        with self._lock:
            if self._filling or self.complete:
                return False
            self._filling = True
            self._clear()
            return True

    def add(self, elements: Sequence[Element]) -> bool:
        self._elements.extend(map(copied, elements))
        self._bytes += sum(map(element_bytes, elements))
        if self._max_bytes is not None and self._bytes > self._max_bytes:
            warnings.warn(
                f"cache: {len(self._elements)} elements exceed max_bytes={self._max_bytes}; nothing is cached. "
                "Raise max_bytes, or give a path to cache in files",
                stacklevel=2,
            )
            self._clear()
            return False
        return True

    def finish(self) -> None:
        with self._lock:
            self.complete, self._filling = True, False

    def abandon(self) -> None:
        with self._lock:
            if not self.complete:
                self._filling = False
                self._clear()

    def read(self, start: int, want: int) -> list[Element]:
        return list(map(copied, self._elements[start : start + want]))


_memory: weakref.WeakKeyDictionary[MemorySlot, MemoryStore] = weakref.WeakKeyDictionary()


def memory_store(slot: MemorySlot, max_bytes: int | None) -> MemoryStore:
    """Return the store of a cache operator: the same for every pipeline of this process that contains it."""
    store = _memory.get(slot)
    if store is None:
        store = _memory[slot] = MemoryStore(max_bytes)
    return store


class _CacheMarks(msgspec.Struct, frozen=True):
    given: int
    marks: Marks | None

    def at(self, k: int) -> State:
        return [self.given + k, None if self.marks is None else self.marks.at(k)]

    def origin(self, k: int) -> Origin | None:
        return None if self.marks is None else self.marks.origin(k)


class Caching(Stage):
    _given: int

    def __init__(self, meter: StageMeter, upstream: Stage, store: Store, *, with_idents: bool) -> None:
        super().__init__(meter, upstream)
        self.upstream = upstream
        self._store = store
        self._with_idents = with_idents
        self._filling = False

    def open(self, pass_: int, state: State) -> None:
        self._give_up()
        self._place = derive_word("cache", pass_)
        self._given, inner = state or (0, None)
        self._reading = self._store.complete
        if self._reading:
            return
        if inner is None and self._given and not self.upstream.repeatable:
            raise StateMismatchError(
                f"the state was saved while cache() gave its elements again, {self._given} of them, and this process "
                "has not cached them: they would come in another order. Load a state from between two epochs, or use "
                "order='deterministic'"
            )
        self.upstream.open(0, inner)
        if inner is None and self._given:
            self.upstream.skip(self._given)
        self._filling = self._given == 0 and self._store.begin()

    def _pull(self, want: int) -> Chunk:
        if self._reading:
            chunk = Chunk(self._store.read(self._given, want), _CacheMarks(self._given, None))
        else:
            chunk = self.upstream.pull(want)
            self._keep(chunk)
            chunk = Chunk(chunk.elements, _CacheMarks(self._given, chunk.marks))
        count = len(chunk.elements)
        if self._with_idents:
            # The pass is part of it: what stands above a cache draws anew in every epoch.
            chunk.idents = make_idents(self._place, np.arange(self._given, self._given + count))
        self._given += count
        return chunk

    def _keep(self, chunk: Chunk) -> None:
        if not self._filling:
            return
        if not chunk.elements:
            self._store.finish()
            self._filling = False
        elif not self._store.add(chunk.elements):
            self._give_up()

    def skip(self, count: int) -> int:
        if not self._reading:
            return super().skip(count)
        before = self._given
        while self._given - before < count and (elements := self._store.read(self._given, 1)):
            self._given += len(elements)
        return self._given - before

    def _give_up(self) -> None:
        if self._filling:
            self._filling = False
            self._store.abandon()

    def close(self) -> None:
        self._give_up()
        super().close()


@builds(ops.Cache)
def _caching(node: ops.Cache, at: Site, upstream: Stage) -> Stage:
    return Caching(at.meter, upstream, _store(node, at), with_idents=at.with_idents)


def _store(node: ops.Cache, at: Site) -> Store:
    if node.path is None:
        return memory_store(node.slot, node.max_bytes)
    # A cached pass is drawn with the seed: another seed is other content. The files above are part of the key too.
    content = fingerprint(node.upstream, source_digest=lambda source: source_digest(at.source_of(source)))
    drawn = any(map(draws, walk(node)))
    return FileStore(node.path, f"{content[:24]}-{at.seed:x}" if drawn else content[:24])
