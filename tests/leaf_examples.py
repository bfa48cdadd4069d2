"""Leaves of every type of the table, for tests that send, keep and batch them."""

from __future__ import annotations

import datetime
import decimal
import enum
import uuid
import zoneinfo
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

import penstock as ps

Pair = namedtuple("Pair", "left right")


class Span(NamedTuple):
    start: int
    stop: int

    def length(self) -> int:
        return self.stop - self.start


@dataclass
class Plain:
    number: int
    values: Any
    inner: Any = None


@dataclass(frozen=True, slots=True)
class Frozen:
    number: int
    checked: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        if not isinstance(self.number, int):
            raise TypeError("only ints")
        object.__setattr__(self, "checked", True)

    def doubled(self) -> Any:
        return self.number * 2


class Colour(enum.Enum):
    RED = "r"
    GREEN = "g"


class Box:
    """One object to a batch."""

    def __init__(self, corner: Any, label: str) -> None:
        self.corner, self.label = corner, label


class Sparse:
    """Batched part by part."""

    def __init__(self, indices: Any, values: Any) -> None:
        self.indices, self.values = indices, values


ps.register_type(Box, lambda box: (box.corner, box.label), lambda parts: Box(*parts))
ps.register_type(
    Sparse, lambda one: {"at": one.indices, "is": one.values}, lambda all: Sparse(all["at"], all["is"]), batch="parts"
)

BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")
DAY = datetime.date(2024, 2, 28)
MOMENT = datetime.datetime(2024, 10, 27, 2, 30, 0, 5)

LEAVES: dict[str, Callable[[int], Any]] = {
    "array": lambda i: np.full((2, 3), i, np.float32),
    "numpy scalar": lambda i: np.float32(i),
    "numpy date": lambda i: np.datetime64("2024-01-01", "D") + i,
    "number": lambda i: i,
    "complex": lambda i: complex(i, -1),
    "text": lambda i: f"number {i}",
    "bytes": lambda i: bytes([i]) * (10_000 if i % 2 else 3),
    "none": lambda i: None,
    "list": lambda i: [i, str(i), None],
    "nested": lambda i: {"a": (i, {"b": np.arange(i)[:0], "c": [np.full(2, i)]})},
    "ragged": lambda i: {"rows": ps.Ragged.of([[1, 2], [], [i]])},
    "keyed dense": lambda i: ps.KeyedDense(
        ("a", "b"), np.full((2, 1), i, np.float32), None if i % 3 else np.array([[False], [True]])
    ),
    "keyed ragged": lambda i: {
        "k": ps.KeyedRagged(("a", "b"), np.arange(i), np.array([0, i // 2, i]), np.ones(i, np.float32))
    },
    "tensor": lambda i: torch.full((2, 3), float(i)),
    "bfloat16 tensor": lambda i: {"t": torch.full((2, 3), float(i), dtype=torch.bfloat16)},
    "named tuple": lambda i: Pair(np.full(2, i), f"{i}"),
    "named tuple class": lambda i: Span(i, i + 3),
    "dataclass": lambda i: Plain(i, np.full(3, i), Plain(i, f"{i}")),
    "frozen dataclass": lambda i: {"f": Frozen(i)},
    "ordered dict": lambda i: OrderedDict([("b", i), ("a", np.full(2, i))]),
    "date": lambda i: DAY + datetime.timedelta(i),
    "datetime": lambda i: MOMENT + datetime.timedelta(0, i),
    "datetime of a zone": lambda i: (MOMENT + datetime.timedelta(i)).replace(tzinfo=BERLIN, fold=1),
    "datetime of an offset": lambda i: MOMENT.replace(tzinfo=datetime.timezone(datetime.timedelta(hours=i % 3))),
    "time": lambda i: datetime.time(12, i, tzinfo=datetime.UTC),
    "timedelta": lambda i: datetime.timedelta(i, 1, 5),
    "decimal": lambda i: decimal.Decimal(i) / 8,
    "uuid": lambda i: uuid.UUID(int=i),
    "enum": lambda i: Colour.RED if i % 2 else Colour.GREEN,
    "registered": lambda i: Box(np.full(2, i), f"{i}"),
    "registered by parts": lambda i: {"s": Sparse(np.arange(2) + i, np.full(2, float(i)))},
    "many": lambda i: {f"leaf {n}": np.full(n % 5, i, ("u1", "f8", "M8[s]")[n % 3]) for n in range(100)},
}
