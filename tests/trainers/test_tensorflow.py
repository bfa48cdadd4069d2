"""TensorFlow: pipelines as `tf.data.Dataset`, and tf.data pipelines as sources."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import tensorflow as tf

import penstock as ps
from tests.trainers.rows import rows


def indices(dataset):
    return [batch["index"].numpy().tolist() for batch in dataset]


def test_a_pipeline_is_a_dataset_with_a_signature():
    made = ps.tensorflow.to_tf_dataset(rows().batch(10))
    assert made.element_spec["x"] == tf.TensorSpec((None, 4), tf.float32)
    assert made.element_spec["index"] == tf.TensorSpec((None,), tf.int64)
    first, second = indices(made), indices(made)
    assert sorted(chain.from_iterable(first)) == sorted(chain.from_iterable(second)) == list(range(96)), (
        "the last batch has six rows"
    )
    assert first != second, "each iteration is the next epoch"


def test_text_is_strings_and_an_axis_that_differs_has_no_length():
    dataset = ps.range(4).map(lambda i: {"tokens": np.arange(i + 1), "text": f"é{i}"}).padded_batch(2)
    made = ps.tensorflow.to_tf_dataset(dataset)
    assert made.element_spec["tokens"].shape.as_list() == [None, None]
    assert [text.decode() for batch in made for text in batch["text"].numpy()] == ["é0", "é1", "é2", "é3"]


def test_a_signature_that_is_given_is_kept_and_nothing_is_read_for_it():
    signature = {
        "x": tf.TensorSpec((None, 4), tf.float64),
        "y": tf.TensorSpec((None,)),
        "index": tf.TensorSpec(None, tf.int32),
    }
    made = ps.tensorflow.to_tf_dataset(rows().batch(8), signature=signature)
    assert made.element_spec == signature
    assert next(iter(made))["x"].dtype == tf.float64


def test_the_state_is_that_of_the_batch_trained_last_however_far_tf_data_reads_ahead():
    state = ps.tensorflow.DatasetState()
    seen = []
    made = ps.tensorflow.to_tf_dataset(rows().batch(8), state=state).prefetch(4)
    for batch in made:
        seen.append(batch["index"].numpy().tolist())
        state.trained()
        if len(seen) == 5:
            saved = state.state_dict()
    other = ps.tensorflow.DatasetState()
    again = ps.tensorflow.to_tf_dataset(rows().batch(8), state=other, signature=made.element_spec)
    other.load_state_dict(saved)
    assert seen[5:] == indices(again) and len(seen) == 12


def make_numbers():
    return tf.data.Dataset.range(20).map(lambda x: {"n": x, "square": tf.cast(x * x, tf.float32)})


@pytest.mark.parametrize("shards", [1, 3])
def test_a_tf_data_pipeline_is_a_source_that_resumes(shards):
    dataset = ps.tensorflow.from_tf_dataset(make_numbers, shards=shards).batch(4)
    iterator = dataset.iterator()
    head = [next(iterator)["n"].tolist() for _ in range(2)]
    state = iterator.state_dict()
    rest = [batch["n"].tolist() for batch in iterator]
    again = dataset.iterator()
    again.load_state_dict(state)
    assert [batch["n"].tolist() for batch in again] == rest
    assert sorted(chain.from_iterable(head + rest)) == list(range(20))


def test_a_tf_data_pipeline_runs_on_workers():
    with ps.tensorflow.from_tf_dataset(make_numbers, shards=2).batch(4).distribute(1) as loader:
        assert sorted(n for batch in loader for n in batch["n"].tolist()) == list(range(20))


def test_a_dataset_itself_is_refused_with_the_remedy():
    with pytest.raises(ps.InvalidArgumentError, match="takes a function that returns"):
        ps.tensorflow.from_tf_dataset(tf.data.Dataset.range(3))
