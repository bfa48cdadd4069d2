"""Many seeds, on some lanes at once: progress, failing cases made smaller, and a summary by mode."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from .case import Case, draw
from .driver import Limits
from .lanes import Lane
from .modes import DRAWING, Modes, refusals
from .shrink import shrink
from .verdict import Verdict

SHRINK_LIMITS = Limits(timeout_s=5.0, case_s=12.0)


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A failing seed with the smallest case that failed likewise."""

    seed: int
    verdict: Verdict
    smallest: Case
    tried: int
    again: bool
    """It failed in the same way when it was run a second time: it does not depend on chance, or not much."""


class Summary:
    def __init__(self) -> None:
        self.cases, self.refused = 0, 0
        self.by_mode: Counter[str] = Counter()
        self.failed_by_mode: Counter[str] = Counter()
        self.happened: Counter[str] = Counter()
        self.found: list[Found] = []
        self.seconds = 0.0

    def add(self, case: Case, verdict: Verdict) -> None:
        self.cases += 1
        self.refused += verdict.refused
        self.seconds += verdict.seconds
        for mode in modes_of(case):
            self.by_mode[mode] += 1
            self.failed_by_mode[mode] += bool(verdict.kind)
        self.happened.update(f"event {event}" for event in set(verdict.happened))

    def text(self) -> str:
        failed = len(self.found)
        lines = [
            f"{self.cases} cases, {failed} failed, {self.refused} refused as they must be, "
            f"{self.seconds / max(1, self.cases):.2f} s a case"
        ]
        for mode, count in sorted(self.by_mode.items()):
            wrong = self.failed_by_mode[mode]
            said = [f"{wrong} failed"] if wrong else []
            if mode.startswith("event "):
                said.insert(0, f"in {self.happened[mode]} it came about")
            lines.append(f"  {mode:28} {count:6}  {', '.join(said)}".rstrip())
        kinds = Counter(found.verdict.kind for found in self.found)
        lines += [f"  failed: {kind} × {count}" for kind, count in kinds.most_common()]
        return "\n".join(lines)


def modes_of(case: Case) -> Iterator[str]:
    modes = case.modes
    yield f"order {modes.order}"
    yield f"sharding {modes.sharding}"
    yield f"uneven {modes.uneven}"
    if modes.ranks > 1:
        yield f"ranks {modes.ranks}"
    for name in ("guarantee", "sharing", "feed", "streams"):
        if getattr(modes, name) is not None:
            yield f"{name} {getattr(modes, name)}" if name != "streams" else "streams given"
    for name in ("coordinated", "own_processes", "moving_cut", "read_here"):
        if getattr(modes, name):
            yield name
    if modes.reach != Modes().reach:
        yield "in parts"
    if modes.replicas > 1:
        yield "replicas"
    if modes.transport != "auto":
        yield "transport"
    if modes.after:
        yield "operators after"
    if any(step.name in DRAWING for step in modes.after):
        yield "rng after"
    if modes.evaluation:
        yield "evaluation"
    yield from (name for name in ("holdout", "resample", "balanced") if case.pipeline.has(name))
    yield from (name for name in ("collate", "mask") if any(step.arguments.get(name) for step in case.pipeline.steps))
    if refusals(case.pipeline, modes):
        yield "illegal"
        return
    if any(leg.inline for leg in case.legs):
        yield "inline"
    if len(case.legs) > 1:
        yield "resumed"
        if any(leg.ranks != case.modes.ranks for leg in case.legs):
            yield "resumed on other ranks"
    yield from sorted({f"event {event.what}" for leg in case.legs for event in leg.events})


def run_seeds(
    seeds: Iterable[int],
    *,
    jobs: int = 1,
    seconds: float | None = None,
    shrink_s: float = 60.0,
    limits: Limits | None = None,
    quiet: bool = False,
    only: str | None = None,
) -> Summary:
    """Run cases on `jobs` lanes at once; print as it goes. `seconds` bounds when the last case begins.

    `only`: those that have this mode, as the summary names it.
    """
    limits = limits or Limits()
    begin = time.monotonic()
    summary, lock = Summary(), threading.Lock()
    pending = iter(seeds if only is None else (seed for seed in seeds if only in modes_of(draw(seed))))

    def say(text: str) -> None:
        if not quiet:
            print(text, flush=True)

    def work() -> None:
        lane = Lane()
        try:
            while True:
                with lock:
                    over = seconds is not None and time.monotonic() - begin > seconds
                    seed = None if over else next(pending, None)
                if seed is None:
                    return
                case = draw(seed)
                verdict = lane.run(case, limits)
                found = find(lane, case, verdict, limits, shrink_s) if verdict.kind else None
                with lock:
                    summary.add(case, verdict)
                    if found is not None:
                        summary.found.append(found)
                        say(report(found))
                    if sys.stderr.isatty() or summary.cases % 50 == 0:
                        end = "\r" if sys.stderr.isatty() else "\n"
                        rate = (time.monotonic() - begin) / summary.cases
                        line = f"seed {seed}: {summary.cases} cases, {len(summary.found)} failed, {rate:.2f} s a case"
                        print(line, end=end, file=sys.stderr, flush=True)
        finally:
            lane.close()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return summary


def find(lane: Lane, case: Case, verdict: Verdict, limits: Limits, shrink_s: float) -> Found:
    """Run a failing case again, and make it smaller if it fails again."""
    again = lane.run(case, limits).kind == verdict.kind
    small, found, tried = case, verdict, 0
    if again:
        small, found, tried = shrink(
            case, verdict, lambda candidate: lane.run(candidate, SHRINK_LIMITS), seconds=shrink_s
        )
    return Found(seed=case.seed, verdict=found, smallest=small, tried=tried, again=again)


def report(found: Found) -> str:
    failed = "FAILED" if found.again else "FAILED ONCE OF TWICE"
    return (
        f"seed {found.seed} {failed}: {found.verdict.kind}: {found.verdict.text.strip()[:1500]}\n"
        f"smallest of {found.tried} tried:\n{found.smallest}\n  as JSON   {found.smallest.encode()}\n"
    )
