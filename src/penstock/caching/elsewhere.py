"""What other hosts keep: entries that are read from there, a piece at a time, as if they lay here.

Entries in a folder belong to its host. A host that does not have one asks the others that run the same job, and reads
it from the first that has it; it makes no copy, so that what all hosts keep together stays as large as it is. Bytes are
checked here by the sums that they were written with. Whatever goes wrong, elements are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from penstock.caching.entries import Bytes, DamagedEntryError, OpenEntry
from penstock.caching.patience import PendingCall
from penstock.caching.store import PATIENCE_S, CacheStore, StoreCounts
from penstock.core.errors import CodecError

Found = TypeVar("Found")


class RemoteEntry(msgspec.Struct, frozen=True):
    """An entry on another host."""

    entry: OpenEntry
    doubt: Callable[[], None]
    """Tells the host that keeps it that its bytes were wrong when they came."""


class BeingMade(msgspec.Struct, frozen=True):
    """Another host makes the entry now, and gets on with it."""


class OtherHosts(Protocol):
    """The other hosts that run the job. Each call waits for them, and for none of them long."""

    def open(self, key: str, subject: bytes) -> RemoteEntry | BeingMade | None:
        """Return the entry of a split; None: no host has it."""

    def frames(self, key: str, subjects: Sequence[bytes]) -> Mapping[bytes, Bytes]:
        """Return frames of those elements that were had, their bytes as they were written."""


class EntryKeeper(Protocol):
    """Where a reader's entry lies, who reads it, and who is told what became of that."""

    @property
    def counts(self) -> StoreCounts: ...

    @property
    def away(self) -> bool:
        """Whether nothing is to be asked now."""

    def read_took(self, nbytes: int, seconds: float, compute_s: float) -> None:
        """Hear how long a read took, and how long it took to make what was read."""

    def ask(self, call: Callable[[], Found]) -> PendingCall[Found]: ...

    def wait(self, answer: PendingCall[Found]) -> Found | None: ...

    def damaged(self, name: str) -> None: ...


class RemoteKeeper:
    """The keeper of one remote entry: what fails there says nothing about the location here."""

    def __init__(self, store: CacheStore, doubt: Callable[[], None]) -> None:
        self._store, self._doubt = store, doubt

    @property
    def counts(self) -> StoreCounts:
        return self._store.counts

    @property
    def away(self) -> bool:
        return False

    def read_took(self, nbytes: int, seconds: float, compute_s: float) -> None:
        """A host that takes too long for an answer is left alone by those who ask it."""

    def ask(self, call: Callable[[], Found]) -> PendingCall[Found]:
        return self._store.ask(call)

    def wait(self, answer: PendingCall[Found]) -> Found | None:
        try:
            return answer.wait(PATIENCE_S)
        except (DamagedEntryError, CodecError):
            raise
        except Exception:  # the host is gone, or slow
            return None

    def damaged(self, name: str) -> None:
        self.counts.count(damaged=1)
        self._doubt()
