"""Restores a pipeline at every position and compares what follows, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from penstock.api.dataset import Dataset
from penstock.core.element import Element
from penstock.core.leaves import leaf_type


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
    elements, states = _read_with_states(make, most, epoch=epoch, **options)
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


def check_states_cross(
    makes: Mapping[str, Callable[[], Dataset]], *, epoch: int = 0, every: int = 1, **options: Any
) -> int:
    """Take states in each of several ways to run one pipeline, and load each in every other; return how many were.

    Each way must give the same elements, and the same rest from each state. A way is made anew for each reading, so
    that it may set up what it is about: files that are there, or are gone.
    """
    states: dict[str, list[str]] = {}
    elements: list[Element] | None = None
    for name, make in makes.items():
        found, states[name] = _read_with_states(make, None, epoch=epoch, **options)
        elements = found if elements is None else elements
        if (difference := compare_all(elements, found)) is not None:
            raise ConformanceError(f"read as {name!r}: {difference}")
    assert elements is not None
    loaded = 0
    for saved, its_states in states.items():
        for name, make in makes.items():
            for position in range(0, len(its_states), every):
                with make().iterator(epoch=epoch, seed=1234, **options) as iterator:
                    iterator.load_state_dict(json.loads(its_states[position]))
                    rest = list(iterator)
                loaded += 1
                if position == len(its_states) - 1:
                    continue  # the loop had ended: this is the next epoch
                if (difference := compare_all(elements[position:], rest)) is not None:
                    raise ConformanceError(
                        f"saved as {saved!r} after {position} elements, read on as {name!r}: {difference}\n"
                        f"state: {its_states[position]}"
                    )
    return loaded


def _read_with_states(make: Callable[[], Dataset], most: int | None, **options: Any) -> tuple[list[Element], list[str]]:
    """Return the first elements, and the states before and after each of them."""
    elements: list[Element] = []
    with make().iterator(seed=1234, **options) as iterator:
        states = [json.dumps(iterator.state_dict())]
        for element in islice(iterator, most):
            elements.append(element)
            states.append(json.dumps(iterator.state_dict()))
    return elements, states


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
    if isinstance(expected, np.generic):
        return compare(np.asarray(expected), np.asarray(found))
    flatten = leaf_type(type(expected)).flatten
    if flatten is not None:
        return compare(flatten(expected), flatten(found))
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
