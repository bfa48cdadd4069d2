"""Datasets of the `datasets` package: indexable ones by index, iterable ones shard by shard.

Elements are dicts, of Python values or, as the dataset's format says, numpy arrays; torch tensors become numpy arrays.
The order of an iterable dataset's shard must be the same each time it is iterated (a `shuffle` in it has a seed).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.core.element import Element
from penstock.core.errors import InvalidArgumentError, MissingExtraError
from penstock.graph.readers import FromHuggingface
from penstock.sources.base import Reader, Records, Source, Split, SplitPosition
from penstock.sources.memory import (
    GeneratorReader,
    IndexReader,
    as_ints,
    index_splits,
    tensors_to_numpy,
)


def huggingface_source(node: FromHuggingface) -> Source:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("datasets", "huggingface") from error
    dataset = node.dataset.value
    if isinstance(dataset, datasets.Dataset):
        return MapDatasetSource(dataset)
    if isinstance(dataset, datasets.IterableDataset):
        return IterableDatasetSource(dataset)
    if isinstance(dataset, (datasets.DatasetDict, datasets.IterableDatasetDict)):
        raise InvalidArgumentError(f"from_huggingface got a dict of datasets; choose one of {', '.join(dataset)}")
    raise InvalidArgumentError(
        f"from_huggingface got a {type(dataset).__name__}; it needs a datasets.Dataset or datasets.IterableDataset"
    )


class MapDatasetSource:
    """A `datasets.Dataset`: rows are fetched many at a time, a run of neighbours as one slice of the Arrow table."""

    remote = False

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def splits(self) -> Sequence[Split]:
        return index_splits(len(self), at_least=16)

    def open(self, split: Split, at: SplitPosition) -> Reader:
        return IndexReader(self.fetch, split, at)

    def fetch(self, indices: Sequence[int]) -> Sequence[Element]:
        if not len(indices):
            return []
        if isinstance(indices, range) and indices.step == 1:
            columns = self._dataset[indices.start : indices.stop]
        else:
            columns = self._dataset[list(as_ints(indices))]
        if not isinstance(columns, Mapping):
            raise InvalidArgumentError(
                f"the dataset's format gives a {type(columns).__name__} for rows; "
                "use dataset.with_format(None), 'numpy' or 'torch'"
            )
        rows = [dict(zip(columns, row)) for row in zip(*columns.values())]
        return tensors_to_numpy(rows)


class IterableDatasetSource:
    """A `datasets.IterableDataset`: a split is a shard; a position is reached by iterating again and discarding."""

    remote = False

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def splits(self) -> Sequence[Split]:
        return [Split(start=number, stop=number + 1) for number in range(self._dataset.num_shards)]

    def open(self, split: Split, at: SplitPosition) -> Reader:
        shard = self._dataset.shard(num_shards=self._dataset.num_shards, index=split.start)
        return _ShardReader(iter(shard), at)


class _ShardReader(GeneratorReader):
    def read(self, want: int) -> Records:
        return Records(tensors_to_numpy(super().read(want).elements))
