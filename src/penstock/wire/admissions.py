"""Who is let in to a runner, and as whom a runner is let in: what agents and runners say about keys."""

from __future__ import annotations

from penstock.core.ids import AgentId, JobName, RunnerId
from penstock.wire.jobs import Message


class ExpectRunner(Message, frozen=True, tag="expect_runner"):
    """An agent has made a key for a process that starts: whoever shows the key of this verifier is that runner."""

    agent: AgentId
    job: JobName
    runner: RunnerId
    verifier: str


class WhoReads(Message, frozen=True, tag="who_reads"):
    """A runner asks whose key this verifier is of: of who reads its job, or of another runner of the same job."""

    job: JobName
    verifier: str


class KnownReader(Message, frozen=True, tag="known_reader"):
    """The principal that has the key, as `str` writes it."""

    principal: str
