"""Batches that are taken before they are trained: the state is that of the one trained last."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.api.reading_ahead import ReadAhead


def numbers():
    return ps.range(40).shuffle(seed=3).batch(4)


def lists(batches):
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("trained", [0, 1, 3, 10])
def test_going_on_from_the_state_gives_what_was_not_trained(trained):
    whole = lists(numbers().distribute())
    ahead = ReadAhead(numbers().distribute())
    taken = lists(ahead)
    ahead.trained(trained)
    again = numbers().distribute()
    again.load_state_dict(ahead.state_dict())
    assert taken == whole
    assert lists(again) == (whole[trained:] if trained < 10 else lists(numbers().iterator(epoch=1)))


def test_looking_takes_nothing():
    ahead = ReadAhead(numbers().distribute())
    looked_at = lists(ahead.look(2))
    assert lists([next(ahead), next(ahead)]) == looked_at
    assert not ahead.exhausted and len(lists(ahead)) == 8 and ahead.exhausted
    assert not ahead.all_trained
    ahead.trained(10)
    assert ahead.all_trained and ahead.state_dict()["phase"] == "ended"


def test_a_note_stays_true_whatever_is_read_after_it():
    with numbers().distribute(1, order="deterministic") as loader:
        batches = iter(loader)
        next(batches)
        state, note = loader.state_dict(), loader.note_state()
        rest = lists(batches)
        assert note() == state
    with numbers().distribute(1, order="deterministic") as again:
        again.load_state_dict(note())
        assert lists(again) == rest
