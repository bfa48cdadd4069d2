"""The decision that a run takes while it goes on."""

from __future__ import annotations

import time

import numpy as np
import pytest

import penstock as ps
from penstock.runtime import cache_profile, keeping
from tests.caching.kit import entry_files, store_at


@pytest.fixture(autouse=True)
def a_short_profile(monkeypatch):
    monkeypatch.setattr(cache_profile, "PROFILE_S", 0.2)
    monkeypatch.setattr(cache_profile, "PROFILE_ELEMENTS", 10)


def slow(x):
    time.sleep(0.004)
    return np.full(100, x)


def numbers(split):
    yield from range(split * 10, split * 10 + 10)


def epoch_of(dataset, epoch, *, busy_s=0.0):
    with dataset.iterator(epoch=epoch, threads=1) as iterator:
        for _ in iterator:
            time.sleep(busy_s)
        return iterator.statistics().caching[0]


def until_decided(dataset, *, busy_s=0.0):
    for epoch in range(50):
        caching = epoch_of(dataset, epoch, busy_s=busy_s)
        if caching.step == "chosen":
            return caching
    raise AssertionError("nothing was decided in fifty epochs")


def test_a_slow_function_is_kept_from_the_next_split_on(tmp_path):
    dataset = ps.from_generator(numbers, splits=range(12)).map(slow).autocache(tmp_path, version="1")
    caching = until_decided(dataset)
    assert caching.point == 1 and caching.reason.startswith("keep at point 1")
    for epoch in range(3):
        epoch_of(dataset, epoch)
        store_at(tmp_path)
    began = time.perf_counter()
    assert epoch_of(dataset, 9).hits >= 12
    assert time.perf_counter() - began < 0.004 * 120, "faster than the function alone could be"


def test_a_trainer_that_never_waits_writes_nothing(tmp_path):
    quick = ps.from_generator(numbers, splits=range(12)).map(lambda x: np.full(100, x))
    caching = until_decided(quick.autocache(tmp_path, version="1"), busy_s=0.004)
    assert (caching.point, caching.put) == (0, 0)
    assert caching.reason == "compute: the trainer is the bound, and waits for nothing"
    assert entry_files(tmp_path) == []


def test_a_wrong_choice_to_keep_is_seen_and_given_up(tmp_path, monkeypatch):
    dataset = ps.from_generator(numbers, splits=range(12)).map(slow).autocache(tmp_path, version="3")
    assert until_decided(dataset).point == 1
    read = keeping.KeptReader.read

    def read_slowly(self, want):
        time.sleep(0.01)
        return read(self, min(want, 1))

    monkeypatch.setattr(keeping.KeptReader, "read", read_slowly)  # the storage has become slow since it was measured
    for epoch in range(50, 70):
        seen = epoch_of(dataset, epoch)
        if (seen.step, seen.point) == ("chosen", 0):
            break
    assert seen.point == 0 and "seen were" in seen.reason
    assert epoch_of(dataset, 70).hits == seen.hits, "nothing is got any more"


def test_a_choice_to_keep_is_tried_on_a_few_splits_first(tmp_path):
    dataset = ps.from_generator(numbers, splits=range(40)).map(slow).autocache(tmp_path, version="4")
    steps = []
    for epoch in range(50):
        with dataset.iterator(epoch=epoch, threads=1) as iterator:
            for _ in iterator:
                caching = iterator.statistics().caching[0]
                if not steps or steps[-1][0] != caching.step:
                    steps.append((caching.step, caching.put))
        if steps[-1][0] == "chosen":
            break
    assert [step for step, _ in steps] == ["measuring", "trying", "chosen"]
    assert dict(steps)["trying"] == 0 and dict(steps)["chosen"] <= 16


def test_what_was_measured_and_chosen_can_be_read_afterwards(tmp_path, capsys):
    from penstock.cli.main import main

    until_decided(ps.from_generator(numbers, splits=range(12)).map(slow).autocache(tmp_path, version="2"))
    store_at(tmp_path)
    assert main(["cache", "why", "--location", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "reads of 64 KB, 4 at once" in said and "keep at point 1" in said
