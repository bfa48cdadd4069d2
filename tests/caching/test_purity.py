"""One element in a thousand is made twice, and a function that gives another is named."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest

import penstock as ps
from penstock.runtime import repeating


@pytest.fixture(autouse=True)
def nobody_named_yet(monkeypatch):
    monkeypatch.setattr(repeating, "_named", set())


def grown(row):
    row["values"] += 1  # in place, as functions may
    return row


def drawing(row, rng):
    return {**row, "noise": rng.random()}


def rows(count=4000):
    return ps.range(count).map(lambda i: {"values": np.full(3, i)})


def said_by(dataset) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with dataset.iterator(threads=2) as iterator:
            for _ in iterator:
                pass
    return [str(each.message) for each in caught if issubclass(each.category, ps.ImpureFunctionWarning)]


def test_an_impure_function_is_named_once_with_an_element_of_its(tmp_path):
    numbers = itertools.count()

    def counted(row):
        return {**row, "number": next(numbers)}

    (text,) = said_by(rows().map(grown).map(counted).map(grown).autocache(tmp_path, always=True).map(grown))
    assert text.startswith("map(counted) gave another result when it was called again with element ")
    assert "Have it depend on its argument alone, take rng" in text


def test_functions_that_are_pure_or_draw_from_what_they_are_given_are_not(tmp_path):
    assert said_by(rows().map(grown).map(drawing).autocache(tmp_path, always=True, frozen=True)) == []


def test_what_is_not_kept_may_be_as_it_likes(tmp_path):
    numbers = itertools.count()
    dataset = rows().map(grown).autocache(tmp_path, always=True).map(lambda row: {**row, "n": next(numbers)})
    assert said_by(dataset) == []
    assert next(numbers) == 4000


def test_about_one_in_a_thousand_is_made_twice_more(tmp_path):
    calls = itertools.count()

    def called(row):
        next(calls)
        return row

    said_by(rows(20_000).map(called).autocache(tmp_path, always=True))
    assert 20_000 + 2 * 5 <= next(calls) <= 20_000 + 2 * 50
