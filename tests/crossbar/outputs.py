"""What a reader received, as plain values: rows that compare wherever they were put, and what was around them."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

import penstock as ps

from .functions import Note, Span

Row = tuple[Any, ...]

MASK = "mask"
"""The column that says which rows of a batch are elements: the others fill it up, and are no rows."""


class Output(NamedTuple):
    """One step's output. `width` is the padded length, `number` what `enumerate` counted.

    `filled` is how many rows a batch with a mask has, with those that fill it up.
    """

    rows: tuple[Row, ...]
    width: int | None = None
    number: int | None = None
    filled: int | None = None


def output_of(element: Any) -> Output:
    """Return an output's rows; nothing of the element is kept, since its memory may be used again."""
    if isinstance(element, tuple) and len(element) == 2 and isinstance(element[0], (int, np.integer)):
        inner = output_of(element[1])
        return inner._replace(number=int(element[0]))
    width = None
    if isinstance(element, dict) and isinstance(element.get("tokens"), np.ndarray) and element["tokens"].ndim == 2:
        width = element["tokens"].shape[1]
    filled = None
    if isinstance(element, dict) and np.ndim(element.get(MASK)) == 1:
        filled = len(element["id"])
    return Output(tuple(_rows(element)), width, filled=filled)


def without(row: Row, *names: str) -> Row:
    """Return a row without some of its fields."""
    return tuple(field for field in row if not (isinstance(field, tuple) and field[0] in names))


def rows_of(outputs: Iterable[Output]) -> Counter[Row]:
    """Return the rows as they compare on any number of streams: without what was drawn for a whole batch."""
    return Counter(without(row, "chance") for output in outputs for row in output.rows)


def _rows(element: Any) -> list[Row]:
    if isinstance(element, (list, tuple)):
        return [row for each in element for row in _rows(each)]
    if not isinstance(element, dict):
        return [("value", _value(element))]
    if "segment_ids" in element:
        used = np.asarray(element["segment_ids"]) > 0
        return [("token", int(token)) for token in np.asarray(element["tokens"])[used].reshape(-1)]
    if np.ndim(element["id"]) == 0:
        return [_row(element)] if element.get(MASK, True) else []
    real = element.get(MASK, [True] * len(element["id"]))
    return [_row({name: _at(column, at) for name, column in element.items()}) for at in np.flatnonzero(real)]


def _at(column: Any, number: int) -> Any:
    if isinstance(column, Span):
        return Span(column.start[number], column.stop[number])
    if isinstance(column, Note):
        return Note(column.text[number], column.weights[number])
    if isinstance(column, (ps.KeyedDense, ps.KeyedRagged)):
        return column.slice(number, number + 1)
    return column[number]


def _row(fields: dict[str, Any]) -> Row:
    fields = {name: value for name, value in fields.items() if name != MASK}
    if "tokens" in fields:
        fields = {**fields, "tokens": fields["tokens"][: int(fields["len"])]}
    return tuple(sorted((name, _value(value)) for name, value in fields.items()))


def _value(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.ndim == 0:
            return value.item()
        if value.size > 64:
            return value.size, zlib.crc32(value.tobytes())
        return tuple(value.reshape(-1).tolist())
    if isinstance(value, ps.KeyedDense):
        return "dense", value.keys, _value(value.values), value.presence is None or _value(value.presence)
    if isinstance(value, ps.KeyedRagged):
        return "sparse", value.keys, _value(value.values), _value(value.offsets)
    if isinstance(value, Span):
        return "span", _value(value.start), _value(value.stop)
    if isinstance(value, Note):
        return "note", value.text, _value(value.weights)
    return value.item() if isinstance(value, np.generic) else value
