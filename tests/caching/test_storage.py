"""What becomes of entries when files, disks and processes fail; and what stays where there is little room."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time

import pytest

import penstock as ps
from penstock.caching.catalogue import Catalogue, CatalogueEntry
from penstock.caching.evicting import KeptValue, choose_kept
from penstock.caching.store import CacheStore, open_store
from penstock.core.errors import CacheAwayWarning
from penstock.testing.conformance import compare_all, read_all
from tests.caching.kit import by_index, entry_files, in_splits, numbered, store_at


@pytest.mark.parametrize("make", [in_splits, by_index], ids=["splits", "index"])
def test_flipped_and_cut_bytes_are_found_and_computed_again(make, tmp_path):
    expected = read_all(make(None), seed=1)
    rng = random.Random(7)
    for _ in range(50):
        read_all(make(tmp_path), seed=1)
        damaged = store_at(tmp_path).counts.damaged
        path = rng.choice([path for path in entry_files(tmp_path) if path.stat().st_size > 64])
        content = bytearray(path.read_bytes())
        at = rng.randrange(64, len(content))  # what lies before is padding
        if rng.random() < 0.5:
            content[at] ^= 1 << rng.randrange(8)
        else:
            del content[at:]
        replaced = path.with_suffix(".new")
        replaced.write_bytes(content)
        replaced.rename(path)
        assert compare_all(expected, read_all(make(tmp_path), seed=1)) is None
        if make is in_splits:  # a pack may have elements that are read from another one
            assert store_at(tmp_path).counts.damaged == damaged + 1
    assert store_at(tmp_path).counts.damaged >= 20


WRITER = """
import sys
from tests.caching.kit import in_splits, store_at
from pathlib import Path
while True:
    for _ in in_splits(Path(sys.argv[1])).iterator(epoch=0, seed=1):
        pass
    print("epoch", flush=True)
    for path in sorted(Path(sys.argv[1]).glob("*/*/*.entry"))[::2]:
        path.unlink(missing_ok=True)
"""


def test_a_writer_killed_at_any_moment_leaves_nothing_wrong(tmp_path):
    expected = read_all(in_splits(None), seed=1)
    rng = random.Random(3)
    location = tmp_path / "kept"
    for _ in range(6):
        child = subprocess.Popen([sys.executable, "-c", WRITER, location], stdout=subprocess.PIPE, cwd=os.getcwd())
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(rng.random() * 0.05)  # at any moment of its work, which goes on for ever
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        assert compare_all(expected, read_all(in_splits(location), seed=1)) is None
    assert store_at(location).counts.damaged == 0
    CacheStore(str(location), "user", None)
    assert not list(location.glob("*/*/*.partial")), "what was killed is removed by whoever comes next"


def test_a_location_that_hangs_is_said_once_and_computed_instead(tmp_path):
    expected = read_all(in_splits(None), seed=1)
    read_all(in_splits(tmp_path), seed=1)
    for path in entry_files(tmp_path):
        path.unlink()
        os.mkfifo(path)  # whoever opens it waits for a writer
    began = time.monotonic()
    with pytest.warns(CacheAwayWarning, match="computed") as said:
        assert compare_all(expected, read_all(in_splits(tmp_path), seed=1)) is None
    assert time.monotonic() - began < 5 + 3, "of which five are ours"
    assert len([each for each in said if each.category is CacheAwayWarning]) == 1
    for path in tmp_path.glob("*/*/*.entry"):
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))  # let the threads that hang go


def test_a_location_that_vanishes_is_computed_instead(tmp_path):
    import shutil

    expected = read_all(in_splits(None), seed=1)
    read_all(in_splits(tmp_path / "kept"), seed=1)
    store_at(tmp_path / "kept")
    shutil.rmtree(tmp_path / "kept")
    with pytest.warns(CacheAwayWarning):
        assert compare_all(expected, read_all(in_splits(tmp_path / "kept"), seed=1)) is None
        open_store(str(tmp_path / "kept")).flush(10)


FULL = """
import resource, sys, warnings
from pathlib import Path
from penstock.caching.store import open_store
from penstock.testing.conformance import compare_all, read_all
from tests.caching.kit import in_splits
expected = read_all(in_splits(None), seed=1)
open_store(sys.argv[1]).catalogue.remember("a", "b")
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(2):
        assert compare_all(expected, read_all(in_splits(Path(sys.argv[1])), seed=1)) is None
        open_store(sys.argv[1]).flush(10)
