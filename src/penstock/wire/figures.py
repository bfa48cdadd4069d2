"""What the service knows in numbers of a job: its stages, its workers, its trainers.

Sums only grow: they are over all epochs and all processes of the job since the dispatcher started. Rates are of the
last samples, by the clocks of those who sent them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from penstock.core.ids import JobName

LINE_BYTES = 3900  # what is written to a pipe at once is whole; see `processes.forked_child`

WaitsFor: TypeAlias = Literal["", "credit", "processor", "input"]


class StageFigures(msgspec.Struct, frozen=True, array_like=True):
    """One stage's work on workers so far. An operator may run as several: `node` and `name` together say which."""

    node: int
    """The operator's number in the job's plan as it is run, from the sources down: two that look alike have two."""
    name: str
    elements: int = 0
    nbytes: int = 0
    """Of the elements, by a sample of them."""
    busy_s: float = 0.0
    """Time spent in it without its inputs, over all threads; waiting for a disk or for the GIL is in it."""
    cpu_s: float = 0.0
    """How much of that a processor worked for it."""
    wait_s: float = 0.0
    """Whoever pulls it waited for work under way."""
    values: int = 0
    """In arrays that it padded, without the padding."""
    padding: int = 0
    """Values that only fill up."""
    threads: int = 0
    """That it runs on now."""


class RunnerFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a runner has done and used since its process began, and how fast it is now."""

    at_s: float = 0.0
    """When it was so, by the runner's own clock."""
    streams: int = 0
    """That run now."""
    rounds: int = 0
    nbytes: int = 0
    runs: int = 0
    """How often a stream began or began again."""
    busy_s: float = 0.0
    """Making outputs, summed over streams."""
    credit_wait_s: float = 0.0
    """Waiting for readers to make room."""
    refused: int = 0
    """Connections that were not let in."""
    stages: tuple[StageFigures, ...] = ()
    """In a runner's line to its agent, some of them: there may be more than one line holds."""
    cpu_s: float = 0.0
    rss_bytes: int = 0
    cores: float = 0.0
    """Processor seconds a second, of the last second or so."""
    kind: str = "process"
    threads: int = 0
    """That it may use; 0: not known, as the next."""
    memory_bytes: int = 0
    """That it may use."""


class WorkerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's process for one job: what it has done since it began, what it uses now, and of how much."""

    worker: str
    host: str
    kind: str
    """process: one of its own; inline: threads in a trainer, whose processor and memory are counted."""
    streams: int
    outputs: int
    """Made for readers."""
    sent_bytes: int
    busy_s: float
    """Its streams spent making outputs."""
    credit_wait_s: float
    """Its streams waited for readers to make room."""
    cpu_s: float
    outputs_per_s: float
    sent_bytes_per_s: float
    cores: float
    """Processor seconds a second, of `threads` that it may use."""
    threads: int
    resident_bytes: int
    """Memory of the process, of `memory_bytes` that it may use."""
    memory_bytes: int
    waits_for: WaitsFor
    """What holds it up: credit, that is its readers; the processor; its input, a disk or a slow answer. Empty: it has
    nothing to do."""
    stages: tuple[StageFigures, ...] = ()


class TrainerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank of one trainer has read of a job, over all its epochs."""

    rank: int
    replica: int
    trainer: str
    batches: int
    nbytes: int
    wait_s: float
    """It waited in `next()`."""
    run_s: float
    """It was busy between two calls of it."""
    skipped: int
    shared: int
    batches_per_s: float = 0.0
    """Now; 0: it does not read now, as the next."""
    wait_fraction: float = 0.0
    """The share of the time that it waits now."""
    buffered_elements: int = 0
    buffered_bytes: int = 0


class JobFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A job as its service knows it in numbers."""

    job: JobName
    outputs: int = 0
    """That workers have made for readers, in all."""
    sent_bytes: int = 0
    busy_s: float = 0.0
    credit_wait_s: float = 0.0
    cpu_s: float = 0.0
    outputs_per_s: float = 0.0
    """Now, as the next."""
    sent_bytes_per_s: float = 0.0
    stages: tuple[StageFigures, ...] = ()
    """In all, from the sources down."""
    workers: tuple[WorkerFigures, ...] = ()
    """Those that serve the job now."""
    trainers: tuple[TrainerFigures, ...] = ()
    """All that have read it."""


def lines_of(figures: RunnerFigures) -> Iterator[str]:
    """Give the figures as lines, each with as many of the stages as go into one, and with all else."""
    stages = figures.stages
    while True:
        count = len(stages)
        while len(line := msgspec.json.encode(replace(figures, stages=stages[:count]))) > LINE_BYTES and count > 1:
            count //= 2
        yield line.decode()
        stages = stages[count:]
        if not stages:
            return
