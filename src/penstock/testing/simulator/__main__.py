"""Run seeded schedules: `python -m penstock.testing.simulator --seeds 1000`; it ends with 1 if a promise is broken."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import get_args

from penstock.testing.simulator.dispatcher import Bug
from penstock.testing.simulator.schedule import fails, make_schedule, shrink

AT_ONCE = 50  # schedules handed to a process


def failing(seeds: range, bug: Bug = "") -> list[int]:
    """Return which of these seeds' schedules break a promise."""
    return [seed for seed in seeds if fails(make_schedule(seed), bug) is not None]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m penstock.testing.simulator", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many schedules")
    parser.add_argument("--first", type=int, default=0, help="the first one's seed")
    parser.add_argument("--bug", choices=get_args(Bug), default="", help="what to break")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--log", action="store_true", help="print what happened in a failing schedule")
    given = parser.parse_args(arguments)
    stop = given.first + given.seeds
    parts = [range(at, min(at + AT_ONCE, stop)) for at in range(given.first, stop, AT_ONCE)]
    found: list[int] = []
    run = partial(failing, bug=given.bug)
    if given.jobs == 1:
        found = [seed for part in parts for seed in run(part)]
    else:
        with ProcessPoolExecutor(given.jobs) as pool:
            found = [seed for part in pool.map(run, parts) for seed in part]
    if not found:
        print(f"{given.seeds} schedules from seed {given.first} on: all promises kept")
        return 0
    failed = fails(make_schedule(found[0]), given.bug)
    assert failed is not None
    failed = shrink(failed, given.bug)
    print(
        f"{len(found)} of {given.seeds} schedules failed: seeds {found[:20]}. "
        "The first, with as few faults as still fail:"
    )
    print(failed)
    if given.log:
        print("\n".join(failed.log))
    return 1


if __name__ == "__main__":
    sys.exit(main())
