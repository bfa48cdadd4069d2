"""Columns as rows: a dict for each, made as fast as Python can.

A `CutRows` gives the values of the rows start to stop. Dicts are made in blocks that stay in the processor's cache, so
what is cheap to convert is converted once and then cut; what becomes objects (text, lists) is converted block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from penstock.core.element import copied
from penstock.core.leaves import leaf_type

CutRows: TypeAlias = Callable[[int, int], list[Any]]

COMPILED_COLUMNS = 64  # wider rows gain nothing from a dict display of their own


def rows_of(columns: dict[str, Any]) -> CutRows:
    """Join cuts, and dicts of them, into one that gives dicts."""
    cuts = [rows_of(column) if isinstance(column, dict) else column for column in columns.values()]
    make = _dict_maker(tuple(columns))
    return lambda start, stop: make([cut(start, stop) for cut in cuts])


@lru_cache(maxsize=64)
def _dict_maker(names: tuple[str, ...]) -> Callable[[Sequence[Sequence[Any]]], list[Any]]:
    """Return a function from columns to dicts, its keys written out: half the time of `dict(zip(names, row))`."""
    if len(names) > COMPILED_COLUMNS:
        return lambda columns: [dict(zip(names, row)) for row in zip(*columns)]
    variables = [f"v{number}" for number in range(len(names))]
    display = ", ".join(f"{name!r}: {variable}" for name, variable in zip(names, variables))
    source = f"lambda columns: [{{{display}}} for {', '.join(variables)}, in zip(*columns)]"
    made: Callable[[Sequence[Sequence[Any]]], list[Any]] = eval(source)
    return made


def cut_of(values: np.ndarray[Any, Any]) -> CutRows:
    """Cut an array of one value a row."""
    if values.dtype.kind in "mM":
        return lambda start, stop: list(values[start:stop])  # tolist would give Python's times, or ints
    return lambda start, stop: values[start:stop].tolist()


def cells_of(leaf: Any) -> list[Any]:
    """Return the rows of a block as they stand in dicts."""
    if isinstance(leaf, np.ndarray) and leaf.ndim == 1:
        return cut_of(leaf)(0, len(leaf))
    # A copy: a row that is kept must keep its block alive and not the whole chunk.
    return leaf_type(type(leaf)).rows(copied(leaf))
