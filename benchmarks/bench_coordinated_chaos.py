"""50 SIGKILLs of workers and the dispatcher over an epoch of 20,000 coordinated steps for 4 consumers.

Each consumer is a process that writes down what it gets. In no step may two of them have batches of different padded
lengths, or rows of different buckets (but for the last groups, which are made of what is left); each sentence must have
been received exactly once, and all consumers must end at the same step. Whom to kill and when follows from the seed and
the slowest consumer's progress.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from harness import Bench, BenchError, main, say
from os_processes import kill
from ours.rank import BATCH, BOUNDARIES, RECORD, lengths
from report import machine, our_versions, paired

import penstock as ps
from trainers import Trainer, exactly_once

STEPS, KILLS, CONSUMERS, WORKERS = 20_000, 50, 4, 3
QUICK_STEPS, QUICK_KILLS = 2_000, 6
PARTIES = {"worker": 4, "dispatcher": 1}  # weights
PATIENCE_S = 900
STALL_S = 60


def strike(service: ps.LocalService, rng: random.Random) -> str:
    """Kill somebody; return whom."""
    deadline = time.monotonic() + STALL_S
    while time.monotonic() < deadline:
        party = rng.choices(list(PARTIES), list(PARTIES.values()))[0]
        if party == "dispatcher":
            if kill(service.dispatcher_pid):
                return party
        else:
            pids = sorted(service.worker_pids().values())
            if pids and kill(rng.choice(pids)):
                return party
        time.sleep(0.02)  # all of them were killed: somebody will be back
    raise BenchError(f"nobody to kill for {STALL_S} s: no process came back")


def epoch(folder: Path, *, order: str, seed: int, steps: int, kills: int) -> tuple[list[Any], Counter[str], float]:
    """Run one epoch with so many kills; return each consumer's records."""
    begin = time.monotonic()
    rng, done = random.Random(seed), Counter[str]()
    marks = [int((k + 0.5) * steps / kills) for k in range(kills)]
    with ps.LocalService(workers=WORKERS, threads=1, journal=str(folder / "journal")) as service:
        common = {
            "service": str(service.service_file),
            "job": "coordinated",
            "consumers": CONSUMERS,
            "order": order,
            "steps": steps,
            "seed": seed,
        }
        ranks = [
            Trainer(folder / f"rank{consumer}", common | {"consumer": consumer}, module="ours.rank")
            for consumer in range(CONSUMERS)
        ]
        try:
            for rank in ranks:
                rank.start()
            best, moved = 0, time.monotonic()
            while not all(rank.finished() for rank in ranks):
                for rank in ranks:
                    rank.look()
                progress = min(rank.progress() for rank in ranks) // RECORD
                now = time.monotonic()
                if progress > best:
                    best, moved = progress, now
                elif now - moved > STALL_S or now - begin > PATIENCE_S:
                    raise BenchError(f"no new step for {now - moved:.0f} s after {best}; killed so far: {dict(done)}")
                if marks and progress >= marks[0]:
                    marks.pop(0)
                    done[strike(service, rng)] += 1
                else:
                    time.sleep(0.005)
        finally:
            for rank in ranks:
                rank.close()
    if marks:
        raise BenchError(f"the epoch ended with {len(marks)} kills to come")
    return [rank.received().reshape(-1, RECORD) for rank in ranks], done, time.monotonic() - begin


def torn_steps(records: list[Any], rows: int) -> int:
    """Count steps in which consumers had different padded lengths, or rows of different buckets."""
    count = min(map(len, records))
    steps = np.stack([record[:count] for record in records], axis=1)  # steps x consumers x record
    torn = (steps[:, :, 0] != steps[:, :1, 0]).any(axis=1)
    ids = steps[:, :, 1:].reshape(count, -1)
    buckets = np.searchsorted(BOUNDARIES, lengths(rows))[ids]
    mixed = np.where(ids < 0, buckets[:, :1], buckets) != buckets[:, :1]
    mixed[count - len(BOUNDARIES) - 1 :] = False  # at the very end, what is left moves up into larger buckets
    return int((torn | mixed.any(axis=1)).sum())


def run(bench: Bench) -> None:
    steps, kills = (QUICK_STEPS, QUICK_KILLS) if bench.options.quick else (STEPS, KILLS)
    common = {"versions": our_versions(), "machine": machine()}
    rows = steps * CONSUMERS * BATCH
    for order in ("relaxed", "deterministic"):
        say(f"coordinated chaos: {order}, {kills} kills over {steps:,} steps of {CONSUMERS} consumers")
        with tempfile.TemporaryDirectory() as scratch:
            records, done, seconds = epoch(Path(scratch), order=order, seed=1, steps=steps, kills=kills)
        ids = np.concatenate([record[:, 1:].ravel() for record in records])
        once, lost, twice = exactly_once(ids[ids >= 0], rows)
        ends = [len(record) for record in records]
        details = {"kills": dict(done), "lost": lost, "more_than_once": twice, "seconds": round(seconds, 1)}
        torn = torn_steps(records, rows)
        whole = [(float(min(ends) - torn), float(max(ends)))]
        case = f"{order}: steps of one group"
        bench.add(paired(bench.name, case, "all steps", "steps", whole, 1.0, torn=torn, ends=ends, **details, **common))
        bench.add(
            paired(
                bench.name, f"{order}: exactly once", "the epoch", "rows", [(float(once), float(rows))], 1.0, **common
            )
        )


if __name__ == "__main__":
    main("coordinated_chaos", run)
