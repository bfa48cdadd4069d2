"""Weighted and balanced sampling without a sampler: each element is given as often as its weight says.

A weight of 2.25 gives an element twice, and a third time in a quarter of the epochs. Which ones follows from the seed,
the epoch and the element: so it needs no list of all weights, works on streams and on workers, and resumes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from penstock.core.errors import InvalidArgumentError

if TYPE_CHECKING:
    from penstock.api.operators import Operators


class Copies(msgspec.Struct, frozen=True):
    """Gives an element as often as its weight says, on average."""

    weight: Callable[[Any], float]

    def __call__(self, element: Any, rng: np.random.Generator) -> list[Any]:
        weight = float(self.weight(element))
        if not 0 <= weight < float("inf"):
            raise InvalidArgumentError(
                f"resample(): the weight of an element is {weight}; it must be a number of at least 0"
            )
        return [element] * int(weight + rng.random())


class Balanced(msgspec.Struct, frozen=True):
    """The weight of an element in a dataset in which all classes come equally often, and as many as before in all."""

    key: Callable[[Any], Hashable] | str
    weights: dict[Hashable, float]

    def __call__(self, element: Any) -> float:
        key = class_of(element, self.key)
        try:
            return self.weights[key]
        except KeyError:
            known = ", ".join(map(repr, list(self.weights)[:10]))
            raise InvalidArgumentError(
                f"balanced(): an element is of class {key!r}, and counts= has {known}; add it"
            ) from None


def class_of(element: Any, key: Callable[[Any], Hashable] | str) -> Hashable:
    found = element[key] if isinstance(key, str) else key(element)
    item = getattr(found, "item", None)
    return item() if callable(item) else found  # a label of numpy or torch


def balancing(
    pipeline: Operators, key: Callable[[Any], Hashable] | str, counts: Mapping[Hashable, int] | None
) -> Balanced:
    if not isinstance(key, str) and not callable(key):
        raise InvalidArgumentError(f"balanced({key!r}): give the name of a column, or a function of an element")
    found: Mapping[Hashable, int] = counts if counts is not None else _counted(pipeline, key)
    if not found or any(count < 1 for count in found.values()):
        raise InvalidArgumentError("balanced(): counts= has how many elements each class has, at least 1 each")
    even = sum(found.values()) / len(found)
    return Balanced(key, {name: even / count for name, count in found.items()})


def _counted(pipeline: Operators, key: Callable[[Any], Hashable] | str) -> Mapping[Hashable, int]:
    labels = pipeline._plan.labels if key == "label" else None
    if labels is not None:
        names, counts = np.unique(labels, return_counts=True)
        return dict(zip(names.tolist(), counts.tolist()))
    raise InvalidArgumentError(
        f"balanced({key!r}): how many elements each class has is known of read_images() only; give counts=, such as "
        "counts={0: 9000, 1: 1000}, or ps.count_classes(dataset, key), which reads it once"
    )


def count_classes(dataset: Operators, key: Callable[[Any], Hashable] | str) -> dict[Any, int]:
    """Read a dataset once and return how many elements each class has, for `balanced(key, counts=...)`.

    >>> import penstock as ps
    >>> count_classes(ps.range(10).map(lambda x: {"label": x % 3}), "label")
    {0: 4, 1: 3, 2: 3}
    """
    from penstock.api.iteration import DatasetIterator, Plan

    with DatasetIterator(Plan(dataset.node), epoch=0) as iterator:
        return dict(sorted(Counter(class_of(element, key) for element in iterator).items(), key=repr))
