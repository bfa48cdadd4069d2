"""How a loader fares, as users see it."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import msgspec

from penstock.client.reader import EpochReader
from penstock.runtime.stats import StageStatistics, Statistics
from penstock.stream.reading import StreamReader


class StreamStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One stream as this consumer read it."""

    number: int
    worker: str
    """Where it runs now; empty: nowhere."""
    elements: int
    bytes: int
    buffered_elements: int
    """Arrived, and not taken."""
    buffered_bytes: int
    ended: bool


class LoaderStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The present epoch, or the last one read."""

    elements: int = 0
    """That the trainer has taken."""
    bytes: int = 0
    """Of what was read of the service; of a loader that reads here, what it made, by a sample."""
    wait_s: float = 0.0
    """The trainer waited in `next()`, until now if it does."""
    run_s: float = 0.0
    """The trainer was busy between two calls of it, until now if it is."""
    buffered_elements: int = 0
    """Received of the service and not taken yet; of a loader that reads here, made and not taken."""
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
        """The share of the time that the trainer waited for batches."""
        total = self.wait_s + self.run_s
        return self.wait_s / total if total > 0 else 0.0

    @property
    def step_s(self) -> float:
        """How long the trainer is busy with an element, on average."""
        return self.run_s / self.elements if self.elements else 0.0

    @property
    def elements_per_s(self) -> float:
        """How many elements the trainer took a second."""
        total = self.wait_s + self.run_s
        return self.elements / total if total > 0 else 0.0

    @property
    def ideal_elements_per_s(self) -> float:
        """How many it would take if it never waited: the same steps, fed from memory."""
        return self.elements / self.run_s if self.run_s > 0 else 0.0

    @property
    def hit_ratio(self) -> float:
        """The share of what was read that another trainer had caused to be made."""
        read = sum(stream.elements for stream in self.streams)
        return self.shared / read if read else 0.0

    @property
    def workers(self) -> dict[str, int]:
        """Elements by worker."""
        found: dict[str, int] = {}
        for stream in self.streams:
            if stream.worker:
                found[stream.worker] = found.get(stream.worker, 0) + stream.elements
        return found


def statistics_of(readers: Sequence[EpochReader], here: Statistics | None = None) -> LoaderStatistics:
    """Of a loader over services. `here`: of the operators that stand between them and the trainer."""
    streams = tuple(_stream_statistics(stream) for reader in readers for stream in reader.streams())
    said = [reader.session.figures() for reader in readers]
    wait_s, run_s = readers[0].session.clock.times(perf_counter())
    return LoaderStatistics(
        elements=sum(each.batches for each in said) if here is None else here.elements,
        bytes=sum(each.nbytes for each in said),
        wait_s=wait_s,
        run_s=run_s,
        buffered_elements=sum(each.buffered_elements for each in said),
        buffered_bytes=sum(each.buffered_bytes for each in said),
        reconnects=sum(reader.consumer.reconnects for reader in readers),
        skipped=sum(each.skipped for each in said),
        shared=sum(each.shared for each in said),
        dropped=tuple(name for reader in readers for name in reader.consumer.view.dropped),
        streams=streams,
        stages=() if here is None else here.stages,
    )


def _stream_statistics(stream: StreamReader) -> StreamStatistics:
    elements, nbytes = stream.buffered
    return StreamStatistics(
        number=stream.number,
        worker=stream.view.worker or "",
        elements=stream.elements,
        bytes=stream.credit.taken_bytes,
        buffered_elements=elements,
        buffered_bytes=nbytes,
        ended=stream.standing.ended,
    )


def statistics_here(statistics: Statistics) -> LoaderStatistics:
    """Of a loader that runs in this process."""
    return LoaderStatistics(
        elements=statistics.elements,
        bytes=statistics.stages[-1].bytes if statistics.stages else 0,
        wait_s=statistics.read_s,
        run_s=statistics.idle_s,
        buffered_elements=statistics.buffered_elements,
        buffered_bytes=statistics.buffered_bytes,
        stages=statistics.stages,
    )
