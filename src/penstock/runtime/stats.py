"""What a stage measures about itself, and the frozen record users see."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from time import perf_counter


class _Nested(threading.local):
    """Seconds spent in inputs during the current pull of this thread."""

    seconds = 0.0


_nested = _Nested()


@dataclass(slots=True)
class PaddingCount:
    """Batches of one bucket, and what they were filled with."""

    batches: int = 0
    rows: int = 0
    values: int = 0
    padding: int = 0

    def add(self, *, batches: int, rows: int, values: int, padding: int) -> None:
        self.batches += batches
        self.rows += rows
        self.values += values
        self.padding += padding


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
        "padding",
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
        self.padding: dict[int | None, PaddingCount] = {}

    def count_padding(self, up_to: int | None, **counts: int) -> None:
        """Count batches of the bucket of lengths up to `up_to`; None: there is no limit."""
        self.padding.setdefault(up_to, PaddingCount()).add(**counts)

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
            padding=self._padding(),
        )

    def _padding(self) -> tuple[PaddingStatistics, ...]:
        counts = list(self.padding.items())  # at once: another thread may be adding to it
        return tuple(
            PaddingStatistics(
                up_to=up_to, batches=count.batches, rows=count.rows, values=count.values, padding=count.padding
            )
            for up_to, count in sorted(counts, key=lambda item: (item[0] is None, item[0]))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingStatistics:
    """Padded batches of one bucket of lengths."""

    up_to: int | None
    """Its boundary; None: there is no limit."""
    batches: int
    rows: int
    values: int
    """In arrays that are padded, without the padding."""
    padding: int
    """Values that only fill up."""

    @property
    def padding_fraction(self) -> float:
        return self.padding / (self.values + self.padding) if self.padding else 0.0


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
    padding: tuple[PaddingStatistics, ...] = ()
    """Of a stage that pads, by bucket."""

    @property
    def seconds_per_element(self) -> float:
        """How long a stage works on an element, on average."""
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
        """The share of the time that the reader waited for elements."""
        total = self.read_s + self.idle_s
        return self.read_s / total if total > 0 else 0.0
