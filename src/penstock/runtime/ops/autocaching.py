"""autocache: the point. It adds no state, and hands elements on as they are.

Chunks that were made up to here are so no longer; of the others, those whose split is to be kept go to the writer.
"""

from __future__ import annotations

from penstock.graph import ops
from penstock.runtime.building import Site, builds
from penstock.runtime.contract import Chunk, Stage, State
from penstock.runtime.keeping import PASS_END, CachePoint, SplitKeeping, SplitVisit
from penstock.runtime.keeping_elements import ElementKeeping
from penstock.runtime.stats import StageMeter


class KeepingStage(Stage):
    def __init__(
        self,
        meter: StageMeter,
        upstream: Stage,
        point: CachePoint,
        keeping: SplitKeeping | ElementKeeping,
        *,
        idents: bool,
    ) -> None:
        """`idents`: a stage further down needs identities; else they end here."""
        super().__init__(meter, upstream)
        self.upstream = upstream
        self._point = point
        self._keeping = keeping
        self._idents = idents

    def open(self, pass_: int, state: State) -> None:
        self.upstream.open(pass_, state)

    def _pull(self, want: int) -> Chunk:
        chunk = self.upstream.pull(want)
        visit = chunk.visit
        if not isinstance(visit, SplitVisit):
            return chunk
        point = self._point
        for complete in self._keeping.passed(point, visit):
            self._keeping.finish(point, complete)
        self._keeping.went_through(point, visit, len(chunk.elements))
        if visit is PASS_END:
            return chunk
        made = chunk.made and visit.made_at != point.number
        if not chunk.made:
            point.computed += len(chunk.elements)
            if visit.put_at == point.number:
                self._keeping.keep(point, chunk, visit)
            elif visit.recheck is not None and visit.compared_at == point.number:
                visit.recheck.compare(chunk, point.label, point.prefix)
        idents = chunk.idents if self._idents else None
        if idents is not None and point.frozen:
            idents = idents.copy()
            idents[:, 0] = visit.place
        last = point.number == self._keeping.highest
        return Chunk(chunk.elements, chunk.marks, idents, None if last else visit, made)

    def skip(self, count: int) -> int:
        passed = self.upstream.skip(count)
        self._keeping.interrupted()
        return passed

    def close(self) -> None:
        self._keeping.close(self._point)
        super().close()


@builds(ops.Autocache)
def _keeping(node: ops.Autocache, at: Site, upstream: Stage) -> Stage:
    found = at.kept_at(node)
    if found is None:
        return upstream
    point, keeping = found
    return KeepingStage(at.meter, upstream, point, keeping, idents=at.with_idents or point.number < keeping.highest)
