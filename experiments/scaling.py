"""Does a job get the workers it needs? Eight real workloads, the policies side by side, and what scaling must not cost.

python experiments/scaling.py [--quick] [--only NAME ...] [--who NAME ...] [--results FILE] [--show]
                                                                                  or: make experiment E=scaling

Workers wait instead of computing (`scaling_workloads.py`), so that twelve of them fit on two cores. The oracle is a
sweep over fixed numbers of workers: the smallest within 3 % of the best. Costs are per batch: the trainer's host and
the workers that were held, by the prices of `workloads.toml`, search included. Where a trainer changes its speed in
mid-run, the oracle has the right number for each of the speeds.

Beside the workloads there are bounds (`scaling_bounds.py`): `jsonl`, `texts` and `jpegs` are data sets on which eight
workers must make 0.9 of eight times what one does; `epochs` is how idle workers are between short epochs; `shrinking`
what 2 workers make after they were 16, and `repeated` what is made twice by that. `steady` is ten minutes of a trainer
whose steps take their time +- 20 %: a number of workers that was found is kept.

The whole takes two hours. `--only` and `--who` (oracle, or a policy) choose parts; what ends is written to `--results`,
and what is in there is not run again, so that it can be run in pieces; `--show` runs nothing more. --quick (three
minutes) takes three of the workloads and `model_first` alone, and sweeps around the number that is needed. Printed is a
table, then every claim beside what was seen; it ends with 1 if one does not hold, or if none was looked at.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from scaling_bounds import SPLITS, WORKERS, idle_between_epochs, repeated_by_shrinking, speed_up
from scaling_results import ORACLE, Bound, Claim, Decision, Part, Results, Swept, claims, plot, rows
from scaling_workloads import POOL, WORKLOADS, sweep, trainer_of

from penstock.control.scaling_rules import PolicyName

POLICIES: tuple[PolicyName, ...] = ("model_first", "cachew", "utilization", "buffers")
WATCHED_S = 180.0
PLOT = Path(__file__).resolve().parent.parent / "build" / "experiments" / "scaling.png"
QUICK = ("trainer-bound", "needs-4", "two-consumers")
BOUNDS = (*SPLITS, "epochs", "shrinking", "repeated", "steady")
SHRINK_FROM, SHRINK_TO = 16, 2
SHRINK_SPEED = 5.0
"""So that a split takes six seconds, which retired streams read on."""
STEADY, STEP_NOISE, CONVERGED_S = "needs-4", 0.2, 20.0
STEADY_BATCHES = 60_000
"""More than its workers make in ten minutes: an epoch that ends would take their work away."""


def shrunk(seconds: float) -> tuple[float, float]:
    """Return the batches a second that 2 workers make after they were 16, and those of 2 from the beginning."""
    with trainer_of("needs-8", SHRINK_FROM, pool=SHRINK_FROM, speed=SHRINK_SPEED) as trainer:
        trainer.wait_for(SHRINK_FROM)
        time.sleep(3.0)
        trainer.scale(SHRINK_TO)
        time.sleep(25.0)  # what was granted to retired streams is read, and what was buffered
        after = trainer.watch(seconds)
    with trainer_of("needs-8", SHRINK_TO, pool=SHRINK_FROM, speed=SHRINK_SPEED) as trainer:
        trainer.wait_for(SHRINK_TO)
        time.sleep(1.5)
        fresh = trainer.watch(seconds)
    return after.per_s, fresh.per_s


def bound(name: str, *, quick: bool) -> Bound:
    """Run one of the bounds; return what was seen, and what is claimed of it."""
    if name in SPLITS:
        alone_s, together_s, count = speed_up(name, 1 if quick else 5)
        ratios = sorted(alone_s / each_s / WORKERS for each_s in together_s)
        ratio = ratios[len(ratios) // 2]
        times = ", ".join(f"{each_s:.2f}" for each_s in together_s)
        seen = f"{count} elements: one worker {alone_s:.1f} s, {WORKERS} workers {times} s (low {ratios[0]:.3f})"
        claim = Claim(f"{name}: {WORKERS} workers make {ratio:.3f} of {WORKERS} times (0.9 at least)", ratio >= 0.9)
    elif name == "epochs":
        epochs = 6 if quick else 20
        short, long = idle_between_epochs(epochs, 3.0)
        seen = f"workers are idle for {short:.1%} of {epochs} epochs of 3 s, for {long:.1%} of a long one"
        more = short - long
        claim = Claim(f"epochs of 3 s: idle for {more:.1%} more than in a long one (3 % at most)", more <= 0.03)
    elif name == "repeated":
        twice, moved, most = repeated_by_shrinking(SHRINK_FROM, SHRINK_TO)
        seen = f"{SHRINK_FROM} to {SHRINK_TO} workers: {twice} elements were made twice, {moved} streams moved"
        claim = Claim(f"a scale-down repeats {twice} elements ({most} at most: a split for each stream)", twice <= most)
    elif name == "steady":
        with trainer_of(STEADY, "auto", noise=STEP_NOISE, batches=STEADY_BATCHES) as trainer:
            run = trainer.watch(60.0 if quick else 600.0)
        late = [each for each in run.path[1:] if each.at_s > CONVERGED_S]
        seen = " ".join(f"{each.target}@{each.at_s:.0f}s ({each.reason})" for each in run.path)
        text = f"steps of +- {STEP_NOISE:.0%} for {run.seconds:.0f} s: {len(late)} changes once converged (none)"
        claim = Claim(text, not late)
    else:
        pairs = [shrunk(8.0) for _ in range(1 if quick else 6)]
        ratios = sorted(after / fresh for after, fresh in pairs)
        middle = ratios[len(ratios) // 2]
        seen = "  ".join(f"{after:.1f}/s against {fresh:.1f}/s" for after, fresh in pairs)
        text = f"{SHRINK_FROM} to {SHRINK_TO} workers: {middle:.2f} of a fresh {SHRINK_TO} (0.95 at least)"
        claim = Claim(text, middle >= 0.95)
    return Bound((f"{name:<16} {seen}",), (claim,))


def parts_of(names: list[str], who: list[str]) -> Iterator[Part]:
    for name in names:
        if name in WORKLOADS:
            yield from (Part(name, each) for each in who)
        else:
            yield Part(name)


def run(part: Part, *, quick: bool) -> Swept | Decision | Bound:
    if part.name in BOUNDS:
        return bound(part.name, quick=quick)
    if part.who == ORACLE:
        needs = WORKLOADS[part.name]["needs"]
        numbers = range(max(1, needs - 1), needs + 2) if quick else range(1, POOL + 1)
        return Swept(sweep(part.name, numbers, 3.0 if quick else 6.0))
    policy = next(each for each in POLICIES if each == part.who)
    with trainer_of(part.name, "auto", policy=policy) as trainer:
        return Decision(trainer.watch(22.0 if quick else WATCHED_S))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three workloads, model_first alone: three minutes")
    parser.add_argument("--only", nargs="+", choices=[*WORKLOADS, *BOUNDS], help="some workloads and bounds")
    parser.add_argument("--who", nargs="+", choices=[ORACLE, *POLICIES], help="what to run on workloads")
    parser.add_argument("--results", type=Path, help="a file to keep results in; what is there is not run again")
    parser.add_argument("--show", action="store_true", help="run nothing")
    parser.add_argument("--plot", type=Path, default=PLOT)
    given = parser.parse_args()
    names = given.only or (list(QUICK) if given.quick else [*WORKLOADS, *BOUNDS])
    who = given.who or [ORACLE, *POLICIES[: 1 if given.quick else None]]
    results = Results(given.results)
    for part in parts_of(names, who):
        if part not in results.found and not given.show:
            results.add(part, run(part, quick=given.quick))
            print(f"done: {part.name} {part.who}", flush=True)
    for row in rows(results):
        print(row)
    claimed = list(claims(results, whole=not given.quick))
    print()
    for claim in claimed:
        print(claim.line())
    plot(results, given.plot)
    print(f"plot: {given.plot}")
    return 0 if claimed and all(claim.holds for claim in claimed) else 1


if __name__ == "__main__":
    sys.exit(main())
