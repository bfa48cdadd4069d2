"""shard: where data sharding takes its part. Elsewhere it is not there at all."""

from __future__ import annotations

from penstock.graph import ops
from penstock.runtime.building import Site, builds
from penstock.runtime.contract import Stage
from penstock.runtime.streaming.sharding import ShardStage


@builds(ops.Shard)
def _sharding(node: ops.Shard, at: Site, upstream: Stage) -> Stage:
    return ShardStage(at.meter, upstream, at.placement.share) if at.placement.shards_at(node) else upstream
