"""Runs ours against a peer, fairly, and reports.

Rules. Each side is a process of its own, in its own environment, alive for the whole comparison; start-up and a warm-up
round come first. Then pairs: ours, theirs, ours, theirs, never two at once, the waiting side blocked on a pipe. A
pair's ratio compares neighbouring rounds, so that a machine that slows down slows both. Reported are the medians, the
median of the pairs' ratios, and `low`: the lower end of its 95 % interval (bootstrap over the pairs). Every round's
figure is in the line too. One peer is alive at a time: an idle Ray cluster is not idle.

With `--against PATH` the other side of each pair is ours again, run from the sources of another checkout: the cases and
the data are this checkout's, no peer is needed, and the targets say that nothing became slower.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from report import ROOT, Result, figures, machine, median_and_low, our_versions, paired, paired_costs, show_table

HERE = Path(__file__).resolve().parent
ROUND_S = 2.0
DATA = ROOT / ".bench"
OUR_PYTHON = Path(sys.executable)
THEIR_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
SOURCE = ROOT / "src"
ROUND_LIMIT_S = 300  # a round takes seconds; a side that is silent for this long hangs
AS_FAST, AS_FAST_LOW = 0.98, 0.95  # `ratio` and `low` against another checkout: below, something became slower


class BenchError(Exception):
    """A side is missing, failed or hangs. The run ends with it: a gap in a comparison must not look like a result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """`where` is module:function below `benchmarks/`; `theirs` picks the environment, `source` the Penstock in ours."""

    name: str
    where: str
    theirs: bool = True
    arguments: dict[str, Any] = field(default_factory=dict)
    source: Path = SOURCE

    @property
    def python(self) -> Path:
        return THEIR_PYTHON if self.theirs else OUR_PYTHON


def ours(where: str, name: str = "penstock", **arguments: Any) -> Side:
    return Side(name=name, where=where, theirs=False, arguments=arguments)


def peer(name: str, where: str, **arguments: Any) -> Side:
    return Side(name=name, where=where, arguments=arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    pairs: int
    seconds: float | None
    """Of a round; None: as long as the comparison itself says."""
    quick: bool
    case: str = ""
    """Only what has this in its name is compared."""
    against: Path | None = None
    """The sources of another checkout to compare with, instead of the peers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the rounds of two sides say."""

    rate: Result
    per_cpu: Result
    p99: Result | None
    """Of `next()`, where the sides tell it."""


def environment(source: Path) -> dict[str, str]:
    """Return what a process, and each that it starts, needs in its environment to run these sources."""
    return os.environ | {"PYTHONPATH": str(source)}


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
                env=None if side.theirs else environment(side.source),
                start_new_session=True,  # so that whatever the side started can be ended with it
            )
        hello = self._answer()
        self.first: int = hello["first"]
        self.versions: dict[str, str] = hello["versions"]
        self.notes: dict[str, Any] = hello["notes"]
        if hello["penstock"] is not None and side.source not in Path(hello["penstock"]).parents:
            self.close()
            raise BenchError(f"{side.name} runs {hello['penstock']} instead of what is in {side.source}")

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
        self._compared: list[Side] = []
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
        """Run ours against each peer. The target is held against the best of them: the one with the lowest ratio.

        Without peers the other side is ours once more, and the ratios show the machine's spread.
        """
        seconds = self.options.seconds or seconds or ROUND_S
        if not self.wants(case):
            return []
        if self.options.against is not None:
            return self._compare_trees(case, mine, self.options.against, unit, per_cpu_target is not None, seconds)
        measured = [
            self._pairs(case, mine, other, unit, seconds, number)
            for number, other in enumerate(peers or [replace(mine, name="the same again")])
        ]
        best = min(range(len(measured)), key=lambda i: measured[i].rate.ratio)
        found = []
        for i, one in enumerate(measured):
            extra = {"best_peer": i == best} if len(peers) > 1 else {}
            found.append(self.add(_with(one.rate, target if i == best else None, extra)))
            if per_cpu_target is not None:
                self.add(_with(one.per_cpu, per_cpu_target if i == best else None, extra))
            if one.p99 is not None:
                self.add(one.p99)
        return found

    def wants(self, case: str) -> bool:
        return self.options.case in case

    def _compare_trees(
        self, case: str, mine: Side, source: Path, unit: str, with_cpu: bool, seconds: float
    ) -> list[Result]:
        if mine in self._compared:
            return []  # a bench names our side once for each group of peers
        self._compared.append(mine)
        other = replace(mine, name=str(source.parent), source=source)
        measured = self._pairs(case, mine, other, unit, seconds, 0)
        found = [measured.rate, *([measured.per_cpu] if with_cpu else []), *([measured.p99] if measured.p99 else [])]
        return [self.add(as_fast(result)) for result in found]

    def alternate(self, unit: str, measure: Callable[[Path], Mapping[str, float]], source: Path) -> None:
        """Compare what `measure` finds, with our sources and with others in turn: costs, each under its case's name."""
        for tree in (SOURCE, source):
            measure(tree)  # writes byte code, fills the page cache
        say(f"{self.name}: {self.options.pairs} pairs with {source.parent}")
        pairs = [(measure(SOURCE), measure(source)) for _ in range(self.options.pairs)]
        for case in pairs[0][0]:
            costs = [(mine[case], theirs[case]) for mine, theirs in pairs]
            self.add(as_fast(paired_costs(self.name, case, str(source.parent), unit, costs)))

    def _pairs(self, case: str, mine: Side, other: Side, unit: str, seconds: float, number: int) -> Measured:
        say(f"{self.name}/{case}: {mine.name} and {other.name}, {self.options.pairs} pairs of {seconds:g} s")
        slug = "".join(c if c.isalnum() else "-" for c in f"{self.name}-{case}-{number}")
        children: list[Child] = []
        try:
            children.append(Child(mine, self.logs / f"{slug}-ours.log"))
            children.append(Child(other, self.logs / f"{slug}-theirs.log"))
            sizes = [child.calibrate(seconds) for child in children]
            if mine.where == other.where:
                sizes = [sizes[0]] * 2
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
        p99 = None
        if all("p99_s" in side for pair in rounds for side in pair):
            costs = [(a["p99_s"] * 1e6, b["p99_s"] * 1e6) for a, b in rounds]
            p99 = paired_costs(self.name, f"{case}: p99 of next()", other.name, "us", costs)
        return Measured(
            rate=_with(rate, None, details | notes),
            per_cpu=_with(per_cpu, None, {"pairs": len(rounds), "machine": machine()}),
            p99=p99,
        )

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


