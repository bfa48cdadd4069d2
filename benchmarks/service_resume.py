"""What a checkpoint of a distributed epoch costs, and that it is exact: 10^6 elements, saved at 90 %.

Loaded by other numbers of workers and consumers, and on a new service that has never heard of the job. Every id is
counted: what was received before the checkpoint and after it must be the epoch, once. In deterministic order the
sequence must be that of an undisturbed run.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from harness import Bench, BenchError, say
from ours.interface import Reading, distribute
from report import figures, machine, our_versions, paired

import penstock as ps
from trainers import exactly_once

ELEMENTS = 1_000_000
BATCH = 256
SAVED_AT = 0.9
BYTES_PER_STREAM = 300
NEXT_BATCH_S = 1.0
PATIENCE_S = 300

Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class Part:
    """What one consumer received in one go."""

    batches: list[Array] = field(default_factory=list)
    state: str = ""
    first_s: float = 0.0
    """From loading the state (or from opening) to the first batch."""


def same(x: int) -> int:
    return x


def dataset(elements: int = ELEMENTS, batch: int = BATCH, drop_last: bool = False) -> ps.Dataset:
    return ps.range(elements).shuffle(10_000, seed=7).map(same).batch(batch, drop_last=drop_last)


def read(
    service: ps.LocalService,
    source: ps.Dataset,
    *,
    job: str,
    consumers: int = 1,
    states: Sequence[str] = (),
    steps: int | None = None,
    **options: Any,
) -> list[Part]:
    """Let all consumers read, each in a thread: to the end, or so many steps, and then save."""
    parts = [Part() for _ in range(consumers)]
    errors: list[BaseException] = []

    def consume(consumer: int) -> None:
        part = parts[consumer]
        try:
            reading = Reading(job=job, ranks=consumers, rank=consumer, timeout_s=60, **options)
            with distribute(source, service, reading) as loader:
                begin = time.perf_counter()
                if states:
                    saved = [json.loads(state) for state in states]
                    loader.load_state_dict(saved if len(saved) > 1 else saved[0])
                for batch in loader:
                    if not part.batches:
                        part.first_s = time.perf_counter() - begin
                    part.batches.append(np.array(batch))
                    if len(part.batches) == steps:
                        part.state = json.dumps(loader.state_dict())
                        break
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=consume, args=(i,), daemon=True) for i in range(consumers)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + PATIENCE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        raise errors[0]
    if any(thread.is_alive() for thread in threads):
        raise BenchError(f"{job}: {consumers} consumers did not finish in {PATIENCE_S} s")
    return parts


def ids(parts: Sequence[Part]) -> Array:
    found = [batch for part in parts for batch in part.batches]
    return np.concatenate(found) if found else np.empty(0, np.int64)


class Cases:
    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.elements = ELEMENTS // 10 if bench.options.quick else ELEMENTS
        self.runs = 1 if bench.options.quick else 5
        self._common = {"versions": our_versions(), "machine": machine()}

    def exact(self, case: str, received: Array, elements: int) -> None:
        once, lost, twice = exactly_once(received, elements)
        pairs = [(float(once), float(elements))]
        result = paired(
            self.bench.name,
            f"service, {case}: exactly once",
            "the epoch",
            "elements",
            pairs,
            1.0,
            lost=lost,
            more_than_once=twice,
            **self._common,
        )
        self.bench.add(result)

    def same(self, case: str, is_same: bool) -> None:
        pairs = [(float(is_same), 1.0)]
        name = f"service, {case}"
        self.bench.add(paired(self.bench.name, name, "undisturbed run", "same", pairs, 1.0, **self._common))

    def size(self, case: str, state: str, streams: int) -> None:
        name = f"service, {case}: state, per stream"
        size = len(state)
        self.bench.limit(name, [size / streams], BYTES_PER_STREAM, unit="bytes", state_bytes=size, streams=streams)

    def next_batch(self, case: str, seconds: Sequence[float]) -> None:
        name = f"service, {case}: next batch"
        rounds = [figures(each) for each in seconds]
        self.bench.limit(name, seconds, NEXT_BATCH_S, unit="s", rounds=rounds)

    # The cases

    def workers(self, order: str) -> None:
        """Saved with 4 workers; loaded on the same service, and on new ones of 1, 4 and 7."""
        source = dataset(self.elements)
        steps = int(SAVED_AT * self.elements) // BATCH
        expected = None
        with ps.LocalService(workers=4) as service:
            if order == "deterministic":
                expected = ids(read(service, source, job="whole", order=order))
            before = read(service, source, job="saved", order=order, steps=steps)
            state = before[0].state
            self.size(f"{order}, 4 workers", state, 16 if order == "deterministic" else 4)
            self._again(f"{order}, same service", service, source, before, expected, job="saved", order=order)
        for workers in (1, 4, 7):
            name = f"{order}, new service of {workers}"
            with ps.LocalService(workers=workers) as service:
                service.wait_ready(60)  # it runs, and has never heard of the job
                self._again(name, service, source, before, expected, job="saved", order=order)

    def _again(
        self,
        case: str,
        service: ps.LocalService,
        source: ps.Dataset,
        before: Sequence[Part],
        expected: Array | None,
        *,
        job: str,
        consumers: int = 1,
        **options: Any,
    ) -> None:
        say(f"resume: {case}")
        states = [part.state for part in before]
        # A checkpoint may be loaded again and again: all but the last time only the first batch is read.
        seconds = []
        for _ in range(self.runs - 1):
            parts = read(service, source, job=job, consumers=consumers, states=states, steps=1, **options)
            seconds.append(max(part.first_s for part in parts))
        after = read(service, source, job=job, consumers=consumers, states=states, **options)
        seconds.append(max(part.first_s for part in after))
        self.next_batch(case, seconds)
        received = np.concatenate([ids(before), ids(after)])
        self.exact(case, received, self.elements)
        if expected is not None:
            self.same(f"{case}: sequence", bool(np.array_equal(received, expected)))

    def consumers(self) -> None:
        """Saved by 4 consumers; loaded by 2 and by 8. The batches divide evenly, so that none may be dropped."""
        batch = 25
        source = dataset(self.elements, batch)  # 40,000 batches: whole rounds for 2, 4 and 8
        steps = int(SAVED_AT * self.elements) // batch // 4
        with ps.LocalService(workers=4) as service:
            before = read(service, source, job="four", consumers=4, steps=steps)
        self.size("4 consumers, 4 workers", max((part.state for part in before), key=len), 4)
        for consumers in (2, 8):
            with ps.LocalService(workers=4) as service:
                service.wait_ready(60)
                name = f"4 consumers to {consumers}"
                self._again(name, service, source, before, None, job="four", consumers=consumers)

    def many_streams(self) -> None:
        source = dataset(self.elements)
        steps = int(SAVED_AT * self.elements) // BATCH
        options: dict[str, Any] = {"order": "deterministic", "streams": 256}
        with ps.LocalService(workers=4) as service:
            expected = ids(read(service, source, job="whole", **options))
            before = read(service, source, job="many", steps=steps, **options)
        self.size("256 streams", before[0].state, 256)
        with ps.LocalService(workers=4) as service:
            service.wait_ready(60)
            self._again("256 streams, new service", service, source, before, expected, job="many", **options)

    def ends(self) -> None:
        """`drop_last` at 64 streams; and one file for two consumers, who must end at the same step."""
        elements, batch, consumers = 100_003, 64, 2
        source = dataset(elements, batch, drop_last=True)
        with ps.LocalService(workers=2) as service:
            options: dict[str, Any] = {"order": "deterministic", "streams": 64}
            parts = read(service, source, job="dropping", consumers=consumers, **options)
            received = ids(parts)
            if len(np.unique(received)) != len(received):
                raise BenchError("drop_last at 64 streams: an element came twice")
            dropped = (elements - len(received)) / (batch * consumers)
            name = "service, drop_last at 64 streams: dropped, per consumer"
            self.bench.limit(name, [max(dropped, 1e-9)], 1.0, unit="batches", dropped=elements - len(received))
            with tempfile.TemporaryDirectory() as folder:
                lines = 10_001
                (Path(folder) / "one.txt").write_text("".join(f"{i}\n" for i in range(lines)))
                one_file = ps.read_text(f"{folder}/*.txt").map(int)
                parts = read(service, one_file, job="one file", consumers=2)
            steps = [len(part.batches) for part in parts]
            is_even = steps == [lines // 2] * 2
            result = paired(
                self.bench.name,
                "service, one file, two consumers: steps",
                "floor(N / m)",
                "same",
                [(float(is_even), 1.0)],
                1.0,
                steps=steps,
                **self._common,
            )
            self.bench.add(result)


def run(bench: Bench) -> None:
    cases = Cases(bench)
    for order in ("relaxed", "deterministic"):
        cases.workers(order)
    cases.consumers()
    cases.many_streams()
    cases.ends()
