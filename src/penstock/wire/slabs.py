"""Slabs: on one host, batches lie in memory that both sides map, and only their places are sent.

A runner has one arena: an anonymous file (memfd), sealed so that nobody can shrink it under a reader, and gone with the
last process that has it, however that ended. Its readers map it once; who holds what of it is `wire.leases`.

- A range belongs to its `_Range` object. It is free again when that is collected: when no array over it and no lease
  that names it is left. So memory is never written to while anybody may read it.
- Readers get a descriptor that they cannot write through, unless they ask for another and the runner allows it.
- `__del__` may run at any point of any thread, so it takes no lock: it appends to a deque, which the next call drains.
  At the interpreter's end modules are empty, so it uses nothing of this one but what it was defined with.
- After a fork the child takes nothing from the arena and gives nothing back.

A page that was never touched costs twenty times what a warm one does, and stays with the process from then on. So what
was given back last is handed out first, and untouched memory only where nothing given back fits (`FreeRanges`):

1. A freed range waits for the next request of about its size; of those that fit the last given is taken.
2. If none fits, waiting ranges are looked at together with their neighbours, and the lowest place is cut.
3. Then untouched memory is taken, and at last a place that is warm in part.

What has been free for a while goes back to the system (`ranges_to_cool`), and with it out of all mappings.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import fcntl
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any, NamedTuple

import numpy as np

from penstock.core.element import Array
from penstock.wire.elements import bytes_over
from penstock.wire.frames import SlabPlaces
from penstock.wire.leases import NOBODY, Holder, LeaseBook, Mapping, array_interface
from penstock.wire.neighbours import DescriptorServer

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
ALIGNMENT = 64
IDLE_S = 5.0  # memory of a burst is not kept for the next one, if that is further away than this
KEPT_BYTES = 16 << 20  # stays warm however long it is free: a trainer that pauses to evaluate finds it again
COOLED_SHARE = 4  # at most a fourth of what is idle goes at once: a need that comes and goes finds most of it again
_PAGE_BYTES = 4096
_SLACK = 1.25  # a waiting range may be so much larger than what is asked for
_MOST_PARTS = 1024  # beyond, neighbours are one part with the younger one's age: looking through many costs time

ByteRange = tuple[int, int]
"""(offset, size)"""


class _Range:
    """Owns a range of the arena. Arrays over it have it as their base."""

    __slots__ = ("__array_interface__", "_pid", "_returned", "mapping", "offset", "placed", "size")

    def __init__(self, mapping: Mapping, offset: int, size: int, returned: collections.deque[tuple[int, int]]) -> None:
        self.mapping, self.offset, self.size = mapping, offset, size
        self.placed = False
        """Whether some reader has it, and may write to it."""
        self._returned, self._pid = returned, os.getpid()
        self.__array_interface__ = array_interface(mapping.address + offset, size, writable=True)

    def __del__(self, _getpid: Callable[[], int] = os.getpid) -> None:
        if self._pid == _getpid():
            self._returned.append((self.offset, self.size))


class Arena:
    """A runner's shared memory, of which at most `max_bytes` are ever used. Any thread may use it."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = -(-max_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._free = FreeRanges(self.max_bytes)
        self._returned: collections.deque[tuple[int, int]] = collections.deque()
        self.leases = LeaseBook()
        self._closed = False
        self._descriptor = os.memfd_create("penstock", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._descriptor, self.max_bytes)  # sparse: a page takes memory when it is first written to
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
            os.fchmod(self._descriptor, 0o600)  # else other users could make a descriptor they write through of it
            self._mapping = Mapping(self._descriptor, self.max_bytes, writable=True)
            self._server = DescriptorServer(self._descriptor, self.max_bytes)
        except BaseException:
            os.close(self._descriptor)
            raise

    @property
    def name(self) -> str:
        """What `SlabReader.connect` needs. It contains the secret."""
        return self._server.name

    @property
    def free_bytes(self) -> int:
        with self._lock:
            self._collect()
            return self._free.free_bytes

    def allow_writers(self) -> None:
        """Let readers that ask for it write to what they are given: nobody else reads that."""
        self._server.allow_writers()

    def limit(self, max_bytes: int) -> None:
        """Use less than was reserved, if nothing was used yet: what was never touched takes no memory."""
        with self._lock:
            if self._free.free_bytes == self.max_bytes and max_bytes < self.max_bytes:
                self._free = FreeRanges(max_bytes // mmap.PAGESIZE * mmap.PAGESIZE)

    def array(self, shape: Sequence[int], dtype: Any) -> Array | None:
        """Return an array in the arena, not initialised, or None: no room. Its memory is free with its last view."""
        kind = np.dtype(dtype)
        if kind.hasobject:
            return None
        size = math.prod(shape) * kind.itemsize
        owner = self._take(size) if size else None
        return None if owner is None else np.asarray(owner)[:size].view(kind).reshape(shape)

    def place(self, buffers: Sequence[Any], holder: Holder = NOBODY, *, exclusive: bool = True) -> SlabPlaces | None:
        """Return where a reader finds these buffers, or None if there is no room; they stay until it is released.

        What lies in the arena already is not copied and becomes the reader's, who may write to it. With `exclusive`
        false (somebody else reads it too, or it will be sent again) everything is copied.
        """
        contents = [bytes_over(buffer) for buffer in buffers]
        given = self._give([self._range_of(buffer) if exclusive else None for buffer in buffers])
        held: list[Any] = [buffer for buffer, found in zip(buffers, given) if found is not None]
        position = 0
        copied_bytes = sum(_aligned(content.nbytes) for content, found in zip(contents, given) if found is None)
        if copied_bytes:
            target = self._take(copied_bytes)
            if target is None:
                self._take_back(given)
                return None
            held.append(target)
            position = target.offset
        places = []
        for content, found in zip(contents, given):
            if found is not None:
                places.append((content.__array_interface__["data"][0] - self._mapping.address, content.nbytes))
                continue
            places.append((position, content.nbytes))
            self._copy(content, position)
            position += _aligned(content.nbytes)
        return SlabPlaces(self.leases.add(holder, held), tuple(places))

    def views(self, places: SlabPlaces) -> list[Array]:
        """Return the buffers of a lease as they lie here, read-only. They keep the memory as a lease does."""
        held = self.leases.held(places.lease)
        return [np.asarray(_View(held, self._mapping.address + offset, size)) for offset, size in places.places]

    def cool(self, now_s: float) -> int:
        """Give memory that has been free for a while back to the system; return how many bytes. Called now and then."""
        if self._pid != os.getpid():
            return 0
        with self._lock:
            self._collect()
            ranges = ranges_to_cool(self._free.idle(), now_s)
            self._free.withdraw(ranges)
        try:
            with contextlib.suppress(OSError):  # a system that cannot: then it stays, and is used again all the same
                for offset, size in ranges:
                    self._mapping.forget(offset, size)
        finally:
            with self._lock:
                self._free.give_cold(ranges)
        return sum(size for _, size in ranges)

    def close(self) -> None:
        """Hand out nothing any more. Memory is unmapped when the last array over it is gone."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.leases = LeaseBook()
        self._server.close()
        os.close(self._descriptor)

    def _take(self, size: int) -> _Range | None:
        if self._pid != os.getpid():
            return None
        with self._lock:
            self._collect()
            found = None if self._closed else self._free.take(size)
        return None if found is None else _Range(self._mapping, *found, self._returned)

    def _give(self, ranges: list[_Range | None]) -> list[_Range | None]:
        """Mark ranges as a reader's; None for those that already are, since two would write to the same memory."""
        given: list[_Range | None] = []
        with self._lock:
            for found in ranges:
                mine = found is not None and not found.placed
                if found is not None:
                    found.placed = True
                given.append(found if mine else None)
        return given

    def _take_back(self, given: list[_Range | None]) -> None:
        for found in given:
            if found is not None:
                found.placed = False

    def _collect(self) -> None:
        if self._returned:
            now_s = monotonic()
            while self._returned:
                self._free.give(*self._returned.popleft(), now_s)

    def _range_of(self, buffer: Any) -> _Range | None:
        """Return the range of this arena that a buffer lies in, by the chain of what keeps it alive."""
        while isinstance(buffer, (np.ndarray, memoryview)):
            buffer = buffer.base if isinstance(buffer, np.ndarray) else buffer.obj
        return buffer if isinstance(buffer, _Range) and buffer.mapping is self._mapping else None

    def _copy(self, content: Array, offset: int) -> None:
        source = content.reshape(-1).view(np.uint8)
        np.copyto(self._mapping.bytes[offset : offset + source.nbytes], source)  # without the GIL


class _View:
    """One buffer of a lease in the process that placed it: the base of an array over it."""

    __slots__ = ("__array_interface__", "held")

    def __init__(self, held: list[Any], address: int, size: int) -> None:
        self.held = held
        self.__array_interface__ = array_interface(address, size, writable=False)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


# Which parts are free


class IdleRange(NamedTuple):
    """A free range that takes memory, and when it was given back."""

    offset: int
    size: int
    since_s: float


class FreeRanges:
    """
    >>> free = FreeRanges(1 << 20)
    >>> first = free.take(100_000)
    >>> free.give(*first)
    >>> free.take(99_000) == first
    True
    """

    def __init__(self, size_bytes: int) -> None:
        self.free_bytes = size_bytes
        self._waiting: dict[int, list[IdleRange]] = {}
        """Ranges that wait for a request of their own size, by size; the last one given back is at the end."""
        self._warm: list[IdleRange] = []
        """Those that wait for no size in particular, by offset. Each has its own age, neighbours too."""
        self._cold: list[ByteRange] = [(0, size_bytes)]
        """What takes no memory, by offset; never adjacent to one another."""

    def take(self, size_bytes: int) -> ByteRange | None:
        """Return (offset, size) of at least `size_bytes`, or None."""
        size = rounded(size_bytes)
        if size > self.free_bytes:
            return None
        found = self._take_waiting(size) or self._take_warm(size) or self._take_cold(size) or self._take_across(size)
        if found is not None:
            self.free_bytes -= found[1]
        return found

    def give(self, offset: int, size: int, now_s: float = 0.0) -> None:
        """Give back exactly what `take` returned."""
        self._waiting.setdefault(size, []).append(IdleRange(offset, size, now_s))
        self.free_bytes += size

    def idle(self) -> list[IdleRange]:
        """Return what is free and takes memory."""
        return [*self._warm, *(one for waiting in self._waiting.values() for one in waiting)]

    def withdraw(self, ranges: Sequence[ByteRange]) -> None:
        """Keep parts of what is idle, by offset, from being handed out until they are given back."""
        for size, waiting in list(self._waiting.items()):
            kept = [one for one in waiting if not _overlaps(ranges, one)]
            if len(kept) < len(waiting):
                self._warm += [one for one in waiting if _overlaps(ranges, one)]
                self._waiting[size] = kept
                if not kept:
                    del self._waiting[size]
        self._warm = _without(sorted(self._warm), ranges)
        self.free_bytes -= sum(size for _, size in ranges)

    def give_cold(self, ranges: Iterable[ByteRange]) -> None:
        """Give back what was withdrawn: its pages are gone."""
        for one in ranges:
            bisect.insort(self._cold, one)
            self.free_bytes += one[1]
        self._cold = _joined(self._cold)

    def _take_waiting(self, size: int) -> ByteRange | None:
        fitting = [known for known in self._waiting if size <= known <= size * _SLACK]
        if not fitting:
            return None
        chosen = max(fitting, key=lambda known: self._waiting[known][-1].since_s)
        waiting = self._waiting[chosen]
        found = waiting.pop()
        if not waiting:
            del self._waiting[chosen]
        return found.offset, found.size

    def _take_warm(self, size: int) -> ByteRange | None:
        found = _lowest(self._warm, size)
        if found is None and self._waiting:
            self._warm = sorted(self.idle())
            self._waiting.clear()
            if len(self._warm) > _MOST_PARTS:
                self._warm = _with_fewer_parts(self._warm)
            found = _lowest(self._warm, size)
        if found is not None:
            self._warm = _without(self._warm, [found])
        return found

    def _take_cold(self, size: int) -> ByteRange | None:
        found = _lowest(self._cold, size)
        if found is not None:
            self._cold = _cut(self._cold, found)
        return found

    def _take_across(self, size: int) -> ByteRange | None:
        """Take a place that lies in warm and in untouched memory."""
        found = _lowest(sorted([*self._cold, *((one.offset, one.size) for one in self._warm)]), size)
        if found is not None:
            self._warm, self._cold = _without(self._warm, [found]), _cut(self._cold, found)
        return found


def ranges_to_cool(idle: Iterable[IdleRange], now_s: float) -> list[ByteRange]:
    """Return, by offset, whole pages of what has been free for a while: the longest first, and not all of it at once.

    >>> MB = 1 << 20
    >>> ranges_to_cool([IdleRange(0, 16 * MB, 99.0), IdleRange(32 * MB, 8 * MB, 90.0)], now_s=100.0)
    [(33554432, 8388608)]
    >>> ranges_to_cool([IdleRange(0, 16 * MB, 0.0)], now_s=100.0)
    []
    """
    warm_bytes = old_bytes = 0
    old: list[tuple[float, ByteRange]] = []
    for one in idle:
        pages = _whole_pages(one)
        warm_bytes += pages[1]
        if pages[1] and now_s - one.since_s >= IDLE_S:
            old.append((one.since_s, pages))
            old_bytes += pages[1]
    most_bytes = min(warm_bytes - KEPT_BYTES, max(KEPT_BYTES, old_bytes // COOLED_SHARE))
    chosen: list[ByteRange] = []
    for _, (offset, size) in sorted(old):
        part_bytes = min(size, most_bytes // _PAGE_BYTES * _PAGE_BYTES)
        if part_bytes <= 0:
            break
        chosen.append((offset + size - part_bytes, part_bytes))  # its end: places are cut at their beginning
        most_bytes -= part_bytes
    return sorted(chosen)


def rounded(size_bytes: int) -> int:
    """Return the size of the range for so many bytes: at most an eighth more, so that similar sizes share ranges.

    >>> rounded(1), rounded(5000), rounded(9_600_000)
    (64, 8192, 9961472)
    """
    if size_bytes <= _PAGE_BYTES:
        return max(ALIGNMENT, _aligned(size_bytes))
    step = max(_PAGE_BYTES, 1 << (size_bytes.bit_length() - 5))
    return -(-size_bytes // step) * step


def _lowest(ranges: Iterable[IdleRange] | Iterable[ByteRange], size: int) -> ByteRange | None:
    """Return the lowest place of that size in ranges that are sorted by offset; neighbours count as one."""
    begin = end = 0
    for one in ranges:
        if one[0] != end:
            begin = one[0]
        end = one[0] + one[1]
        if end - begin >= size:
            return begin, size
    return None


def _without(idle: list[IdleRange], taken: Sequence[ByteRange]) -> list[IdleRange]:
    """Return what is left of idle ranges. Both are sorted by offset."""
    left: list[IdleRange] = []
    at = 0
    for one in idle:
        begin, end = one.offset, one.offset + one.size
        while at < len(taken) and taken[at][0] < end:
            cut_begin, cut_end = taken[at][0], sum(taken[at])
            if begin < cut_begin:
                left.append(IdleRange(begin, cut_begin - begin, one.since_s))
            begin = max(begin, cut_end)
            if cut_end > end:
                break  # the rest of it lies in the next one
            at += 1
        if begin < end:
            left.append(IdleRange(begin, end - begin, one.since_s))
    return left


def _overlaps(ranges: Sequence[ByteRange], one: IdleRange) -> bool:
    """Say whether any of the ranges, which are sorted by offset and apart, lies in this one."""
    after = bisect.bisect_left(ranges, (one.offset + one.size, 0))
    return after > 0 and sum(ranges[after - 1]) > one.offset


def _cut(ranges: list[ByteRange], taken: ByteRange) -> list[ByteRange]:
    return [(offset, size) for offset, size, _ in _without([IdleRange(*one, 0.0) for one in ranges], [taken])]


def _joined(ranges: list[ByteRange]) -> list[ByteRange]:
    """Return the same, sorted by offset as they are, with neighbours as one."""
    joined: list[ByteRange] = []
    for offset, size in ranges:
        if joined and sum(joined[-1]) == offset:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((offset, size))
    return joined


def _with_fewer_parts(idle: list[IdleRange]) -> list[IdleRange]:
    joined: list[IdleRange] = []
    for one in idle:
        last = joined[-1] if joined else None
        if last is not None and last.offset + last.size == one.offset:
            joined[-1] = IdleRange(last.offset, last.size + one.size, max(last.since_s, one.since_s))
        else:
            joined.append(one)
    return joined


def _whole_pages(one: IdleRange) -> ByteRange:
    begin = -(-one.offset // _PAGE_BYTES) * _PAGE_BYTES
    return begin, max(0, (one.offset + one.size) // _PAGE_BYTES * _PAGE_BYTES - begin)
