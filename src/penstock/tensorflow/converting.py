"""Pipelines as `tf.data.Dataset`, and the other way round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from penstock.api.dataset import Dataset
from penstock.api.loader import Loader
from penstock.api.readers import from_generator
from penstock.api.reading_ahead import ReadAhead
from penstock.core.checks import check_whole
from penstock.core.errors import InvalidArgumentError

_LOOKED_AT = 2  # elements: an axis in which they differ has no fixed length


class DatasetState:
    """Where the training on a `tf.data.Dataset` made by `to_tf_dataset` stands.

    tf.data reads ahead of the training, as far as `prefetch` and a strategy let it. Say after each step that its batch
    was trained, and the state is that of the batch trained last.

        state = ps.tensorflow.DatasetState()
        for x, y in ps.tensorflow.to_tf_dataset(loader, state=state).prefetch(2):
            train_step(x, y)
            state.trained()
        checkpoint["data"] = state.state_dict()
    """

    def __init__(self) -> None:
        self._loader: Loader | None = None
        self._ahead: ReadAhead | None = None

    def trained(self, count: int = 1) -> None:
        """Say that so many more elements were trained, in the order in which they came."""
        if self._ahead is not None:
            self._ahead.trained(count)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the element that was trained last: small, JSON-able."""
        if self._ahead is not None:
            return self._ahead.state_dict()
        return self._required().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Begin the next iteration over the dataset where the state was taken."""
        self._required().load_state_dict(state_dict)
        self._ahead = None

    def follow(self, loader: Loader) -> None:
        if self._loader is not None and self._loader is not loader:
            raise InvalidArgumentError("a DatasetState follows one dataset; make another for each")
        self._loader = loader

    def begin(self) -> ReadAhead:
        self._ahead = ReadAhead(self._required())
        return self._ahead

    def _required(self) -> Loader:
        if self._loader is None:
            raise InvalidArgumentError("this DatasetState follows no dataset yet: give it to to_tf_dataset(state=...)")
        return self._loader


def to_tf_dataset(pipeline: Dataset | Loader, *, signature: Any = None, state: DatasetState | None = None) -> Any:
    """Return a dataset or a loader as a `tf.data.Dataset`; each iteration over it is the next epoch.

    `signature` is that of its elements, a nest of `tf.TensorSpec`. None: the first two elements are looked at, and an
    axis has a fixed length if both agree in it, the first one excepted, which is the batch's. `state` follows what was
    trained.

    >>> import penstock as ps
    >>> made = to_tf_dataset(ps.range(4).map(lambda i: {"x": i / 2}).batch(2))
    >>> made.element_spec, [batch["x"].numpy().tolist() for batch in made]
    ({'x': TensorSpec(shape=(None,), dtype=tf.float64, name=None)}, [[0.0, 0.5], [1.0, 1.5]])
    """
    if not isinstance(pipeline, (Dataset, Loader)):
        raise InvalidArgumentError(f"to_tf_dataset() takes a dataset or a loader, not {type(pipeline).__name__}")
    loader = pipeline if isinstance(pipeline, Loader) else Loader(pipeline.node)
    followed = DatasetState() if state is None else state
    followed.follow(loader)
    fresh: list[ReadAhead] = []
    if signature is None:
        fresh.append(followed.begin())
        looked_at = fresh[0].look(_LOOKED_AT)
        if not looked_at:
            raise InvalidArgumentError("the pipeline has no element to learn the signature from; give signature=")
        signature = tf.nest.map_structure(_spec, looked_at[0], looked_at[-1])

    def elements() -> Iterator[Any]:
        yield from fresh.pop() if fresh else followed.begin()

    # No cardinality is asserted: an epoch that goes on where a state was taken has fewer elements.
    return tf.data.Dataset.from_generator(elements, output_signature=signature)


def _spec(one: Any, other: Any) -> tf.TensorSpec:
    shapes = [np.shape(leaf) for leaf in (one, other)]
    dtype = tf.as_dtype(tf.convert_to_tensor(one).dtype)
    if len(shapes[0]) != len(shapes[1]):
        return tf.TensorSpec(None, dtype)
    fixed = [a if a == b and axis else None for axis, (a, b) in enumerate(zip(*shapes))]
    return tf.TensorSpec(fixed, dtype)


def from_tf_dataset(make: Callable[[], Any], *, shards: int = 1) -> Dataset:
    """Read an existing tf.data pipeline: `make` returns the `tf.data.Dataset`, wherever the pipeline runs.

    Its tensors arrive as numpy arrays. With `shards=n` it is cut into n parts by `Dataset.shard`, which workers read
    beside each other, each running what stands before the cut: call `shard` early yourself where that is dear.

    tf.data cannot say where it stands. The state is how many elements of each shard were received: to go on there, the
    shard is read again and passed over. So it must give the same elements in the same order each time: give `shuffle` a
    seed and `reshuffle_each_iteration=False`, or shuffle after it, with `Dataset.shuffle` of ours.

    >>> import tensorflow as tf
    >>> list(from_tf_dataset(lambda: tf.data.Dataset.range(4).map(lambda x: x * x)))
    [np.int64(0), np.int64(1), np.int64(4), np.int64(9)]
    """
    if isinstance(make, tf.data.Dataset):
        raise InvalidArgumentError(
            "from_tf_dataset() takes a function that returns the tf.data.Dataset, lambda: make_dataset(): a dataset of "
            "TensorFlow cannot be sent to workers"
        )
    if not callable(make):
        raise InvalidArgumentError(f"from_tf_dataset() takes a function, not {type(make).__name__}")
    check_whole("shards", shards, 1)

    def elements(shard: int) -> Iterator[Any]:
        return iter(make().shard(shards, shard).as_numpy_iterator())

    return from_generator(elements, splits=list(range(shards)))
