"""Weights of a mix that change from one opening of a stream to the next."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import InvalidArgumentError, InvalidPipelineError
from penstock.runtime.placement import check_weights_midway
from penstock.runtime.streams import StreamPart
from tests.runtime.streams_kit import FakeFeed, Job

pytestmark = pytest.mark.usefixtures("many_splits")

FIRST, SECOND = 0, 10_000


@pytest.fixture
def job():
    return Job(ps.mix([ps.range(FIRST, 3_000), ps.range(SECOND, 13_000)], [1, 1], stop="all"))


def read(job, weights, state=None, most=1000, **options):
    feed = FakeFeed(lambda source, pass_: list(range(job.counts[source])), state)
    return job.run(StreamPart(feed=feed, weights=weights), state=state, most=most, **options)


def share_of_first(elements) -> int:
    return sum(x < SECOND for x in elements)


def check_each_once(elements):
    """Check that every input was read from its start on, in order, with no gap."""
    for start, own in ((FIRST, [x for x in elements if x < SECOND]), (SECOND, [x for x in elements if x >= SECOND])):
        assert own == list(range(start, start + len(own)))


@pytest.mark.parametrize("done", [0, 1, 7, 333, 500])
def test_new_weights_hold_from_the_state_on_and_catch_up_with_nothing(job, done):
    before = read(job, (0.8, 0.2), most=500)
    after = read(job, (0.5, 0.5), before.states[done], want=64)
    for count in (10, 100, 1000):
        assert abs(share_of_first(after.elements[:count]) - count / 2) <= 1
    check_each_once(before.elements[:done] + after.elements)


@pytest.mark.parametrize("done", [1, 3, 250])
def test_the_same_weights_go_on_as_if_nothing_had_been(job, done):
    whole = read(job, (0.8, 0.2), most=400)
    again = read(job, (0.8, 0.2), whole.states[done], most=400 - done)
    assert again.elements == whole.elements[done:] and again.states[1:] == whole.states[done + 1 :]
    for count in range(0, 400, 7):
        assert abs(share_of_first(whole.elements[:count]) - 0.8 * count) <= 1


def test_the_pipelines_own_weights_are_told_from_given_ones(job):
    own = read(job, None, most=100)
    assert len(own.states[-1]) == 2, "states of streams without weights are as they were"
    given = read(job, (0.9, 0.1), own.states[100], most=200)
    assert abs(share_of_first(given.elements) - 180) <= 1
    back = read(job, None, given.states[200], most=100)
    assert abs(share_of_first(back.elements) - 50) <= 1
    check_each_once(own.elements + given.elements + back.elements)


def test_an_input_without_weight_waits_for_one(job):
    alone = read(job, (1.0, 0.0), most=50)
    assert share_of_first(alone.elements) == 50
    both = read(job, (1.0, 1.0), alone.states[50], most=50)
    assert share_of_first(both.elements) == 25
    check_each_once(alone.elements + both.elements)


@pytest.mark.parametrize(
    "after",
    [
        lambda mixed: mixed.batch(3),
        lambda mixed: mixed.map(lambda x: x).filter(lambda x: x % 3 > 0),
        lambda mixed: mixed.padded_batch(4, drop_last=True).prefetch(2),
        lambda mixed: mixed.repeat(2),
    ],
)
def test_after_operators_that_hold_nothing_weights_may_change_at_every_state(after):
    mixed = ps.mix([ps.range(FIRST, 20), ps.range(SECOND, SECOND + 20)], [1, 3], stop="all")
    job = Job(after(mixed))
    check_weights_midway(job.graph)
    whole = read(job, (1.0, 3.0))
    expected = sorted(np.concatenate([np.ravel(x) for x in whole.elements]).tolist())
    for done in range(len(whole.elements)):
        rest = read(job, (5.0, 1.0), whole.states[done])
        given = np.concatenate([np.ravel(x) for x in (*whole.elements[:done], *rest.elements)]).tolist()
        assert sorted(given) == expected


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("shuffle", lambda mixed: mixed.shuffle(4)),
        ("group_by_window", lambda mixed: mixed.group_by_window(lambda x: x % 2, size=3)),
        ("flat_map", lambda mixed: mixed.flat_map(lambda x: [x, x]).batch(3)),
        ("map", lambda mixed: mixed.map(lambda xs: xs, batch_size=4)),
        ("unbatch", lambda mixed: mixed.batch(4).unbatch()),
        ("rebatch", lambda mixed: mixed.batch(4).rebatch(3)),
    ],
)
def test_after_an_operator_that_holds_elements_weights_may_not_change_in_the_middle(name, after):
    mixed = ps.mix([ps.range(9), ps.range(9).shuffle(4)])
    with pytest.raises(InvalidArgumentError, match=rf"{name}.* after the mix.*between epochs"):
        check_weights_midway(Job(after(mixed)).graph)
    check_weights_midway(Job(mixed).graph)  # what stands before the mix holds what it holds


def test_weights_that_fit_no_mix_are_refused(job):
    with pytest.raises(InvalidArgumentError, match="2 sources and 3 weights"):
        read(job, (1.0, 1.0, 1.0))
    with pytest.raises(InvalidArgumentError, match="negative"):
        read(job, (1.0, -1.0))
    with pytest.raises(InvalidPipelineError, match="no mix"):
        read(Job(ps.range(4)), (1.0,))
    two = ps.mix([ps.mix([ps.range(4), ps.range(4)]), ps.range(4)])
    with pytest.raises(InvalidPipelineError, match="2 mix"):
        read(Job(two), (1.0, 1.0))
