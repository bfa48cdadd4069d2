"""The journaled part of the state as bytes: what replay would rebuild, without replaying."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.control.metric_store import MetricStore
from penstock.control.records import Job, Stream, Streams
from penstock.control.state import ClusterState
from penstock.core.conversion import Conversion
from penstock.core.ids import JobName, StreamId, WorkerId
from penstock.wire.jobs import JobSpec

_streams = Conversion(dict[StreamId, Stream])

FORMAT = 3


class _Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    generation: int
    jobs: dict[JobName, Job]
    pipelines: dict[str, JobSpec]
    drained: tuple[WorkerId, ...]
    metrics: dict[str, dict[str, float]] = {}


def _as_dict(table: Any) -> dict[StreamId, Stream]:
    if not isinstance(table, Streams):
        raise NotImplementedError(f"a snapshot holds no {type(table).__name__}")
    return dict(table.items())


def _as_table(kind: type, rows: Any) -> Streams:
    if kind is not Streams:
        raise NotImplementedError(f"a snapshot holds no {kind.__name__}")
    return Streams(_streams(rows))


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_as_dict)
_DECODER = msgspec.msgpack.Decoder(_Snapshot, dec_hook=_as_table)


def snapshot(state: ClusterState) -> bytes:
    """Return what `restore` needs. Two states that replay cannot tell apart give the same bytes."""
    return _ENCODER.encode(
        _Snapshot(
            format=FORMAT,
            generation=state.generation,
            jobs=state.jobs,
            pipelines=state.pipelines,
            drained=tuple(sorted(state.drained)),
            metrics=dict(state.metrics.items()),
        )
    )


def restore(data: bytes) -> ClusterState:
    """Return the state a snapshot was made of, with no leases. Raises `msgspec.DecodeError` on anything else."""
    read = _DECODER.decode(data)
    if read.format != FORMAT:
        raise msgspec.ValidationError(f"snapshot of format {read.format}; this release reads {FORMAT}")
    state = ClusterState()
    state.generation = read.generation
    state.jobs = read.jobs
    state.pipelines = read.pipelines
    state.drained = frozenset(read.drained)
    state.metrics = MetricStore(read.metrics)
    return state
