"""200 SIGKILLs over an epoch of 200,000 elements: workers, the dispatcher, their parents, and the trainer itself.

The trainer is a process that checkpoints and is started again. Whom to kill and when follows from the seed and the
trainer's progress. Each element must have been received exactly once, relative to the trainer's own checkpoints; in
deterministic order the sequence must be the one of an undisturbed run.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from harness import Bench, BenchError, main, say
from os_processes import kill
from report import machine, our_versions, paired

import penstock as ps
from trainers import Trainer, exactly_once

ELEMENTS, KILLS = 200_000, 200
QUICK_ELEMENTS, QUICK_KILLS = 20_000, 20
SEEDS = (1, 2, 3)
WORKERS = 3
WORK_S = 0.0005
PADDING_BYTES = 2_000
PARTIES = {"worker": 14, "dispatcher": 3, "trainer": 3}  # weights
PATIENCE_S = 900
STALL_S = 60  # without a new element: something hangs


class Chaos:
    def __init__(self, service: ps.LocalService, trainer: Trainer, seed: int) -> None:
        self._service, self._trainer = service, trainer
        self._rng = random.Random(seed)
        self.done: Counter[str] = Counter()

    def strike(self) -> None:
        party = self._rng.choices(list(PARTIES), list(PARTIES.values()))[0]
        match party:
            case "trainer":
                self._trainer.kill()
                self._trainer.start()
            case "dispatcher":
                if not kill(self._service.dispatcher_pid):
                    return self.strike()
            case _:
                pids = sorted(self._service.worker_pids().values())
                if not pids or not kill(self._rng.choice(pids)):
                    return self.strike_later()
        self.done[party] += 1

    def strike_later(self) -> None:
        """Nobody is there to be killed: all of them were. Wait until somebody is back."""
        time.sleep(0.05)
        self.strike()


def epoch(
    folder: Path, *, order: str, seed: int, elements: int, kills: int, work_s: float
) -> tuple[np.ndarray[Any, Any], Counter[str], float]:
    """Run one epoch with so many kills, spread over its elements; return the ids in the order they were received."""
    begin = time.monotonic()
    with ps.LocalService(workers=WORKERS, threads=1, journal=str(folder / "journal")) as service:
        arguments = {
            "service": str(service.service_file),
            "job": "chaos",
            "elements": elements,
            "order": order,
            "seed": seed,
            "work_s": work_s,
            "padding_bytes": PADDING_BYTES,
        }
        trainer = Trainer(folder / "trainer", arguments)
        chaos = Chaos(service, trainer, seed)
        # The first and the last bit of the epoch are hit too: kills come at equal steps of progress.
        marks = [int((k + 0.5) * elements / kills) for k in range(kills)]
        best, moved = 0, time.monotonic()
        try:
            trainer.start()
            while not trainer.finished():
                trainer.look()
                progress = trainer.progress()
                if progress > best:
                    best, moved = progress, time.monotonic()
                elif time.monotonic() - moved > STALL_S:
                    raise BenchError(f"no new element for {STALL_S} s after {best}; killed so far: {dict(chaos.done)}")
                if time.monotonic() - begin > PATIENCE_S:
                    raise BenchError(f"the epoch did not end in {PATIENCE_S} s; at {progress} of {elements}")
                if marks and progress >= marks[0]:
                    marks.pop(0)
                    chaos.strike()
                else:
                    time.sleep(0.005)
        finally:
            trainer.close()
    if marks:
        raise BenchError(f"the epoch ended with {len(marks)} kills to come")
    return trainer.received(), chaos.done, time.monotonic() - begin


def run(bench: Bench) -> None:
    elements, kills = (QUICK_ELEMENTS, QUICK_KILLS) if bench.options.quick else (ELEMENTS, KILLS)
    seeds = SEEDS[:1] if bench.options.quick else SEEDS
    common = {"versions": our_versions(), "machine": machine()}
    for order in ("relaxed", "deterministic"):
        for seed in seeds:
            say(f"chaos: {order}, seed {seed}, {kills} kills over {elements:,} elements")
            with tempfile.TemporaryDirectory() as scratch:
                ids, done, seconds = epoch(
                    Path(scratch), order=order, seed=seed, elements=elements, kills=kills, work_s=WORK_S
                )
                once, lost, twice = exactly_once(ids, elements)
                case = f"{order}, seed {seed}: exactly once"
                details: dict[str, Any] = {
                    "kills": dict(done),
                    "lost": lost,
                    "more_than_once": twice,
                    "seconds": round(seconds, 1),
                }
                if order == "deterministic":
                    quiet = Path(scratch) / "quiet"
                    expected, _, _ = epoch(quiet, order=order, seed=seed, elements=elements, kills=0, work_s=0.0)
                    details["same_sequence"] = bool(np.array_equal(ids, expected))
                    pair = (float(details["same_sequence"]), 1.0)
                    bench.add(
                        paired(bench.name, f"{order}, seed {seed}: sequence", "undisturbed run", "same", [pair], 1.0)
                    )
                pairs = [(float(once), float(elements))]
                bench.add(paired(bench.name, case, "the epoch", "elements", pairs, 1.0, **details, **common))
                if lost or twice:
                    print(f"lost {lost}, more than once {twice}", file=sys.stderr)


if __name__ == "__main__":
    main("chaos", run)
