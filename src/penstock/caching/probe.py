"""How fast a location is: measured on it, past the page cache, by size of requests and how many are under way.

A probe writes some megabytes, asks for them back, and removes them. It takes about a second, less where storage is
fast, and is remembered with the location for a day. What it finds are bounds of storage alone: what comes out of the
page cache is faster, and counts as luck. `read_back` reads entries that there are, as pipelines do, into elements.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from time import perf_counter, time

import msgspec
import numpy as np

from penstock.caching.entries import FrameTable
from penstock.caching.files import EntryFiles, FolderFiles
from penstock.caching.store import PATIENCE_S, CacheStore

SIZES = (64 << 10, 1 << 20)
PARALLEL = (1, 4)
PROBE_BYTES = 8 << 20
STEP_S = 0.2  # one measurement: storage that gives less than PROBE_BYTES meanwhile is measured by what it gave
REMEMBERED_S = 24 * 3600.0
READ_BACK_BYTES = 4 << 20
READ_BACK_S = 0.4  # after which what was read so far is enough
FACT = "storage"


class ProbedSpeed(msgspec.Struct, frozen=True, array_like=True):
    """What storage gave for one kind of request."""

    writes: bool
    nbytes: int
    parallel: int
    latency_s: float
    """The least that one request took."""
    bytes_per_s: float
    """Of all requests together."""


class StorageProbe(msgspec.Struct, frozen=True):
    at_s: float
    took_s: float
    speeds: tuple[ProbedSpeed, ...]


def storage_of(store: CacheStore) -> StorageProbe:
    """Return how fast a store's location is, as it was measured within a day, or now."""
    known = store.catalogue.fact(FACT)
    if known is not None:
        probe = _probes.decode(known)
        if time() - probe.at_s < REMEMBERED_S:
            return probe
    probe = probe_storage(store.files)
    store.catalogue.remember(FACT, msgspec.json.encode(probe).decode())
    return probe


def probe_storage(files: EntryFiles) -> StorageProbe:
    began = perf_counter()
    name = f"probe/{secrets.token_hex(8)}.entry"
    try:
        # A little first: slow storage would take long for what tells of fast storage.
        first = _write(files, name, SIZES[0], 4 * SIZES[0])
        speeds = [first]
        enough = min(PROBE_BYTES, int(first.bytes_per_s * STEP_S))
        if enough >= SIZES[1]:
            speeds = [_write(files, name, SIZES[1], enough)]
        speeds += [_read(files, name, size, parallel) for size in SIZES for parallel in PARALLEL]
    finally:
        files.remove(name, though_read=True)
    return StorageProbe(time(), perf_counter() - began, tuple(speeds))


def _write(files: EntryFiles, name: str, size: int, total: int) -> ProbedSpeed:
    """Write an entry in steps until it is as large as it shall be, or time is up; storage has all of it at the end."""
    piece = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    table, partial = FrameTable(), files.create(name)
    began = perf_counter()
    latency_s = float("inf")
    partial.write(table.beginning())
    while table.nbytes < total and perf_counter() - began < STEP_S:
        at = perf_counter()
        partial.write(piece)
        latency_s = min(latency_s, perf_counter() - at)
        table.add(piece, 0)
    partial.write(table.end(label="probe", prefix="probe", compute_s=0.0, made_at_s=time()))
    partial.publish()
    if isinstance(files, FolderFiles):
        _past_the_page_cache(files, name)
    took_s = perf_counter() - began
    return ProbedSpeed(True, len(piece), 1, min(latency_s, took_s), table.nbytes / took_s)


def _past_the_page_cache(files: FolderFiles, name: str) -> None:
    descriptor = os.open(files.folder / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _read(files: EntryFiles, name: str, size: int, parallel: int) -> ProbedSpeed:
    if isinstance(files, FolderFiles):
        _past_the_page_cache(files, name)
    entry = files.open(name)
    if entry is None:
        raise OSError("what was written for a probe is gone")
    try:
        offsets = range(0, max(size, entry.nbytes - size + 1), size)
        return _timed(lambda offset: len(entry.read_at(offset, size)), offsets, size, parallel)
    finally:
        entry.close()


def _timed(read: Callable[[int], int], offsets: range, size: int, parallel: int) -> ProbedSpeed:
    began = perf_counter()
    latencies = [float("inf")]

    def some(number: int) -> int:
        got = 0
        for offset in offsets[number::parallel]:
            at = perf_counter()
            if at - began > STEP_S and got:
                break
            got += read(offset)
            latencies.append(perf_counter() - at)
        return got

    if parallel == 1:
        got = some(0)
    else:
        with ThreadPoolExecutor(parallel) as threads:
            got = sum(threads.map(some, range(parallel)))
    return ProbedSpeed(False, size, parallel, min(latencies), got / (perf_counter() - began))


def read_back(store: CacheStore, prefix: str, *, window_bytes: int, in_flight: int) -> float:
    """Return how many bytes a second entries of a prefix give as elements; 0: there are none that can be read.

    They are read some windows at once, and then the next ones: each of `window_bytes`, or one frame where that is
    larger. The middle one of what they gave counts: others use the location meanwhile, a writer that has a last entry
    to write among them.
    """
    files, nbytes, began = store.files, 0, perf_counter()
    speeds: list[float] = []
    for name, _ in files.names(prefix):
        if nbytes >= READ_BACK_BYTES or perf_counter() - began >= READ_BACK_S:
            break
        if isinstance(files, FolderFiles):
            _past_the_page_cache(files, name)
        at = perf_counter()
        entry = files.open(name)
        if entry is None:
            continue
        if not window_bytes:  # single frames are of entries that stay open
            at = perf_counter()
        try:
            first = 0
            while first < len(entry.sizes) and nbytes < READ_BACK_BYTES and at - began < READ_BACK_S:
                windows = [(first, entry.window(first, window_bytes))]
                while len(windows) < in_flight and windows[-1][1] < len(entry.sizes):
                    windows.append((windows[-1][1], entry.window(windows[-1][1], window_bytes)))
                if len(windows) == 1:
                    entry.frames(*windows[0])
                else:
                    for read in [store.ask(partial(entry.frames, *window)) for window in windows]:
                        read.wait(PATIENCE_S)
                size = int(entry.sizes[first : windows[-1][1]].sum())
                now = perf_counter()
                speeds.append(size / max(now - at, 1e-9))
                nbytes, first, at = nbytes + size, windows[-1][1], now
        finally:
            entry.close()
    return median(speeds) if speeds else 0.0


_probes = msgspec.json.Decoder(StorageProbe)
