"""What a stage measures about itself, and the frozen record users see."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from random import Random
from time import perf_counter, thread_time

import msgspec

from penstock.core.element import Element, element_bytes
from penstock.sources.coalescing import ReadingStatistics

WEIGH_EVERY_S = 0.01  # one element is weighed for all that a stage gives meanwhile
CLOCK_EVERY_S = 1e-3  # the processor's clock is a system call: it is read for one pull in so long, and for longer ones


class ReaderClock:
    """How long a reader waited in `next()`, and how long it did something else between two calls of it.

    The reader's thread turns it; any may ask. What is under way counts up to the moment somebody asks.
    """

    __slots__ = ("_turned",)

    def __init__(self) -> None:
        self._turned: tuple[float, float, float | None, bool] = (0.0, 0.0, None, False)
        """Waited, busy, when it last changed (None: nobody reads), whether the reader waits. Replaced as one."""

    def enter(self, now: float) -> None:
        """The reader has come for more: it was busy until now."""
        wait_s, run_s = self.times(now)
        self._turned = (wait_s, run_s, now, True)

    def leave(self, now: float, *, ended: bool = False) -> None:
        """The reader has what it came for; `ended`: that there is no more, and no step follows."""
        wait_s, run_s = self.times(now)
        self._turned = (wait_s, run_s, None if ended else now, False)

    def times(self, now: float) -> tuple[float, float]:
        """Return how long the reader has waited, and how long it has been busy."""
        wait_s, run_s, since, waiting = self._turned
        if since is None:
            return wait_s, run_s
        return (wait_s + now - since, run_s) if waiting else (wait_s, run_s + now - since)


class _Pulls:
    """The pulls of one thread, one inside the other."""

    __slots__ = ("_chance", "_clock_at", "cpu_s", "depth", "is_clocked", "seconds")

    def __init__(self) -> None:
        self.depth = 0
        self.seconds = 0.0
        """How long inputs took during the innermost pull."""
        self.cpu_s = 0.0
        """The processor's part of that, if it is measured."""
        self.is_clocked = False
        """Whether the processor's time is measured, for the outermost pull and all inside it."""
        self._clock_at = 0.0
        self._chance = Random()

    def enter(self, now: float) -> tuple[float, float]:
        """Begin a pull; return what was counted of the one around it."""
        if not self.depth:
            self.is_clocked = now >= self._clock_at
        self.depth += 1
        outer = self.seconds, self.cpu_s
        self.seconds = self.cpu_s = 0.0
        return outer

    def leave(self, now: float, seconds: float, cpu_s: float) -> None:
        """End a pull; what it and the one around it took in inputs is given."""
        self.seconds, self.cpu_s = seconds, cpu_s
        self.depth -= 1
        if self.is_clocked and not self.depth:
            # At uneven times, so that it does not fall in step with what a pipeline does.
            self._clock_at = now + CLOCK_EVERY_S * 2 * self._chance.random()


class _ThisThread(threading.local):
    def __init__(self) -> None:
        self.pulls = _Pulls()


_this_thread = _ThisThread()


