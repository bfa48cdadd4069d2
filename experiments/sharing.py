"""Ephemeral sharing: what k jobs over one pipeline cost. The shape of figure 10, and of the cost formula beside it.

python experiments/sharing.py [--quick] [--without-tf]     or: make experiment E=sharing

1 to 16 jobs, each a process, read batches of 64 JPEG images, decoded, cropped at random, resized, flipped and
normalised to 32-bit floats, 38.5 MB: the paper's models are not public, and this is the usual pipeline of vision
models, which it says theirs are like. A training step is simulated by sleeping 1 s. Measured are the CPU seconds of all
processes of the service, those of its workers, and how long a job takes, while all jobs train. Compared are the paper's
three modes, and its own implementation:

- `shared, sharing`: one service, `sharing="skip"`,
- `shared, no sharing`: one service, every job makes its own batches,
- `dedicated`: a service for each job,
- `tf.data service`: its cross-trainer cache, one worker, the same files and steps, its own image operations.

Sharing and tf.data service are measured with images of 8 bits too, which cost nearly as much to make and a quarter to
deliver. A worker has one thread, which makes a batch in a tenth of a step. What is held against each other is measured
three times, in turns, and medians are told.

Then jobs of different speeds: what the slow ones skip, against what a window of that size lets expect; and jobs one
after the other, against the paper's formula k C - (k - 1) (cache / dataset) C. It prints tables and writes a plot.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from sweep import BATCH, BATCH_BYTES, FILLING, PATIENCE_S, STEP_S, Outcome, cpu_seconds, measure, train, wait_until

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".venv-peers" / "bin" / "python"
JOBS = (1, 2, 4, 8, 16)
SHARING, UNSHARED, DEDICATED, TF = "shared, sharing", "shared, no sharing", "dedicated", "tf.data service"
IN_BYTES = ", 8 bits"
WINDOW_BATCHES = 8
WINDOW_BYTES = int((WINDOW_BATCHES + 0.5) * BATCH_BYTES * 8 / 5)
"""Of a window that holds so many: batches in the making and connections need the rest."""
LITTLE_MEMORY_BYTES = 7 * BATCH_BYTES  # of a worker: it holds a few batches


def images() -> Path:
    """Return the folder of the images benchmark, which is made at the first call."""
    import inputs

    return inputs.images()


def image_batches(normalized: bool) -> Any:
    """Return a dataset without end of training images: floats, or as they are before `normalize`."""
    from ours.images import augment_record

    import penstock as ps
    import penstock.image

    def normalize(example: dict[str, Any]) -> dict[str, Any]:
        return {"image": penstock.image.normalize(example["image"]), "label": example["label"]}

    examples = ps.read_tfrecord(f"{images()}/*.tfrecord").repeat().map(augment_record)
    return (examples.map(normalize) if normalized else examples).batch(BATCH)


# A trainer: a process of its own


def trainer(given: dict[str, Any]) -> None:
    """Read as one job, until killed; a line for each step says when it was, and what was skipped so far."""
    import penstock as ps

    with image_batches(given["normalized"]).distribute(
        given["service"],
        job=given["job"],
        sharing=given["sharing"] and ps.Share(**given["sharing"]),
        limits=ps.Limits(timeout_s=PATIENCE_S, memory_bytes=given["memory_bytes"]),
    ) as loader:
        train(
            iter(loader),
            given["step_s"],
            lambda: print(time.monotonic(), loader.statistics().skipped, flush=True),
            filling=given["filling"],
        )


class Trainers:
    """So many jobs at once. `taken` and `skipped` grow with their steps."""

    def __init__(self, given: list[dict[str, Any]]) -> None:
        self.taken: list[list[float]] = [[] for _ in given]
        self.skipped = [0] * len(given)
        self._ending = False
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--trainer", json.dumps(one)], stdout=subprocess.PIPE, text=True
            )
            for one in given
        ]
        for number in range(len(given)):
            threading.Thread(target=self._hear, args=(number,), daemon=True).start()

    def _hear(self, number: int) -> None:
        process = self._processes[number]
        assert process.stdout is not None
        for line in process.stdout:
            at, skipped = line.split()
            self.taken[number].append(float(at))
            self.skipped[number] = int(skipped)
        if not self._ending:
            print(f"a trainer ended with {process.wait()}", file=sys.stderr)
            os._exit(1)  # the others would be waited for in vain; services end with us

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ending = True
        for process in self._processes:
            process.kill()
            process.wait()


# Jobs of one speed


def ours(mode: str, jobs: int, steps: int, *, normalized: bool = True) -> Outcome:
    import penstock as ps

    # Jobs that do not share read ahead as little as can be: what is made and not taken yet would count too.
    memory_bytes = None if mode == SHARING else LITTLE_MEMORY_BYTES
    with ExitStack() as stack:
        services = [
            stack.enter_context(ps.LocalService(workers=1, threads=1, memory_bytes=memory_bytes))
            for _ in range(jobs if mode == DEDICATED else 1)
        ]
        given = []
        for number in range(jobs):
            shared = mode == SHARING
            service = str(services[number % len(services)].service_file)
            given.append(
                {
                    "service": service,
                    "job": "sweep" if shared else f"job {number}",
                    "sharing": {"kind": "skip", "trainer": f"t{number}"} if shared else None,
                    "memory_bytes": None if shared else BATCH_BYTES,
                    "step_s": STEP_S,
                    "filling": FILLING,
                    "normalized": normalized,
                }
            )
        trainers = stack.enter_context(Trainers(given))

        def cpu_s() -> tuple[float, float]:
            dispatchers = cpu_seconds({service.dispatcher_pid for service in services})
            whole = cpu_seconds({pid for service in services for pid in service.pids()})
            return whole, whole - dispatchers

        return measure(trainers.taken, steps, cpu_s)


def tf_service(jobs: int, steps: int, *, normalized: bool = True) -> Outcome:
    given = json.dumps({"jobs": jobs, "steps": steps, "folder": str(images()), "normalized": normalized})
    script = Path(__file__).with_name("tf_sharing.py")
    ran = subprocess.run(
        [str(PEERS), str(script), given], capture_output=True, text=True, timeout=3 * PATIENCE_S, check=False
    )
    if ran.returncode:
        raise RuntimeError(f"tf.data service: {ran.stderr[-2000:]}")
    return Outcome(**json.loads(ran.stdout.splitlines()[-1]))


# Jobs of different speeds, and one after the other


def different_speeds(steps: int) -> list[tuple[float, int, int, int]]:
    """Return for each job its step, what it read, what it skipped, and what a window that slides lets expect."""
    import penstock as ps

    slower = (1, 2, 4)
    with ps.LocalService(workers=1, threads=1) as service:
        given = [
            {
                "service": str(service.service_file),
                "job": "speeds",
                "sharing": {"kind": "skip", "trainer": f"x{factor}", "window_bytes": WINDOW_BYTES},
                "memory_bytes": None,
                "step_s": STEP_S / 2 * factor,
                "filling": 0,
                "normalized": True,
            }
            for factor in slower
        ]
        with Trainers(given) as trainers:
            wait_until(lambda: len(trainers.taken[0]) >= 4 * steps, "the steps of the fastest job")
            read, skipped = [len(one) for one in trainers.taken], list(trainers.skipped)
    # Who is behind has skipped all that the fastest read before it, but for what the window still had.
    return [
        (one["step_s"], mine, gone, max(0, read[0] - mine - WINDOW_BATCHES))
        for one, mine, gone in zip(given, read, skipped)
    ]


def one_after_the_other(jobs: int, steps: int) -> tuple[int, float]:
    """Return how many batches were made for jobs that do not overlap, and how many the paper's formula says."""
    import penstock as ps

    batches = image_batches(normalized=True)
    made = 0
    with ps.LocalService(workers=1, threads=1) as service:
        for number in range(jobs):
            with batches.distribute(
                service,
                job="sequence",
                sharing=ps.Share("skip", f"t{number}", window_bytes=WINDOW_BYTES),
                limits=ps.Limits(timeout_s=PATIENCE_S),
            ) as loader:
                for _ in zip(range(steps), loader):
                    pass
                statistics = loader.statistics()
                made += statistics.elements - statistics.shared
    return made, jobs * steps - (jobs - 1) * WINDOW_BATCHES


