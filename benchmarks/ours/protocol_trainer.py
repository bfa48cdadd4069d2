"""A trainer of the protocol benchmark: reads a job for each line on stdin, and answers how fast it was.

    python -m ours.protocol_trainer '{"service": ..., "output": ..., "after": ..., "options": {...}}'  # of `Reading`

with lines `{"job": ..., "outputs": n}`. The clock is read once for each output: the time between two readings is one
`next()` and a look at what came. The first fifth of the outputs is not counted.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import transfers
from ours.interface import Reading, distribute
from ours.service import elements_dataset

import penstock as ps

Array = np.ndarray[Any, Any]

ROWS = {"element": 1, "batch": 64}
"""Of 1 KB each, in an output of that name."""
WARM_UP = 5  # one in so many outputs


def dataset(output: str, outputs: int) -> ps.Dataset:
    rows = ROWS[output]
    elements = elements_dataset(outputs * rows)
    return elements if rows == 1 else elements.batch(rows)


def negated(array: Array) -> Array:
    return -array


def with_operators(loader: ps.Dataset, after: str) -> ps.Dataset:
    match after:
        case "":
            return loader
        case "map":
            return loader.map(negated)
        case "map, unbatch, batch":
            return loader.map(negated).unbatch().batch(ROWS["batch"])
        case _:
            raise ValueError(f"no operators are called {after!r}")


def check(array: Array) -> None:
    """Every row has one number in all its places; memory that was written again too early would show other ones."""
    rows = array.reshape(-1, transfers.FLOATS)
    if (rows != rows[:, :1]).any():
        raise transfers.WrongContentError(f"a row of {rows} has several numbers")


def read(given: dict[str, Any], job: str, outputs: int) -> dict[str, Any]:
    clock, stamps = time.perf_counter, []  # the machine's clock, the same in all processes
    source = dataset(given["output"], outputs)
    with distribute(source, given["service"], Reading(job=job, timeout_s=120.0, **given["options"])) as loader:
        for number, array in enumerate(with_operators(loader, given["after"])):
            stamps.append(clock())
            if not number % transfers.CHECK_WHOLE:
                check(array)
    steady = stamps[len(stamps) // WARM_UP :]
    if len(steady) < 2:
        raise RuntimeError(f"{len(stamps)} outputs of {outputs} came: too few to time")
    return {
        "received": len(stamps),
        "counted": len(steady) - 1,
        "begin_s": steady[0],
        "end_s": steady[-1],
        "p99_s": float(np.percentile(np.diff(steady), 99)),
    }


def main() -> None:
    given = json.loads(sys.argv[1])
    for line in sys.stdin:
        print(json.dumps(read(given, **json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
