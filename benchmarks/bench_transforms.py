"""Each feature transform against the best of numpy, torch, pyarrow and polars doing the same, in one process.

All have one thread, and arrays in memory as each library has them: 49,305 ids in 4,096 lists, 65,536 numbers. What a
library gives is compared with ours before it is timed. Runs are interleaved; a figure is the median of the processor
time of the whole process. Two threads are timed by the wall, against one. Targets are printed beside what was seen, and
the exit code is 1 where one is missed. `--quick` takes fewer runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter, process_time
from typing import Any, NamedTuple

os.environ["POLARS_MAX_THREADS"] = "1"

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import torch

from penstock.graph import transforms as tr
from penstock.kernels import hashing
from penstock.kernels.features import Lists, Numbers
from penstock.runtime.feature_transforms import application, warm

ROWS, IDS, NUMBERS = 4096, 49_305, 65_536
LEAST, HASH_LEAST, WINDOW_LEAST, THREADS_LEAST = 0.95, 2.5, 1.8, 1.8
MUL = np.uint64(0x9DDFEA08EB382D69)
W = np.uint64


class Case(NamedTuple):
    transform: Any
    inputs: list[Any]
    peers: dict[str, Callable[[], Any]]
    least: float = LEAST
    same: Callable[[Any, Any], bool] = lambda made, theirs: np.array_equal(made.values, np.asarray(theirs))


def mixed(x: Any) -> Any:
    x = (~x) + (x << W(21))
    x ^= x >> W(24)
    x = x + (x << W(3)) + (x << W(8))
    x ^= x >> W(14)
    x = x + (x << W(2)) + (x << W(4))
    x ^= x >> W(28)
    return x + (x << W(31))


def combined(upper: Any, lower: Any) -> Any:
    a = (lower ^ upper) * MUL
    a ^= a >> W(47)
    b = (upper ^ a) * MUL
    b ^= b >> W(47)
    return b * MUL


def torch_hash(x: Any, salt: int, most: int) -> Any:
    def shifted(word: Any, by: int) -> Any:  # torch has no unsigned shift
        return (word >> by) & ((1 << (64 - by)) - 1)

    x = (~x) + (x << 21)
    x = x ^ shifted(x, 24)
    x = x + (x << 3) + (x << 8)
    x = x ^ shifted(x, 14)
    x = x + (x << 2) + (x << 4)
    x = x ^ shifted(x, 28)
    x = x + (x << 31)
    mul = int(MUL.astype(np.int64))
    a = (x ^ salt) * mul
    a = a ^ shifted(a, 47)
    b = (a ^ salt) * mul
    return torch.remainder((b ^ shifted(b, 47)) * mul, most)


def close(made: Any, theirs: Any) -> bool:
    return np.allclose(made.values, np.asarray(theirs), rtol=1e-4, atol=1e-5)


def cases() -> list[Case]:
    rng = np.random.default_rng(3)
    lengths = rng.multinomial(IDS, np.ones(ROWS) / ROWS)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    ids = rng.integers(0, 1 << 40, IDS)
    few = rng.integers(0, 60, IDS)
    others = rng.integers(0, 60, IDS)
    floats = rng.random(NUMBERS).astype(np.float32)
    times = rng.integers(0, 2 * 10**9, NUMBERS)
    row = np.repeat(np.arange(ROWS), lengths)
    lists, few_lists, other_lists = (Lists(values, offsets) for values in (ids, few, others))
    numbers = Numbers(floats)
    t_ids, t_floats, t_times, t_offsets = map(torch.from_numpy, (ids, floats, times, offsets))
    p_ids = pl.Series(ids)
    p_floats, p_times, a_floats, a_times = pl.Series(floats), pl.Series(times), pa.array(floats), pa.array(times)
    a_lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(ids))
    p_lists = pl.Series(values=a_lists)
    borders = tuple(float(b) for b in np.linspace(0.01, 0.99, 63, dtype=np.float32))
    n_borders = np.array(borders, np.float32)
    t_borders, p_borders = torch.from_numpy(n_borders), pl.Series(n_borders)
    mapping = {int(key): int(key % 1000) for key in ids[:2000]}
    keys = np.array(sorted(mapping))
    targets = np.array([mapping[int(key)] for key in keys])
    t_keys, t_targets = torch.from_numpy(keys), torch.from_numpy(targets)
    a_keys, a_targets = pa.array(keys), pa.array(targets)
    low, high = pa.scalar(0.2, pa.float32()), pa.scalar(0.7, pa.float32())
    p_keys, p_targets = pl.Series(keys), pl.Series(targets)
    files, rows = np.repeat(np.arange(16), NUMBERS // 16), np.tile(np.arange(NUMBERS // 16), 16)

    def np_first(x: int) -> Any:
        kept = np.minimum(lengths, x)
        ends = np.cumsum(kept)
        return ids[np.arange(ends[-1]) + np.repeat(offsets[:-1] - (ends - kept), kept)]

    def torch_first(x: int) -> Any:
        kept = (t_offsets[1:] - t_offsets[:-1]).clamp(max=x)
        ends = kept.cumsum(0)
        places = torch.arange(int(ends[-1])) + torch.repeat_interleave(t_offsets[:-1] - (ends - kept), kept)
        return t_ids[places]

    def np_windows(n: int) -> Any:
        scrambled = mixed(ids.view(np.uint64))
        count = np.where(lengths >= n, lengths - (n - 1), (lengths > 0).astype(np.int64))
        ends = np.cumsum(count)
        starts = np.arange(ends[-1]) + np.repeat(offsets[:-1] - (ends - count), count)
        sizes = np.repeat(np.minimum(lengths, n), count)
        word = np.zeros(len(starts), np.uint64)
        for k in range(n):
            here = sizes > k
            if here.all():
                word = combined(word, scrambled[starts + k])
            else:
                word[here] = combined(word[here], scrambled[starts[here] + k])
        return word.view(np.int64)

    def np_map() -> Any:
        places = np.searchsorted(keys, ids)
        places[places == len(keys)] = 0
        return np.where(keys[places] == ids, targets[places], 0)

    def torch_map() -> Any:
        places = torch.searchsorted(t_keys, t_ids).clamp(max=len(keys) - 1)
        return torch.where(t_keys[places] == t_ids, t_targets[places], 0)

    def np_intersect() -> Any:
        return few[np.isin(row * 64 + few, row * 64 + others)]

    def np_overlap() -> Any:
        ones, one_counts = np.unique(row * 64 + few, return_counts=True)
        twos, two_counts = np.unique(row * 64 + others, return_counts=True)
        _, at, also = np.intersect1d(ones, twos, assume_unique=True, return_indices=True)
        least = np.minimum(one_counts[at], two_counts[also])
        return np.bincount(ones[at] // 64, least, ROWS).astype(np.float32)

    def np_cartesian(limit: int) -> Any:
        pairs = np.minimum(lengths * lengths, limit)
        ends = np.cumsum(pairs)
        within = np.arange(ends[-1]) - np.repeat(ends - pairs, pairs)
        width, first = np.repeat(lengths, pairs), np.repeat(offsets[:-1], pairs)
        left, right = mixed(few.view(np.uint64)), mixed(others.view(np.uint64))
        return combined(left[first + within // width], right[first + within % width]).view(np.int64)

    def np_onehot() -> Any:
        out = np.zeros((NUMBERS, 8), np.float32)
        place = floats.astype(np.float64) / 0.125
        inside = np.flatnonzero((place >= 0) & (place < 8))
        out[inside, place[inside].astype(np.int64)] = 1
        return out.reshape(-1)

    def torch_onehot() -> Any:
        return torch.nn.functional.one_hot((t_floats * 8).long(), 8).float().reshape(-1)

    def np_boxcox() -> Any:
        return (np.maximum(floats + np.float32(1), np.float32(1e-6)) ** np.float32(0.3) - 1) / np.float32(0.3)

    def np_logit() -> Any:
        kept = np.clip(floats, np.float32(1e-6), np.float32(1 - 1e-6))
        return np.log(kept / (1 - kept))

    def np_sampled() -> Any:
        word = combined(combined(W(0), mixed(files.view(np.uint64))), mixed(rows.view(np.uint64)))
        return word < W(2**62)

    return [
        Case(
            tr.SigridHash("a", out="b", salt=5, max_value=1_000_003),
            [lists],
            {
                "numpy": lambda: combined(W(5), mixed(ids.view(np.uint64))).view(np.int64) % 1_000_003,
                "torch": lambda: torch_hash(t_ids, 5, 1_000_003),
            },
            HASH_LEAST,
        ),
        Case(
            tr.FirstX("a", out="b", x=10),
            [lists],
            {
                "numpy": lambda: np_first(10),
                "torch": lambda: torch_first(10),
                "pyarrow": lambda: pc.list_slice(a_lists, 0, 10).flatten(),
                "polars": lambda: p_lists.list.head(10).explode(),
            },
            WINDOW_LEAST,
        ),
        Case(tr.NGram(("a",), out="b", n=3), [lists], {"numpy": lambda: np_windows(3)}, WINDOW_LEAST),
        Case(
            tr.Bucketize("a", out="b", borders=borders),
            [numbers],
            {
                "numpy": lambda: np.searchsorted(n_borders, floats),
                "torch": lambda: torch.bucketize(t_floats, t_borders),
                "polars": lambda: p_borders.search_sorted(p_floats, "left"),
            },
        ),
        Case(
            tr.Clamp("a", out="b", low=0.2, high=0.7),
            [numbers],
            {
                "numpy": lambda: np.clip(floats, np.float32(0.2), np.float32(0.7)),
                "torch": lambda: torch.clamp(t_floats, 0.2, 0.7),
                "pyarrow": lambda: pc.max_element_wise(pc.min_element_wise(a_floats, high), low),
                "polars": lambda: p_floats.clip(0.2, 0.7),
            },
        ),
        Case(
            tr.PositiveModulus("a", out="b", divisor=1_000_003),
            [lists],
            {
                "numpy": lambda: np.mod(ids, 1_000_003),
                "torch": lambda: torch.remainder(t_ids, 1_000_003),
                "polars": lambda: p_ids % 1_000_003,
            },
        ),
        Case(
            tr.BoxCox("a", out="b", lambda1=0.3, lambda2=1.0),
            [numbers],
            {
                "numpy": np_boxcox,
                "torch": lambda: ((t_floats + 1).clamp(min=1e-6) ** 0.3 - 1) / 0.3,
                "polars": lambda: ((p_floats + 1).clip(1e-6) ** 0.3 - 1) / 0.3,
            },
            same=close,
        ),
        Case(
            tr.Logit("a", out="b"),
            [numbers],
            {"numpy": np_logit, "torch": lambda: torch.logit(t_floats, 1e-6)},
            same=close,
        ),
        Case(
            tr.MapId("a", out="b", mapping=tuple(mapping.items())),
            [lists],
            {
                "numpy": np_map,
                "torch": torch_map,
                "pyarrow": lambda: pc.fill_null(a_targets.take(pc.index_in(a_lists.values, a_keys)), 0),
                "polars": lambda: p_ids.replace_strict(p_keys, p_targets, default=0),
            },
        ),
        Case(
            tr.GetLocalHour("a", out="b", offset_s=3600),
            [Numbers(times)],
            {
                "numpy": lambda: (times + 3600) // 3600 % 24,
                "torch": lambda: torch.remainder(torch.div(t_times + 3600, 3600, rounding_mode="floor"), 24),
                "pyarrow": lambda: pc.hour(pc.add(a_times, 3600).cast(pa.timestamp("s"))),
                "polars": lambda: (p_times + 3600) // 3600 % 24,
            },
        ),
        Case(tr.Onehot("a", out="b", low=0, high=1, count=8), [numbers], {"numpy": np_onehot, "torch": torch_onehot}),
        Case(
            tr.EnumerateIds("a", out="b"),
            [lists],
            {
                "numpy": lambda: (np.arange(IDS) - np.repeat(offsets[:-1], lengths)).astype(np.float32),
                "torch": lambda: (
                    torch.arange(IDS) - torch.repeat_interleave(t_offsets[:-1], t_offsets.diff())
                ).float(),
            },
            same=lambda made, theirs: np.array_equal(made.weights, np.asarray(theirs)),
        ),
        Case(tr.IdListTransform("a", "b", out="c"), [few_lists, other_lists], {"numpy": np_intersect}),
        Case(
            tr.ComputeScore("a", "b", out="c", mode="id_overlap_count"), [few_lists, other_lists], {"numpy": np_overlap}
        ),
        Case(tr.Cartesian("a", "b", out="c", limit=50), [few_lists, other_lists], {"numpy": lambda: np_cartesian(50)}),
        Case(
            tr.Sampling("f", "r", rate=0.25),
            [files, rows],
            {"numpy": np_sampled},
            same=lambda made, theirs: np.array_equal(made, theirs),
        ),
    ]


def of_ours(case: Case) -> Callable[[], Any]:
    if isinstance(case.transform, tr.Sampling):
        files, rows = case.inputs
        return lambda: hashing.sampled(files, rows, case.transform.seed, case.transform.rate)
    ready = application(case.transform)
    return lambda: ready(case.inputs)


def medians(
    runs: dict[str, Callable[[], Any]], repeats: int, clock: Callable[[], float] = process_time
) -> dict[str, float]:
    """Return the median time of each in µs; the runs take turns."""
    for call in runs.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, call in runs.items():
            call()  # so that what the one before has left in the cache is not charged to this one
            start = clock()
            call()
            times[name].append((clock() - start) * 1e6)
    return {name: statistics.median(each) for name, each in times.items()}


def two_threads(repeats: int) -> dict[str, float]:
    """Return how much more two threads hash than one, a millisecond of work and more each time.

    The threads stay, as those of the runtime do: a new one would be charged for the first touch of all its memory.
    """
    lists = Lists(np.arange(1 << 20), np.arange(0, (1 << 20) + 1, 8))
    ready = application(tr.SigridHash("a", out="b", max_value=1_000_003))
    at_once = threading.Barrier(2)

    def work() -> None:
        for _ in range(8):
            ready([lists])

    def work_beside() -> None:
        at_once.wait()
        work()

    with ThreadPoolExecutor(2) as pool:

        def alone() -> None:
            pool.submit(work).result()

        def together() -> None:
            for done in [pool.submit(work_beside) for _ in range(2)]:
                done.result()

        together()
        found = medians({"one": alone, "two": together}, repeats, perf_counter)
    return {"call_ms": found["one"] / 8e3, "speedup": 2 * found["one"] / found["two"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer runs")
    repeats = 30 if parser.parse_args().quick else 200
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    missed = 0
    results: dict[str, Any] = {}
    for case in cases():
        warm([case.transform])
        ours = of_ours(case)
        for name, peer in case.peers.items():
            if not case.same(ours(), peer()):
                raise SystemExit(f"{case.transform.OP}: {name} gives something else")
        found = medians({"ours": ours, **case.peers}, repeats)
        best = min(case.peers, key=lambda name: found[name])
        ratio = found[best] / found["ours"]
        met = ratio >= case.least
        missed += not met
        results[case.transform.OP] = {"us": {k: round(v, 1) for k, v in found.items()}, "ratio": round(ratio, 2)}
        print(
            f"{case.transform.OP:16} ours {found['ours']:8.1f} µs, best {best:7} {found[best]:8.1f} µs: {ratio:6.2f}x, "
            f"target {case.least}x {'' if met else 'MISSED'}",
            flush=True,
        )
    threads = two_threads(7 if repeats == 30 else 15)
    met = threads["speedup"] >= THREADS_LEAST
    missed += not met
    print(
        f"two threads      {threads['speedup']:.2f}x one, on calls of {threads['call_ms']:.1f} ms, target "
        f"{THREADS_LEAST}x {'' if met else 'MISSED'}"
    )
    versions = {module.__name__: module.__version__ for module in (np, torch, pa, pl)}
    machine = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    print(json.dumps({"bench": "transforms", **machine, "versions": versions, "results": results, "threads": threads}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