# Reporting


def measured(
    modes: dict[str, tuple[Sequence[int], Callable[[int], Outcome]]], repeats: int
) -> dict[str, list[Outcome]]:
    """Return the medians for each number of jobs. Modes take turns: a machine that slows down slows all of them."""
    found: dict[str, dict[int, list[Outcome]]] = {mode: {jobs: [] for jobs in modes[mode][0]} for mode in modes}
    for turn in range(repeats):
        for mode, (counts, run) in modes.items():
            for jobs in counts:
                if turn and (mode in (UNSHARED, DEDICATED) or jobs not in (counts[0], counts[-1])):
                    continue  # they show a shape
                one = run(jobs)
                found[mode][jobs].append(one)
                print(f"{mode}, {jobs} jobs: {one.cpu_s:.2f} CPU s, {one.job_s:.2f} s a job", file=sys.stderr)
    return {mode: [median(outcomes) for outcomes in by_jobs.values()] for mode, by_jobs in found.items()}


def median(outcomes: list[Outcome]) -> Outcome:
    return replace(
        outcomes[0],
        cpu_s=statistics.median(one.cpu_s for one in outcomes),
        workers_s=statistics.median(one.workers_s for one in outcomes),
        job_s=statistics.median(one.job_s for one in outcomes),
    )


