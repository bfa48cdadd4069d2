"""Runs ours against a peer, fairly, and reports.

Rules. Each side is a process of its own, in its own environment, alive for the whole comparison; start-up and a warm-up
round come first. Then pairs: ours, theirs, ours, theirs, never two at once, the waiting side blocked on a pipe. A
pair's ratio compares neighbouring rounds, so that a machine that slows down slows both. Reported are the medians, the
median of the pairs' ratios, and `low`: the lower end of its 95 % interval (bootstrap over the pairs). Every round's
figure is in the line too. One peer is alive at a time: an idle Ray cluster is not idle.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from report import ROOT, Result, figures, machine, median_and_low, our_versions, paired, show_table

HERE = Path(__file__).resolve().parent
DATA = ROOT / ".bench"
ROUND_LIMIT_S = 300  # a round takes seconds; a side that is silent for this long hangs


class BenchError(Exception):
    """A side is missing, failed or hangs. The run ends with it: a gap in a comparison must not look like a result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """`where` is module:function below `benchmarks/`; `theirs` picks the environment."""

    name: str
    where: str
    theirs: bool = True
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        return ROOT / (".venv-peers" if self.theirs else ".venv") / "bin" / "python"


def ours(where: str, name: str = "penstock", **arguments: Any) -> Side:
    return Side(name=name, where=where, theirs=False, arguments=arguments)


def peer(name: str, where: str, **arguments: Any) -> Side:
    return Side(name=name, where=where, arguments=arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    pairs: int
    seconds: float
    quick: bool
    case: str = ""
    """Only what has this in its name is compared."""


class Child:
    """A side's process."""

    def __init__(self, side: Side, log: Path) -> None:
        if not side.python.exists():
            raise BenchError(f"{side.name}: no {side.python}; `make bench` makes it")
        self.side, self.log = side, log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [side.python, HERE / "side.py", side.where, json.dumps(side.arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=HERE,
                start_new_session=True,  # so that whatever the side started can be ended with it
            )
        hello = self._answer()
        self.first: int = hello["first"]
        self.versions: dict[str, str] = hello["versions"]
        self.notes: dict[str, Any] = hello["notes"]

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], ROUND_LIMIT_S)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            self.close()
            why = f"ended with {self.process.returncode}" if ready else f"gave no answer in {ROUND_LIMIT_S} s"
            tail = "\n    ".join(self.log.read_text(errors="replace").splitlines()[-15:])
            raise BenchError(f"{self.side.name} ({self.side.where}) {why}; the end of {self.log}:\n    {tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def round(self, elements: int) -> dict[str, float]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"elements": elements}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it died; reading the answer says why
        return self._answer()

    def calibrate(self, seconds: float) -> int:
        """Return how many elements a round of so many seconds takes; this is the warm-up too."""
        least = elements = self.first
        for _ in range(6):
            answer = self.round(elements)
            if "too_short" in answer:  # mostly start-up, which is taken off: the rest would be noise
                least = elements = 2 * elements
            elif answer["seconds"] >= 0.5 * seconds:
                break
            else:
                elements = max(elements + 1, int(answer["rate"] * seconds * 1.25))
        return max(least, int(self.round(elements)["rate"] * seconds * 1.25))

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # nothing of it is left
        self.process.wait()


class Bench:
    """One benchmark's run: collects results and prints each as it is there."""

    def __init__(self, name: str, options: Options) -> None:
        self.name, self.options = name, options
        self.results: list[Result] = []
        self.logs = DATA / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)

    def compare(
        self,
        case: str,
        mine: Side,
        peers: Sequence[Side],
        *,
        unit: str,
        target: float | None = None,
        per_cpu_target: float | None = None,
        seconds: float | None = None,
    ) -> list[Result]:
        """Run ours against each peer. The target is held against the best of them: the one with the lowest ratio."""
        if self.options.case not in case:
            return []
        seconds = seconds if seconds is not None and not self.options.quick else self.options.seconds
        measured: list[tuple[Result, Result]] = []
        for number, other in enumerate(peers):
            say(f"{self.name}/{case}: {mine.name} and {other.name}, {self.options.pairs} pairs of {seconds:g} s")
            measured.append(self._pairs(case, mine, other, unit, seconds, number))
        best = min(range(len(measured)), key=lambda i: measured[i][0].ratio)
        found = []
        for i, (rate, per_cpu) in enumerate(measured):
            extra = {"best_peer": i == best} if len(peers) > 1 else {}
            found.append(self.add(_with(rate, target if i == best else None, extra)))
            if per_cpu_target is not None:
                self.add(_with(per_cpu, per_cpu_target if i == best else None, extra))
        return found

    def _pairs(
        self, case: str, mine: Side, other: Side, unit: str, seconds: float, number: int
    ) -> tuple[Result, Result]:
        slug = "".join(c if c.isalnum() else "-" for c in f"{self.name}-{case}-{number}")
        children: list[Child] = []
        try:
            children.append(Child(mine, self.logs / f"{slug}-ours.log"))
            children.append(Child(other, self.logs / f"{slug}-theirs.log"))
            sizes = [child.calibrate(seconds) for child in children]
            rounds = [[child.round(size) for child, size in zip(children, sizes)] for _ in range(self.options.pairs)]
        finally:
            for child in children:
                child.close()
        details = {
            "pairs": len(rounds),
            "rounds": [[figures(side["rate"]) for side in pair] for pair in rounds],
            "cpu_s_per_1000": [
                figures(statistics.median(1000 * p[i]["cpu_s"] / p[i]["elements"] for p in rounds)) for i in (0, 1)
            ],
            "versions": our_versions() | children[0].versions | children[1].versions,
            "machine": machine(),
        }
        notes = {name: child.notes for name, child in zip(("ours_notes", "theirs_notes"), children) if child.notes}
        rate = paired(self.name, case, other.name, unit, [(a["rate"], b["rate"]) for a, b in rounds])
        per_cpu = paired(
            self.name,
            f"{case}, per CPU second",
            other.name,
            f"{unit.split('/')[0]}/CPU s",
            [(a["elements"] / max(a["cpu_s"], 0.01), b["elements"] / max(b["cpu_s"], 0.01)) for a, b in rounds],
        )
        return _with(rate, None, details | notes), _with(per_cpu, None, {"pairs": len(rounds), "machine": machine()})

    def limit(
        self, case: str, values: Sequence[float], limit: float, *, unit: str, peer: str = "limit", **details: Any
    ) -> Result:
        """Report figures that must stay below a limit; the ratio is limit over ours, so that above 1 is better."""
        ratio, low = median_and_low([limit / value for value in values])
        return self.add(
            Result(
                bench=self.name,
                case=case,
                ours=statistics.median(values),
                peer=peer,
                theirs=limit,
                unit=unit,
                ratio=ratio,
                low=low,
                target=1.0,
                details={"runs": len(values), **details, "versions": our_versions(), "machine": machine()},
            )
        )

    def add(self, result: Result) -> Result:
        self.results.append(result)
        print(json.dumps(result.line()), flush=True)
        return result


