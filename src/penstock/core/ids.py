"""Names of things in a cluster. Whoever makes one draws it at random; the control core only compares them."""

from __future__ import annotations

from typing import NewType

JobName = NewType("JobName", str)
AttemptId = NewType("AttemptId", str)
"""One life of a job's state; part of every stream's id, so that nothing of an older life is taken for this one's."""
StreamId = NewType("StreamId", str)
AgentId = NewType("AgentId", str)
"""The process that starts and watches the workers of one `penstock worker`."""
WorkerId = NewType("WorkerId", str)
"""A place for one process. It outlives the processes that fill it."""
RunnerId = NewType("RunnerId", str)
"""One process that runs one job's user code in a worker's place. It never returns: its successor has another id."""
ClientId = NewType("ClientId", str)
"""One loader's reading of one epoch: a trainer that is started again has another."""
BlobHash = NewType("BlobHash", str)
Fingerprint = NewType("Fingerprint", str)


def stream_id(attempt: AttemptId, number: int) -> StreamId:
    """
    >>> stream_id(AttemptId("a1b2"), 3)
    'a1b2.3'
    """
    return StreamId(f"{attempt}.{number}")


def stream_number(stream: StreamId) -> int:
    """
    >>> stream_number(StreamId("a1b2.3"))
    3
    """
    return int(stream.rpartition(".")[2])
