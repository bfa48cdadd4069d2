"""Does memory stay where it was put? 10,000,000 elements; and 9.6 MB batches made faster than they are taken.

Each run is a process of its own that reads its RssAnon. Stated is `memory_bytes`, what may be buffered between stages;
measured is all that the process holds on top of what it held before the first element.

Through the service both sides have a budget: then all that each process holds (PSS, which divides shared memory among
those who map it) must stay within it plus 100 MB. And whoever is killed, nothing is left: no process, no shared memory.

At default budgets memory follows the need: 131 KB batches that are read as fast as they come take little of it.

It ends with 1 where a target is missed. `--case engine`, `service` or `fast` runs that part alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from harness import HERE, Bench, BenchError, main, say
from os_processes import is_dead, kill, marked, new_mark, wait_until
from report import machine, our_versions, paired

MB = 1 << 20
CASES = {  # name: (kind, elements, budget)
    "10,000,000 ints": ("long", 10_000_000, 64 * MB),
    "slow consumer, 9.6 MB batches": ("slow", 64 * 600, 256 * MB),
}
GROWTH = 1.10
SERVICE_BUDGET = 256 * MB
BESIDES = 100 * MB  # Python, numpy, our code, and what is under way
SERVICE_BATCHES = 600
FAST_EPOCHS, FAST_BATCHES = 120, 500
FAST_SLABS = 64e6  # bytes, of each worker
FAST_TRAINER = 150e6
GONE_S = 15.0  # after the end of the last party
PATIENCE_S = 300


def run_once(kind: str, budget_bytes: int, elements: int) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "ours" / "memory.py"), kind, str(budget_bytes), str(elements)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE)
    if done.returncode:
        raise BenchError(f"ours/memory.py {kind} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def run_service_memory(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "ours.service_memory", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE, timeout=PATIENCE_S)
    if done.returncode:
        raise BenchError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def leave_nothing(number: int) -> tuple[str, dict[int, str], set[str]]:
    """Start a trainer with a service, kill one of them, end the trainer; return who was hit and what is left.

    The party of that number is hit; the name is empty if there are not so many.
    """
    mark = new_mark()
    shared_before = set(os.listdir("/dev/shm"))
    trainer = subprocess.Popen(
        [sys.executable, "-m", "ours.service_memory", "hold"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=HERE,
    )
    try:
        assert trainer.stdin is not None and trainer.stdout is not None
        line = trainer.stdout.readline()
        if not line:
            raise BenchError(f"ours.service_memory hold ended with {trainer.wait()}")
        parties: dict[str, int] = json.loads(line)
        if number >= len(parties):
            trainer.stdin.close()
            trainer.wait(timeout=GONE_S)
            return "", {}, set()
        party = list(parties)[number]
        kill(parties[party])
        wait_until(lambda: is_dead(parties[party]), f"the end of the {party}")
        trainer.stdin.close()  # it ends by itself now, if it was not the one
        try:
            trainer.wait(timeout=GONE_S)
        except subprocess.TimeoutExpired:
            return party, marked(mark), set(os.listdir("/dev/shm")) - shared_before
        try:
            wait_until(lambda: not marked(mark), "the others", GONE_S)
        except BenchError:
            pass  # what is left is the answer
        return party, marked(mark), set(os.listdir("/dev/shm")) - shared_before
    finally:
        trainer.kill()
        trainer.wait()
        for pid in marked(mark):
            kill(pid)


def run_service(bench: Bench) -> None:
    common = {"versions": our_versions(), "machine": machine()}
    for path in ("slabs", "sockets"):
        say(f"memory: slow trainer, {path}")
        batches = SERVICE_BATCHES // (4 if bench.options.quick else 1)
        arguments = ("slow", path, str(SERVICE_BUDGET), str(batches))
        runs = [run_service_memory(*arguments) for _ in range(1 if bench.options.quick else 3)]
        for who in ("trainer", "worker"):
            held = [each[who]["pss"] / MB for each in runs]
            details = {f"{kind}_mib": [each[who][kind] // MB for each in runs] for kind in ("anon", "shared", "pss")}
            limit = (SERVICE_BUDGET + BESIDES) / MB
            case = f"service, slow trainer, {path}: the {who}"
            bench.limit(case, held, limit, unit="MiB", budget_mib=SERVICE_BUDGET // MB, **details)
    say("memory: killing")
    number = 0
    while True:
        party, processes, shared = leave_nothing(number)
        if not party:
            break
        left = len(processes) + len(shared)
        case = f"service, SIGKILL of the {party}: nothing left"
        details = {"processes_left": list(processes.values()), "shared_left": sorted(shared)}
        bench.add(paired(bench.name, case, "clean", "clean", [(float(left == 0), 1.0)], 1.0, **details, **common))
        number += 1


def run_fast(bench: Bench) -> None:
    say("memory: 131 KB batches, read as fast as they come")
    epochs = FAST_EPOCHS // (10 if bench.options.quick else 1)
    runs = [run_service_memory("fast", str(epochs), str(FAST_BATCHES)) for _ in range(1 if bench.options.quick else 3)]
    rates = [round(each["batches_per_s"]) for each in runs]
    for what, limit, case in (("slabs", FAST_SLABS, "slabs of a worker"), ("trainer", FAST_TRAINER, "the trainer")):
        held = [each[what] / 1e6 for each in runs]
        name = f"service, 131 KB batches for {epochs} epochs: {case}"
        bench.limit(name, held, limit / 1e6, unit="MB", batches_per_s=rates)


def run(bench: Bench) -> None:
    for part, name in ((run_engine, "engine"), (run_service, "service"), (run_fast, "fast")):
        if bench.options.case in name:
            part(bench)


def run_engine(bench: Bench) -> None:
    for case, (kind, elements, budget_bytes) in CASES.items():
        size = elements // 4 if bench.options.quick else elements
        runs = [run_once(kind, budget_bytes, size) for _ in range(1 if bench.options.quick else 5)]
        held = [(each["peak"] - each["before"]) / MB for each in runs]
        bench.limit(f"{case}: most held", held, budget_bytes / MB, unit="MiB")
        growth = [each["end"] / each["tenth"] for each in runs]
        sizes: dict[str, Any] = {
            "tenth_mib": [each["tenth"] // MB for each in runs],
            "end_mib": [each["end"] // MB for each in runs],
        }
        bench.limit(f"{case}: end against 10 %", growth, GROWTH, unit="x", **sizes)


if __name__ == "__main__":
    results = main("memory", run)
    sys.exit(int(any(result.verdict == "missed" for result in results)))
