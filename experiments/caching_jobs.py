"""Eight jobs that begin with the same prefix and go on differently, started together: what is computed, and how often.

python experiments/caching_jobs.py [--quick] [--plot FILE]     or: make experiment E=caching_jobs

A sweep of hyperparameters reads and decodes the same data eight times over, and only what follows differs. Each job
reads two epochs, on the workers of one service. Three ways: nothing is kept; entries are known by the whole graph, as
Cachew knows them (ATC 2022, section 4.1: another suffix is another key); and by the prefix, of which one job makes each
split while the others wait for it. The function's calls are counted by a byte each in one file. Printed is how often
the prefix was computed in all in either epoch, how long the jobs took and what they keep, and the targets beside what
was seen. It ends with 1 if one is missed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps

ROOT = Path(__file__).resolve().parent.parent
JOBS = 8
WORKERS = 2
COST_S = 0.01  # of the function, without the GIL
RESULT_VALUES = 4_000
MOST_TIMES = 1.1
WAYS = {"nothing kept": "nothing", "by the whole graph": "graph", "by the prefix": "prefix"}


@dataclass
class Outcome:
    way: str
    times: tuple[float, float]
    """How often the prefix was computed, over all jobs, in the first and in the second epoch."""
    seconds: tuple[float, float]
    """How long an epoch of all jobs took."""
    kept_bytes: int


def counted(calls: str) -> Callable[[Any], Any]:
    """Return the prefix's function."""

    def decoded(line: str) -> dict[str, Any]:
        descriptor = os.open(calls, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, b"x")
        finally:
            os.close(descriptor)
        time.sleep(COST_S)
        return {"line": line, "values": np.arange(RESULT_VALUES)}

    return decoded


def suffix(number: int) -> Callable[[Any, np.random.Generator], Any]:
    """Return what one job does with what the prefix made."""

    def augmented(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {**row, "values": row["values"] * number + rng.random()}

    return augmented


def run_way(way: str, folder: Path, elements: int) -> Outcome:
    calls, kept = str(folder / f"calls-{WAYS[way]}"), folder / f"kept-{WAYS[way]}"
    Path(calls).touch()
    prefix = ps.read_text(str(folder / "data" / "*.txt")).shuffle(1).map(counted(calls))
    failures: list[BaseException] = []

    marks: list[tuple[float, int]] = []
    together = threading.Barrier(JOBS, action=lambda: marks.append((time.perf_counter(), os.path.getsize(calls))))

    def job(service: ps.LocalService, number: int) -> None:
        dataset = prefix
        if WAYS[way] != "nothing":
            # Another version is another key: what a graph's fingerprint does with jobs that go on differently.
            version = f"job {number}" if WAYS[way] == "graph" else None
            dataset = prefix.autocache(kept, always=True, version=version)
        made = dataset.map(suffix(number)).batch(8 + number)
        try:
            with made.distribute(service, job=f"{WAYS[way]} {number}", seed=number) as loader:
                for _ in range(2):
                    together.wait()
                    count = sum(len(batch["line"]) for batch in loader)
                    assert count == elements, f"{count} elements of {elements}"
                    together.wait()
        except BaseException as error:
            failures.append(error)
            together.abort()

    with ps.LocalService(workers=WORKERS) as service:
        service.wait_ready()
        jobs = [threading.Thread(target=job, args=(service, number)) for number in range(JOBS)]
        for thread in jobs:
            thread.start()
        for thread in jobs:
            thread.join()
    if failures:
        raise failures[0]
    spans = [(after[0] - before[0], after[1] - before[1]) for before, after in zip(marks[::2], marks[1::2])]
    return Outcome(
        way,
        (spans[0][1] / elements, spans[1][1] / elements),
        (spans[0][0], spans[1][0]),
        sum(path.stat().st_size for path in kept.rglob("*.entry")) if kept.exists() else 0,
    )


def plot(outcomes: list[Outcome], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (times, seconds) = pyplot.subplots(1, 2, figsize=(11, 4))
    names = [outcome.way for outcome in outcomes]
    for axis, of, label in (
        (times, lambda outcome: outcome.times, "times the prefix is computed, over eight jobs"),
        (seconds, lambda outcome: outcome.seconds, "seconds until all eight jobs are through"),
    ):
        for epoch in range(2):
            places = np.arange(len(names)) + 0.4 * epoch - 0.2
            axis.bar(places, [of(outcome)[epoch] for outcome in outcomes], 0.38, label=f"epoch {epoch + 1}")
        axis.set_xticks(range(len(names)), names)
        axis.set_ylabel(label)
        axis.legend()
    times.axhline(MOST_TIMES, color="grey", linestyle="--")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer elements")
    parser.add_argument("--plot", type=Path, default=ROOT / "build" / "experiments" / "caching_jobs.png")
    options = parser.parse_args()
    files, lines = (60, 5) if options.quick else (120, 20)
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="penstock-jobs-") as name:
        folder = Path(name)
        os.environ["PENSTOCK_CACHE"] = str(folder / "host")
        (folder / "data").mkdir()
        for number in range(files):
            text = "\n".join(f"{number}-{line} {'x' * 40}" for line in range(lines))
            (folder / "data" / f"{number:04}.txt").write_text(text + "\n")
        print(f"{JOBS} jobs, {files * lines} elements of {COST_S * 1e3:g} ms, {WORKERS} workers")
        print("key                  times, epoch 1  epoch 2   seconds, epoch 1  epoch 2     kept")
        for way in WAYS:
            outcome = run_way(way, folder, files * lines)
            outcomes.append(outcome)
            print(
                f"{way:20} {outcome.times[0]:14.2f}  {outcome.times[1]:7.2f}   {outcome.seconds[0]:16.1f}  "
                f"{outcome.seconds[1]:7.1f}  {outcome.kept_bytes / 1e6:4.1f} MB",
                flush=True,
            )
    _, graph, ours = outcomes
    targets = [
        (f"the prefix is computed at most {MOST_TIMES:g} times in all", sum(ours.times), MOST_TIMES),
        (
            "by the whole graph every job computes it: less than by that, by a factor of",
            ours.times[0] / graph.times[0],
            0.2,
        ),
        ("what is kept, against what is kept by the whole graph", ours.kept_bytes / graph.kept_bytes, 1.2 / JOBS),
    ]
    for text, seen, most in targets:
        print(f"{'holds ' if seen <= most else 'MISSED'}  {text}: {seen:.2f}, at most {most:.2f}")
    plot(outcomes, options.plot)
    print(f"plot: {options.plot}")
    return 0 if all(seen <= most for _, seen, most in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