class PaddingCount(msgspec.Struct):
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
        "_clocked_cpu_s",
        "_clocked_s",
        "_weigh_at",
        "_work_cpu_s",
        "buffered_bytes",
        "buffered_elements",
        "busy_s",
        "bytes_per_element",
        "chunks",
        "elements",
        "holds_gil",
        "label",
        "nbytes",
        "node",
        "padding",
        "reading",
        "skipped",
        "threads",
        "wait_s",
        "work_s",
    )

    def __init__(self, label: str, node: int = 0) -> None:
        """`node`: the operator's number in its graph, from the sources down."""
        self.label, self.node = label, node
        self.elements = 0
        self.chunks = 0
        self.nbytes = 0.0
        self.busy_s = 0.0  # in the puller's thread
        self.work_s = 0.0  # in calls of parallel work, summed over threads
        self._work_cpu_s = 0.0  # the processor's part of that
        self._clocked_s = self._clocked_cpu_s = 0.0  # of busy_s: what the processor's time was measured of, and that
        self.wait_s = 0.0  # the puller waited for work under way
        self.skipped = 0
        self.bytes_per_element = 0.0
        self.threads = 0
        self.buffered_elements = 0
        self.buffered_bytes = 0
        self._weigh_at = 0.0
        self.holds_gil: bool | None = None
        self.padding: dict[int | None, PaddingCount] = {}
        self.reading: Callable[[], ReadingStatistics] | None = None

    def count_padding(self, up_to: int | None, **counts: int) -> None:
        """Count batches of the bucket of lengths up to `up_to`; None: there is no limit."""
        self.padding.setdefault(up_to, PaddingCount()).add(**counts)

    @property
    def cpu_s(self) -> float:
        """Processor time of pulls and of work; that of pulls by a sample of them."""
        share = min(1.0, self._clocked_cpu_s / self._clocked_s) if self._clocked_s > 0 else 0.0
        return self._work_cpu_s + self.busy_s * share

    def begin(self) -> tuple[float, float, float, float]:
        pulls, now = _this_thread.pulls, perf_counter()
        outer_s, outer_cpu_s = pulls.enter(now)
        return now, thread_time() if pulls.is_clocked else 0.0, outer_s, outer_cpu_s

    def end(self, span: tuple[float, float, float, float], made: Sequence[Element], count: int) -> None:
        began, cpu_before, outer_s, outer_cpu_s = span
        pulls, now, took_cpu = _this_thread.pulls, perf_counter(), 0.0
        took = now - began
        own = took - pulls.seconds
        self.busy_s += own
        if pulls.is_clocked:
            took_cpu = thread_time() - cpu_before
            self._clocked_s += own
            self._clocked_cpu_s += max(0.0, took_cpu - pulls.cpu_s)
        pulls.leave(now, outer_s + took, outer_cpu_s + took_cpu)
        self.chunks += 1
        if count:
            if now >= self._weigh_at:
                self.bytes_per_element, self._weigh_at = element_bytes(made[0]), now + WEIGH_EVERY_S
            self.elements += count
            self.nbytes += self.bytes_per_element * count

    def weighed(self, bytes_per_element: float) -> None:
        """Whoever made elements has weighed them; none is weighed when they are pulled."""
        self.bytes_per_element, self._weigh_at = bytes_per_element, float("inf")

    def buffers(self, elements: int, nbytes: int) -> None:
        """So much is made and not pulled yet."""
        self.buffered_elements, self.buffered_bytes = elements, nbytes

    def add_wait(self, seconds: float) -> None:
        """Waiting inside a pull is not work of this stage."""
        self.wait_s += seconds
        _this_thread.pulls.seconds += seconds

    def add_work(self, seconds: float, cpu_s: float, *, inline: bool) -> None:
        """Count a call of parallel work; one made in the puller's own thread is not counted as pulling too."""
        self.work_s += seconds
        self._work_cpu_s += cpu_s
        if inline:
            pulls = _this_thread.pulls
            pulls.seconds += seconds
            pulls.cpu_s += cpu_s

    def snapshot(self) -> StageStatistics:
        return StageStatistics(
            node=self.node,
            name=self.label,
            elements=self.elements,
            chunks=self.chunks,
            busy_s=self.busy_s + self.work_s,
            cpu_s=self.cpu_s,
            wait_s=self.wait_s,
            bytes=int(self.nbytes),
            skipped=self.skipped,
            threads=self.threads,
            buffered_elements=self.buffered_elements,
            buffered_bytes=self.buffered_bytes,
            holds_gil=self.holds_gil,
            padding=self._padding(),
            reading=None if self.reading is None else self.reading(),
        )

    def _padding(self) -> tuple[PaddingStatistics, ...]:
        counts = list(self.padding.items())  # at once: another thread may be adding to it
        return tuple(
            PaddingStatistics(
                up_to=up_to, batches=count.batches, rows=count.rows, values=count.values, padding=count.padding
            )
            for up_to, count in sorted(counts, key=lambda item: (item[0] is None, item[0]))
        )


class PaddingStatistics(msgspec.Struct, frozen=True, kw_only=True):
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


class StageStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of a running pipeline. An operator may run as several: `node` and `name` together say which."""

    node: int
    """The operator's number in the plan as it is run, from the sources down: two that look alike have two."""
    name: str
    elements: int
    chunks: int
    busy_s: float
    """Time spent in it without its inputs, over all threads; waiting for a disk or for the GIL is in it."""
    cpu_s: float
    """How much of that a processor worked for it."""
    wait_s: float
    """Whoever pulls it waited for work under way."""
    bytes: int
    """Of the elements, by a sample of them."""
    skipped: int
    threads: int
    """How many threads it runs on; 0: in the thread that reads."""
    buffered_elements: int
    """Made, and not taken by the next stage."""
    buffered_bytes: int
    holds_gil: bool | None
    """Whether its function was found to keep other threads from running; None: not known."""
    padding: tuple[PaddingStatistics, ...] = ()
    """Of a stage that pads, by bucket."""
    reading: ReadingStatistics | None = None
    """Of a source that counts its reads: how many there were, and what they brought."""

    @property
    def seconds_per_element(self) -> float:
        """How long a stage works on an element, on average."""
        return self.busy_s / self.elements if self.elements else 0.0


class CachingStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What autocache() does over one source, and what became of the entries of its location in this process."""

    location: str
    step: str
    """"measuring", "trying" (some entries are written and read back, to see how fast they are), "chosen", or "doubting"
    (computing is measured again, because keeping was not as fast as was thought)."""
    point: int
    """At which autocache() of the source, counted from it, elements are kept now; 0: they are computed."""
    reason: str
    """Why; empty: it is still being measured."""
    hits: int
    """Splits that were found, or elements of a source that is read by index."""
    fetched: int
    """How many of those were on another host."""
    misses: int
    put: int
    """Entries that were written."""
    put_bytes: int
    got_bytes: int
    damaged: int
    """Entries whose bytes were wrong: they were removed, and computed."""
    left: int
    """Splits that the writer could not follow: they are left for a later epoch."""
    no_room: int
    """Entries that were not worth what would have had to go for them."""
    failures: int
    """Times that storage failed or did not answer."""


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline's stages from source to sink, and how the reader fared."""

    stages: tuple[StageStatistics, ...]
    elements: int
    read_s: float
    """The reader waited in `next()`."""
    idle_s: float
    """The pipeline was waited for by nobody: the time between two reads."""
    buffered_elements: int
    """Made by the last stage, and not read yet."""
    buffered_bytes: int
    """Made by any stage, and not taken by the next."""
    memory_budget_bytes: int
    threads: int
    caching: tuple[CachingStatistics, ...] = ()
    """Of each source that has autocache() above it."""

    @property
    def wait_fraction(self) -> float:
        """The share of the time that the reader waited for elements."""
        total = self.read_s + self.idle_s
        return self.read_s / total if total > 0 else 0.0
