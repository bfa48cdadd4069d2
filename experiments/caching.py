"""Caching by figure 8 of Cachew (ATC 2022): the function's cost swept, source and cache throttled.

python experiments/caching.py [--quick] [--points 0-5]     or: make experiment E=caching

A source of 250 KB an element, of which a function makes 100 KB, 2.5 times less; twelve points: six costs of the
function on a fast and on a slow cache. Each is run in every mode (computing, kept after the source, kept after the
function) by epochs in turns, and then left to the live decision, with the settings that everybody has, at a location
that was not measured before. Source and cache are behind a limit of bytes a second (`ThrottledStorage`, an fsspec file
system), so that no page cache helps. Printed is, for each point, what every mode took, what was chosen at first and
after some epochs more, how long choosing took, what Cachew's table would choose from the same figures, and the claims
beside what was seen. It ends with 1 if one does not hold.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem

import penstock as ps
from penstock.caching.store import open_store
from penstock.policies.caching import PipelineProfile, PointProfile, cachew_choice

SOURCE_BYTES, RESULT_BYTES = 250_000, 100_000
SOURCE_LIMIT = 60e6
CACHE_LIMITS = {"slow": 6e6, "fast": 60e6}
COSTS_S = (0.0, 0.002, 0.005, 0.010, 0.020, 0.040)
WITHIN = 1.05
CHOOSING_S = 3.6  # 3 % of an epoch of 120 s
MOST_EPOCHS = 60
EPOCHS_AFTER = 4  # in which a wrong choice can be seen to be one


class ThrottledStorage(LocalFileSystem):  # type: ignore[misc]
    """Local files of which all readers and writers of one name together get so many bytes a second."""

    protocol = "throttled"
    limits: dict[str, float] = {}
    _free_at: dict[str, float] = {}
    _turn = threading.Lock()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        return "/" + str(path).removeprefix("throttled://").strip("/")

    def _wait(self, path: str, nbytes: int) -> None:
        name, limit = next((item for item in self.limits.items() if f"/{item[0]}" in path), ("", float("inf")))
        with self._turn:
            now = time.monotonic()
            at = max(now, self._free_at.get(name, now)) + nbytes / limit
            self._free_at[name] = at
        time.sleep(max(0.0, at - now))

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        found: dict[str, Any] = super().info(path, **options)
        return {**found, "ETag": f"{found.get('mtime')}"}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        content: bytes = super().cat_file(self._strip_protocol(path), start=start, end=end, **options)
        self._wait(path, len(content))
        return content

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        self._wait(path, len(value))
        super().pipe_file(self._strip_protocol(path), value, **options)


fsspec.register_implementation("throttled", ThrottledStorage, clobber=True)


def function_of(cost_s: float) -> Callable[[Any], Any]:
    def function(row: Any) -> Any:
        if cost_s:
            time.sleep(cost_s)  # without the GIL and without a processor that others use: the same on any machine
        return {"values": np.frombuffer(row["data"], np.uint8)[:RESULT_BYTES].copy()}

    return function


@dataclass
class Point:
    cache: str
    cost_s: float
    seconds: dict[str, float]
    first: str
    """What was chosen first, and what holds after some epochs of it."""
    chosen: str
    reason: str
    cachew: str
    choosing_s: float
    """From the first element on, with measuring, probing and trying."""

    def ratio(self, mode: str) -> float:
        """What a mode takes, against the best."""
        return self.seconds[mode] / min(self.seconds.values())


def epoch_s(dataset: ps.Dataset, epoch: int) -> float:
    began = time.perf_counter()
    with dataset.iterator(epoch=epoch, threads=2) as iterator:
        for _ in iterator:
            pass
    return time.perf_counter() - began


def run_point(folder: str, cache: str, cost_s: float, repeats: int) -> Point:
    function = function_of(cost_s)
    source = ps.read_files(f"throttled://{folder}/source")

    def made(where: str, *, after_source: bool, after_function: bool, always: bool) -> ps.Dataset:
        location = f"throttled://{folder}/{cache}/{where}"
        start = source.autocache(location, always=always) if after_source else source
        end = start.map(function, threads=2)
        return (end.autocache(location, always=always) if after_function else end).batch(8)

    name = f"{cost_s * 1e3:g}"
    modes = {
        "compute": made("", after_source=False, after_function=False, always=False),
        "keep 1": made(f"{name}-1", after_source=True, after_function=False, always=True),
        "keep 2": made(f"{name}-2", after_source=False, after_function=True, always=True),
    }
    for number, where in ((1, f"{name}-1"), (2, f"{name}-2")):
        for epoch in range(50):  # until all is written: what a slow writer cannot follow waits for the next epoch
            epoch_s(modes[f"keep {number}"], epoch)
            store = open_store(f"throttled://{folder}/{cache}/{where}")
            store.flush(120)
            before = store.counts.misses
            epoch_s(modes[f"keep {number}"], epoch)
            store.flush(120)
            if store.counts.misses == before:
                break
    took: dict[str, list[float]] = {mode: [] for mode in modes}
    for repeat in range(repeats):
        for mode, dataset in modes.items():
            took[mode].append(epoch_s(dataset, 100 + repeat))
    seconds = {mode: statistics.median(each) for mode, each in took.items()}
    live = made(f"{name}-live", after_source=True, after_function=True, always=False)
    first, choosing_s, choice = "", 0.0, None
    left = EPOCHS_AFTER
    for epoch in range(MOST_EPOCHS):
        with live.iterator(epoch=epoch, threads=2) as iterator:
            began = time.perf_counter()
            for _ in iterator:
                if not first and iterator.statistics().caching[0].step == "chosen":
                    choosing_s += time.perf_counter() - began
                    first = mode_of(iterator.statistics().caching[0].point)
            if not first:
                choosing_s += time.perf_counter() - began
            (choice,) = iterator.statistics().caching
        left -= bool(first)
        if not left:
            break
    assert first and choice is not None, f"nothing was chosen in {MOST_EPOCHS} epochs"
    elements = len(os.listdir(f"{folder}/source"))
    by_table = cachew_choice(
        PipelineProfile(
            cpu_s=cost_s,
            gil_s=0.0,
            source_s=SOURCE_BYTES / SOURCE_LIMIT,
            points=(
                PointProfile(number=1, cpu_s=0.0, gil_s=0.0, nbytes=SOURCE_BYTES),
                PointProfile(number=2, cpu_s=cost_s, gil_s=0.0, nbytes=RESULT_BYTES),
            ),
        )
    )
    each = {mode: value / elements for mode, value in seconds.items()}
    return Point(cache, cost_s, each, first, mode_of(choice.point), choice.reason, mode_of(by_table.point), choosing_s)


def mode_of(point: int) -> str:
    return f"keep {point}" if point else "compute"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="four of the twelve points, fewer elements")
    parser.add_argument("--points", default="", metavar="FIRST-LAST", help="some of the points: a run takes minutes")
    options = parser.parse_args()
    elements, repeats = (48, 3) if options.quick else (64, 6)
    costs = (0.0, 0.040) if options.quick else COSTS_S
    sweep = [(cache, cost_s) for cache in CACHE_LIMITS for cost_s in costs]
    if options.points:
        first, last = map(int, options.points.split("-"))
        sweep = sweep[first : last + 1]
    folder = tempfile.mkdtemp(prefix="penstock-caching-")
    os.environ["PENSTOCK_CACHE"] = f"{folder}/host"
    ThrottledStorage.limits = {"source": SOURCE_LIMIT, **CACHE_LIMITS}
    os.makedirs(f"{folder}/source")
    for number in range(elements):
        with open(f"{folder}/source/{number:05}.bin", "wb") as file:
            file.write(os.urandom(SOURCE_BYTES))
    points = []
    print("cache   cost    compute   keep 1    keep 2    at first  ratio  chosen    ratio  after   table     ratio")
    try:
        for cache, cost_s in sweep:
            point = run_point(folder, cache, cost_s, repeats)
            points.append(point)
            ms = "  ".join(f"{point.seconds[mode] * 1e3:6.2f}ms" for mode in ("compute", "keep 1", "keep 2"))
            print(
                f"{point.cache:6}  {cost_s * 1e3:4.0f}ms  {ms}  {point.first:8}  {point.ratio(point.first):5.2f}  "
                f"{point.chosen:8}  {point.ratio(point.chosen):5.2f}  {point.choosing_s:4.1f} s  {point.cachew:8}  "
                f"{point.ratio(point.cachew):5.2f}   {point.reason}",
                flush=True,
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    worst = max(point.ratio(point.chosen) for point in points)
    at_first = max(point.ratio(point.first) for point in points)
    choosing_s = max(point.choosing_s for point in points)
    claims = [
        (f"what is chosen takes at most {WITHIN:g} x the best mode, at every point", worst, worst <= WITHIN),
        ("and so does what is chosen first, before epochs of it were seen", at_first, at_first <= WITHIN),
        (f"choosing takes at most {CHOOSING_S:g} s, 3 % of 120 s", choosing_s, choosing_s <= CHOOSING_S),
    ]
    for text, seen, holds in claims:
        print(f"{'holds ' if holds else 'MISSED'}  {text}: {seen:.2f}")
    return 0 if all(holds for _, _, holds in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
