"""Pipelines as datasets of the `datasets` package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import datasets

from penstock.api.dataset import Dataset
from penstock.core.errors import InvalidArgumentError


def to_datasets(dataset: Dataset, *, streaming: bool = False, features: Any = None) -> Any:
    """Return the elements of a pipeline, which are dicts, as a `datasets.Dataset`, or with `streaming` an iterable one.

    The first reads all of epoch 0 now, and holds it as an Arrow table. The second reads the next epoch whenever it is
    iterated over. `features` are those of the `datasets` package; None: they follow from the elements.

    >>> import penstock as ps
    >>> made = to_datasets(ps.range(3).map(lambda i: {"id": i, "text": f"t{i}"}))
    >>> made.column_names, made[2]
    (['id', 'text'], {'id': 2, 'text': 't2'})
    """
    if not isinstance(dataset, Dataset):
        raise InvalidArgumentError(
            f"to_datasets() takes a dataset, not {type(dataset).__name__}; convert it before distribute()"
        )
    if streaming:
        return datasets.IterableDataset.from_generator(_rows, gen_kwargs={"dataset": dataset}, features=features)
    return datasets.Dataset.from_list(list(_rows(dataset, epoch=0)), features=features)


def _rows(dataset: Dataset, epoch: int | None = None) -> Iterator[dict[str, Any]]:
    with dataset.iterator(epoch=epoch) as elements:
        for element in elements:
            if not isinstance(element, Mapping):
                raise InvalidArgumentError(
                    f"to_datasets() takes a pipeline of dicts, and an element is a {type(element).__name__}; "
                    "map it to {'name': value}"
                )
            yield dict(element)
