"""`python -m tests.crossbar 0-99 [--jobs 2] [--seconds 600]`; one seed with -v prints its case and runs it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .case import Case, draw
from .driver import Limits
from .lanes import Lane, serve_lane
from .runner import run_seeds


def seeds_of(text: str) -> range:
    """Return the seeds from a to b, both included.

    >>> seeds_of("3-5"), seeds_of("7")
    (range(3, 6), range(7, 8))
    """
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crossbar", description=__doc__)
    parser.add_argument("seeds", nargs="?", default="0-99", help="a seed, or first-last")
    parser.add_argument("--jobs", type=int, default=1, help="cases at once")
    parser.add_argument("--seconds", type=float, help="begin no case after so long")
    parser.add_argument("--shrink-seconds", type=float, default=60.0, help="for making a failing case smaller; 0: none")
    parser.add_argument("--timeout", type=float, default=Limits().timeout_s, help="what a loader waits at most")
    parser.add_argument("--only", help="a mode as the summary names it, such as 'rng after': no cases without it")
    parser.add_argument("--case", type=Path, help="a file with a case as JSON, instead of seeds; - is stdin")
    parser.add_argument("-v", "--verbose", action="store_true", help="print each case")
    parser.add_argument("--lane", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.lane:
        serve_lane()
        return 0
    limits = Limits(timeout_s=arguments.timeout, case_s=2.5 * arguments.timeout)
    if arguments.case is not None or arguments.verbose:
        if arguments.case is not None:
            text = sys.stdin.read() if str(arguments.case) == "-" else arguments.case.read_text()
            cases = [Case.decode(text)]
        else:
            cases = [draw(seed) for seed in seeds_of(arguments.seeds)]
        return max(show(case, limits) for case in cases)
    summary = run_seeds(
        seeds_of(arguments.seeds),
        jobs=arguments.jobs,
        seconds=arguments.seconds,
        shrink_s=arguments.shrink_seconds,
        limits=limits,
        only=arguments.only,
    )
    print(summary.text())
    return 1 if summary.found else 0


def show(case: Case, limits: Limits) -> int:
    print(case)
    lane = Lane()
    verdict = lane.run(case, limits)
    lane.close()
    outcome = (
        f"FAILED: {verdict.kind}: {verdict.text}"
        if verdict.kind
        else "refused, as it must be"
        if verdict.refused
        else "well"
    )
    print(f"  {outcome} ({verdict.seconds:.1f} s)", flush=True)
    return 1 if verdict.kind else 0


if __name__ == "__main__":
    sys.exit(main())
