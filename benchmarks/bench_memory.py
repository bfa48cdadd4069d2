"""Does memory stay where it was put? 10,000,000 elements; and 9.6 MB batches made faster than they are taken.

Each run is a process of its own that reads its RssAnon. Stated is `memory_bytes`, what may be buffered between stages;
measured is all that the process holds on top of what it held before the first element.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

from harness import HERE, Bench, BenchError, main
from report import ROOT

MB = 1 << 20
CASES = {  # name: (kind, elements, budget)
    "10,000,000 ints": ("long", 10_000_000, 64 * MB),
    "slow consumer, 9.6 MB batches": ("slow", 64 * 600, 256 * MB),
}
GROWTH = 1.10


def run_once(kind: str, budget_bytes: int, elements: int) -> dict[str, Any]:
    python = ROOT / ".venv" / "bin" / "python"
    command = [str(python), str(HERE / "ours" / "memory.py"), kind, str(budget_bytes), str(elements)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE)
    if done.returncode:
        raise BenchError(f"ours/memory.py {kind} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def run(bench: Bench) -> None:
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
    main("memory", run)
