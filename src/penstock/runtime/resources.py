"""The threads and the memory that the stages of a run share."""

from __future__ import annotations

import msgspec

from penstock.graph import ops
from penstock.runtime.budget import Budget
from penstock.runtime.ordered import Buffering
from penstock.runtime.pool import ThreadPool
from penstock.runtime.stats import StageMeter
from penstock.runtime.tuning import FixedTuner, PrefetchTuner, Tuner, WorkTuner

BUFFERS_SHARE = 0.5  # of the memory budget: work under way, and what an allocator keeps, take as much
LARGEST_SHARE = 0.5  # of that, for one buffer


class Resources(msgspec.Struct, frozen=True):
    budget: Budget
    pool: ThreadPool | None
    buffers: int
    """How many stages share the memory."""

    def room(self, max_elements: int | None = None) -> Buffering:
        share = BUFFERS_SHARE * min(LARGEST_SHARE, 1 / max(1, self.buffers))
        max_bytes = int(self.budget.memory_bytes * share)
        return Buffering(max_bytes=max_bytes, max_elements=max_elements, cores=self.budget.threads)

    def tuner(self, threads: int | None, meter: StageMeter) -> Tuner:
        if self.pool is None:
            return FixedTuner(meter, 0)
        return FixedTuner(meter, threads) if threads is not None else WorkTuner(meter, self.budget.threads)

    def prefetch_tuner(self, node: ops.Prefetch, meter: StageMeter) -> Tuner:
        if self.pool is None:
            return FixedTuner(meter, 0)
        return PrefetchTuner(meter) if node.size is None else FixedTuner(meter, 1, limit=max(1, node.size // 2))
