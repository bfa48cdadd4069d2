"""Sentences of many lengths, and ranks that read them in step: what the tests of coordinated reads share.

`python -c "from tests.service.sentences import rank_process; rank_process()"` is a rank in a process of its own.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import penstock as ps

from .checks import Background

ROWS = 3000
BATCH = 4
BOUNDARIES = (16, 48, 128)
STEP_TIMEOUT_S = 60


def length_of(i: int) -> int:
    """A long tail: half of them are shorter than 16, few longer than 128."""
    return 1 + int(8 / (1 - (i * 7919 % ROWS) / ROWS)) % 400


def bucket_of(length: int) -> int:
    return int(np.searchsorted(BOUNDARIES, length))


def sentences(work_s: float = 0.0, rows: int = ROWS) -> ps.Dataset:
    def read(i: int) -> dict[str, Any]:
        if work_s:
            time.sleep(work_s)
        return {"id": i, "tokens": np.full(length_of(i), i)}

    return (
        ps.range(rows)
        .shuffle(seed=5)
        .map(read)
        .bucket_by_length(lambda row: len(row["tokens"]), boundaries=BOUNDARIES, batch_size=BATCH)
    )


class Step(NamedTuple):
    """What one rank got in one step."""

    ids: tuple[int, ...]
    padded: int


def step_of(batch: dict[str, np.ndarray]) -> Step:
    return Step(tuple(batch["id"].tolist()), batch["tokens"].shape[1])


class Ranks:
    """So many loaders, each on a thread, that wait for each other after every step as synchronous trainers do."""

    def __init__(
        self,
        service: ps.LocalService,
        job: str,
        consumers: int,
        *,
        dataset: ps.Dataset | None = None,
        steps: int | None = None,
        states: list[Any] | Callable[[int], Any] | None = None,
        at_step: dict[int, Callable[[], None]] | None = None,
        uneven: str = "drop",
        coordinated: bool = True,
        **options: Any,
    ) -> None:
        self.read: list[list[Step]] = [[] for _ in range(consumers)]
        self.states: list[Any] = [None] * consumers
        self._service, self._job = service, job
        self._ranks = partial(ps.Ranks, consumers, uneven=uneven, coordinated=coordinated)
        self._dataset = sentences() if dataset is None else dataset
        self._steps, self._at_step, self._options = steps, at_step or {}, options
        self._load = states
        self._together = threading.Barrier(consumers)
        self._threads = [Background(lambda c=c: self._rank(c)) for c in range(consumers)]

    def _rank(self, consumer: int) -> None:
        options = {"limits": ps.Limits(timeout_s=STEP_TIMEOUT_S), **self._options}
        loader = self._dataset.distribute(self._service, job=self._job, ranks=self._ranks(rank=consumer), **options)
        with loader:
            if self._load is not None:
                loader.load_state_dict(self._load(consumer) if callable(self._load) else self._load)
            for batch in loader:
                self.read[consumer].append(step_of(batch))
                number = len(self.read[consumer])
                self._together.wait(STEP_TIMEOUT_S)
                if consumer == 0 and number in self._at_step:
                    self._at_step[number]()
                if number == self._steps:
                    break
            self.states[consumer] = json.loads(json.dumps(loader.state_dict()))

    def done(self) -> Ranks:
        try:
            for thread in self._threads:
                thread.result(100)
        except BaseException:
            self._together.abort()
            raise
        return self

    @property
    def steps(self) -> Iterator[tuple[Step, ...]]:
        """What all ranks got in each step."""
        return zip(*self.read, strict=True)


def ids_of(*ranks: Ranks) -> list[int]:
    return [i for each in ranks for rank in each.read for step in rank for i in step.ids]


def assert_in_step(ranks: Ranks) -> None:
    """All ranks took the same number of steps, and each step is one group of one padded length."""
    assert len({len(read) for read in ranks.read}) == 1, [len(read) for read in ranks.read]
    mixed = 0
    for number, step in enumerate(ranks.steps):
        assert len({one.padded for one in step}) == 1, f"step {number} is torn: {[one.padded for one in step]}"
        rows = [i for one in step for i in one.ids]
        assert max(map(length_of, rows)) == step[0].padded, f"step {number} is not one group"
        buckets = {bucket_of(length_of(i)) for i in rows}
        mixed += len(buckets) > 1
    # Only what is left at the very end moves up into larger buckets: at most a group of each.
    assert mixed <= len(BOUNDARIES) + 1, f"{mixed} steps have rows of several buckets"


def assert_all_but_a_last_round(ids: list[int], consumers: int, rows: int = ROWS) -> None:
    counted = Counter(ids)
    assert not [i for i, count in counted.items() if count > 1]
    assert set(counted) <= set(range(rows))
    assert rows - len(counted) < consumers


def rank_process() -> None:
    """Read as one rank; a line of JSON for each step, and one for the state after step `save_at`."""
    arguments = json.loads(sys.argv[1])
    loader = sentences(arguments["work_s"]).distribute(
        arguments["service"],
        job=arguments["job"],
        ranks=ps.Ranks(arguments["consumers"], arguments["consumer"], coordinated=True),
        order=arguments["order"],
        limits=ps.Limits(timeout_s=STEP_TIMEOUT_S),
    )
    with loader:
        if arguments.get("state"):
            loader.load_state_dict(json.loads(Path(arguments["state"]).read_text()))
        for number, batch in enumerate(loader, 1):
            print(json.dumps(step_of(batch)), flush=True)
            if number == arguments.get("save_at"):
                Path(arguments["save_to"]).write_text(json.dumps(loader.state_dict()))
                print("saved", flush=True)
