"""What a checkpoint costs: its size, the time to take it, and the time from loading it to the next batch.

Each restored batch is compared with the one the uninterrupted run gave: a fast wrong answer is an error. The cases of
the service are in `service_resume.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import inputs
import layout
import numpy as np
import service_resume
from harness import Bench, BenchError, main

import penstock as ps

ELEMENTS = layout.LINES
BATCH = 256
STOP_AT = int(0.9 * ELEMENTS) // BATCH  # batches
DECODE_S = 0.002
SLOW = "BENCH_SLOW_DECODE"


def parse(line: str) -> int:
    return int(line.split()[0])


def keep_most(x: int) -> bool:
    return x % 100 != 13


def jitter(x: int, rng: np.random.Generator) -> dict[str, Any]:
    return {"x": x, "noise": rng.random()}


class Decode:
    """Two milliseconds of work without the GIL, once the environment says so: reaching 90 % need not take so long."""

    def __init__(self, block_bytes: int) -> None:
        self.block = bytes(block_bytes)

    def __call__(self, x: Any) -> int:
        if SLOW in os.environ:
            hashlib.sha256(self.block).digest()
        return x if isinstance(x, int) else parse(x)


def two_milliseconds() -> int:
    """Return how many bytes to hash for about 2 ms here."""
    block = bytes(1 << 20)
    hashlib.sha256(block).digest()
    fastest = min(_timed(lambda: hashlib.sha256(block).digest()) for _ in range(20))
    return int(len(block) * DECODE_S / fastest)


def _timed(call: Any) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def pipelines(folder: Path) -> dict[str, ps.Dataset]:
    """Six operators each, on a source that is indexable and on one that is not."""
    ids = ps.range(ELEMENTS)
    text = ps.read_text(f"{folder}/*.txt").map(parse)
    return {
        "range": ids.map(abs).shuffle(10_000, seed=7).filter(keep_most).map(jitter).batch(BATCH).repeat(2),
        "text files": text.shuffle(10_000, seed=7).filter(keep_most).map(jitter).batch(BATCH).repeat(2),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)
    return bool(np.array_equal(a, b))


def restore_times(dataset: ps.Dataset, state: str, expected: Any, runs: int) -> list[float]:
    found = []
    for _ in range(runs):
        begin = time.perf_counter()
        with dataset.iterator() as iterator:
            iterator.load_state_dict(json.loads(state))
            batch = next(iterator)
            found.append(time.perf_counter() - begin)
        if not same(batch, expected):
            raise BenchError("the batch after restoring is not the one that followed the checkpoint")
    return found


def run(bench: Bench) -> None:
    run_engine(bench)
    service_resume.run(bench)


def run_engine(bench: Bench) -> None:
    folder = inputs.lines()
    runs = 3 if bench.options.quick else 10
    for source, dataset in pipelines(folder).items():
        sizes, times = [], []
        state, expected = "", None
        with dataset.iterator() as iterator:
            for step, batch in enumerate(iterator, 1):
                if step == STOP_AT + 1:
                    expected = batch
                    break
                begin = time.perf_counter()
                taken = iterator.state_dict()
                times.append(time.perf_counter() - begin)
                if step == STOP_AT or step % 97 == 0:
                    state = json.dumps(taken)
                    sizes.append(len(state))
        bench.limit(f"{source}: bytes of the largest state", [max(sizes)], 1024, unit="bytes", states=len(sizes))
        parts = np.array_split(np.array(times) * 1e3, runs)
        means = [float(part.mean()) for part in parts]
        bench.limit(f"{source}: state_dict() each step", means, 0.1, unit="ms", slowest_ms=round(max(times) * 1e3, 3))
        seconds = restore_times(dataset, state, expected, runs)
        bench.limit(f"{source}: restored at 90 %, next batch", seconds, 0.2, unit="s")
    decode = Decode(two_milliseconds())
    sources = {"range": ps.range(ELEMENTS), "text files": ps.read_text(f"{folder}/*.txt")}
    for source, elements in sources.items():
        dataset = elements.map(decode).shuffle(10_000, seed=7).batch(BATCH)
        with dataset.iterator() as iterator:
            for _ in range(STOP_AT):
                next(iterator)
            state, expected = json.dumps(iterator.state_dict()), next(iterator)
        os.environ[SLOW] = "1"
        try:
            seconds = restore_times(dataset, state, expected, runs)
        finally:
            del os.environ[SLOW]
        bench.limit(f"{source}: 2 ms decode before shuffle(10,000)", seconds, 1.0, unit="s")


if __name__ == "__main__":
    main("resume", run)
