"""Computing, putting, getting and what is half evicted give the same, and states go from each to each."""

from __future__ import annotations

import itertools
import shutil

import numpy as np
import pytest

import penstock as ps
from penstock.testing.conformance import check_states_cross, compare_all, read_all
from tests.caching.kit import by_index, entry_files, in_splits, is_kept, noisy, numbered, split_texts, store_at

PIPELINES = pytest.mark.parametrize("make", [in_splits, by_index], ids=["splits", "index"])


@PIPELINES
def test_states_cross_between_all_modes(make, tmp_path):
    filled, halves, fresh = tmp_path / "filled", tmp_path / "halves", itertools.count()
    for location in (filled, halves):
        read_all(make(location), seed=1234)
        assert entry_files(location)

    def half_evicted():
        if make is in_splits:
            for path in entry_files(halves)[::2]:
                path.unlink()
        return make(halves)

    makes = {
        "computing": lambda: make(None),
        "putting": lambda: make(tmp_path / f"empty{next(fresh)}"),
        "getting": lambda: make(filled),
        "half evicted": half_evicted,
    }
    with pytest.warns(UserWarning, match="made differently"):  # where an autocache() was added, and changes nothing
        assert check_states_cross(makes, every=7, threads=2) > 60
    counts = store_at(filled).counts
    assert counts.hits > counts.misses and not counts.damaged


@PIPELINES
@pytest.mark.parametrize("epoch", [0, 3])
def test_all_of_a_later_epoch_is_got(make, epoch, tmp_path):
    expected = read_all(make(None), epoch=epoch, seed=7)
    read_all(make(tmp_path), epoch=0, seed=7)
    before = store_at(tmp_path).counts.misses
    assert compare_all(expected, read_all(make(tmp_path), epoch=epoch, seed=7)) is None
    assert store_at(tmp_path).counts.misses == before


def test_what_was_evicted_meanwhile_is_computed(tmp_path):
    expected = read_all(in_splits(None), seed=1)
    read_all(in_splits(tmp_path), seed=1)
    for path in entry_files(tmp_path)[::2]:
        path.unlink()
    assert compare_all(expected, read_all(in_splits(tmp_path), seed=1)) is None
    assert len(entry_files(tmp_path)) == 6, "and kept again"


def test_packs_that_vanish_between_two_epochs_are_computed(tmp_path):
    expected = read_all(by_index(None), seed=1)
    read_all(by_index(tmp_path), seed=1)
    (pack,) = entry_files(tmp_path)
    shutil.copy(pack, pack.with_suffix(".gone"))
    pack.unlink()
    assert compare_all(expected, read_all(by_index(tmp_path), seed=1)) is None


def test_a_mark_where_elements_may_be_shared_out_is_no_obstacle(tmp_path):
    def make():
        return ps.range(30).shard().map(str).autocache(tmp_path, always=True)

    expected = read_all(make(), epoch=0, seed=3)
    before = store_at(tmp_path).counts.misses
    assert read_all(make(), epoch=1, seed=3) == expected == [str(x) for x in range(30)]
    assert store_at(tmp_path).counts.misses == before
    with make().distribute(1, sharding="hint", limits=ps.Limits(timeout_s=60)) as loader:
        assert sorted(loader) == sorted(expected)


def test_frozen_random_numbers_are_those_of_the_first_epoch_in_every_mode(tmp_path):
    def draw(x, rng):
        return x, float(rng.random())

    def make(location):
        return ps.range(30).shuffle(seed=1).map(draw).autocache(location, always=True, frozen=True).map(draw)

    first = {x: (y, z) for (x, y), z in read_all(make(tmp_path), epoch=0, seed=3)}
    later = {x: (y, z) for (x, y), z in read_all(make(tmp_path), epoch=5, seed=3)}
    computed = {x: (y, z) for (x, y), z in read_all(make(tmp_path / "other"), epoch=5, seed=3)}
    assert later == computed, "whether got or computed"
    assert {x: y for x, (y, _) in first.items()} == {x: y for x, (y, _) in later.items()}, "drawn once below the point"
    assert all(first[x][1] != later[x][1] for x in first), "and anew above it"
    other = {x: y for (x, y), _ in read_all(make(tmp_path), epoch=0, seed=4)}
    assert all(other[x] != first[x][0] for x in first), "another seed is another entry"


@pytest.mark.parametrize("kind", ["splits", "index"])
def test_of_two_points_the_lower_one_may_be_there_and_the_upper_one_not(kind, tmp_path):
    def make(below, above, *, keep=True):
        if kind == "splits":
            made = ps.from_generator(split_texts, splits=range(6)).map(numbered)
        else:
            made = ps.range(60).shuffle(seed=3).map(numbered)
        made = made.autocache(tmp_path / "below", always=below, version="1") if keep else made
        made = made.filter(is_kept)
        made = made.autocache(tmp_path / "above", always=above, version="1") if keep else made
        return made.map(noisy)

    expected = read_all(make(False, False, keep=False), seed=1)
    for below, above in ((True, False), (False, True), (True, False), (False, True), (True, True)):
        assert compare_all(expected, read_all(make(below, above), seed=1)) is None
    assert all(store_at(tmp_path / each).counts.hits for each in ("below", "above"))


def test_what_is_held_stays_as_it_is_while_memory_of_what_is_not_is_used_again(tmp_path):
    def made(number):
        return np.full(60_000, number)

    dataset = ps.from_generator(range, splits=[40, 40]).map(made).autocache(tmp_path, always=True, version="1")
    list(dataset)
    store_at(tmp_path)
    held, places = [], set()
    for position, row in enumerate(dataset):
        places.add(row.ctypes.data)
        if position % 8 == 0:
            row += 1000  # what is got may be written to
            held.append((position % 40, row))
    assert all((row == number + 1000).all() for number, row in held) and len(held) == 10
    assert len(places) < 80, "a place is used again"