print([str(each.message) for each in said if "autocache" in str(each.message)])
"""


def test_a_location_without_room_is_said_once_and_computed_instead(tmp_path):
    location = tmp_path / "kept"
    done = subprocess.run([sys.executable, "-c", FULL, location], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cannot be used") == 1, done.stdout
    assert not list(location.glob("*/*/*.partial")) and not list(location.glob("*/*/*.entry"))


# Room


def test_what_stays_saves_within_five_percent_of_the_best():
    rng = random.Random(11)
    for _ in range(200):
        entries = [KeptValue(str(i), rng.randint(1, 100), rng.uniform(0.1, 10)) for i in range(rng.randint(4, 13))]
        capacity = sum(entry.nbytes for entry in entries) // 2
        saves = {entry.name: entry for entry in entries}
        best = max(
            sum(entry.saves_s for entry in some)
            for count in range(len(entries) + 1)
            for some in itertools.combinations(entries, count)
            if sum(entry.nbytes for entry in some) <= capacity
        )
        kept = choose_kept(entries, capacity)
        assert sum(saves[name].nbytes for name in kept) <= capacity
        assert sum(saves[name].saves_s for name in kept) >= 0.95 * best


def entry(name, nbytes, compute_s):
    return CatalogueEntry(
        name=name,
        prefix="p",
        label="",
        nbytes=nbytes,
        elements=1,
        compute_s=compute_s,
        made_at_s=0.0,
        used_at_s=0.0,
    )


def test_what_saves_more_by_the_byte_takes_the_place_of_what_saves_less(tmp_path):
    catalogue = Catalogue(tmp_path / "c")
    catalogue.add(entry("little", 50, 1.0))
    catalogue.add(entry("much", 50, 9.0))
    gone = []

    def evict(name):
        gone.append(name)
        return True

    def reserve(writer, saves):
        return catalogue.reserve(writer, 50, capacity_bytes=100, saves_s_per_byte=saves, evict=evict)

    assert not reserve("equal", 1.0 / 50), "equals would push each other out for ever"
    assert reserve("better", 5.0 / 50) and gone == ["little"]
    assert not reserve("another", 5.0 / 50), "what is being written has its room"
    catalogue.close()


def test_what_is_read_is_not_evicted(tmp_path):
    read_all(in_splits(tmp_path), seed=1)
    store = store_at(tmp_path)
    name = sorted(store.catalogue.names())[0]
    held = store.files.open(name)
    assert held is not None and not store.files.remove(name)
    held.close()
    assert store.files.remove(name)


def test_bytes_stay_within_the_capacity(tmp_path):
    def made(x):
        return numbered(str(x) * 200)

    capacity = 60_000

    def kept():
        return ps.from_generator(lambda split: range(split * 20, split * 20 + 20), splits=range(12)).map(made)

    dataset = kept().autocache(tmp_path, always=True, version="1", capacity_bytes=capacity)
    store = open_store(str(tmp_path), "user", capacity)
    for epoch in range(3):
        assert compare_all(read_all(kept(), epoch=epoch), read_all(dataset, epoch=epoch)) is None
        store.flush(20)
        files = [path.stat().st_size for path in tmp_path.glob("*/*/*.entry")]
        assert 0 < sum(files) <= capacity and store.counts.no_room
    assert store.counts.hits >= 2 * len(files), "half of it stays, and is found in every epoch"


def test_a_catalogue_is_rebuilt_by_listing(tmp_path):
    read_all(in_splits(tmp_path), seed=1)
    store = store_at(tmp_path)
    before = store.catalogue.entries()
    for each in before:
        store.catalogue.remove(each.name)
    assert store.rebuild() == len(before) == 6
    assert [(e.name, e.nbytes, e.elements, e.label) for e in store.catalogue.entries()] == [
        (e.name, e.nbytes, e.elements, e.label) for e in before
    ]


def test_others_cannot_enter_the_folder_and_names_say_nothing(tmp_path):
    read_all(in_splits(tmp_path), seed=1)
    store_at(tmp_path)
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.rglob("*"))
    other = CacheStore(str(tmp_path), "somebody else", None)
    assert other.catalogue.names() == set()


def test_a_url_is_a_location_too(tmp_path):
    import fsspec

    location = f"memory://kept-{tmp_path.name}"
    expected = read_all(in_splits(None), seed=1)
    for _ in range(2):
        assert compare_all(expected, read_all(in_splits(location), seed=1)) is None
        assert open_store(location).flush(20)
    assert (open_store(location).counts.hits, open_store(location).counts.put) == (6, 6)
    assert len(fsspec.filesystem("memory").find(location)) == 6
