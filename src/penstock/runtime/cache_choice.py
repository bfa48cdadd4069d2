"""What is done with the next split: the live decision of one run.

A run begins by computing, and measures; meanwhile the location is probed. When enough is known `policies.caching`
chooses, and what it chose holds from the next split on, for this run and those after it in this process. A choice to
compute is looked at again in the next run: trainers change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

from penstock.caching.patience import PendingCall
from penstock.caching.probe import StorageProbe, storage_of
from penstock.graph import ops
from penstock.policies.caching import (
    EPOCHS_UNTOLD,
    CacheChoice,
    CacheDemand,
    PipelineProfile,
    PointProfile,
    StorageModel,
    StorageSpeed,
    choose_caching,
)
from penstock.runtime.keeping import CachePoint
from penstock.runtime.stats import StageMeter

PROFILE_S = 0.5  # of a run, before its figures are worth a decision
PROFILE_ELEMENTS = 50

_kept: dict[tuple[str, ...], CacheChoice] = {}
"""What runs of this process chose to keep, by the points they had."""
_begun: dict[tuple[str, ...], tuple[float, list[PendingCall[StorageProbe]]]] = {}
"""When runs with some points began to measure, and the probes of their locations: epochs may be short."""
_lock = threading.Lock()


class LiveChoice:
    """One run's, for the points over one source."""

    def __init__(
        self,
        nodes: Sequence[ops.Autocache],
        points: Sequence[CachePoint],
        meters: Sequence[StageMeter],
        *,
        cores: int,
        reader_times: Callable[[], tuple[float, float]],
    ) -> None:
        """`reader_times`: how long the reader has waited, and how long it has been busy."""
        self._points = points
        self._meters = meters
        self._cores = cores
        self._reader_times = reader_times
        self._epochs = max((node.epochs for node in nodes if node.epochs is not None), default=EPOCHS_UNTOLD)
        self._stores = list(dict.fromkeys(point.store for point in points))
        self._key = tuple(f"{point.store.location} {point.key}" for point in points)
        asked = [number for number, node in enumerate(nodes, 1) if node.always]
        self.chosen = _asked_for(asked[-1]) if asked else _kept.get(self._key)
        """None: it is not decided yet."""

    def point(self) -> int:
        if self.chosen is None:
            self._look()
        return 0 if self.chosen is None else self.chosen.point

    def _look(self) -> None:
        now = perf_counter()
        with _lock:
            if self._key not in _begun:
                _begun[self._key] = now, [store.ask(partial(storage_of, store)) for store in self._stores]
            began, probes = _begun[self._key]
        measured = self._points[0].computed >= PROFILE_ELEMENTS and now - began >= PROFILE_S
        if not measured or not all(probe.done for probe in probes) or any(store.away for store in self._stores):
            return
        probed = [store.wait(probe) for store, probe in zip(self._stores, probes)]
        if any(probe is None for probe in probed):
            with _lock:
                _begun.pop(self._key, None)
            return
        slowest = min((probe for probe in probed if probe is not None), key=_read_speed)
        demand = CacheDemand(epochs_left=self._epochs, cores=self._cores)
        self.chosen = choose_caching(self.profile(), _model(slowest), demand)
        if self.chosen.mode == "keep":
            with _lock:
                _kept[self._key] = self.chosen
        for point in self._points:
            point.store.note(f"choice {point.prefix}", self.chosen.reason)

    def profile(self) -> PipelineProfile:
        """Return what was measured so far, by element of the source."""
        source = self._points[0].meters[0]
        count = max(1, source.elements)
        _, busy_s = self._reader_times()
        return PipelineProfile(
            cpu_s=_cpu_s(self._meters) / count,
            gil_s=_gil_s(self._meters) / count,
            stage_s=_slowest_s(self._meters, source) / count,
            source_s=max(0.0, source.busy_s + source.work_s - source.cpu_s) / count,
            points=tuple(
                PointProfile(
                    number=point.number,
                    cpu_s=_cpu_s(point.meters) / count,
                    gil_s=_gil_s(point.meters) / count,
                    nbytes=0.0 if point.meter is None else point.meter.nbytes / count,
                    rest_stage_s=_slowest_s([m for m in self._meters if m not in point.meters], source) / count,
                )
                for point in self._points
            ),
            trainer_s=busy_s / count,
        )


def _asked_for(point: int) -> CacheChoice:
    return CacheChoice(mode="keep", point=point, workers=1, seconds_by_mode={}, reason="keep: always=True asks for it")


def _cpu_s(meters: Sequence[StageMeter]) -> float:
    return sum(meter.cpu_s for meter in meters)


def _gil_s(meters: Sequence[StageMeter]) -> float:
    return sum(meter.cpu_s for meter in meters if meter.holds_gil)


def _slowest_s(meters: Sequence[StageMeter], source: StageMeter) -> float:
    """Return how long the slowest stage was busy, by the thread; the source's waiting has a bound of its own."""
    each = (
        meter.cpu_s if meter is source else (meter.busy_s + meter.work_s) / max(1, meter.threads) for meter in meters
    )
    return max(each, default=0.0)


def _read_speed(probe: StorageProbe) -> float:
    return max((speed.bytes_per_s for speed in probe.speeds if not speed.writes), default=0.0)


def _model(probe: StorageProbe) -> StorageModel:
    speeds = [
        (
            speed.writes,
            StorageSpeed(
                nbytes=speed.nbytes,
                parallel=speed.parallel,
                latency_s=speed.latency_s,
                bytes_per_s=max(1.0, speed.bytes_per_s),
            ),
        )
        for speed in probe.speeds
    ]
    return StorageModel(
        reads=tuple(speed for writes, speed in speeds if not writes),
        writes=tuple(speed for writes, speed in speeds if writes),
    )
