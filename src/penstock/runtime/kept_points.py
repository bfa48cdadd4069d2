"""The caching points over one source of a run: their stores, their names, what decides between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from penstock.caching.elsewhere import OtherHosts
from penstock.caching.store import open_store
from penstock.core.errors import InvalidPipelineError
from penstock.graph.node import Node
from penstock.graph.parameters import short_label
from penstock.runtime.cache_choice import CacheJudge, LiveChoice, evidence_about, own_job
from penstock.runtime.cache_points import MarkedPoint
from penstock.runtime.keeping import CachePoint, SplitKeeping
from penstock.runtime.keeping_elements import ElementKeeping
from penstock.runtime.quarantine import Quarantine
from penstock.runtime.stats import CachingStatistics, StageMeter


class CacheTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What a run says to what is kept."""

    seed: int
    source: int
    """The number by which random numbers know the source."""
    scope: str
    pipeline: tuple[object, ...]
    """What tells this pipeline from others of the process, with how it is run."""
    epoch: int
    judge: CacheJudge | None
    """Who decides what is kept; None: this process does."""
    hosts: OtherHosts | None
    """Those that may have what this host does not; None: nobody else keeps anything."""
    cores: int
    reader_times: Callable[[], tuple[float, float]]
    """How long the reader has waited, and how long it has been busy."""
    split_local: bool
    """Whether a chunk of the source is of one split, whole: not where elements of a split are shared out, or units of
    a sampler are read."""


class KeptPoints:
    """Of one source. `meters` and `quarantines` are those of the run: they fill up while its stages are built."""

    def __init__(
        self,
        points: Sequence[MarkedPoint],
        terms: CacheTerms,
        meters: list[StageMeter],
        quarantines: list[Quarantine],
    ) -> None:
        frozen = [point.node for point in points if point.node.frozen]
        if frozen and not terms.split_local:
            raise InvalidPipelineError(
                "autocache(frozen=True) needs whole splits: it cannot be used with feed= or sharding='hint'. Leave "
                "frozen out and put autocache() before what draws random numbers"
            )
        self._terms, self._meters, self._quarantines = terms, meters, quarantines
        self._first_meter = 0
        self._points = [self._point(number, marked) for number, marked in enumerate(points, 1)]
        self.choice = LiveChoice(
            [point.node for point in points],
            self._points,
            meters,
            evidence=evidence_about(terms.pipeline, terms.judge, terms.source),
            cores=terms.cores,
            epoch=terms.epoch,
            reader_times=terms.reader_times,
        )
        self._keeping: SplitKeeping | ElementKeeping | None = None
        self._nodes = [point.node for point in points]

    def _point(self, number: int, marked: MarkedPoint) -> CachePoint:
        node, terms = marked.node, self._terms
        key = node.prefix_key
        if node.frozen:
            key += f" frozen {terms.seed:x} {terms.source} 0"
        return CachePoint(
            number=number,
            store=open_store(node.location, terms.scope, node.capacity_bytes),
            key=key,
            label=" → ".join(map(short_label, marked.prefix)),
            frozen=node.frozen,
        )

    def splits(self, source_meter: StageMeter) -> SplitKeeping | None:
        """Return what the source's stage asks, where it is read split by split."""
        if not self._terms.split_local:
            return None
        skipped = partial(_skipped, self._quarantines)
        self._first_meter = self._meters.index(source_meter)
        self._keeping = kept = SplitKeeping(
            self._points, self.choice, skipped, self._terms.hosts, held_splits(self._terms)
        )
        return kept

    def elements(self, source_meter: StageMeter) -> ElementKeeping | None:
        """The same, where it is read by index."""
        if not self._terms.split_local:
            return None
        self._first_meter = self._meters.index(source_meter)
        self.choice.reads_ahead, judge = False, self._terms.judge
        self._keeping = kept = ElementKeeping(
            self._points, self.choice, self._terms.hosts, own_job() if judge is None else judge.job
        )
        return kept

    def statistics(self) -> CachingStatistics:
        verdict = self.choice.verdict
        store = self._points[-1].store
        counts = store.counts
        return CachingStatistics(
            location=store.location,
            step=verdict.step,
            point=verdict.point,
            reason=verdict.reason,
            hits=counts.hits,
            fetched=counts.fetched,
            misses=counts.misses,
            put=counts.put,
            put_bytes=counts.put_bytes,
            got_bytes=counts.got_bytes,
            damaged=counts.damaged,
            left=counts.left,
            no_room=counts.no_room,
            failures=counts.failures,
        )

    def nodes(self) -> Sequence[Node]:
        return self._nodes

    def stand(self, node: Node) -> tuple[CachePoint, SplitKeeping | ElementKeeping] | None:
        """Return what a point's own stage needs, as it is built: all stages since the source's are below it.

        None: nothing can be kept here.
        """
        if self._keeping is None:
            return None
        point = self._points[next(i for i, each in enumerate(self._nodes) if each is node)]
        *below, point.meter = self._meters[self._first_meter :]
        point.meters = tuple(below)
        return point, self._keeping


_held: dict[tuple[object, ...], set[int]] = {}


def held_splits(terms: CacheTerms) -> set[int]:
    """Return the numbers of the splits of a pipeline's source that this host keeps: one set for all runs."""
    return _held.setdefault((*terms.pipeline, terms.source, id(terms.judge)), set())


def _skipped(quarantines: list[Quarantine]) -> int:
    return sum(quarantine.skipped for quarantine in quarantines)