def _with(result: Result, target: float | None, details: dict[str, Any]) -> Result:
    return replace(result, target=target, details=result.details | details)


def say(message: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {message}", file=sys.stderr, flush=True)


def wait_for_turn(lock: TextIO) -> None:
    """Wait until no other benchmark runs in this checkout: two at once measure each other."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("another benchmark is running; waiting for its end")
        fcntl.flock(lock, fcntl.LOCK_EX)


def main(name: str, run: Callable[[Bench], None]) -> list[Result]:
    """Run one benchmark. It ends with 1 if it could not be measured; whether targets were met is for the caller."""
    parser = argparse.ArgumentParser(prog=f"bench_{name}.py")
    parser.add_argument("--pairs", type=int, help="pairs of rounds in a comparison (default 12)")
    parser.add_argument("--seconds", type=float, help="length of a round (default 2)")
    parser.add_argument("--quick", action="store_true", help="three short pairs: to see that it runs, not to measure")
    parser.add_argument("--case", default="", help="only comparisons with this in their name")
    given = parser.parse_args()
    options = Options(
        pairs=given.pairs or (3 if given.quick else 12),
        seconds=given.seconds or (0.3 if given.quick else 2.0),
        quick=given.quick,
        case=given.case,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # through the `finally`s: sides end too
    bench = Bench(name, options)
    try:
        with (DATA / "lock").open("w") as lock:
            wait_for_turn(lock)
            run(bench)
    except BenchError as error:
        say(f"bench {name} failed: {error}")
        sys.exit(1)
    show_table(bench.results)
    return bench.results
