"""Restores a pipeline at every position and compares what follows, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from penstock.api.dataset import Dataset
from penstock.core.element import Element, Ragged


class ConformanceError(AssertionError):
    """A pipeline that does not keep the contract; the message says where."""


def read_all(dataset: Dataset, *, epoch: int = 0, most: int = 100_000, **options: Any) -> list[Element]:
    """Return up to `most` elements of an epoch."""
    with dataset.iterator(epoch=epoch, **options) as iterator:
        return list(islice(iterator, most))


def check_resumes_everywhere(
    make: Callable[[], Dataset], *, epoch: int = 0, most: int = 200, every: int = 1, **options: Any
) -> int:
    """Restore at the start, after every `every`-th element and at the end; return how many positions were tried.

    Each state makes a round trip through JSON, as a checkpoint would, is loaded into a pipeline built anew, saved again
    right away, and must give the same rest.
    """
    elements: list[Element] = []
    with make().iterator(epoch=epoch, seed=1234, **options) as iterator:
        states = [json.dumps(iterator.state_dict())]
        for element in islice(iterator, most):
            elements.append(element)
            states.append(json.dumps(iterator.state_dict()))
    ended = len(elements) < most
    positions = sorted({*range(0, len(states), every), len(states) - 1})
    for position in positions:
        with make().iterator(epoch=epoch, seed=1234, **options) as iterator:
            iterator.load_state_dict(json.loads(states[position]))
            again = iterator.state_dict()
            iterator.load_state_dict(json.loads(json.dumps(again)))
            rest = list(islice(iterator, len(elements) - position + ended))  # nothing may follow the end
        difference = compare_all(elements[position:], rest)
        if difference is not None:
            raise ConformanceError(
                f"restored after {position} of {len(elements)} elements: {difference}\nstate: {states[position]}"
            )
    return len(positions)


def compare_all(expected: Sequence[Element], found: Sequence[Element]) -> str | None:
    """Return how two sequences of elements differ, or None."""
    difference = _first_difference((f"element {i}", *pair) for i, pair in enumerate(zip(expected, found)))
    if difference is None and len(expected) != len(found):
        return f"{len(found)} elements instead of {len(expected)}"
    return difference


def compare(expected: Element, found: Element) -> str | None:
    """Return how two elements differ, byte for byte, or None."""
    if type(expected) is not type(found):
        return f" is a {type(found).__name__} instead of a {type(expected).__name__}"
    if isinstance(expected, dict):
        if list(expected) != list(found):
            return f" has the keys {list(found)} instead of {list(expected)}"
        return _first_difference((f"[{key!r}]", expected[key], found[key]) for key in expected)
    if isinstance(expected, (list, tuple)):
        if len(expected) != len(found):
            return f" has {len(found)} parts instead of {len(expected)}"
        return _first_difference((f"[{i}]", *pair) for i, pair in enumerate(zip(expected, found)))
    if isinstance(expected, Ragged):
        return compare([expected.values, expected.offsets], [found.values, found.offsets])
    if isinstance(expected, np.generic):
        return compare(np.asarray(expected), np.asarray(found))
    if isinstance(expected, np.ndarray):
        if expected.dtype != found.dtype or expected.shape != found.shape:
            return f" is {found.dtype}{found.shape} instead of {expected.dtype}{expected.shape}"
        if expected.dtype == object:
            return compare(expected.tolist(), found.tolist())
        same = expected.tobytes() == found.tobytes()
    else:
        same = bool(expected == found)
    return None if same else f" is {found!r} instead of {expected!r}"


def _first_difference(parts: Iterable[tuple[str, Element, Element]]) -> str | None:
    """Return how the first (place, expected, found) that differ do so, or None."""
    differences = ((place, compare(expected, found)) for place, expected, found in parts)
    return next((f"{place}{difference}" for place, difference in differences if difference is not None), None)
