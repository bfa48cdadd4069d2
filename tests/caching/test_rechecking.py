"""One in a thousand of what is got is made all the same: what does not give the same any more is named."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import penstock as ps
from penstock.runtime import keeping, keeping_elements, rechecking
from penstock.testing.conformance import compare_all, read_all
from tests.caching.kit import by_index, in_splits, store_at

MAKERS = pytest.mark.parametrize("make", [in_splits, by_index], ids=["splits", "index"])


@pytest.fixture
def all_due(monkeypatch):
    monkeypatch.setattr(rechecking, "_named", set())
    for module in (keeping, keeping_elements):
        monkeypatch.setattr(module, "is_due", lambda place, index=0: True)


def said_by(dataset: ps.Dataset, rows: list) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows.extend(dataset.iterator(seed=1))
    return [str(each.message) for each in caught if issubclass(each.category, ps.ImpureFunctionWarning)]


def test_about_one_in_a_thousand_is_due_in_each_pass_and_in_time_each_of_them():
    due = [{k for k in range(100_000) if rechecking.is_due(place, k)} for place in (1, 2**63 + 5)]
    assert all(50 <= len(each) <= 200 for each in due) and not due[0] & due[1]
    assert 50 <= sum(rechecking.is_due(place * 0x9E3779B1) for place in range(100_000)) <= 200


@MAKERS
def test_what_still_gives_the_same_is_handed_on_and_nothing_is_said(make, tmp_path, all_due):
    expected = read_all(make(None), seed=1)
    read_all(make(tmp_path), seed=1)
    before = store_at(tmp_path).counts.hits
    found: list = []
    assert said_by(make(tmp_path), found) == [] and compare_all(expected, found) is None
    assert store_at(tmp_path).counts.hits == before, "all were due, and so were made"


@pytest.mark.parametrize("kind", ["splits", "index"])
def test_a_library_that_has_changed_is_noticed_once_and_what_it_gives_now_is_handed_on(kind, tmp_path, all_due):
    library = {"offset": 0}

    def made(x):
        return np.full(20, x + library["offset"])

    source = ps.range(30).shuffle(seed=1) if kind == "index" else ps.from_generator(range, splits=[30])
    dataset = source.map(made).autocache(tmp_path, always=True, version="1")
    list(dataset.iterator(seed=1))
    store_at(tmp_path)
    library["offset"] = 100  # since the pipeline was described, and its prefix with it
    found: list = []
    (text,) = said_by(dataset, found)
    assert "map(made) does not give what autocache() keeps of it: element " in text and "cache rm" in text
    assert sorted(int(row[0]) for row in found) == list(range(100, 130))
