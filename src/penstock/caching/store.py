"""One location as pipelines use it: ask for entries, have some written, and never wait long for either.

Storage that fails or does not answer is *away* for a while: said once, computed instead, and tried again later.
"""

from __future__ import annotations

import atexit
import os
import secrets
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, time
from typing import Any, TypeVar

import msgspec

from penstock.caching.catalogue import Catalogue, CatalogueEntry
from penstock.caching.claims import Claim, Claims
from penstock.caching.entries import Bytes, DamagedEntryError, FrameTable, OpenEntry
from penstock.caching.files import EntryFiles, FolderFiles, files_at
from penstock.caching.names import Secret, host_folder
from penstock.caching.pace import ReadPace
from penstock.caching.patience import PatientThreads, PendingCall, StorageStalledError
from penstock.caching.writing import EntrySink, EntryWriting, WriterThread
from penstock.core.errors import CacheAwayWarning, CodecError

PATIENCE_S = 3.0  # for one read; with what follows, computing goes on within five seconds
AWAY_S = 30.0
RESERVE_BYTES = 8 << 20
FREE_SHARE = 0.5  # of what is free on its file system, for a location without a capacity
FLUSH_AT_EXIT_S = 10.0

Found = TypeVar("Found")


class SlowStorageError(Exception):
    """Storage answers, but so slowly that it is of no use."""


class StoreCounts(msgspec.Struct):
    """What became of entries, of one store since this process began."""

    hits: int = 0
    fetched: int = 0
    """Hits on other hosts."""
    misses: int = 0
    put: int = 0
    put_bytes: int = 0
    got_bytes: int = 0
    damaged: int = 0
    left: int = 0
    """Splits that the writer could not follow: they are left for a later epoch."""
    no_room: int = 0
    """Entries that were not worth what would have had to go for them."""
    failures: int = 0
    """Times that storage failed or did not answer."""
    lock: threading.Lock = msgspec.field(default_factory=threading.Lock)

    def count(self, **more: int) -> None:
        with self.lock:
            for name, value in more.items():
                setattr(self, name, getattr(self, name) + value)