def table(columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    texts = [columns, *(tuple(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row) for row in rows)]
    widths = [max(len(row[at]) for row in texts) for at in range(len(columns))]
    for row in texts:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths)))
    print(flush=True)


def plot(outcomes: dict[str, list[Outcome]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    for mode, found in outcomes.items():
        jobs = [one.jobs for one in found]
        left.plot(jobs, [one.cpu_s for one in found], marker="o", label=mode)
        right.plot(jobs, [one.job_s for one in found], marker="o", label=mode)
    left.set(xlabel="jobs", ylabel="CPU seconds of the service", xscale="log", yscale="log")
    right.set(xlabel="jobs", ylabel="seconds a job", xscale="log", ylim=0)
    for axes in (left, right):
        axes.set_xticks(JOBS, [str(jobs) for jobs in JOBS])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    left.legend()
    figure.suptitle(f"{BATCH} JPEG images a batch, steps of {STEP_S} s, 2 cores")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def report(outcomes: dict[str, list[Outcome]]) -> None:
    rows = []
    for mode, found in outcomes.items():
        alone = found[0]
        for one in found:
            ratios = one.workers_s / alone.workers_s, one.job_s / alone.job_s
            rows.append((mode, one.jobs, one.cpu_s, one.workers_s, ratios[0], one.job_s, ratios[1], one.cpu_ms_a_batch))
    table(("mode", "jobs", "CPU s", "workers' CPU s", "of 1 job", "job s", "of 1 job", "CPU ms/batch"), rows)
    for kind in ("", IN_BYTES):
        if TF + kind in outcomes:
            most, theirs = outcomes[SHARING + kind][-1], outcomes[TF + kind][-1]
            ratio = most.cpu_ms_a_batch / theirs.cpu_ms_a_batch
            print(f"CPU time for each delivered batch, {most.jobs} jobs{kind}: {ratio:.2f} of tf.data service's cache")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer jobs and steps, once")
    parser.add_argument("--without-tf", action="store_true", help="leave tf.data service out")
    parser.add_argument("--plot", type=Path, default=ROOT / "build" / "experiments" / "sharing.png")
    parser.add_argument("--trainer", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trainer:
        trainer(json.loads(arguments.trainer))
        return
    images()  # once, before many trainers find none
    steps, repeats, counts, few = (6, 1, (1, 16), (1, 4)) if arguments.quick else (8, 3, JOBS, JOBS)
    modes: dict[str, tuple[Sequence[int], Callable[[int], Outcome]]] = {
        SHARING: (counts, lambda jobs: ours(SHARING, jobs, steps)),
        UNSHARED: (few, lambda jobs: ours(UNSHARED, jobs, steps)),
        DEDICATED: (few, lambda jobs: ours(DEDICATED, jobs, steps)),
    }
    if not arguments.without_tf and PEERS.exists():
        ends = (counts[0], counts[-1])
        modes[TF] = (counts, lambda jobs: tf_service(jobs, steps))
        modes[SHARING + IN_BYTES] = (ends, lambda jobs: ours(SHARING, jobs, steps, normalized=False))
        modes[TF + IN_BYTES] = (ends, lambda jobs: tf_service(jobs, steps, normalized=False))
    outcomes = measured(modes, repeats)
    report(outcomes)

    print(f"Jobs of different speeds, a window of {WINDOW_BATCHES} batches")
    table(("step s", "read", "skipped", "expected"), different_speeds(steps))
    jobs, length = 4, 2 * steps
    made, formula = one_after_the_other(jobs, length)
    print(f"{jobs} jobs of {length} batches one after the other: {made} made, {formula:.0f} by the paper's formula")
    plot(outcomes, arguments.plot)
    print(f"plot: {arguments.plot}")


if __name__ == "__main__":
    main()
