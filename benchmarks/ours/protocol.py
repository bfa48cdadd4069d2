"""One or several trainers, each a process (`protocol_trainer.py`), reading one job of a service of two workers."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from ours.protocol_trainer import ROWS
from side import Workload

import penstock as ps

PACKAGES = ("penstock", "numpy", "pyzmq")
WORKERS = 2
LEAST = 100  # outputs of a round: fewer say nothing of the 99th percentile


class Trainer:
    """A trainer's process, alive through all rounds."""

    def __init__(self, given: dict[str, Any]) -> None:
        command = [sys.executable, "-m", "ours.protocol_trainer", json.dumps(given)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, job: str, outputs: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"job": job, "outputs": outputs}) + "\n")
        self._process.stdin.flush()

    def wait(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a trainer ended with {self._process.wait()}; its last words are above")
        found: dict[str, Any] = json.loads(line)
        return found


class Rounds:
    """A service and its trainers. In a round they read one job, dividing its outputs; or, sharing, all read all."""

    def __init__(self, given: dict[str, Any], trainers: Sequence[dict[str, Any]]) -> None:
        self._service = ps.LocalService(workers=WORKERS)
        service = {"service": str(self._service.service_file)}
        self._trainers = [Trainer(given | service | {"options": options}) for options in trainers]
        self._are_sharing = any("sharing" in options for options in trainers)
        # Ranks drop a last incomplete round. A trainer that skips need not read anything.
        skips = any(options.get("sharing") == "skip" for options in trainers)
        self._may_miss = math.inf if skips else len(trainers) - 1
        self._numbers = itertools.count()

    def measure(self, elements: int) -> dict[str, float]:
        job = f"round {next(self._numbers)}"
        many = len(self._trainers)
        outputs = max(LEAST, elements // many) if self._are_sharing else elements
        for trainer in self._trainers:
            trainer.start(job, outputs)
        found = [trainer.wait() for trainer in self._trainers]
        received = sum(one["received"] for one in found)
        missing = outputs * (many if self._are_sharing else 1) - received
        if not 0 <= missing <= self._may_miss:
            raise RuntimeError(f"{received} of {outputs} outputs came: {found}")
        # From the first that is warm to the last that ends: one that comes late and skips most is not a fast one.
        seconds = max(one["end_s"] for one in found) - min(one["begin_s"] for one in found)
        return {
            "elements": received,
            "seconds": seconds,
            "rate": sum(one["counted"] for one in found) / seconds,
            "p99_s": max(one["p99_s"] for one in found),
        }


def read(output: str, trainers: list[dict[str, Any]], first: int, after: str = "") -> Workload:
    """Each trainer is given by its own fields of `interface.Reading`.

    `output` and `after` name what is made and what is done to it behind `distribute` (see `protocol_trainer.py`).
    """
    rounds = Rounds({"output": output, "after": after}, trainers)
    note = f"{WORKERS} worker processes, {len(trainers)} trainer processes; outputs of {ROWS[output]} KB"
    return Workload(measure=rounds.measure, first=first, packages=PACKAGES, notes={"how": note})
