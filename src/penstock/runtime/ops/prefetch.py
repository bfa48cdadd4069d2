"""prefetch: elements made ahead on a thread (`runtime.ordered`). It adds no state."""

from __future__ import annotations

from penstock.graph import ops
from penstock.runtime.building import Site, builds
from penstock.runtime.contract import Stage
from penstock.runtime.ordered import Prefetching


@builds(ops.Prefetch)
def _prefetching(node: ops.Prefetch, at: Site, upstream: Stage) -> Stage:
    tuner = at.resources.prefetch_tuner(node, at.meter)
    return Prefetching(at.meter, upstream, at.pool, tuner, at.resources.room(node.size))
