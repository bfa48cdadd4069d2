"""One side of a comparison, alone in its process.

    python side.py MODULE:FUNCTION '{"argument": 1}'

calls the function with the arguments; it returns a `Workload`. Then each line on stdin, `{"elements": n}`, runs a round
of about n elements and is answered by one JSON line. Between rounds the process blocks on stdin, so that the other side
has the machine to itself. Nothing but the standard library is used here: the file runs in both environments.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

WARM_UP = 0.2  # this share of a round's elements passes before the clock starts: start-up is nobody's throughput
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a side runs. `open(n)` starts a fresh pipeline over about n elements and yields counts as they arrive."""

    open: Callable[[int], Iterator[int]] | None = None
    measure: Callable[[int], dict[str, float]] | None = None
    """Instead of `open`, where others than this process read: runs a round of about n elements and returns `elements`,
    `seconds`, `rate`, and what else it tells."""
    first: int  # elements of the first round, from which the others' size follows
    packages: tuple[str, ...] = ()
    in_bursts: bool = False
    """Makes most of its output before it hands any over. Then a clock started after some elements would measure only
    the handing over; so the whole round is timed, and the time of a tiny round (start-up) is taken off."""
    notes: dict[str, Any] = field(default_factory=dict)
    weighed: bool = False
    """Whether the memory of this process and of those below it is told, as it is when the clock starts."""


def tree_cpu_s() -> float:
    """Return the CPU seconds of this process and everything below it, living or reaped."""
    return sum(_tree().values()) / TICKS_PER_S


def tree_pss_bytes() -> int:
    """Return the memory of this process and everything below it; a page that several share counts once."""
    total = 0
    for pid in _tree():
        try:
            with open(f"/proc/{pid}/smaps_rollup") as file:
                total += sum(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended between the listing and the reading
    return total


def _tree() -> dict[int, int]:
    """Return the ticks that this process and everything below it have used, by pid."""
    children: dict[int, list[int]] = {}
    spent: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rsplit(b")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended between the listing and the reading
        children.setdefault(int(fields[1]), []).append(int(name))
        spent[int(name)] = sum(map(int, fields[11:15]))
    found, stack = {}, [os.getpid()]
    while stack:
        pid = stack.pop()
        found[pid] = spent.get(pid, 0)
        stack += children.get(pid, [])
    return found


def run_round(workload: Workload, elements: int) -> dict[str, float]:
    gc.collect()
    if workload.measure is not None:
        cpu_begin = tree_cpu_s()
        return workload.measure(elements) | {"cpu_s": tree_cpu_s() - cpu_begin}
    assert workload.open is not None
    if workload.in_bursts:
        return _run_whole(workload.open, elements)
    stream = workload.open(elements)
    warm = elements * WARM_UP
    passed = 0
    for count in stream:
        passed += count
        if passed >= warm:
            break
    weight = {"pss_bytes": tree_pss_bytes()} if workload.weighed else {}
    cpu_begin, begin = tree_cpu_s(), time.perf_counter()
    counted, end = 0, begin
    for count in stream:
        counted += count
        end = time.perf_counter()
    if counted == 0:
        raise RuntimeError(f"a round of {elements} elements ended within its warm-up; make it longer")
    return _answer(counted, end - begin, tree_cpu_s() - cpu_begin) | weight


def _run_whole(open_pipeline: Callable[[int], Iterator[int]], elements: int) -> dict[str, float]:
    begin = time.perf_counter()
    for _ in open_pipeline(1):
        pass
    start_up_s = time.perf_counter() - begin
    cpu_begin, begin = tree_cpu_s(), time.perf_counter()
    counted = sum(open_pipeline(elements))
    seconds = time.perf_counter() - begin
    # Bounded, so that a start-up that happened to be slow cannot make a rate out of nothing.
    net_s = max(seconds - start_up_s, 0.2 * seconds)
    answer = _answer(counted, net_s, tree_cpu_s() - cpu_begin)
    return answer | {"too_short": 1} if seconds < 2 * start_up_s else answer


def _answer(counted: int, seconds: float, cpu_s: float) -> dict[str, float]:
    return {"elements": counted, "seconds": seconds, "rate": counted / seconds, "cpu_s": cpu_s}


def _version(package: str) -> str:
    return metadata.version(package)


def main() -> None:
    # Libraries print; the answers need a pipe of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    where, arguments = sys.argv[1], json.loads(sys.argv[2])
    module, function = where.split(":")
    workload: Workload = getattr(importlib.import_module(module), function)(**arguments)
    hello = {
        "first": workload.first,
        "versions": {package: _version(package) for package in workload.packages},
        "notes": workload.notes,
        "penstock": getattr(sys.modules.get("penstock"), "__file__", None),
    }
    print(json.dumps(hello), file=answers)
    for line in sys.stdin:
        print(json.dumps(run_round(workload, json.loads(line)["elements"])), file=answers)


if __name__ == "__main__":
    main()
