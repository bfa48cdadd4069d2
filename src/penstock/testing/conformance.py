"""Restores a pipeline at every position and compares what follows, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.api.dataset import Dataset
from penstock.core.element import Element
from penstock.core.leaves import leaf_type


class ConformanceError(AssertionError):
    """A pipeline that does not keep the contract; the message says where."""


def read_all(dataset: Dataset, *, epoch: int = 0, most: int = 100_000, **options: Any) -> list[Element]:
    """Return up to `most` elements of an epoch."""
    elements: list[Element] = []
    with dataset.iterator(epoch=epoch, **options) as iterator:
        for element in iterator:
            elements.append(element)
            if len(elements) == most:
                break
    return elements


def check_resumes_everywhere(
    make: Callable[[], Dataset], *, epoch: int = 0, most: int = 200, every: int = 1, **options: Any
) -> int:
    """Restore at the start, after every `every`-th element and at the end; return how many positions were tried.

    Each state makes a round trip through JSON, as a checkpoint would, is loaded into a pipeline built anew, saved again
    right away, and must give the same rest.
    """
    elements: list[Element] = []
    states: list[str] = []
    with make().iterator(epoch=epoch, seed=1234, **options) as iterator:
        states.append(json.dumps(iterator.state_dict()))
        for element in iterator:
            elements.append(element)
            states.append(json.dumps(iterator.state_dict()))
            if len(elements) == most:
                break
    positions = [*range(0, len(states), every)]
    if positions[-1] != len(states) - 1:
        positions.append(len(states) - 1)
    for position in positions:
        with make().iterator(epoch=epoch, seed=1234, **options) as iterator:
            iterator.load_state_dict(json.loads(states[position]))
            again = iterator.state_dict()
            iterator.load_state_dict(json.loads(json.dumps(again)))
            rest = _take(iterator, len(elements) - position)
        same = compare_all(elements[position:], rest)
        if same is not None:
            raise ConformanceError(
                f"restored after {position} of {len(elements)} elements: {same}\nstate: {states[position]}"
            )
    return len(positions)


def _take(iterator: Any, count: int) -> list[Element]:
    taken: list[Element] = []
    while len(taken) < count:
        element = next(iterator, _END)
        if element is _END:
            break
        taken.append(element)
    else:
        if count == 0 and next(iterator, _END) is not _END:
            taken.append("an element after the end")
    return taken


_END = object()


def compare_all(expected: Sequence[Element], found: Sequence[Element]) -> str | None:
    """Return how two sequences of elements differ, or None."""
    for i, (one, other) in enumerate(zip(expected, found)):
        difference = compare(one, other)
        if difference is not None:
            return f"element {i}{difference}"
    if len(expected) != len(found):
        return f"{len(found)} elements instead of {len(expected)}"
    return None


def compare(expected: Element, found: Element) -> str | None:
    """Return how two elements differ, byte for byte, or None."""
    if type(expected) is not type(found):
        return f" is a {type(found).__name__} instead of a {type(expected).__name__}"
    if isinstance(expected, dict):
        if list(expected) != list(found):
            return f" has the keys {list(found)} instead of {list(expected)}"
        return (
            _first(f"[{key!r}]", expected[key], found[key])
            if (key := _differing(expected, found)) is not None
            else None
        )
    if isinstance(expected, (list, tuple)):
        if len(expected) != len(found):
            return f" has {len(found)} parts instead of {len(expected)}"
        for i, (one, other) in enumerate(zip(expected, found)):
            if compare(one, other) is not None:
                return _first(f"[{i}]", one, other)
        return None
    if isinstance(expected, np.ndarray):
        if expected.dtype != found.dtype or expected.shape != found.shape:
            return f" is {found.dtype}{found.shape} instead of {expected.dtype}{expected.shape}"
        if expected.dtype == object:
            return compare(expected.tolist(), found.tolist())
        return None if expected.tobytes() == found.tobytes() else f" is {found!r} instead of {expected!r}"
    if isinstance(expected, np.generic):
        return compare(np.asarray(expected), np.asarray(found))
    flatten = leaf_type(type(expected)).flatten
    if flatten is not None:
        return compare(flatten(expected), flatten(found))
    return None if expected == found else f" is {found!r} instead of {expected!r}"


def _differing(expected: dict[Any, Any], found: dict[Any, Any]) -> Any:
    return next((key for key in expected if compare(expected[key], found[key]) is not None), None)


def _first(where: str, expected: Element, found: Element) -> str:
    return f"{where}{compare(expected, found)}"
