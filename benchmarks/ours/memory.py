"""Pipelines that watch their own resident size. Run as a script; prints one JSON line.

python ours/memory.py long|slow BUDGET_BYTES ELEMENTS
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps

SLOW_CONSUMER_S = 0.01
ARRAY = (224, 224, 3)


def anonymous_bytes() -> int:
    """Return RssAnon: what this process holds itself, without files and shared pages."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def one_more(x: int) -> int:
    return x + 1


def array_of(x: int) -> np.ndarray[Any, Any]:
    return np.full(ARRAY, x % 256, np.uint8)


def watch(dataset: ps.Dataset, batches: int, budget_bytes: int, pause_s: float) -> dict[str, int]:
    """Read everything; note the size before, after a tenth, at the end, and the largest in between."""
    before = anonymous_bytes()
    tenth = end = peak = 0
    with dataset.iterator(memory_bytes=budget_bytes) as iterator:
        for step, batch in enumerate(iterator, 1):
            del batch
            if pause_s:
                time.sleep(pause_s)
            if step % max(1, batches // 200) == 0:
                end = anonymous_bytes()
                peak = max(peak, end)
            if step == batches // 10:
                tenth = anonymous_bytes()
    return {"before": before, "tenth": tenth, "end": end, "peak": peak, "batches": step}


def main() -> None:
    kind, budget_bytes, elements = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if kind == "long":
        dataset = ps.range(elements).shuffle(10_000, seed=7).map(one_more).batch(256)
        found = watch(dataset, elements // 256, budget_bytes, 0.0)
    else:
        # A producer that could make 64 arrays in about the time the consumer takes to want one batch.
        dataset = ps.range(elements).map(array_of).batch(64).prefetch()
        found = watch(dataset, elements // 64, budget_bytes, SLOW_CONSUMER_S)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
