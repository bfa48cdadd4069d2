"""The part of `penstock demo` that runs worker processes: the same pipeline elsewhere, under kills, and moved.

What is compared is every image by its path and its pixels, against a run on threads in this process: one that is
lost, comes twice, or was augmented with other random numbers shows.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import signal
import statistics
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from time import perf_counter
from typing import Any

import penstock as ps
from penstock.cli.demo_data import DemoData, hold_the_gil, image_pipeline
from penstock.cli.demo_table import Finding

WORKERS = 3
FEWER_WORKERS = 1
CALLS = 1000
"""How often the function that holds the GIL is called; a call takes about a quarter of a millisecond."""
AHEAD_BYTES = 32 << 20
"""What may be received ahead where something is killed: so little that there is work left to lose."""
ROUNDS = 3
TIMEOUT_S = 60.0
LIMITS = ps.Limits(timeout_s=TIMEOUT_S)

Seen = Counter[tuple[str, int]]


def service(data: DemoData) -> Iterator[Finding]:
    """Read the same pipeline through worker processes."""
    dataset = image_pipeline(data)
    began = perf_counter()
    with ps.LocalService(WORKERS) as local, dataset.distribute(local, limits=LIMITS) as loader:
        iterator = iter(loader)
        first = next(iterator)
        started_s = perf_counter() - began
        read = _seen([first]) + _seen(iterator)
        took_s = [_time(loader) for _ in range(ROUNDS)]
        yield Finding(f"{WORKERS} worker processes, from nothing to the first batch", f"{started_s:.2f} s")
        rate = read.total() / statistics.median(took_s)
        yield Finding("the image pipeline through them, by shared memory", f"{rate:,.0f} images/s")
        yield _compare("the same images as on threads, pixel for pixel", read, _expected(data))

        calls = ps.range(CALLS).map(hold_the_gil).batch(50)
        with calls.distribute(local, limits=LIMITS) as away:
            _time(away)  # now its processes are there
            both_s = [(_time(calls), _time(away)) for _ in range(ROUNDS)]
        here_s, away_s = (statistics.median(times) for times in zip(*both_s))
    yield Finding("a function that holds the GIL, on threads", f"{CALLS / here_s:,.0f} calls/s")
    yield Finding(
        f"the same in {WORKERS} processes ({_cores()})", f"{CALLS / away_s:,.0f} calls/s, {here_s / away_s:.2f}x"
    )


def kills(data: DemoData) -> Iterator[Finding]:
    """Kill a worker process, then the dispatcher, in the middle of an epoch."""
    dataset = image_pipeline(data)
    worker_dies_at, dispatcher_dies_at = max(1, len(dataset) // 4), max(1, len(dataset) // 2)
    read: Seen = Counter()
    step, dispatcher, longest_s, began = 0, 0, 0.0, perf_counter()
    with (
        ps.LocalService(WORKERS) as local,
        dataset.distribute(local, limits=ps.Limits(timeout_s=TIMEOUT_S, memory_bytes=AHEAD_BYTES)) as loader,
    ):
        for batch in loader:
            step += 1
            if step > worker_dies_at:  # from here on it is the kills that one waits for, not the start
                longest_s = max(longest_s, perf_counter() - began)
            read += _seen([batch])
            if step == worker_dies_at:
                _kill(_busy_worker(local, loader))
            if step == dispatcher_dies_at:
                dispatcher = local.dispatcher_pid
                _kill(dispatcher)
            began = perf_counter()
        reopened, successor = loader.statistics().reconnects, local.dispatcher_pid
    yield Finding(
        f"kill -9 of a worker process at step {worker_dies_at} of {len(dataset)}", f"streams opened again: {reopened}"
    )
    yield Finding(
        f"kill -9 of the dispatcher at step {dispatcher_dies_at}",
        f"process {dispatcher}, now {successor}",
        dispatcher != successor,
    )
    yield Finding("longest wait for a batch after the first kill", f"{longest_s:.2f} s")
    yield _compare("every image came once, pixel for pixel", read, _expected(data))


def moving(data: DemoData) -> Iterator[Finding]:
    """Save a state on one service and go on from it on another."""
    dataset = image_pipeline(data)
    half = len(dataset) // 2
    with ps.LocalService(WORKERS) as local, dataset.distribute(local, limits=LIMITS) as loader:
        read = _seen(itertools.islice(loader, half))
        saved = json.dumps(loader.state_dict())
    with (
        ps.LocalService(FEWER_WORKERS) as local,
        dataset.distribute(local, limits=LIMITS) as loader,
    ):
        loader.load_state_dict(json.loads(saved))
        read += _seen(loader)
    yield Finding(f"state after {half} steps on {WORKERS} workers, as JSON", f"{len(saved):,} bytes")
    what = f"went on with {FEWER_WORKERS} worker of another service: every image once"
    yield _compare(what, read, _expected(data))


def _seen(batches: Iterable[dict[str, Any]]) -> Seen:
    return Counter(
        (str(path), zlib.crc32(image)) for batch in batches for path, image in zip(batch["path"], batch["image"])
    )


@functools.lru_cache(maxsize=1)
def _expected(data: DemoData) -> Seen:
    with image_pipeline(data).iterator(epoch=0) as iterator:
        return _seen(iterator)


def _compare(what: str, read: Seen, expected: Seen) -> Finding:
    lost, extra = (expected - read).total(), (read - expected).total()
    wrong = f"; {lost} missing, {extra} too many or other" if lost or extra else ""
    return Finding(what, f"{read.total()} of {expected.total()}{wrong}", not wrong)


def _busy_worker(local: ps.LocalService, loader: ps.Loader) -> int:
    """Return a process that has work left, if there is one."""
    running = local.worker_pids()
    busy = [stream.worker for stream in loader.statistics().streams if not stream.ended and stream.worker in running]
    return running[busy[0]] if busy else max(running.values())


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _time(batches: Iterable[Any]) -> float:
    began = perf_counter()
    for _ in batches:
        pass
    return perf_counter() - began


def _cores() -> str:
    from penstock.runtime.budget import default_budget

    cores = default_budget().threads
    return f"{cores} core" if cores == 1 else f"{cores} cores"
