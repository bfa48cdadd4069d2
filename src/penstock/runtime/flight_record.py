"""What a runner's threads are working on, written where it survives the process.

The record is memory shared with the nursery (64 KB is plenty), which reads it after a death: a function that calls
`os._exit` or crashes the interpreter is named by the element it was called with.

Layout: a header of 16 bytes (magic, version), then slots of 128 bytes, little-endian:

    active u32 | count u32 | source i32 | split i32 | index i64 | began f64 (CLOCK_MONOTONIC) | stream, 96 bytes utf-8

`active` is written last when work begins and cleared first when it ends, so a slot that is being written says nothing.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable
from time import monotonic
from typing import TYPE_CHECKING, Protocol

import msgspec

from penstock.core.ids import StreamId

if TYPE_CHECKING:  # an agent reads records, and runs nothing
    from penstock.runtime.contract import Origin

MAGIC = b"PSFL\x01\0\0\0"
HEADER_BYTES = 16
SLOT_BYTES = 128
_SLOT = struct.Struct("<IIiiqd96s")
_BODY = struct.Struct("<Iiiqd96s")
assert _SLOT.size == SLOT_BYTES
_ACTIVE = struct.Struct("<I")
_TOO_MANY = -1


class RecordMemory(Protocol):
    """An `mmap.mmap`, or a bytearray."""

    def __len__(self) -> int: ...
    def __getitem__(self, key: slice, /) -> bytes | bytearray: ...
    def __setitem__(self, key: slice, value: bytes, /) -> None: ...


class InFlight(msgspec.Struct, frozen=True):
    """Elements `index` to `index + count - 1` of a split, under way since `began` (monotonic)."""

    stream: str
    source: int
    split: int
    index: int
    count: int
    began: float

    def plain(self) -> tuple[str, int, int, int, int]:
        """Return it as `RunnerGone.in_flight` holds it."""
        return self.stream, self.source, self.split, self.index, self.count


def read_flight(record: bytes | bytearray | memoryview | RecordMemory) -> tuple[InFlight, ...]:
    """Return what was under way when the record was last written; nothing if it never was."""
    found: list[InFlight] = []
    if bytes(record[: len(MAGIC)]) != MAGIC:
        return ()
    for start in range(HEADER_BYTES, len(record) - SLOT_BYTES + 1, SLOT_BYTES):
        active, count, source, split, index, began, stream = _SLOT.unpack(bytes(record[start : start + SLOT_BYTES]))
        if active:
            name = stream.rstrip(b"\0").decode(errors="replace")
            found.append(InFlight(name, source, split, index, count, began))
    return tuple(found)


class FlightRecord:
    """Writes the slots of one process. Any number of threads; those beyond the number of slots are not recorded."""

    def __init__(self, memory: RecordMemory) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        slots = (len(memory) - HEADER_BYTES) // SLOT_BYTES
        self._free = list(range(slots - 1, -1, -1))
        memory[HEADER_BYTES : HEADER_BYTES + slots * SLOT_BYTES] = bytes(slots * SLOT_BYTES)
        memory[: len(MAGIC)] = MAGIC

    def recorder(self, stream: StreamId) -> StreamRecorder:
        return StreamRecorder(self, stream)

    def begin(self, stream: bytes, source: int, split: int, index: int, count: int) -> int:
        with self._lock:
            if not self._free:
                return _TOO_MANY
            slot = self._free.pop()
        start = HEADER_BYTES + slot * SLOT_BYTES
        self._memory[start + 4 : start + SLOT_BYTES] = _BODY.pack(count, source, split, index, monotonic(), stream)
        self._memory[start : start + 4] = _ACTIVE.pack(1)
        return slot

    def end(self, slot: int) -> None:
        if slot == _TOO_MANY:
            return
        start = HEADER_BYTES + slot * SLOT_BYTES
        self._memory[start : start + 4] = _ACTIVE.pack(0)
        with self._lock:
            self._free.append(slot)

    def in_flight(self) -> tuple[InFlight, ...]:
        return read_flight(self._memory)


class StreamRecorder:
    """A `runtime.streams.FlightRecorder` for one stream."""

    def __init__(self, record: FlightRecord, stream: StreamId) -> None:
        self._record = record
        self._stream = stream.encode()[:96]

    def begin(self, origin: Origin | None, count: int) -> int:
        if origin is None:
            return _TOO_MANY
        source = int(getattr(origin, "source", 0))
        return self._record.begin(self._stream, source, origin.split, origin.index, count)

    def end(self, token: int) -> None:
        self._record.end(token)


class HangWatch:
    """Names work that takes longer than `limit_s`, once for each piece of it."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._named: set[InFlight] = set()

    def overdue(self, under_way: Iterable[InFlight], now: float) -> list[InFlight]:
        late = {work for work in under_way if now - work.began > self._limit_s}
        fresh = late - self._named
        self._named = late
        return sorted(fresh, key=lambda work: work.began)
