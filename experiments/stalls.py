"""Data stalls of a trainer whose host is short of processor time, and what one worker elsewhere changes.

python experiments/stalls.py [--quick]     or: make experiment E=stalls

The paper's table VII: a trainer that prepares its own data is stalled for 56 % of the time. Here the accelerator is a
step that waits, 1.5 times as long as a batch of the representative session takes one core to prepare. The trainer
process is held to a quota of processor time (it is stopped while it has used more than its share, some hundred times a
second) that lets it prepare 44 % of the batches that its steps ask for. Then the same trainer, under the same quota on
the same core, reads from one worker process on the other core, which has no quota. The step runs beside the trainer's
own thread, as an accelerator's does, which has the next batch at hand; stalled is all the time in which none runs.
Targets stand beside what was seen; the exit code is 1 where one is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import penstock as ps
from penstock.warehouse.generating import generate
from penstock.warehouse.model_statistics import model
from penstock.warehouse.representative import representative_session

PUBLISHED_STALL, TOLERANCE, MOST_STALL = 0.56, 0.05, 0.05
STEP_OF_COST = 1.5
PERIOD_S = 0.005
WARM_BATCHES = 8
AHEAD_BATCHES = 30  # of the steps, so many use up what was made before there was a quota
PROCESS_CLOCK = 2  # of another process: Linux has a clock for each, whose number is made of its id and this


def train(session: ps.Session, workers: int, step_s: float, batches: int) -> dict[str, float]:
    """Run as the trainer: wait a step for each batch, and return for which share of the time no step ran."""
    cores = sorted(os.sched_getaffinity(0))
    if workers:
        os.sched_setaffinity(0, {cores[-1]})  # what it starts is to run there
    # Without end: an epoch of this small table is over after a few steps, and how another begins is not the point.
    with session.dataset().repeat().distribute(workers or None) as loader:
        reading = iter(loader)
        next(reading)
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), {cores[0]})
        for _ in range(WARM_BATCHES):
            next(reading)
        print("begins", flush=True)
        given: queue.Queue[object] = queue.Queue(maxsize=1)
        accelerator = threading.Thread(target=lambda: [time.sleep(step_s) for _ in iter(given.get, None)])
        accelerator.start()
        for number in range(AHEAD_BATCHES + batches):
            if number == AHEAD_BATCHES:
                began, used = perf_counter(), process_time()
            given.put(next(reading))
        given.put(None)
        accelerator.join()
        taken_s = perf_counter() - began
        stall = 1 - batches * step_s / taken_s
        return {"stall": stall, "cpu_s": (process_time() - used) / batches, "s": taken_s / batches}


def used_s(pid: int) -> float:
    """Return the processor time of a process, with that of threads that have ended."""
    return time.clock_gettime((~pid << 3) | PROCESS_CLOCK)


def run(file: Path, *, workers: int, step_s: float, batches: int, quota: float | None) -> dict[str, float]:
    """Run a trainer in a process of its own, and hold it to a share of one core from its first step on."""
    command = [sys.executable, __file__, "--train", str(file), str(workers), str(step_s), str(batches)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        while (line := trainer.stdout.readline()).strip() != "begins":
            assert line, "the trainer ended"
        if quota is not None:
            _throttle(trainer, quota)
        answer: dict[str, float] = json.loads(trainer.stdout.readline())
        return answer


def _throttle(trainer: subprocess.Popen[str], quota: float) -> None:
    began, before, stopped = perf_counter(), used_s(trainer.pid), False
    while trainer.poll() is None:
        try:
            over = used_s(trainer.pid) - before > quota * (perf_counter() - began)
        except OSError:
            break
        if over != stopped:
            trainer.send_signal(signal.SIGSTOP if over else signal.SIGCONT)
            stopped = over
        time.sleep(PERIOD_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--train", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        file, workers, step_s, batches = options.train
        print(json.dumps(train(ps.Session.from_file(file), int(workers), float(step_s), int(batches))), flush=True)
        return 0
    batches = 60 if options.quick else 300
    with tempfile.TemporaryDirectory() as folder:
        scale = 0.1
        table = generate(Path(folder, "table"), like="rm1", scale=scale, rows=2048, partitions=2, sessions=1)
        session = representative_session(table, model("rm1").scaled(scale), batch=256)
        file = Path(folder, "session.json")
        file.write_text(json.dumps(session.pinned().to_plain()))
        cost_s = run(file, workers=0, step_s=0.0, batches=batches, quota=None)["cpu_s"]
        step_s = STEP_OF_COST * cost_s
        quota = (1 - PUBLISHED_STALL) * cost_s / step_s
        # Being stopped again and again costs caches: what a batch takes under a quota is seen under one.
        tried = run(file, workers=0, step_s=step_s, batches=batches, quota=quota)
        quota = (1 - PUBLISHED_STALL) * tried["cpu_s"] / step_s
        alone = run(file, workers=0, step_s=step_s, batches=batches, quota=quota)
        helped = run(file, workers=1, step_s=step_s, batches=batches, quota=quota)
    print(
        f"a batch takes {cost_s * 1e3:.1f} ms of a core, a step {step_s * 1e3:.1f} ms; the quota is {quota:.0%} of it"
    )
    targets: list[tuple[str, float, bool, str]] = [
        (
            "stalled, on its own",
            alone["stall"],
            abs(alone["stall"] - PUBLISHED_STALL) <= TOLERANCE,
            f"{PUBLISHED_STALL} +- {TOLERANCE}",
        ),
        ("stalled, with one worker", helped["stall"], helped["stall"] <= MOST_STALL, f"<= {MOST_STALL}"),
    ]
    for what, seen, met, target in targets:
        print(f"  {what:28} {seen:6.3f}  {target:14} {'met' if met else 'MISSED'}")
    seen_all: dict[str, Any] = {"experiment": "stalls", "alone": alone, "helped": helped, "quota": quota}
    print(json.dumps(seen_all))
    return 0 if all(met for _, _, met, _ in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
