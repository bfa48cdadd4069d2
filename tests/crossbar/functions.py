"""The functions that random pipelines call. Each is a factory: what it returns is shipped to workers by value.

A row is a dict with a whole number under `id`; every other field follows from the id or from `rng`. So rows can be
compared wherever they end up: in batches, groups or packed rows.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Row = dict[str, Any]

BLOB_BYTES = {"32K-": (32 << 10) - 200, "32K+": (32 << 10) + 200, "1M-": (1 << 20) - 4096, "1M+": (1 << 20) + 4096}
"""Around the sizes at which a batch changes the way it travels."""

LONGEST = 7


class PlantedError(Exception):
    """An exception of the user's own, with a field."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"planted at {number}")


ERRORS: dict[str, Callable[[int], BaseException]] = {
    "ValueError": lambda number: ValueError(f"planted at {number}"),
    "KeyError": lambda number: KeyError(f"planted at {number}"),
    "StopIteration": lambda number: StopIteration(f"planted at {number}"),
    "GeneratorExit": lambda number: GeneratorExit(f"planted at {number}"),
    "SystemExit": lambda number: SystemExit(f"planted at {number}"),
    "PlantedError": PlantedError,
}


def to_row(field: str | None) -> Callable[[Any], Row]:
    """From what a source gives (a number, a text, bytes, or a dict of them) to a row."""

    def row(element: Any) -> Row:
        value = element if field is None else element[field]
        return {"id": int(np.asarray(value).reshape(-1)[0]) if isinstance(value, np.ndarray) else int(value)}

    return row


def add_value() -> Callable[[Row], Row]:
    return lambda row: {**row, "v": row["id"] * 7}


class Span(NamedTuple):
    start: Any
    stop: Any


@dataclass(frozen=True, slots=True)
class Note:
    text: Any
    weights: Any


def add_leaf_types() -> Callable[[Row], Row]:
    """Leaves that travel under the name of their class, as containers and as objects."""

    def typed(row: Row) -> Row:
        number = row["id"]
        note = Note(f"note {number}", np.array([number, 0.5]))
        day = datetime.date(2024, 1, 1) + datetime.timedelta(number)
        return {**row, "span": Span(number, number + 2), "note": note, "day": day}

    return typed


def add_noise() -> Callable[..., Row]:
    def noisy(row: Row, rng: np.random.Generator) -> Row:
        return {**row, "noise": float(rng.random())}

    return noisy


def add_blob(size: str) -> Callable[[Row], Row]:
    count = BLOB_BYTES[size]
    return lambda row: {**row, "blob": np.full(count, row["id"] % 251, np.uint8)}


def add_tokens() -> Callable[[Row], Row]:
    def tokens(row: Row) -> Row:
        length = row["id"] % LONGEST + 1
        return {**row, "len": length, "tokens": np.full(length, row["id"] + 1)}

    return tokens


def only_tokens() -> Callable[[Row], Any]:
    return lambda row: np.full(row["id"] % LONGEST + 1, row["id"] + 1)


def sometimes_none() -> Callable[[Row], Row | None]:
    return lambda row: None if row["id"] % 3 == 0 else row


def slowly(seconds: float) -> Callable[[Any], Any]:
    def slow(element: Any) -> Any:
        time.sleep(seconds)
        return element

    return slow


def each_of_a_list() -> Callable[[list[Row]], list[Row]]:
    return lambda rows: [{**row, "u": row["id"] + 1} for row in rows]


def batch_column() -> Callable[[Row], Row]:
    return lambda batch: {**batch, "w": np.asarray(batch["id"]) * 2}


def batch_chance() -> Callable[..., Row]:
    def chance(batch: Row, rng: np.random.Generator) -> Row:
        return {**batch, "chance": np.full(len(batch["id"]), rng.random())}

    return chance


def not_a_third() -> Callable[[Row], bool]:
    return lambda row: row["id"] % 3 != 0


def none_at_all() -> Callable[[Row], bool]:
    return lambda row: False


def by_chance() -> Callable[..., bool]:
    def coin(row: Row, rng: np.random.Generator) -> bool:
        return bool(rng.random() < 0.7)

    return coin


def children() -> Callable[[Row], list[Row]]:
    return lambda row: [{**row, "child": child} for child in range(row["id"] % 4)]


def lazy_children() -> Callable[..., Iterator[Row]]:
    def lazily(row: Row, rng: np.random.Generator) -> Iterator[Row]:
        for child in range(row["id"] % 3):
            yield {**row, "child": child, "drawn": int(rng.integers(1000))}

    return lazily


def failing(error: str, at: int, how: str) -> Callable[..., Any]:
    """Raises at one id; `how` says in which kind of function: map, filter, flat_map, a generator, or lists."""
    make = ERRORS[error]

    def check(row: Row) -> None:
        if row["id"] == at:
            raise make(at)

    def in_map(row: Row) -> Row:
        check(row)
        return row

    def in_filter(row: Row) -> bool:
        check(row)
        return True

    def in_flat_map(row: Row) -> list[Row]:
        check(row)
        return [row]

    def in_generator(row: Row) -> Iterator[Row]:
        check(row)
        yield row

    def in_lists(rows: list[Row]) -> list[Row]:
        for row in rows:
            check(row)
        return rows

    functions: dict[str, Callable[..., Any]] = {
        "map": in_map,
        "filter": in_filter,
        "flat_map": in_flat_map,
        "generator": in_generator,
        "interleave": in_flat_map,
        "lists": in_lists,
    }
    return functions[how]


def collated() -> Callable[[list[Row]], Row]:
    """A collate function of the user's own: columns of the same kinds as the package makes."""

    def column(values: list[Any]) -> Any:
        first = values[0]
        if isinstance(first, Span):
            return Span(column([value.start for value in values]), column([value.stop for value in values]))
        if isinstance(first, Note):
            return Note(column([value.text for value in values]), column([value.weights for value in values]))
        if isinstance(first, (str, datetime.date)):
            made = np.empty(len(values), object)
            made[:] = values
            return made
        return np.stack([np.asarray(value) for value in values])

    return lambda rows: {name: column([row[name] for row in rows]) for name in rows[0]}


def weight_of() -> Callable[[Row], float]:
    return lambda row: float(row["id"] % 4 * 0.75)


def class_of(classes: int) -> Callable[[Row], int]:
    return lambda row: int(row["id"]) % classes


def key_of(keys: int) -> Callable[[Row], int]:
    return lambda row: int(row["id"]) % keys


def length_of_row() -> Callable[[Row], int]:
    return lambda row: int(row["len"])


def size_of_row() -> Callable[[Row], int]:
    return lambda row: 1 + int(row["id"]) % 3


def split_rows(first: int, count: int) -> Callable[[int], Iterator[int]]:
    def numbers(split: int) -> Iterator[int]:
        yield from range(first + split * count, first + split * count + count)

    return numbers