def as_fast(result: Result) -> Result:
    """Return the result with the targets of a comparison with another checkout."""
    return replace(result, target=AS_FAST, low_target=AS_FAST_LOW)


def compare_runs(bench: Bench, source: Path) -> None:
    """Run the whole benchmark with our sources and with others in turn, and compare what came of each case.

    For benches whose own process is the trainer. How well a case went is its ratio, whatever its figure's unit.
    """
    runs: list[tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]] = []
    for number in range(bench.options.pairs):
        say(f"{bench.name}: whole run {number + 1} of {bench.options.pairs}, with {source.parent} after it")
        runs.append((_whole_run(bench, SOURCE), _whole_run(bench, source)))
    for case, first in runs[0][0].items():
        ratio, low = median_and_low([mine[case]["ratio"] / theirs[case]["ratio"] for mine, theirs in runs])
        rounds = [[mine[case]["ours"], theirs[case]["ours"]] for mine, theirs in runs]
        figures_of = [statistics.median(side) for side in zip(*rounds)]
        result = Result(
            bench=bench.name,
            case=case,
            ours=figures_of[0],
            peer=str(source.parent),
            theirs=figures_of[1],
            unit=first["unit"],
            ratio=ratio,
            low=low,
            details={"rounds": rounds, "versions": our_versions(), "machine": machine()},
        )
        bench.add(as_fast(result))


def _whole_run(bench: Bench, source: Path) -> dict[str, dict[str, Any]]:
    options = ["--case", bench.options.case, *(["--quick"] if bench.options.quick else [])]
    command = [str(OUR_PYTHON), str(HERE / f"bench_{bench.name}.py"), *options]
    log = bench.logs / f"{bench.name}-run.log"
    with log.open("wb") as errors:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment(source))
    if done.returncode:
        tail = "\n    ".join(log.read_text(errors="replace").splitlines()[-15:])
        raise BenchError(f"a run with {source} ended with {done.returncode}; the end of {log}:\n    {tail}")
    return {line["case"]: line for line in map(json.loads, done.stdout.splitlines())}


def say(message: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {message}", file=sys.stderr, flush=True)


def wait_for_turn(lock: TextIO) -> None:
    """Wait until no other benchmark runs in this checkout: two at once measure each other."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("another benchmark is running; waiting for its end")
        fcntl.flock(lock, fcntl.LOCK_EX)


def main(name: str, run: Callable[[Bench], None], *, trees_by_case: bool = False) -> list[Result]:
    """Run one benchmark. It ends with 1 if it could not be measured; whether targets were met is for the caller.

    Against another checkout it says both. `trees_by_case`: `run` itself compares two checkouts, case by case; others
    are run whole, with one and the other in turn.
    """
    parser = argparse.ArgumentParser(prog=f"bench_{name}.py")
    parser.add_argument("--pairs", type=int, help="pairs of rounds in a comparison (default 12)")
    parser.add_argument("--seconds", type=float, help="length of a round (default 2)")
    parser.add_argument("--quick", action="store_true", help="three short pairs: to see that it runs, not to measure")
    parser.add_argument("--case", default="", help="only comparisons with this in their name")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="compare with these sources, not with peers")
    given = parser.parse_args()
    options = Options(
        pairs=given.pairs or (3 if given.quick else 12),
        seconds=given.seconds or (0.3 if given.quick else None),
        quick=given.quick,
        case=given.case,
        against=None if given.against is None else given.against.resolve() / "src",
    )
    if options.against is not None and not (options.against / "penstock").is_dir():
        parser.error(
            f"--against {given.against}: no {options.against}/penstock; give the root of a checkout of Penstock"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # through the `finally`s: sides end too
    bench = Bench(name, options)
    try:
        if options.against is not None and not trees_by_case:
            compare_runs(bench, options.against)  # each run waits for its turn
        else:
            with (DATA / "lock").open("w") as lock:
                wait_for_turn(lock)
                run(bench)
    except BenchError as error:
        say(f"bench {name} failed: {error}")
        sys.exit(1)
    show_table(bench.results)
    if options.against is not None and any(result.missed for result in bench.results):
        sys.exit(1)
    return bench.results
