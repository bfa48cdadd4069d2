"""Print the walks and how many modules each has, beside its target: `python -m tests.walks [NAME ...] [--source DIR]`.

It ends with 1 where a target is missed. With `--source` it is another checkout's Penstock that is traced.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .events import EVENTS
from .trace import ROOT, Walk, trace

TARGETS = {"batch": 15, "death": 24, "loading": 20, "joining": 22}
SHOWN = 3  # functions of a module


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.walks", description=__doc__)
    parser.add_argument("events", nargs="*", metavar="NAME", help=f"of {', '.join(EVENTS)}; none: all")
    parser.add_argument("--source", type=Path, default=ROOT / "src")
    arguments = parser.parse_args()
    walks = [trace(event, arguments.source) for event in arguments.events or EVENTS]
    for walk in walks:
        _print(walk)
    missed = [walk.event for walk in walks if len(walk.steps) > TARGETS[walk.event]]
    print("every walk is within its target" if not missed else f"longer than the target: {', '.join(missed)}")
    return bool(missed)


def _print(walk: Walk) -> None:
    title = (EVENTS[walk.event].__doc__ or "").strip()
    found, target = len(walk.steps), TARGETS[walk.event]
    print(f"{walk.event}: {title}\n{found} modules (target: at most {target})")
    if walk.within_dispatcher:
        print(f"the dispatcher counts as one; its process enters {walk.within_dispatcher}")
    for number, step in enumerate(walk.steps, 1):
        who = "+".join(step.roles)
        print(f"  {number:2} {who:18} {step.module:28} {', '.join(step.functions[:SHOWN])}")
    print()


if __name__ == "__main__":
    raise SystemExit(main())
