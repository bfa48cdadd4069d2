"""What the transport benchmarks send, and how a client proves that it arrived. Numpy only: for both environments.

Every batch has other bytes: row j of the whole run is filled with `j % 251`, a counter written through all rows. The
client adds up every row of every batch as 64-bit words, which reads each byte once, and compares the sums in order: a
batch sent twice, out of order, or from a buffer that was overwritten meanwhile, does not pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

ROWS = 64
ROW_SHAPE = (224, 224, 3)
BATCH_SHAPE = (ROWS, *ROW_SHAPE)
BATCH_BYTES = int(np.prod(BATCH_SHAPE))
BATCH_MB = BATCH_BYTES / 1e6
VALUES = 251  # a prime: the same 64 values come back only after 251 batches
FLOATS = 256  # of a 1 KB element
CHECK_WHOLE = 64  # of each so many small elements one is added up; of the others the first number is compared

_WORDS_PER_ROW = BATCH_BYTES // ROWS // 8
with np.errstate(over="ignore"):
    _ROW_SUMS = np.arange(VALUES, dtype=np.uint64) * np.uint64(0x0101010101010101) * np.uint64(_WORDS_PER_ROW)


class WrongContentError(Exception):
    """What arrived is not what was sent."""


def batches_of(megabytes: float) -> int:
    return max(2, round(megabytes / BATCH_MB))


def row_values(batch: int) -> Array:
    return (np.arange(batch * ROWS, (batch + 1) * ROWS) % VALUES).astype(np.uint8)


class BatchCheck:
    """Checks 9.6 MB batches, which must come in order from `batch` on."""

    def __init__(self, batch: int = 0) -> None:
        self._row = batch * ROWS

    def __call__(self, batch: Array) -> None:
        if batch.shape != BATCH_SHAPE or batch.dtype != np.uint8:
            raise WrongContentError(f"got {batch.dtype}{list(batch.shape)}")
        with np.errstate(over="ignore"):
            sums = batch.reshape(ROWS, -1).view(np.uint64).sum(axis=1)
        expected = _ROW_SUMS[np.arange(self._row, self._row + ROWS) % VALUES]
        if not np.array_equal(sums, expected):
            wrong = int(np.flatnonzero(sums != expected)[0])
            raise WrongContentError(
                f"row {self._row + wrong} (of the batch: {wrong}) has other bytes than were written"
            )
        self._row += ROWS


class ElementCheck:
    """Checks 1 KB elements, in order: number i is 256 times the float i."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, element: Array) -> None:
        if element[0] != self._next or (not self._next % CHECK_WHOLE and (element != element[0]).any()):
            raise WrongContentError(f"element {self._next} is {element}")
        self._next += 1


def timed_nexts(iterator: Iterator[Any], as_array: Callable[[Any], Array] = np.asarray) -> dict[str, float]:
    """Read everything, each `next()` timed by itself, content checked outside of the time; return its quantiles."""
    check = ElementCheck()
    seconds: list[float] = []
    end = object()
    while True:
        begin = time.perf_counter()
        element = next(iterator, end)
        seconds.append(time.perf_counter() - begin)
        if element is end:
            break
        check(as_array(element))
    steady = np.array(seconds[len(seconds) // 5 : -1])  # without start-up and without the end
    quantiles = {f"p{q:g}": float(np.percentile(steady, q)) for q in (50, 99, 99.9)}
    return quantiles | {"max": float(steady.max()), "count": float(len(steady))}
