"""A job's spec from a flat list of what is special about it: each field goes into the record that has it."""

from __future__ import annotations

from typing import Any

from penstock.core.ids import BlobHash, Fingerprint
from penstock.wire.jobs import JobSpec
from penstock.wire.modes import Placement, Ranks, Sharding, Share


def job_spec(*, consumers: int = 1, sharing: str | None = None, **fields: Any) -> JobSpec:
    """Return a spec of ten splits and seed 7; `policy`, `uneven`, `max_workers` and the like need not say of what."""
    ranks = Ranks(count=consumers, **_taken(Ranks, fields))
    sharding = Sharding(**_taken(Sharding, fields))
    placement = Placement(**_taken(Placement, fields))
    share = None if sharing is None else Share(kind=sharing, **_taken(Share, fields))  # type: ignore[arg-type]
    given: dict[str, Any] = {
        "fingerprint": Fingerprint("f"),
        "graph": BlobHash("graph"),
        "splits": BlobHash("splits"),
        "split_counts": (10,),
        "seed": 7,
        **fields,
    }
    return JobSpec(ranks=ranks, sharding=sharding, placement=placement, sharing=share, **given)


def _taken(record: Any, fields: dict[str, Any]) -> dict[str, Any]:
    return {name: fields.pop(name) for name in record.__struct_fields__ if name in fields}