class CacheStore:
    """Any thread may use it."""

    def __init__(self, location: str, scope: str, capacity_bytes: int | None) -> None:
        self.location = location
        self.secret = Secret.of_host()
        name = self.secret.name("scope", scope)[:16]
        self.files: EntryFiles = files_at(location, name)
        if isinstance(self.files, FolderFiles):
            path = self.files.folder / "catalogue.sqlite"
        else:
            path = host_folder() / f"catalogue-{self.secret.name('catalogue', location, scope)[:16]}.sqlite"
        self.catalogue = Catalogue(path)
        self.claims = Claims(path.parent if self.files.local else host_folder() / "claims" / name)
        self._capacity_bytes = capacity_bytes
        self.counts = StoreCounts()
        self._threads = PatientThreads("penstock cache")
        self._writer = WriterThread("penstock cache writer", self.failed)
        self._pace = ReadPace()
        self._away_until = 0.0
        self._said = False
        self._used: list[str] = []
        self._used_lock = threading.Lock()

    @property
    def capacity_bytes(self) -> int:
        """How much may be kept. Without a limit, by what is free now: others write there, too, other principals' jobs.

        Of n that fill a disk each keeps as much as is left free in the end, one part of n + 1.
        """
        if self._capacity_bytes is not None:
            return self._capacity_bytes
        free = self.files.free_bytes()
        return (1 << 62) if free is None else int(FREE_SHARE * (free + self.catalogue.used_bytes()))

    # Whether it can be used

    @property
    def away(self) -> bool:
        """Whether it is not asked for now; a writer that hangs counts as soon as it is noticed."""
        if self._writer.stalled():
            self.failed(StorageStalledError("a write did not come back"))
        return monotonic() < self._away_until

    @property
    def writing(self) -> bool:
        """Whether something is being written: storage then has less to give."""
        return not self._writer.idle

    @property
    def waiting_bytes(self) -> int:
        """What was offered and is not written yet."""
        return self._writer.held_bytes

    def failed(self, error: BaseException) -> None:
        """Storage failed: it is left alone for a while."""
        if monotonic() >= self._away_until:
            self.counts.count(failures=1)
        self._away_until = monotonic() + AWAY_S
        if not self._said:
            self._said = True
            warnings.warn(
                f"autocache: {self.location} cannot be used ({error}); elements are computed, and it is tried again "
                f"every {AWAY_S:.0f} s",
                CacheAwayWarning,
                stacklevel=2,
            )

    def ask(self, call: Callable[[], Found]) -> PendingCall[Found]:
        """Have a call into storage made by another thread."""
        return self._threads.submit(call)

    def wait(self, answer: PendingCall[Found]) -> Found | None:
        """Return what storage gave; None: it failed, or took too long."""
        try:
            return answer.wait(PATIENCE_S)
        except (DamagedEntryError, CodecError):
            raise
        except Exception as error:  # a file system, a client of a store, the catalogue: none may stop a training
            self.failed(error)
            return None

    def read_took(self, nbytes: int, seconds: float, compute_s: float) -> None:
        """Leave the location alone where reads have become slow, and slower than making what is read."""
        if self.writing:
            return  # reads wait for what this process writes; a write that does not come back is seen by itself
        slower = self._pace.slower_by(nbytes, seconds, compute_s)
        if slower:
            self.failed(SlowStorageError(f"reads are {slower:.0f} times slower than before, and than computing"))

    # Entries

    def open(self, name: str) -> OpenEntry | None:
        """Return an entry, None if there is none that can be read. A damaged one is removed, and counted."""
        if self.away:
            return None
        try:
            return self.wait(self.ask(lambda: self.open_here(name)))
        except DamagedEntryError:
            self.damaged(name)
            return None

    def open_here(self, name: str) -> OpenEntry | None:
        """Return an entry, as `open` does, in the calling thread: one of those that may wait for storage."""
        entry = self.files.open(name)
        if entry is not None:
            with self._used_lock:
                self._used.append(name)
        return entry

    def damaged(self, name: str) -> None:
        self.counts.count(damaged=1)
        self._writer.must(lambda: self._forget(name))

    def _forget(self, name: str) -> None:
        self.files.remove(name, though_read=True)
        self.catalogue.remove(name)

    def claim(self, name: str) -> Claim | OpenEntry | None:
        """Claim an entry that one is about to make; None: another makes it, or nothing is written now.

        One that is there after all is returned: another may have published it and let go since it was looked for.
        """
        return None if self.away else self.wait(self.ask(lambda: self._claim_here(name)))

    def _claim_here(self, name: str) -> Claim | OpenEntry | None:
        claim = self.claims.take(name)
        if claim is None:
            return None
        try:
            entry = self.open_here(name)
        except DamagedEntryError:
            return claim  # what is made takes its place
        except BaseException:
            claim.release()
            raise
        if entry is None:
            return claim
        claim.release()
        return entry

    def is_being_made(self, name: str) -> bool:
        return not self.away and bool(self.wait(self.ask(lambda: self.claims.is_being_made(name))))

    def write(
        self,
        prefix: str,
        name: str,
        label: str,
        saves_s_per_byte: Callable[[], float],
        claim: Claim | None = None,
    ) -> EntryWriting | None:
        """Begin an entry; None: nothing is written now. A claim of it ends with it, in either case."""
        if self.away or self._writer.half_full:
            if claim is not None:
                claim.release()
            return None
        return EntryWriting(self._writer, _StoreSink(self, prefix, name, label, saves_s_per_byte, claim))

    def note(self, name: str, value: str) -> None:
        """Remember something of this location, when the writer gets to it."""
        self._writer.must(lambda: self.catalogue.remember(name, value))

    def new_name(self) -> str:
        """Return a name for what is known by what is in it."""
        return secrets.token_hex(20)

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Wait until what was offered is written."""
        with self._used_lock:
            used, self._used = self._used, []
        if used:
            self._writer.must(lambda: self.catalogue.used(used))
        return self._writer.flush(timeout_s)

    def rebuild(self) -> int:
        """Make the catalogue agree with the files; return how many entries were added or removed."""
        found = dict(self.files.names())
        known = self.catalogue.names()
        for name in known - set(found):
            self.catalogue.remove(name)
        for name in set(found) - known:
            try:
                entry = self.files.open(name)
            except DamagedEntryError:
                self.files.remove(name, though_read=True)
                continue
            if entry is not None:
                self.catalogue.add(_described(name, entry))
                entry.close()
        return len(set(found) ^ known)


def _described(name: str, entry: OpenEntry) -> CatalogueEntry:
    footer = entry.footer
    return CatalogueEntry(
        name=name,
        prefix=footer.prefix,
        label=footer.label,
        nbytes=entry.nbytes,
        elements=int(entry.counts.sum()),
        compute_s=footer.compute_s,
        made_at_s=footer.made_at_s,
        used_at_s=footer.made_at_s,
    )


class _StoreSink(EntrySink):
    def __init__(
        self,
        store: CacheStore,
        prefix: str,
        name: str,
        label: str,
        saves_s_per_byte: Callable[[], float],
        claim: Claim | None,
    ) -> None:
        self._store, self._prefix, self._name, self._label = store, prefix, name, label
        self._claim = claim
        self._saves = saves_s_per_byte
        self._writer = f"{os.getpid()}-{secrets.token_hex(6)}"
        self._table = FrameTable()
        self._reserved = 0
        self._file: Any = None

    def write(self, frame: Bytes, count: int, indices: Any, ids: Sequence[bytes]) -> None:
        if self.failed:
            return
        with self._or_fail():
            self._table.add(frame, count, indices=indices, ids=ids)
            if not self._room_for(self._table.nbytes):
                return
            self._begin()
            self._file.write(frame)

    def _begin(self) -> None:
        if self._file is None:
            self._file = self._store.files.create(self._name)
            self._file.write(self._table.beginning())

    def _room_for(self, nbytes: int) -> bool:
        if nbytes <= self._reserved:
            return True
        store, wanted = self._store, max(nbytes, self._reserved + RESERVE_BYTES)
        for asked in (wanted, nbytes):  # exactly what is needed, where a step more does not fit
            if store.catalogue.reserve(
                self._writer,
                asked,
                capacity_bytes=store.capacity_bytes,
                saves_s_per_byte=self._saves(),
                evict=store.files.remove,
            ):
                self._reserved = asked
                return True
        store.counts.count(no_room=1)
        self._fail()
        return False

    def publish(self, compute_s: float) -> None:
        if self.failed:
            return
        store = self._store
        with self._or_fail():
            end = self._table.end(label=self._label, prefix=self._prefix, compute_s=compute_s, made_at_s=time())
            nbytes = self._table.nbytes + len(end)
            if not self._room_for(nbytes):
                return
            self._begin()
            self._file.write(end)
            self._file.publish()
            self._file = None
            now = time()
            store.catalogue.add(
                CatalogueEntry(
                    name=self._name,
                    prefix=self._prefix,
                    label=self._label,
                    nbytes=nbytes,
                    elements=self._table.elements,
                    compute_s=compute_s,
                    made_at_s=now,
                    used_at_s=now,
                ),
                self._writer,
            )
            store.counts.count(put=1, put_bytes=nbytes)
            self._let_go()

    def abandon(self, followed: bool) -> None:
        if not followed:
            self._store.counts.count(left=1)
        if not self.failed:
            self._fail()

    @contextmanager
    def _or_fail(self) -> Iterator[None]:
        """Whatever goes wrong with an entry ends it, and the writer's thread tells the store."""
        try:
            yield
        except BaseException:
            self._fail()
            raise

    def _let_go(self) -> None:
        if self._claim is not None:
            self._claim.release()

    def _fail(self) -> None:
        self.failed = True
        self._let_go()
        with suppress(OSError):
            if self._file is not None:
                self._file.abandon()
        self._file = None
        if self._reserved:
            with suppress(Exception):
                self._store.catalogue.release(self._writer)


_stores: dict[tuple[int, str, str, int | None], CacheStore] = {}
_stores_lock = threading.Lock()


def open_store(location: str | None, scope: str = "user", capacity_bytes: int | None = None) -> CacheStore:
    """Return the store of a location: one a process, whoever asks for it. None: the host's own folder."""
    where = str(host_folder() / "entries") if location is None else location
    key = (os.getpid(), where, scope, capacity_bytes)
    with _stores_lock:
        if key not in _stores:
            _stores[key] = CacheStore(where, scope, capacity_bytes)
        return _stores[key]


def _flush_all() -> None:
    deadline = monotonic() + FLUSH_AT_EXIT_S
    for store in list(_stores.values()):
        if not store._writer.stalled():
            store.flush(max(0.0, deadline - monotonic()))


atexit.register(_flush_all)


def location_exists(location: str | None) -> bool:
    """Say whether something was kept there already."""
    where = str(host_folder() / "entries") if location is None else location
    return "://" in where or Path(where).exists()
