"""What a stage measures about itself, and the frozen record users see."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from time import perf_counter


class _Nested(threading.local):
    """Seconds spent in inputs during the current pull of this thread."""

    seconds = 0.0


_nested = _Nested()


class StageMeter:
    """Own time of a stage: the time of its pulls without the time of its inputs' pulls.

    Pulls of one stage never overlap, so plain additions are safe; work on other threads is added under the stage's
    own lock with `add_work`.
    """

    __slots__ = (
        "buffered",
        "busy_s",
        "bytes_per_element",
        "chunks",
        "cpu_s",
        "elements",
        "holds_gil",
        "label",
        "skipped",
        "threads",
        "wait_s",
        "work_s",
    )

    def __init__(self, label: str) -> None:
        self.label = label
        self.elements = 0
        self.chunks = 0
        self.busy_s = 0.0  # in the puller's thread
        self.work_s = 0.0  # in calls of parallel work, summed over threads
        self.cpu_s = 0.0  # processor time of that work
        self.wait_s = 0.0  # the puller waited for work under way
        self.skipped = 0
        self.bytes_per_element = 0.0
        self.threads = 0
        self.buffered = 0
        self.holds_gil: bool | None = None

    def begin(self) -> tuple[float, float]:
        outer, _nested.seconds = _nested.seconds, 0.0
        return perf_counter(), outer

    def end(self, span: tuple[float, float], elements: int) -> None:
        began, outer = span
        took = perf_counter() - began
        self.busy_s += took - _nested.seconds
        _nested.seconds = outer + took
        self.elements += elements
        self.chunks += 1

    def add_wait(self, seconds: float) -> None:
        """Waiting inside a pull is not work of this stage."""
        self.wait_s += seconds
        _nested.seconds += seconds

    def add_work(self, seconds: float, cpu_s: float, *, inline: bool) -> None:
        """Count a call of parallel work; one made in the puller's own thread is not counted as pulling too."""
        self.work_s += seconds
        self.cpu_s += cpu_s
        if inline:
            _nested.seconds += seconds

    def snapshot(self) -> StageStatistics:
        return StageStatistics(
            name=self.label,
            elements=self.elements,
            chunks=self.chunks,
            busy_s=self.busy_s + self.work_s,
            cpu_s=self.cpu_s,
            wait_s=self.wait_s,
            bytes=int(self.bytes_per_element * self.elements),
            skipped=self.skipped,
            threads=self.threads,
            buffered=self.buffered,
            holds_gil=self.holds_gil,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStatistics:
    """One stage of a running pipeline."""

    name: str
    elements: int
    chunks: int
    busy_s: float
    cpu_s: float
    wait_s: float
    bytes: int
    skipped: int
    threads: int
    """How many threads it runs on; 0: in the thread that reads."""
    buffered: int
    holds_gil: bool | None
    """Whether its function was found to keep other threads from running; None: not known."""

    @property
    def seconds_per_element(self) -> float:
        return self.busy_s / self.elements if self.elements else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """A pipeline's stages from source to sink, and how the reader fared."""

    stages: tuple[StageStatistics, ...]
    elements: int
    read_s: float
    """The reader waited in `next()`."""
    idle_s: float
    """The pipeline was waited for by nobody: the time between two reads."""
    buffered_bytes: int
    memory_budget_bytes: int
    threads: int

    @property
    def wait_fraction(self) -> float:
        total = self.read_s + self.idle_s
        return self.read_s / total if total > 0 else 0.0
