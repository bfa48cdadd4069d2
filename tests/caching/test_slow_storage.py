"""Storage that becomes slow, stops in the middle, or takes no more: computing goes on, and that is said once."""

from __future__ import annotations

import os
import threading
import time
import warnings

import numpy as np
import pytest

from penstock.caching import files, writing
from penstock.caching.entries import OpenEntry
from penstock.caching.pace import FEW, SLOW_S, ReadPace
from penstock.caching.store import CacheStore, open_store
from penstock.core.errors import CacheAwayWarning
from penstock.testing.conformance import compare_all, read_all
from tests.caching.kit import by_index, in_splits, store_at
from tests.waiting import wait_until

MAKERS = pytest.mark.parametrize("make", [in_splits, by_index], ids=["splits", "index"])
FIVE_S = 5.0


class Storage:
    """Reads of entries, which a test makes slow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read_s = 0.0
        self.slow_reads = 0
        self.goes_on = threading.Event()
        self.hangs = False
        usual = OpenEntry.raw_frames

        def raw_frames(entry, first, stop):
            if self.hangs:
                self.goes_on.wait(60)
            if self.read_s:
                self.slow_reads += 1
                time.sleep(self.read_s)
            return usual(entry, first, stop)

        monkeypatch.setattr(OpenEntry, "raw_frames", raw_frames)


@pytest.fixture
def storage(monkeypatch):
    made = Storage(monkeypatch)
    yield made
    made.goes_on.set()


def said_while(read) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        read()
    return [str(each.message) for each in said if each.category is CacheAwayWarning]


@MAKERS
def test_a_location_that_becomes_slow_is_left_alone_and_that_is_said_once(make, tmp_path, storage):
    expected = read_all(make(None), seed=1)
    for _ in range(3):  # written, and read as fast as usual
        assert compare_all(expected, read_all(make(tmp_path), seed=1)) is None
        store_at(tmp_path)
    storage.read_s = 0.75
    (text,) = said_while(lambda: [compare_all(expected, read_all(make(tmp_path), seed=1)) for _ in range(2)])
    assert "times slower than before, and than computing" in text
    assert storage.slow_reads * storage.read_s <= FIVE_S, "what follows in the entries that are open is left, too"
    storage.read_s = 0.0
    assert compare_all(expected, read_all(make(tmp_path), seed=1)) is None


@MAKERS
def test_a_location_that_stops_answering_in_the_middle_is_said_once_and_computed_instead(make, tmp_path, storage):
    expected = read_all(make(None), seed=1)
    for _ in range(2):
        read_all(make(tmp_path), seed=1)
        store_at(tmp_path)
    storage.hangs = True
    seen: list[str | None] = []
    assert len(said_while(lambda: seen.append(compare_all(expected, read_all(make(tmp_path), seed=1))))) == 1
    assert seen == [None] and not storage.goes_on.is_set(), "nobody waited for it"


def test_a_write_that_does_not_come_back_holds_nothing_up(tmp_path, monkeypatch):
    goes_on = threading.Event()
    monkeypatch.setattr(files._PartialFile, "_write_gathered", lambda file: goes_on.wait(60))
    monkeypatch.setattr(writing, "STALLED_S", 0.3)
    try:
        expected = read_all(in_splits(None), seed=1)

        def read():
            assert compare_all(expected, read_all(in_splits(tmp_path), seed=1)) is None
            store = open_store(str(tmp_path))
            wait_until(lambda: store.away, "the writer is seen to hang")
            assert compare_all(expected, read_all(in_splits(tmp_path), seed=1)) is None

        (text,) = said_while(read)
        assert "a write did not come back" in text and not goes_on.is_set()
    finally:
        goes_on.set()


def pace_with(usual_s: float) -> ReadPace:
    pace = ReadPace()
    for _ in range(FEW):
        assert not pace.slower_by(1000, usual_s, 0.0)
    return pace


def test_slow_is_what_has_become_slower_and_is_slower_than_computing():
    assert pace_with(0.1).slower_by(1000, 0.5, 0.0) == 0, "a few times slower it may be: others use it"
    pace = pace_with(0.001)
    assert [pace.slower_by(1000, SLOW_S, 2 * SLOW_S) for _ in range(4)] == [0] * 4, "computing takes longer"
    pace = pace_with(0.001)
    assert pace.slower_by(1000, SLOW_S, 0.1) == 0, "once is no more than once"
    assert pace.slower_by(1000, SLOW_S, 0.1) == pytest.approx(1000)
    assert not any(ReadPace().slower_by(1000, SLOW_S, 0.1) for _ in range(9)), "it was never faster"


# Room


def sizes_below(folder) -> int:
    return sum(path.stat().st_size for pattern in ("*.entry", ".*.partial") for path in folder.rglob(pattern))


def fill(store: CacheStore, prefix: str, count: int, compute_s: float) -> None:
    for number in range(count):
        made = store.write(prefix, f"{prefix}/{number:03}.entry", "label", lambda: compute_s / 40_000)
        assert made is not None
        for frame in range(4):
            assert made.add(np.zeros(10_000, np.uint8), 1, indices=[frame])
        made.finish(compute_s)
        assert store.flush(30)


def test_bytes_stay_within_the_capacity_at_every_moment(tmp_path, monkeypatch):
    capacity, held = 300_000, []
    monkeypatch.setattr(files, "WRITE_BYTES", 1)  # each piece is on the disk as soon as it is given
    usual = files._PartialFile._write_gathered

    def write_gathered(file):
        usual(file)
        held.append(sizes_below(tmp_path))

    monkeypatch.setattr(files._PartialFile, "_write_gathered", write_gathered)
    monkeypatch.setattr("penstock.caching.store.RESERVE_BYTES", 50_000)
    store = open_store(str(tmp_path), "user", capacity)
    fill(store, "aa", 12, 1.0)
    before = {name for name, _ in store.files.names()}
    fill(store, "bb", 12, 2.0)  # saves more, and takes the place of the others piece by piece
    after = {name for name, _ in store.files.names()}
    assert len(before) >= 5 and after and not before & after
    assert len(held) > 80 and max(held) <= capacity


def test_principals_without_a_limit_leave_room_on_the_disk_that_they_share(tmp_path, monkeypatch):
    disk = 3_000_000
    monkeypatch.setattr(files.FolderFiles, "free_bytes", lambda _: disk - sizes_below(tmp_path))
    monkeypatch.setattr("penstock.caching.store.RESERVE_BYTES", 50_000)
    stores = [open_store(str(tmp_path), f"principal {name}") for name in ("alice", "bob")]
    for _ in range(3):
        for store in stores:
            fill(store, "aa", 60, 1.0)
    assert disk - sizes_below(tmp_path) >= 0.3 * disk, "each keeps as much as is left"
    assert all(sizes_below(store.files.folder) >= 0.25 * disk for store in stores)


def test_entries_that_were_opened_early_are_closed_whether_they_were_read_or_not(tmp_path):
    def held() -> list[str]:
        found = []
        for each in os.listdir("/proc/self/fd"):
            try:
                found.append(os.readlink(f"/proc/self/fd/{each}"))
            except OSError:  # closed meanwhile
                continue
        return [path for path in found if path.endswith(".entry") and str(tmp_path) in path]

    for _ in range(2):
        read_all(in_splits(tmp_path), seed=1)
        store_at(tmp_path)
    with in_splits(tmp_path).iterator(seed=1) as rows:
        next(rows)
    wait_until(lambda: not held(), "entries of a loop that was left are closed")
