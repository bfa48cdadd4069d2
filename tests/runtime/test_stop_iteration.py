"""A `StopIteration` out of a user's code is an error, as PEP 479 has it: it never looks like the end of the data."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import penstock as ps
from penstock.runtime.quarantine import read_quarantine
from penstock.samplers.drawing import Drawing, Feed

SAID = "raised StopIteration"


def stops(x):
    return next(iter(())) if x == 3 else x


def stops_with_rng(x, rng):
    return stops(x)


class Stops:
    def __call__(self, x):
        return stops(x)


class StopsWhenMade:
    def __init__(self):
        next(iter(()))

    def __call__(self, x):
        return x


def children(x):
    return [stops(x)] * 2


def generated(x):
    yield x
    yield stops(x)


def sequence(x):
    return np.arange(stops(x) % 4 + 1)


class Rows:
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return stops(index)


class RowsAtOnce(Rows):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def whole_group(rows):
    return [stops(row) for row in rows]


PIPELINES = {
    "map": lambda: ps.range(10).map(stops),
    "map with rng": lambda: ps.range(10).map(stops_with_rng),
    "map, fused": lambda: ps.range(10).map(stops).filter(bool).map(abs),
    "map and batch, fused": lambda: ps.range(10).map(stops).batch(2),
    "map of a class": lambda: ps.range(10).map(Stops),
    "map of an object": lambda: ps.range(10).map(Stops()),
    "map of a partial": lambda: ps.range(10).map(partial(stops)),
    "map of a class that fails when made": lambda: ps.range(10).map(StopsWhenMade),
    "map in groups": lambda: ps.range(10).map(whole_group, batch_size=4),
    "filter": lambda: ps.range(10).filter(lambda x: stops(x) >= 0),
    "flat_map": lambda: ps.range(10).flat_map(children),
    "flat_map of a generator": lambda: ps.range(10).flat_map(generated),
    "interleave": lambda: ps.range(10).interleave(children, cycle=2),
    "interleave of a generator": lambda: ps.range(10).interleave(generated, cycle=2),
    "group_by_window, key": lambda: ps.range(10).group_by_window(stops, size=2),
    "group_by_window, class of a key": lambda: ps.range(10).group_by_window(StopsWhenMade, size=2),
    "group_by_window, reduce": lambda: ps.range(10).group_by_window(lambda x: 0, size=2, reduce=whole_group),
    "bucket_by_length": lambda: ps.range(10).bucket_by_length(stops, boundaries=[2, 4], batch_size=2),
    "pack": lambda: ps.range(10).map(sequence).pack(8),
    "mix": lambda: ps.mix([ps.range(10), ps.range(10)], unit=stops),
    "from_generator, called": lambda: ps.from_generator(lambda split: children(split), splits=[1, 2, 3, 4]),
    "from_generator": lambda: ps.from_generator(generated, splits=[1, 2, 3, 4]),
    "from_torch": lambda: ps.from_torch(Rows()),
    "from_torch, many at once": lambda: ps.from_torch(RowsAtOnce()),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", PIPELINES)
def test_what_stops_is_an_error_and_not_the_end(name, threads):
    with pytest.raises(RuntimeError, match=SAID) as caught:
        list(PIPELINES[name]().iterator(threads=threads))
    assert isinstance(caught.value.__cause__, StopIteration)


@pytest.mark.parametrize(
    "name",
    ["map", "map with rng", "filter", "flat_map", "interleave", "group_by_window, key", "bucket_by_length", "mix"],
)
def test_the_error_names_the_operator_and_the_element(name):
    operator = name.split(",")[0].split()[0]
    with pytest.raises(RuntimeError, match=rf"^{operator}.*{SAID}.*default") as caught:
        list(PIPELINES[name]().iterator(threads=1))
    (note,) = caught.value.__notes__
    assert note.startswith(f"penstock: in {operator}") and "element 3 of split 0" in note


def test_what_came_before_is_given_first():
    given = []
    with pytest.raises(RuntimeError, match=SAID):
        given.extend(ps.range(10).map(stops).iterator(threads=1))
    assert given == [0, 1, 2]


def test_what_stops_is_skipped_within_the_budget_as_any_failure(tmp_path):
    skip = ps.SkipErrors(budget=1, quarantine=str(tmp_path / "quarantine.jsonl"))
    assert list(ps.range(6).map(stops, on_error=skip)) == [0, 1, 2, 4, 5]
    assert list(ps.range(6).filter(lambda x: stops(x) >= 0, on_error=skip)) == [0, 1, 2, 4, 5]
    entries = read_quarantine(tmp_path / "quarantine.jsonl").values()
    assert {entry.exception for entry in entries} == {"builtins.RuntimeError"}
    assert all("in stops" in entry.traceback for entry in entries), "the user's own frames are kept"


class NoTensor:
    """What looks like a tensor of indices, and is none."""

    def __iter__(self):
        return iter([1, 2])

    def tolist(self):
        return next(iter(()))


class NoEpoch:
    def set_epoch(self, epoch):
        next(iter(()))

    def __iter__(self):
        return iter([1])


@pytest.mark.parametrize("sampler", [lambda epoch: next(iter(())), NoEpoch(), [NoTensor()]])
def test_a_sampler_that_stops_by_mistake_has_not_ended(sampler):
    with pytest.raises(RuntimeError, match=f"sampler {SAID}"):
        Drawing(Feed(sampler, 2), epoch=0, grouping=None, count=10)


def test_what_stops_in_a_worker_reaches_the_trainer():
    with ps.range(10).map(stops).batch(2).distribute(1) as loader, pytest.raises(RuntimeError, match=SAID) as caught:
        list(loader)
    assert any("in stops" in note for note in caught.value.__notes__)
