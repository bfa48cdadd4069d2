"""A loader as `fit`, `evaluate` and `predict` of Keras take it, whichever backend computes.

Keras takes objects of its class `DataAdapter` as they are. How it uses them:

1. It asks how many batches an epoch has once, when `fit` begins. So the answer is that of a whole epoch. A resumed
   epoch has fewer; `FitCheckpoint` ends it after its last batch.
2. It stops after so many batches, and does not ask for the end.
3. A model that is not built is built from the first batch; then `on_epoch_end` is called, and reading begins anew. So
   an epoch that ends before its batches do, and of which none was trained, is begun again at the same place.
4. On TensorFlow batches are read in a thread of tf.data's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import keras
import numpy as np
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from penstock.api.dataset import Dataset
from penstock.api.loader import Loader
from penstock.api.offloading import offloaded
from penstock.api.reading_ahead import ReadAhead, Resumable
from penstock.api.services import OwnedService
from penstock.core.errors import InvalidArgumentError
from penstock.graph.length import endless_operator

ColumnNames = str | Sequence[str] | None
_LOOKED_AT = 2  # batches: an axis in which they differ has no fixed length


def adapt(
    pipeline: Dataset | Loader | Any,
    *,
    x: ColumnNames = None,
    y: ColumnNames = None,
    sample_weight: ColumnNames = None,
    offload: OwnedService | str | PathLike[str] | None = None,
) -> FitData:
    """Return a dataset or a loader as what `model.fit`, `evaluate` and `predict` take.

    Batches are tuples `(x, y)` or `(x, y, sample_weight)`, as Keras has them. Of batches that are dicts, `x`, `y` and
    `sample_weight` name the columns: one, or several, which then make a dict. Any loader with `state_dict()` and
    `load_state_dict()` will do, penstock.torch.DataLoader too. `offload` is a service whose workers help this host's
    processors to make the batches of a dataset where that is faster (`ps.offload`).

    >>> import penstock as ps
    >>> data = adapt(ps.range(8).map(lambda i: {"in": i / 8, "out": i % 2}).batch(4), x="in", y="out")
    >>> data.num_batches
    2
    """
    pipeline = offloaded(pipeline, offload)
    if isinstance(pipeline, Dataset):
        pipeline = Loader(pipeline.node)
    if not hasattr(pipeline, "state_dict") or not hasattr(pipeline, "load_state_dict"):
        raise InvalidArgumentError(
            f"adapt() takes a dataset, or a loader with state_dict() and load_state_dict(), not "
            f"{type(pipeline).__name__}"
        )
    if x is None and (y is not None or sample_weight is not None):
        raise InvalidArgumentError("adapt() with y= or sample_weight= needs x= too: the columns that are inputs")
    return FitData(pipeline, _columns_chosen(x, y, sample_weight))


class FitData(DataAdapter):
    """A loader as Keras reads it; `adapt` makes it.

    `state_dict()` is the loader's after the batch that was trained last, where a `penstock.keras.FitCheckpoint` or
    `trained()` says which was; `load_state_dict()` decides where the next epoch begins.
    """

    def __init__(self, loader: Resumable, arrange: Callable[[Any], Any]) -> None:
        self._loader, self._arrange = loader, arrange
        self._ahead: ReadAhead | None = None
        self._begin_at: Mapping[str, Any] | None = None
        """Where the next pass begins, if not where the loader stands."""
        self._fresh = False
        """The pass was begun to look at batches, and none was handed out."""

    # What Keras asks for

    def get_numpy_iterator(self) -> Iterator[Any]:
        return self._batches()

    def get_jax_iterator(self) -> Iterator[Any]:
        return self._batches()

    def get_torch_dataloader(self) -> Any:
        # Not a DataLoader of torch's: each of its iterations draws from the generator that dropout draws from.
        return _Iterable(lambda: (_tensors_of(batch) for batch in self._batches()))

    def get_tf_dataset(self) -> Any:
        import tensorflow as tf

        looked_at = [self._arrange(batch) for batch in self._next_pass().look(_LOOKED_AT)]
        if not looked_at:
            raise InvalidArgumentError("the loader has no batch: the epoch it was to go on with is at its end")
        return tf.data.Dataset.from_generator(
            self._batches, output_signature=data_adapter_utils.get_tensor_spec(looked_at)
        )

    @property
    def num_batches(self) -> int | None:
        """How many batches an epoch has; None: it is not known."""
        try:
            return len(self._loader)  # type: ignore[arg-type]
        except TypeError:
            return None

    @property
    def batch_size(self) -> int | None:
        return None

    @property
    def has_partial_batch(self) -> bool | None:
        return None

    @property
    def partial_batch_size(self) -> int | None:
        return None

    def on_epoch_end(self) -> None:
        ahead = self._ahead
        if ahead is None or self._fresh or ahead.count_trained or ahead.exhausted:
            return
        self._begin_at = ahead.began_at()
        self._ahead = None

    def _batches(self) -> Iterator[Any]:
        ahead = self._next_pass()
        self._fresh = False
        for batch in ahead:
            yield self._arrange(batch)

    def _next_pass(self) -> ReadAhead:
        if self._ahead is None or not self._fresh:
            if self._begin_at is not None:
                self._loader.load_state_dict(self._begin_at)
                self._begin_at = None
            self._ahead, self._fresh = ReadAhead(self._loader), True
        return self._ahead

    # State

    def trained(self, count: int = 1) -> None:
        """Be told that so many more batches were trained; `penstock.keras.FitCheckpoint` does."""
        if self._ahead is not None:
            self._ahead.trained(count)

    @property
    def at_end(self) -> bool:
        """Whether all batches of the present epoch were trained; it may wait for one, to learn that."""
        return self._ahead is not None and self._ahead.all_trained

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the batch that was trained last."""
        if self._begin_at is not None:
            return dict(self._begin_at)
        return self._loader.state_dict() if self._ahead is None else self._ahead.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Begin the next epoch that Keras reads where the state was taken."""
        self._loader.load_state_dict(state_dict)
        if self.num_batches is None and state_dict.get("phase") == "reading" and not self._is_endless:
            raise InvalidArgumentError(
                "the state lies inside an epoch, and how many batches an epoch has is not known: Keras would take the "
                "shorter epoch that follows for all of them. Declare the length with with_length()"
            )
        self._ahead, self._begin_at, self._fresh = None, None, False

    @property
    def _is_endless(self) -> bool:
        return isinstance(self._loader, Loader) and any(endless_operator(each) for each in self._loader._operators())


class _Iterable:
    """What can be iterated over again and again."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[Any]:
        return self._begin()


def _tensors_of(batch: Any) -> Any:
    return keras.tree.map_structure(lambda leaf: None if leaf is None else keras.ops.convert_to_tensor(leaf), batch)


def _columns_chosen(x: ColumnNames, y: ColumnNames, sample_weight: ColumnNames) -> Callable[[Any], Any]:
    def arrange(batch: Any) -> Any:
        if x is None:
            return (batch,) if isinstance(batch, np.ndarray) else tuple(batch) if isinstance(batch, list) else batch
        if not isinstance(batch, Mapping):
            raise InvalidArgumentError(
                f"adapt(x={x!r}) chooses columns of dicts, and a batch is a {type(batch).__name__}"
            )
        parts = [_chosen(batch, names) for names in (x, y, sample_weight)]
        while parts[-1] is None:
            parts.pop()
        return tuple(parts)

    return arrange


def _chosen(batch: Mapping[str, Any], names: ColumnNames) -> Any:
    if names is None:
        return None
    missing = [name for name in ([names] if isinstance(names, str) else names) if name not in batch]
    if missing:
        raise InvalidArgumentError(f"a batch has no column {missing[0]!r}; it has {', '.join(map(repr, batch))}")
    return batch[names] if isinstance(names, str) else {name: batch[name] for name in names}
