"""Where a service puts caching points that nobody put."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.graph import ops
from penstock.graph.traverse import walk
from penstock.passes import canonicalize, optimize
from penstock.runtime.auto_points import with_points


def plain(x):
    return x


def drawing(x, rng):
    return x


def places(dataset: ps.Dataset) -> list[str]:
    """Return what stands right below each point, from the sources up."""
    graph = canonicalize(with_points(canonicalize(dataset.node), "/kept"))
    optimize(graph)
    return [node.upstream.name for node in walk(graph) if isinstance(node, ops.Autocache)]


numbers = ps.range(100)
CASES = {
    "a source alone": (numbers, ["range"]),
    "a function": (numbers.map(plain), ["range", "map"]),
    "before what draws": (numbers.map(plain).filter(plain).map(drawing).map(plain), ["range", "filter"]),
    "what draws comes first": (numbers.map(drawing).map(plain), ["range"]),
    "before a batch": (numbers.map(plain).batch(4).map(plain), ["range", "map"]),
    "before a shuffle, with the maps behind it": (numbers.shuffle(seed=1).map(plain).batch(4), ["range", "map"]),
    "a filter behind a shuffle": (numbers.shuffle(10, seed=1).filter(plain), ["range"]),
    "two sources": (ps.mix([numbers.map(plain), ps.range(5)], [1, 1]), ["range", "map", "range"]),
    "a point of the user's": (numbers.map(plain).autocache("/mine").map(plain), ["map"]),
    "a source that cannot tell": (ps.from_generator(range, splits=[3]).map(plain), []),
}


@pytest.mark.parametrize("name", CASES)
def test_points_stand_over_the_source_and_before_what_is_random_or_mixes(name):
    dataset, below = CASES[name]
    assert places(dataset) == below


def test_columns_are_still_read_from_the_file_alone():
    rows = ps.from_items([{"a": 1, "b": 2}]).select("a").map(plain)
    graph = with_points(canonicalize(rows.node), None)
    first = next(node for node in walk(graph) if isinstance(node, ops.Autocache))
    assert first.upstream.name == "select"
