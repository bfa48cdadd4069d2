"""Batches as JAX arrays, in one process."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import pytest

import penstock as ps
from tests.trainers.rows import rows


def test_batches_are_pytrees_of_arrays_on_devices():
    dataset = ps.range(4).map(lambda i: {"a": np.full(2, i, np.float32), "b": (i, [np.int32(i)]), "text": f"t{i}"})
    (batch,) = ps.jax.arrays(dataset.batch(4))
    assert isinstance(batch["a"], jax.Array) and batch["a"].shape == (4, 2)
    assert isinstance(batch["b"][1][0], jax.Array) and batch["text"].tolist() == ["t0", "t1", "t2", "t3"]


def test_the_state_is_of_what_was_received_not_of_what_lies_on_devices():
    data = ps.jax.arrays(rows().batch(4), ahead=4)
    batches = iter(data)
    for _ in range(3):
        next(batches)
    state = data.state_dict()
    rest = [batch["index"].tolist() for batch in batches]
    again = ps.jax.arrays(rows().batch(4))
    again.load_state_dict(state)
    assert [batch["index"].tolist() for batch in again] == rest and len(rest) == 21
    assert again.state_dict()["phase"] == "ended"


def test_an_older_iterator_says_that_there_is_a_newer_one():
    data = ps.jax.arrays(rows().batch(4), ahead=1)
    older = iter(data)
    next(older)
    newer = iter(data)
    with pytest.raises(ps.SupersededError, match="a newer iterator of this loader"):
        next(older)
    assert len(list(newer)) == 24


def test_an_error_in_the_pipeline_reaches_the_loop():
    def fails(number):
        if number == 5:
            raise LookupError("five")
        return number

    with pytest.raises(LookupError, match="five"):
        list(ps.jax.arrays(ps.range(8).map(fails).batch(2)))
