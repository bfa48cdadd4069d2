"""Run seeded cases: `python -m penstock.testing.simulator 0-999`; it ends with 1 if a promise is broken in one."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from penstock.testing.simulator.schedule import fails, make_schedule, shrink

AT_ONCE = 50  # cases handed to a process
SAID_EVERY = 1_000


def run_case(seed: int) -> tuple[int, str, bool]:
    """Return the seed, the kind of its case, and whether all promises were kept."""
    schedule = make_schedule(seed)
    return seed, schedule.shape.kind, fails(schedule) is None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m penstock.testing.simulator", description=__doc__)
    parser.add_argument("seeds", nargs="?", default="0-999", help="of the cases: a number, or first-last")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--log", action="store_true", help="print what happened in the first case that failed")
    given = parser.parse_args(arguments)
    first, _, last = given.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    passed: Counter[str] = Counter()
    failed: list[int] = []
    with ProcessPoolExecutor(given.jobs) as pool:
        cases = map(run_case, seeds) if given.jobs == 1 else pool.map(run_case, seeds, chunksize=AT_ONCE)
        for count, (seed, kind, kept) in enumerate(cases, 1):
            if kept:
                passed[kind] += 1
            else:
                failed.append(seed)
            if count % SAID_EVERY == 0:
                print(f"{count} of {len(seeds)} cases, {len(failed)} failed", flush=True)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(passed.items()))
    print(f"seeds {given.seeds}: {passed.total()} of {len(seeds)} cases passed ({kinds})")
    if not failed:
        return 0
    print(f"{len(failed)} failed: seeds {failed[:20]}. The first, with as few faults as still fail:")
    broken = fails(make_schedule(failed[0]))
    assert broken is not None, "a seed says everything"
    broken = shrink(broken)
    print(broken, *(broken.log if given.log else ()), sep="\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
