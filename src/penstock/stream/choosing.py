"""Which streams a consumer takes from next: whichever has something, or each in its turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import NamedTuple, Protocol

from penstock.stream.reading import StreamReader

RUN_BYTES = 4 << 20  # of elements handed out together: they are held until the last of them was taken


class Chosen(NamedTuple):
    """Streams to take from, `rounds` rounds of each in turn. The first has rounds, or its end, or a failure."""

    readers: tuple[StreamReader, ...]
    rounds: int = 1


class Order(Protocol):
    next_stream: int | None
    """The stream that the next element is to come from, where a state says so."""

    def arrived(self, reader: StreamReader) -> None:
        """Something came for a stream."""

    def choose(self, readers: Collection[StreamReader]) -> Chosen | None:
        """Return what is next; None: it has not come yet."""

    def forget(self) -> None:
        """What came was given up."""


class ByArrival:
    """First come, first served."""

    def __init__(self, next_stream: int | None = None) -> None:
        self.next_stream = next_stream
        self._arrived: deque[StreamReader] = deque()
        """An entry for each thing that arrived."""

    def arrived(self, reader: StreamReader) -> None:
        self._arrived.append(reader)

    def choose(self, readers: Collection[StreamReader]) -> Chosen | None:
        reader = self._choose(readers)
        return None if reader is None else _all_of(reader)

    def _choose(self, readers: Collection[StreamReader]) -> StreamReader | None:
        arrived = self._arrived
        if self.next_stream is not None and arrived:
            return self._choose_known(readers)
        if arrived and arrived[0].is_tail and not all(r.exhausted or r.is_tail for r in readers):
            # One that came back with an older state reads streams again that have ended for the others. A state with
            # rounds of the tail says that all of them have.
            found = next((reader for reader in arrived if not reader.is_tail), None)
            if found is not None:
                arrived.remove(found)
            return found
        return arrived.popleft() if arrived else None

    def _choose_known(self, readers: Collection[StreamReader]) -> StreamReader | None:
        wanted = self.next_stream
        if all(reader.exhausted for reader in readers if reader.number == wanted):
            self.next_stream = None
        found = next((r for r in self._arrived if wanted == r.number or self.next_stream is None), None)
        if found is not None:
            self.next_stream = None
            self._arrived.remove(found)
        return found

    def forget(self) -> None:
        self._arrived.clear()


class InTurns:
    """The stream with the lowest round, and of several the lowest number; the tail after all others.

    Turns begin when all streams are there: which is first must not depend on which was seen first.
    """

    next_stream: int | None = None

    def __init__(self, streams: int) -> None:
        self._streams = streams

    def arrived(self, reader: StreamReader) -> None:
        """When something came says nothing here."""

    def choose(self, readers: Collection[StreamReader]) -> Chosen | None:
        in_turn = [reader for reader in readers if not reader.is_tail]
        if len(in_turn) < self._streams:
            return None
        active = sorted((r for r in in_turn if not r.exhausted), key=lambda reader: reader.number)
        if not active:
            return next((_all_of(reader) for reader in readers if reader.is_tail and reader.ready), None)
        lowest = min(reader.next_round for reader in active)
        due = [reader for reader in active if reader.next_round == lowest]
        if not due[0].ready:
            return None
        if len(active) == 1 or not due[0].frames:
            return _all_of(due[0])
        chosen, nbytes = [due[0]], due[0].frames[0].round_bytes
        for reader in due[1:]:
            if not reader.frames or nbytes + reader.frames[0].round_bytes > RUN_BYTES:
                break
            nbytes += reader.frames[0].round_bytes
            chosen.append(reader)
        if len(chosen) < len(active):
            return Chosen(tuple(chosen))
        rounds = min(reader.frames[0].left for reader in chosen)
        return Chosen(tuple(chosen), max(1, min(rounds, int(RUN_BYTES / max(nbytes, 1.0)))))

    def forget(self) -> None:
        """Nothing is remembered."""


def _all_of(reader: StreamReader) -> Chosen:
    return Chosen((reader,), reader.frames[0].left if reader.frames else 1)
