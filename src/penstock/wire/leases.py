"""Who holds what of an arena: leases by number. No memory here, and no lock: the arena has both.

A lease belongs to a reader of slabs and to the connection it was sent on. Only that reader gives it back, on whichever
of its connections: its name contains a secret of its own. What never arrived because the connection was closed is given
back too, when the reader says on the next one what it holds (`keep_only`).
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from penstock.wire.frames import SlabPlaces


class Holder(NamedTuple):
    """A reader of slabs (`SlabReader.name`), and the number of one of its connections."""

    reader: str
    connection: int


NOBODY = Holder(secrets.token_hex(8), 0)
"""The process that has the arena: what it keeps for itself. No peer knows the name."""


class _Lease(NamedTuple):
    holder: Holder
    held: list[Any]


class LeaseBook:
    def __init__(self) -> None:
        self._leases: dict[int, _Lease] = {}
        self._next_lease = 1
        self._shares: dict[int, int] = {}
        """Leases made by `share`, and of which lease."""
        self._readers: dict[int, tuple[int, int]] = {}
        """How many of them each lease has, and its bytes."""
        self._shared_bytes = 0
        self._outlived: dict[int, int] = {}
        """Leases that are over while readers still have shares of them, and their bytes."""

    def __len__(self) -> int:
        return len(self._leases)

    def held(self, lease: int) -> list[Any]:
        """Return what a lease keeps alive."""
        return self._leases[lease].held

    def add(self, holder: Holder, held: list[Any]) -> int:
        lease, self._next_lease = self._next_lease, self._next_lease + 1
        self._leases[lease] = _Lease(holder, held)
        return lease

    def share(self, places: SlabPlaces, holder: Holder, *, most_bytes: int | None) -> int | None:
        """Add one more lease of what a lease holds; None if that one is over, or readers hold on to too much."""
        nbytes = sum(size for _, size in places.places)
        found = self._leases.get(places.lease)
        readers, _ = self._readers.get(places.lease, (0, 0))
        if found is None or (not readers and most_bytes is not None and self._crowded(nbytes, most_bytes)):
            return None
        lease = self.add(holder, found.held)
        self._shares[lease] = places.lease
        self._readers[places.lease] = (readers + 1, nbytes)
        self._shared_bytes += 0 if readers else nbytes
        return lease

    def _crowded(self, nbytes: int, most_bytes: int) -> bool:
        return self._shared_bytes + nbytes > most_bytes and sum(self._outlived.values()) > most_bytes // 2

    def remove(self, leases: Iterable[int]) -> None:
        """End leases. One that is not known is no error."""
        for lease in leases:
            self._leases.pop(lease, None)
            if lease in self._shares:
                self._end_share(lease)
            elif lease in self._readers:
                self._outlived[lease] = self._readers[lease][1]

    def _end_share(self, lease: int) -> None:
        placed = self._shares.pop(lease)
        readers, nbytes = self._readers.pop(placed)
        if readers > 1:
            self._readers[placed] = (readers - 1, nbytes)
        else:
            self._outlived.pop(placed, None)
            self._shared_bytes -= nbytes

    def give_back(self, leases: Iterable[int], reader: str) -> None:
        """End leases that this reader holds, and no others."""
        self.remove([lease for lease in leases if (found := self._leases.get(lease)) and found.holder.reader == reader])

    def keep_only(self, held: Collection[int], holder: Holder, live: Collection[int]) -> None:
        """End what was sent to a reader on connections before this one and is not held; `live` ones are left alone."""
        kept = set(held)
        self.remove(
            [
                lease
                for lease, (other, _) in self._leases.items()
                if other.reader == holder.reader
                and other.connection < holder.connection
                and other.connection not in live
                and lease not in kept
            ]
        )

    def remove_reader(self, reader: str) -> None:
        """End all leases of a reader that is known to be gone."""
        self.remove([lease for lease, (holder, _) in self._leases.items() if holder.reader == reader])
