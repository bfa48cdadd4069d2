"""What scaling must not cost: splits enough for eight workers, no idle worker between epochs, little work done twice.

Cases of `experiments/scaling.py`, which runs them by name. Work is a wait (`threads=1`), so that eight workers fit on
two cores; each call is noted down with its beginning and its end by the process that made it.
"""

from __future__ import annotations

import os
import random
import struct
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import penstock as ps
from penstock.sources.memory import index_splits

WAIT_S = 0.002
WORKERS = 8
ALONE_S = 60.0
"""So long is one worker to take at least."""
LIMITS = ps.Limits(timeout_s=120)


@dataclass(frozen=True)
class NotedWait:
    """Waits, and writes down (element, began, ended) into a file of its process's own."""

    seconds: float
    folder: str = ""

    def __call__(self, element: Any) -> int:
        began = time.monotonic()
        time.sleep(self.seconds)
        number = element if isinstance(element, int) else 0
        if self.folder:
            with Path(self.folder, str(os.getpid())).open("ab", buffering=0) as file:
                file.write(struct.pack("qdd", number, began, time.monotonic()))
        return number

    def calls(self) -> dict[str, list[tuple[int, float, float]]]:
        """Return the calls of each process."""
        return {
            path.name: [(int(number), began, ended) for number, began, ended in struct.iter_unpack("qdd", data)]
            for path in Path(self.folder).iterdir()
            if (data := path.read_bytes())
        }


def idle_share(calls: list[tuple[int, float, float]], began: float, ended: float) -> float:
    """Return the part of a time in which a process was in none of its calls.

    >>> idle_share([(0, 0.0, 1.0), (1, 0.5, 2.0), (2, 3.0, 9.0)], 0.0, 4.0)
    0.25
    """
    busy, until = 0.0, began
    for _, start, stop in sorted(calls, key=lambda call: call[1]):
        start, stop = max(start, until), min(stop, ended)
        if stop > start:
            busy, until = busy + stop - start, stop
    return 1 - busy / (ended - began)


# Enough splits


def write_jsonl(folder: Path, rng: random.Random) -> ps.Dataset:
    """One file of 100 MB."""
    lines, size = int(ALONE_S / WAIT_S), 100_000_000
    filler = "x" * (size // lines - 30)
    path = folder / "data.jsonl"
    path.write_text("".join(f'{{"id": {number:8}, "text": "{filler}"}}\n' for number in range(lines)))
    return ps.read_jsonl(str(path))


def write_texts(folder: Path, rng: random.Random) -> ps.Dataset:
    """Forty files of unequal lengths."""
    total = int(ALONE_S / WAIT_S)
    weights = [rng.uniform(0.5, 1.5) for _ in range(40)]
    for number, weight in enumerate(weights):
        lines = max(1, round(total * weight / sum(weights)))
        text = "".join(f"{number} {line} {'word ' * rng.randint(20, 60)}\n" for line in range(lines))
        (folder / f"{number:02}.txt").write_text(text)
    return ps.read_text(str(folder / "*.txt"))


def write_jpegs(folder: Path, rng: random.Random) -> ps.Dataset:
    """3,000 files with the first bytes of a JPEG, which are read and not decoded; so often that one worker is long."""
    for number in range(3_000):
        place = folder / f"class{number % 10}"
        place.mkdir(exist_ok=True)
        (place / f"{number:05}.jpg").write_bytes(b"\xff\xd8\xff\xe0" + rng.randbytes(rng.randint(2_000, 20_000)))
    return ps.read_images(str(folder)).repeat(round(ALONE_S / WAIT_S / 3_000))


SPLITS = {"jsonl": write_jsonl, "texts": write_texts, "jpegs": write_jpegs}


def speed_up(name: str, rounds: int = 5) -> tuple[float, list[float], int]:
    """Return the seconds that one worker takes for a data set, those of eight, `rounds` times, and its elements."""
    took: list[float] = []
    counts = set()
    with tempfile.TemporaryDirectory() as folder:
        dataset = SPLITS[name](Path(folder), random.Random(5)).map(NotedWait(WAIT_S), threads=1).batch(10)
        for number, workers in enumerate([1] + [WORKERS] * rounds):
            with (
                ps.LocalService(workers=workers, threads=1) as service,
                dataset.distribute(service, job=f"{name}-{number}", limits=LIMITS) as loader,
            ):
                began = time.monotonic()
                counts.add(sum(len(batch) for batch in loader))
                took.append(time.monotonic() - began)
    (count,) = counts
    return took[0], sorted(took[1:]), count


# Epochs


def idle_between_epochs(epochs: int, epoch_s: float, workers: int = 4) -> tuple[float, float]:
    """Return how idle workers are over epochs of so many seconds, and over one epoch as long as all of them.

    The first two are left out: from the second on a loader is taken to go on.
    """
    elements = int(epoch_s * workers / WAIT_S)
    with ps.LocalService(workers=workers, threads=1) as service:
        short = _idle(service, "short", elements, epochs + 2, begins_with=2)
        long = _idle(service, "long", elements * min(epochs, 5), 1, begins_with=0)
    return short, long


def _idle(service: ps.LocalService, job: str, elements: int, epochs: int, *, begins_with: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        work = NotedWait(WAIT_S, folder)
        with ps.range(elements).map(work, threads=1).batch(10).distribute(service, job=job, limits=LIMITS) as loader:
            began = ended = 0.0
            for epoch in range(epochs):
                for number, batch in enumerate(loader):
                    if epoch == begins_with and number == 0:
                        began = time.monotonic()
                    ended = time.monotonic()
                    del batch
        calls = work.calls()
        inside = [call for each in calls.values() for call in each if began <= call[1] < ended]
        if epochs > 1 and len(inside) < 0.8 * elements * (epochs - begins_with):
            raise RuntimeError(f"{len(inside)} calls were noted for {epochs - begins_with} epochs of {elements}")
        shares = [idle_share(each, began, ended) for each in calls.values()]
        return sum(shares) / len(shares)


# Work done twice


def repeated_by_shrinking(workers: int, left: int) -> tuple[int, int, int]:
    """Return how many elements were made twice as a job shrank in mid-epoch, how many streams moved, and the bound."""
    elements = 20_000
    with tempfile.TemporaryDirectory() as folder, ps.LocalService(workers=workers, threads=1) as service:
        work = NotedWait(WAIT_S, folder)
        pipeline = ps.range(elements).map(work, threads=1).batch(10)
        placement = ps.Placement(workers=workers)
        with pipeline.distribute(service, job="shrinks", placement=placement, limits=LIMITS) as loader:
            seen = 0
            for number, batch in enumerate(loader):
                seen += len(batch)
                if number == elements // 40:
                    service.scale("shrinks", left)
        if seen != elements:
            raise RuntimeError(f"{seen} elements of {elements} were read")
        made = Counter(number for calls in work.calls().values() for number, _, _ in calls)
        split = max(split.stop - split.start for split in index_splits(elements))
        return sum(count - 1 for count in made.values()), workers - left, split * (workers - left)
