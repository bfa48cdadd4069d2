"""What is done with the next split: the live decision of one run.

A run begins by computing, and measures; meanwhile the location is probed. What it measured is evidence for a
*judge*, who says what holds from the next split on (`policies.cache_judging`): in a trainer's own process the judge is
there too, on a worker it is the dispatcher. To try a choice, a few entries are written and read back while elements
are computed. Runs of one pipeline in one process gather evidence together: epochs may be short.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Protocol

from msgspec.structs import replace

from penstock.caching.patience import PendingCall
from penstock.caching.probe import StorageProbe, read_back, storage_of
from penstock.caching.store import CacheStore
from penstock.graph import ops
from penstock.policies.cache_judging import CacheEvidence, CacheVerdict, judge
from penstock.policies.caching import EPOCHS_UNTOLD, CacheChoice, CacheDemand, StorageModel, StorageSpeed
from penstock.runtime.cache_profile import COMPUTING, ModeSums, ModeWindows, add_sums, profile_of
from penstock.runtime.keeping import CachePoint
from penstock.runtime.keeping_elements import TRIED_BYTES
from penstock.runtime.kept_reader import IN_FLIGHT, WINDOW_BYTES
from penstock.runtime.stats import StageMeter

LOOK_EVERY_S = 0.05
ANSWER_S = 1.0  # that a judge may take before he is told the same again
TRY_ENTRIES = 4
TRY_S = 2.0  # after which one entry is enough
FLUSH_S = 10.0
SEVERAL = 3  # windows in which getting is seen to be slow, before that is believed: others use the machine, too


class CacheJudge(Protocol):
    """Who decides about the points of a source, by its number."""

    @property
    def job(self) -> str:
        """For whom he decides."""

    def verdict(self, source: int) -> CacheVerdict: ...

    def tell(self, source: int, evidence: CacheEvidence, demand: CacheDemand) -> None:
        """Hand evidence in; what follows from it is asked for later. `demand` is what this process knows of it."""


def own_job() -> str:
    """Return what a pipeline of a process that asks nobody is known by beside jobs of a service."""
    return f"process {os.getpid()}"


class OwnJudge:
    """A process that asks nobody."""

    def __init__(self) -> None:
        self._verdicts: dict[int, CacheVerdict] = {}

    @property
    def job(self) -> str:
        return own_job()

    def verdict(self, source: int) -> CacheVerdict:
        return self._verdicts.get(source, CacheVerdict())

    def tell(self, source: int, evidence: CacheEvidence, demand: CacheDemand) -> None:
        self._verdicts[source] = judge(self.verdict(source), evidence, demand)


class _Trial:
    """Some entries of a point, written and read back. While they are read nothing else is asked of the location."""

    def __init__(self, point: CachePoint, window_bytes: int) -> None:
        self._point, self._window_bytes = point, window_bytes
        self._begin()

    def _begin(self) -> None:
        counts = self._point.store.counts
        self._began = perf_counter()
        self._before = counts.put, counts.put_bytes, counts.hits
        self._asked: PendingCall[float] | None = None

    @property
    def holds_back(self) -> bool:
        """Whether nothing more is to be written: entries are read, or enough is on its way to slow storage."""
        store = self._point.store
        on_the_way = store.counts.put_bytes - self._before[1] + store.waiting_bytes
        return self._asked is not None or on_the_way >= 2 * TRIED_BYTES

    def is_at(self, point: CachePoint) -> bool:
        return self._point.prefix == point.prefix

    def read_again(self) -> None:
        """Have the same entries read once more: others may have used the location meanwhile."""
        store = self._point.store
        self._asked = store.ask(partial(_flushed_and_read, store, self._point.prefix, self._window_bytes))

    def bytes_per_s(self) -> float:
        """Return how fast entries were; 0: that is not known yet."""
        store = self._point.store
        if self._asked is None:
            put, put_bytes, hits = self._before
            entries, nbytes = store.counts.put - put, store.counts.put_bytes - put_bytes
            enough = entries >= TRY_ENTRIES or nbytes >= TRIED_BYTES or store.counts.hits - hits >= TRY_ENTRIES
            if enough or (entries and perf_counter() - self._began > TRY_S):
                self.read_again()
            return 0.0
        if not self._asked.done:
            return 0.0
        found = store.wait(self._asked)
        if not found:
            self._begin()
        return found or 0.0


def _flushed_and_read(store: CacheStore, prefix: str, window_bytes: int) -> float:
    store.flush(FLUSH_S)
    return read_back(store, prefix, window_bytes=window_bytes, in_flight=IN_FLIGHT if window_bytes else 1)


class GatheredEvidence:
    """What the runs of one pipeline in this process found out together. Any thread may use it."""

    def __init__(self, judge_: CacheJudge, source: int) -> None:
        self._judge, self._source = judge_, source
        self._lock = threading.Lock()
        self._sums: dict[int, ModeSums] = {}
        self._number = 0
        self._look_at = 0.0
        self._probes: list[PendingCall[StorageProbe]] | None = None
        self._storage: StorageModel | None = None
        self._trial: _Trial | None = None
        self._got: deque[float] = deque(maxlen=SEVERAL)
        """How long elements took that were got, in the last windows."""
        self.runs = 0
        """That read now."""
        self.ended_runs = 0

    @property
    def verdict(self) -> CacheVerdict:
        return self._judge.verdict(self._source)

    @property
    def holds_back(self) -> bool:
        """Whether nothing is to be written or got now."""
        trial = self._trial
        return trial is not None and trial.holds_back

    def add(self, mode: int, sums: ModeSums) -> None:
        with self._lock:
            self._sums[mode] = add_sums(self._sums.get(mode, ModeSums()), sums)

    def look(
        self,
        points: Sequence[CachePoint],
        meters: Sequence[StageMeter],
        demand: CacheDemand,
        *,
        reads_ahead: bool,
    ) -> None:
        """Tell the judge what there is to tell."""
        now = perf_counter()
        if now < self._look_at or not self._lock.acquire(blocking=False):
            return
        try:
            self._look_at = now + LOOK_EVERY_S
            self._look(points, meters, demand, reads_ahead=reads_ahead)
        finally:
            self._lock.release()

    def _look(
        self, points: Sequence[CachePoint], meters: Sequence[StageMeter], demand: CacheDemand, *, reads_ahead: bool
    ) -> None:
        verdict = self.verdict
        if verdict.number != self._number:
            self._number, trial, self._trial = verdict.number, self._trial, None
            if verdict.step == "trying" and trial is not None and trial.is_at(points[verdict.point - 1]):
                self._trial = trial
                trial.read_again()
            self._sums.clear()
            self._got.clear()
            for point in points:
                point.store.note(f"choice {point.prefix}", verdict.reason)
        if self._storage is None and not self._probe(points):
            return
        evidence = CacheEvidence(number=verdict.number, storage=self._storage)
        if verdict.step == "trying":
            point = points[verdict.point - 1]
            self._trial = self._trial or _Trial(point, WINDOW_BYTES if reads_ahead else 0)
            speed = self._trial.bytes_per_s()
            if speed:
                self._tell(replace(evidence, read_back_bytes_per_s=speed), demand)
            return
        sums = self._sums.get(verdict.point)
        if sums is None or not sums.is_enough or len(sums.stages) != len(meters):
            return
        parallel = max(1, self.runs)
        if verdict.point == COMPUTING:
            profile = profile_of(sums, meters, points, reads_ahead=reads_ahead, parallel=parallel)
            self._tell(replace(evidence, profile=profile), demand)
        else:
            self._got.append(sums.seen_s / parallel)
            least = {verdict.point: min(self._got)}
            self._tell(replace(evidence, got_s=least, several=len(self._got) == SEVERAL), demand)
        self._sums.clear()  # what comes next is looked at by itself

    def _tell(self, evidence: CacheEvidence, demand: CacheDemand) -> None:
        self._judge.tell(self._source, evidence, demand)
        if self.verdict.number == evidence.number:
            self._look_at = perf_counter() + ANSWER_S

    def _probe(self, points: Sequence[CachePoint]) -> bool:
        stores = list(dict.fromkeys(point.store for point in points))
        if self._probes is None:
            self._probes = [store.ask(partial(storage_of, store)) for store in stores]
        if not all(probe.done for probe in self._probes) or any(store.away for store in stores):
            return False
        probed = [store.wait(probe) for store, probe in zip(stores, self._probes)]
        self._probes = None
        found = [probe for probe in probed if probe is not None]
        if len(found) == len(probed):
            self._storage = _model(min(found, key=_read_speed))
        return self._storage is not None


class LiveChoice:
    """One run's, for the points over one source."""

    def __init__(
        self,
        nodes: Sequence[ops.Autocache],
        points: Sequence[CachePoint],
        meters: Sequence[StageMeter],
        *,
        evidence: GatheredEvidence,
        cores: int,
        epoch: int,
        reader_times: Callable[[], tuple[float, float]],
    ) -> None:
        """`reader_times`: how long the reader has waited, and how long it has been busy."""
        self._points = points
        self._meters = meters
        self._evidence = evidence
        epochs = max((node.epochs for node in nodes if node.epochs is not None), default=None)
        left = EPOCHS_UNTOLD if epochs is None else max(1, epochs - epoch)
        self._demand = CacheDemand(epochs_left=left, cores=cores)
        asked = [number for number, node in enumerate(nodes, 1) if node.always]
        self._asked = _asked_for(asked[-1]) if asked else None
        self._windows = ModeWindows(meters, reader_times, evidence.add, warm=evidence.ended_runs > 0)
        self._counted = self._disturbed = False
        self.reads_ahead = True
        """Whether entries are read by another thread than the one that needs them."""

    @property
    def verdict(self) -> CacheVerdict:
        """What holds now."""
        return self._evidence.verdict if self._asked is None else self._asked

    @property
    def trying(self) -> bool:
        return self._asked is None and self._evidence.verdict.step == "trying"

    def point(self) -> int:
        if self._asked is not None:
            return self._asked.point
        if not self._counted:
            self._counted = True
            self._evidence.runs += 1
        self._evidence.look(self._points, self._meters, self._demand, reads_ahead=self.reads_ahead)
        return 0 if self._evidence.holds_back else self._evidence.verdict.point

    def passed(self, mode: int, count: int) -> None:
        if self._asked is not None:
            return
        disturbed, self._disturbed = self._disturbed, False
        if disturbed or (mode > COMPUTING and any(point.store.writing for point in self._points)):
            self._windows.end()  # what is got while the rest is written is slower than it will be
        else:
            self._windows.passed(mode, count)

    def disturbed(self) -> None:
        self._disturbed = True

    def ended(self) -> None:
        if self._asked is None:
            self._windows.end()
            self._evidence.look(self._points, self._meters, self._demand, reads_ahead=self.reads_ahead)

    def close(self) -> None:
        if self._counted:
            self._counted = False
            self._evidence.runs -= 1
            self._evidence.ended_runs += 1


def _asked_for(point: int) -> CacheVerdict:
    choice = CacheChoice(
        mode="keep", point=point, workers=1, seconds_by_mode={}, reason="keep: always=True asks for it"
    )
    return CacheVerdict(step="chosen", choice=choice)


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


_gathered: dict[tuple[object, ...], GatheredEvidence] = {}
_gathered_lock = threading.Lock()


def evidence_about(pipeline: tuple[object, ...], judge_: CacheJudge | None, source: int) -> GatheredEvidence:
    """Return what this process knows of a pipeline's source. `judge_` decides; None: one of its own does."""
    key = (*pipeline, source, None if judge_ is None else id(judge_))
    with _gathered_lock:
        if key not in _gathered:
            _gathered[key] = GatheredEvidence(judge_ or OwnJudge(), source)
        return _gathered[key]
