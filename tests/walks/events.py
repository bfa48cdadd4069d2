"""The four events that are traced: `python -m tests.walks.events NAME` makes one happen a few times.

Its last line of output is the stretches of time in which it happened, and the one in which nothing did, as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import penstock as ps

ROWS, ROW_BYTES = 4, 160_000  # a batch is a frame: two of them do not fit into one
MEMORY_BYTES = 8 << 20  # of a loader: every batch that is taken makes room for another to be asked for
IN_MEMORY = 12  # batches: more than a loader has room for
AT_ONCE = 4  # batches that are one happening: the engine makes one or two in a go
IDLE_S = 4.0  # several times what the clock alone makes processes do
OPTIONS: dict[str, Any] = {"limits": ps.Limits(memory_bytes=MEMORY_BYTES, timeout_s=60)}


def row(number: int) -> Any:
    return np.full(ROW_BYTES // 8, number, np.int64)


def batches(count: int = 100_000) -> ps.Dataset:
    return ps.range(count * ROWS).map(row).batch(ROWS)


class Recorder:
    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []
        self.idle: tuple[int, int] = (0, 0)

    def rest(self) -> None:
        """Let nothing happen for a while: what is entered then is entered by the clock."""
        began = time.monotonic_ns()
        time.sleep(IDLE_S)
        self.idle = (began, time.monotonic_ns())

    @contextmanager
    def event(self) -> Iterator[None]:
        began = time.monotonic_ns()
        yield
        self.spans.append((began, time.monotonic_ns()))


def read(reader: Iterator[Any], count: int, pause_s: float = 0.0) -> None:
    for _ in range(count):
        next(reader)
        time.sleep(pause_s)


def batch(recorder: Recorder) -> None:
    """A trainer takes a batch; a runner makes another."""
    with batches().distribute(1, **OPTIONS) as loader:
        reader = iter(loader)
        read(reader, 2 * IN_MEMORY, 0.02)
        recorder.rest()
        read(reader, 2 * IN_MEMORY, 0.02)
        for _ in range(10):
            with recorder.event():
                read(reader, AT_ONCE, 0.02)


def death(recorder: Recorder) -> None:
    """A worker's process is killed; the trainer reads what its successor makes."""
    with (
        ps.LocalService(1) as service,
        batches().distribute(service, job="death", **OPTIONS) as loader,
    ):
        reader = iter(loader)
        read(reader, 2 * IN_MEMORY)
        recorder.rest()
        for _ in range(3):
            (pid,) = service.worker_pids().values()
            with recorder.event():
                os.kill(pid, signal.SIGKILL)
                read(reader, IN_MEMORY)
            read(reader, IN_MEMORY, 0.05)


def loading(recorder: Recorder) -> None:
    """The states of two ranks are loaded by one, while the job's process still lingers."""
    for number in range(3):
        with ps.LocalService(1) as service:  # of its own: no process of another job ends meanwhile

            def loader(rank: int, ranks: int) -> Any:
                return batches().distribute(service, job="loading", ranks=ps.Ranks(ranks, rank), **OPTIONS)

            ranks = [loader(rank, 2) for rank in range(2)]
            readers = [iter(rank) for rank in ranks]
            for _ in range(IN_MEMORY):
                for reader in readers:
                    next(reader)
            if number == 0:
                recorder.rest()
            states = [rank.state_dict() for rank in ranks]
            for rank in ranks:
                rank.close()
            with loader(0, 1) as other, recorder.event(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the number of ranks changes: that is what is asked for
                other.load_state_dict(states)
                next(iter(other))


def joining(recorder: Recorder) -> None:
    """A trainer comes to a job that another one reads."""
    dataset = batches()
    with ps.LocalService(1) as service:

        def trainer(name: str) -> Any:
            return dataset.distribute(service, job="joining", sharing=ps.Share("skip", name), **OPTIONS)

        with trainer("first") as first:
            reader = iter(first)
            read(reader, 2 * IN_MEMORY)
            recorder.rest()
            for number in range(3):
                with recorder.event():
                    other = trainer(f"other {number}")
                    next(iter(other))
                other.close()


EVENTS: dict[str, Callable[[Recorder], None]] = {each.__name__: each for each in (batch, death, loading, joining)}


def main(name: str) -> None:
    recorder = Recorder()
    EVENTS[name](recorder)
    print(json.dumps({"idle": recorder.idle, "spans": recorder.spans}))


if __name__ == "__main__":
    main(sys.argv[1])
