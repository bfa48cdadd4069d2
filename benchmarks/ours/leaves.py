"""What the codecs take for one batch of 3,000 leaves, in a dict and three dicts deep. Prints one JSON line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.wire.runs import decode_run, encode_run

ROWS = 32
ROUNDS = 200


def batches() -> dict[str, Any]:
    def column(number: int) -> np.ndarray[Any, Any]:
        return np.full(ROWS, number, (np.float32, np.int64)[number % 2])

    return {
        "flat": {f"feature_{number}": column(number) for number in range(3_000)},
        "nested": {
            f"group_{i}": {f"kind_{j}": {f"feature_{k}": column(k) for k in range(20)} for j in range(10)}
            for i in range(15)
        },
    }


def best_s(work: Callable[[], Any]) -> float:
    """Return the shortest of many times: a neighbour's work only ever adds to one."""
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    found: dict[str, float] = {}
    for name, batch in batches().items():
        layout, buffers = encode_run([batch])
        memory = [np.frombuffer(bytearray(buffer), np.uint8) for buffer in buffers]
        found[f"3,000 leaves, {name}: flatten"] = best_s(lambda: encode_run([batch]))  # noqa: B023
        found[f"3,000 leaves, {name}: rebuild"] = best_s(lambda: decode_run(layout, memory))  # noqa: B023
    print(json.dumps({"seconds": found}))


if __name__ == "__main__":
    main()
