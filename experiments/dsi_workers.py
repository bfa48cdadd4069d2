"""What workers and trainers spend in `experiments/dsi.py`: by extraction, class of transform, and bytes received."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from encryption import READY_S, WAYS, service

import penstock as ps
from penstock.runtime.feature_batches import FeatureBatches
from penstock.runtime.feature_schedule import StackStep
from penstock.runtime.feature_stacks import Stack
from penstock.sources.coalescing import ReadingMeter
from penstock.warehouse.session import dataset_of, plan_at

RECEIVED_BATCHES = 200
RECEIVED_IDS = 1 << 18  # 2 MB of a batch, and what numbers take beside them


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's processor time, by what it is for, and its bytes."""

    rows: int
    extract_s: float
    by_class_s: dict[str, float]
    gather_s: float
    """To put what was made into batches."""
    rest_s: float
    """The session as a whole has so much more than extraction and transforms one after the other."""
    stored_bytes: int
    batch_bytes: int
    made_bytes: int

    @property
    def cpu_s(self) -> float:
        return self.extract_s + sum(self.by_class_s.values()) + self.gather_s + self.rest_s

    def per_core(self, nbytes: float) -> float:
        """Return bytes by second of processor time."""
        return nbytes / self.cpu_s


def nbytes_of(batch: dict[str, Any]) -> int:
    return sum(leaf.nbytes for leaf in batch.values())


def spent(session: ps.Session, version: int, batches: Any, work: Any) -> Spent:
    """Return what a session's rows cost; `batches` opens its batches before transforms, `work` has its operators."""
    by_class: Counter[str] = Counter()
    run_one = StackStep.run

    def timed(step: StackStep, stacks: Sequence[Stack | None]) -> Stack:
        began = time.thread_time()
        try:
            return run_one(step, stacks)
        finally:
            by_class[step.first.OP] += time.thread_time() - began

    meter = ReadingMeter()
    made = FeatureBatches(work.transform)
    for batch in batches(ReadingMeter()):
        made.made(batch)  # finds the schedule
    rows = batch_bytes = made_bytes = 0
    extract_s = transform_s = 0.0
    StackStep.run = timed  # type: ignore[method-assign]
    try:
        opened = batches(meter)
        while True:
            began = time.process_time()
            read = next(opened, None)
            extract_s += time.process_time() - began
            if read is None:
                break
            began = time.process_time()
            given = made.made(read)
            transform_s += time.process_time() - began
            rows += len(read["label"])
            batch_bytes += nbytes_of(read)
            made_bytes += nbytes_of(given) + read["label"].nbytes
    finally:
        StackStep.run = run_one  # type: ignore[method-assign]
    pinned = replace(session, version=version)
    whole = dataset_of(pinned, plan_at(pinned, version))
    whole_s = (pass_s(whole.repeat(3)) - pass_s(whole)) / 2  # without what is done once: planning, cutting stacks
    return Spent(
        rows=rows,
        extract_s=extract_s,
        by_class_s=dict(by_class),
        gather_s=transform_s - sum(by_class.values()),
        rest_s=whole_s - extract_s - transform_s,
        stored_bytes=meter.snapshot().read_bytes,
        batch_bytes=batch_bytes,
        made_bytes=made_bytes,
    )


def pass_s(dataset: ps.Dataset) -> float:
    """Return the processor time that reading a dataset takes."""
    began = time.process_time()
    for _ in dataset:
        pass
    return time.process_time() - began


def received(features: int) -> dict[str, float]:
    """Return a trainer's processor seconds for each GB of batches that it receives, by way."""

    def same_batch(_: int, made: list[Any] = []) -> dict[str, Any]:  # noqa: B006 (made once a process)
        if not made:
            rng = np.random.default_rng(5)
            keys = tuple(f"f{number}" for number in range(features))
            dense = ps.KeyedDense(keys, rng.random((features, 64), np.float32))
            offsets = np.linspace(0, RECEIVED_IDS, features * 64 + 1).astype(np.int64)
            sparse = ps.KeyedRagged(keys, rng.integers(0, 1 << 40, RECEIVED_IDS), offsets)
            made.append({"dense": dense, "sparse": sparse})
        return made[0]

    found: dict[str, float] = {}
    for way in WAYS:
        with service(way) as (_, file):
            loader = ps.range(1 << 30).map(same_batch).distribute(file, limits=ps.Limits(timeout_s=READY_S))
            with loader:
                epoch = iter(loader)
                for _ in range(20):
                    nbytes = nbytes_of(next(epoch))
                began = time.process_time()
                for _ in range(RECEIVED_BATCHES):
                    next(epoch)
                found[way] = (time.process_time() - began) / (RECEIVED_BATCHES * nbytes / 1e9)
    return found
