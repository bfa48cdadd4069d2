"""How a loader fares, as users see it."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.client.reader import EpochReader
from penstock.runtime.stats import StageStatistics, Statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStatistics:
    """One stream as this consumer read it."""

    number: int
    worker: str
    """Where it runs now; empty: nowhere."""
    elements: int
    bytes: int
    buffered_bytes: int
    ended: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStatistics:
    """The present epoch, or the last one read."""

    elements: int = 0
    bytes: int = 0
    wait_s: float = 0.0
    """The trainer waited in `next()`."""
    run_s: float = 0.0
    """The trainer was busy between two calls of it."""
    buffered_bytes: int = 0
    reconnects: int = 0
    """How often a stream had to be opened again."""
    skipped: int = 0
    """Elements that were gone from the window when this trainer came to them (`sharing=`)."""
    shared: int = 0
    """Elements that had been made for another trainer."""
    dropped: tuple[str, ...] = ()
    """Elements that killed three processes and are left out."""
    streams: tuple[StreamStatistics, ...] = ()
    stages: tuple[StageStatistics, ...] = ()
    """Of what runs in this process."""

    @property
    def wait_fraction(self) -> float:
        total = self.wait_s + self.run_s
        return self.wait_s / total if total > 0 else 0.0

    @property
    def hit_ratio(self) -> float:
        """The share of what was read that another trainer had caused to be made."""
        return self.shared / self.elements if self.elements else 0.0

    @property
    def workers(self) -> dict[str, int]:
        """Elements by worker."""
        found: dict[str, int] = {}
        for stream in self.streams:
            if stream.worker:
                found[stream.worker] = found.get(stream.worker, 0) + stream.elements
        return found


def statistics_of(reader: EpochReader, stages: tuple[StageStatistics, ...] = ()) -> LoaderStatistics:
    streams = tuple(
        StreamStatistics(
            number=stream.number,
            worker=stream.view.worker or "",
            elements=stream.elements,
            bytes=stream.credit.taken_bytes,
            buffered_bytes=stream.queued_bytes,
            ended=stream.standing.ended,
        )
        for stream in reader.streams()
    )
    metrics = reader.session.metrics
    return LoaderStatistics(
        elements=metrics.batches,
        bytes=metrics.nbytes,
        wait_s=metrics.wait_s,
        run_s=metrics.run_s,
        buffered_bytes=sum(stream.buffered_bytes for stream in streams),
        reconnects=reader.consumer.reconnects,
        skipped=metrics.skipped,
        shared=metrics.shared,
        dropped=reader.consumer.view.dropped,
        streams=streams,
        stages=stages,
    )


def statistics_here(statistics: Statistics) -> LoaderStatistics:
    """Of a loader that runs in this process."""
    return LoaderStatistics(
        elements=statistics.elements,
        bytes=statistics.stages[-1].bytes if statistics.stages else 0,
        wait_s=statistics.read_s,
        run_s=statistics.idle_s,
        buffered_bytes=statistics.buffered_bytes,
        stages=statistics.stages,
    )
