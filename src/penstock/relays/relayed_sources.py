"""Sources that a trainer reads for a runner: the engine sees a source as any other, and each reading is a relay.

The source that workers would read by stands behind it. It knows splits, lengths and paths from the job's list, and is
never asked to read. Nor is it asked what its files are like now: those of this host may be others, so that no cache
keeps what was made of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from penstock.core.element import Element
from penstock.core.errors import DataError, ProtocolError, located
from penstock.relays.asking import ArrivedRows, Relay, RelayStart
from penstock.relays.runner_relays import RunRelays
from penstock.sources.base import (
    IndexableSource,
    LocatesElements,
    LocatesRecords,
    OnBad,
    Reader,
    Records,
    Source,
    Split,
    SplitPosition,
)
from penstock.wire.failures import rebuild_failure
from penstock.wire.frames import BadRow
from penstock.wire.runs import decode_run


def relayed(source: Source, number: int, key: str, relays: RunRelays) -> Source:
    """Return the source as a trainer reads it, who knows it by this number and key."""
    kind = RelayedElements if isinstance(source, IndexableSource) else RelayedSplits
    return kind(source, number, key, relays)  # type: ignore[arg-type]


class RelayedSplits:
    """One that is read split by split."""

    remote = True
    on_bad: OnBad | None = None

    def __init__(self, behind: Source, number: int, key: str, relays: RunRelays) -> None:
        self._behind, self._number, self._key, self._relays = behind, number, key, relays
        self._numbers: dict[Split, int] = {}

    def splits(self) -> Sequence[Split]:
        return self._behind.splits()

    def open(self, split: Split, at: SplitPosition) -> Reader:
        if not self._numbers:
            self._numbers = {each: number for number, each in enumerate(self._behind.splits())}
        start = RelayStart(
            source=self._number, key=self._key, split=self._numbers[split], index=at.index, offset=at.offset
        )
        return RelayedReader(self._relays, self._relays.open(start), lambda: self.on_bad)

    def locate(self, split: Split, before: int | None, after: int) -> tuple[str, int | None]:
        if isinstance(self._behind, LocatesRecords):
            return self._behind.locate(split, before, after)
        return split.files[0].path if len(split.files) == 1 else "", None

    def split_stamp(self, split: Split) -> str | None:
        return None


class RelayedReader:
    """Reads one split forward."""

    def __init__(self, relays: RunRelays, relay: Relay, on_bad: Callable[[], OnBad | None]) -> None:
        self._relays, self._relay, self._on_bad = relays, relay, on_bad
        self._records = Records(())
        self._given = 0
        self._bad_until = relay.start.index
        """Up to which index bad records were reported: a source that is opened again tells of the last ones again."""

    def read(self, want: int) -> Records:
        while self._given >= len(self._records.elements):
            arrived = self._relays.take(self._relay)
            if arrived is None:
                return Records(())
            self._accept(arrived)
        start, self._given = self._given, min(self._given + want, len(self._records.elements))
        records, stop = self._records, self._given
        return Records(
            records.elements[start:stop],
            None if records.offsets is None else records.offsets[start:stop],
            None if records.indices is None else records.indices[start:stop],
        )

    def _accept(self, arrived: ArrivedRows) -> None:
        rows = arrived.rows
        for bad in rows.bad:
            if bad.index >= self._bad_until:
                self._bad_until = bad.index + 1
                report_bad(bad, self._on_bad())
        self._records, self._given = Records(_elements_of(arrived), rows.offsets or None, rows.indices or None), 0

    def close(self) -> None:
        self._relays.close(self._relay)


class RelayedElements:
    """One that is read by index. What is expected is under way before it is fetched."""

    remote = True
    on_bad: OnBad | None = None

    def __init__(self, behind: IndexableSource, number: int, key: str, relays: RunRelays) -> None:
        self._behind, self._number, self._key, self._relays = behind, number, key, relays
        self._coming: Callable[[], Iterable[int]] | None = None
        self._relay: _IndexRelay | None = None

    def __len__(self) -> int:
        return len(self._behind)

    def splits(self) -> Sequence[Split]:
        return self._behind.splits()

    def open(self, split: Split, at: SplitPosition) -> Reader:
        raise TypeError("elements of an indexable source are fetched by index")

    def expect(self, coming: Callable[[], Iterable[int]]) -> None:
        self._coming = coming

    def fetch(self, indices: Sequence[int]) -> Sequence[Element]:
        wanted, found = list(map(int, indices)), []
        for place, index in enumerate(wanted):
            relay = self._relay
            if relay is None or not relay.advance(index):
                relay = self._begin(wanted[place:])
            element = relay.take()
            if isinstance(element, BadRow):
                report_bad(element, self.on_bad)
            else:
                found.append(element)
        return found

    def _begin(self, wanted: Sequence[int]) -> _IndexRelay:
        """Ask for what is wanted now, and for what follows it."""
        if self._relay is not None:
            self._relay.close()
        coming, self._coming = self._coming, None
        relay = self._relay = _IndexRelay(self._relays, self._number, self._key, wanted if coming is None else coming())
        if not relay.advance(wanted[0]):
            relay.close()
            relay = self._relay = _IndexRelay(self._relays, self._number, self._key, wanted)
            relay.advance(wanted[0])
        return relay

    def path_of(self, index: int) -> str:
        return self._behind.path_of(index) if isinstance(self._behind, LocatesElements) else ""

    def stamps(self, indices: Sequence[int]) -> list[str | None]:
        return [None] * len(indices)


class _IndexRelay:
    """Elements by their index, one after the other."""

    def __init__(self, relays: RunRelays, number: int, key: str, indices: Iterable[int]) -> None:
        self._relays = relays
        self._upcoming: deque[int] = deque()
        """Indices that were asked for and not taken."""
        self._relay = relays.open(RelayStart(source=number, key=key, indices=self._noted(indices)))
        self._arrived: deque[Element | BadRow] = deque()

    def _noted(self, indices: Iterable[int]) -> Iterator[int]:
        for index in indices:
            self._upcoming.append(index)
            yield index

    def advance(self, index: int) -> bool:
        """Go to where an index is next, passing over others; False: it was not asked for."""
        if self._upcoming and self._upcoming[0] == index:
            return True
        if index not in self._upcoming:
            return False
        while self._upcoming[0] != index:
            self.take()
        return True

    def take(self) -> Element | BadRow:
        """Return the next element, or why it could not be read."""
        while not self._arrived:
            arrived = self._relays.take(self._relay)
            if arrived is None:
                raise ProtocolError(
                    f"a trainer gave fewer elements than were asked for; {len(self._upcoming)} are left"
                )
            self._accept(arrived)
        self._upcoming.popleft()
        return self._arrived.popleft()

    def _accept(self, arrived: ArrivedRows) -> None:
        bad = {row.index: row for row in arrived.rows.bad}
        elements = iter(_elements_of(arrived))
        self._arrived.extend(bad[index] if index in bad else next(elements) for index in arrived.indices)

    def close(self) -> None:
        self._relays.close(self._relay)


def report_bad(row: BadRow, on_bad: OnBad | None) -> None:
    """Tell who counts them of a record that could not be read; without such, it is an error."""
    error = rebuild_failure(row.failure)
    if not isinstance(error, DataError) or on_bad is None:
        raise error
    on_bad(located(error, row.path, row.offset), row.index)


def _elements_of(arrived: ArrivedRows) -> list[Element]:
    if not arrived.rows.count:
        return []
    return decode_run(arrived.rows.layout, [buffer.buffer for buffer in arrived.payload])
