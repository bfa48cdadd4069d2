"""How an agent is started and what it is told. Apart from the agent: a trainer need not import what runs jobs."""

from __future__ import annotations

import secrets
from typing import TypeAlias

import msgspec

from penstock.core.ids import AgentId, WorkerId
from penstock.processes.sandbox import Sandbox
from penstock.wire.addresses import Listening
from penstock.wire.credentials import Credentials
from penstock.wire.messages import WorkerPlace

AGENT_ENTRY = "penstock.processes.agent:run"
DRAIN_S = 30.0


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """An agent that is started again has the same ids: what its predecessor ran is known to be gone."""

    dispatcher: str
    credentials: Credentials
    """The agent's own key. Runners get others, which the agent makes."""
    agent: AgentId
    workers: tuple[WorkerPlace, ...]
    memory_bytes: int
    """How much memory each runner may use."""
    threads: int
    """How many threads each runner may use."""
    listening: Listening = Listening()
    """Where its runners listen."""
    sandbox: Sandbox | None = None
    """What its runners give up; None: nothing."""
    drain_s: float = DRAIN_S


class JoinWorkers(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """There are more workers."""

    workers: tuple[WorkerPlace, ...]


class LeaveWorkers(msgspec.Struct, frozen=True, kw_only=True, tag="leave"):
    """These workers are to end, in peace."""

    workers: tuple[WorkerId, ...]
    drain_s: float = DRAIN_S


AgentOrder: TypeAlias = JoinWorkers | LeaveWorkers


def new_agent_id() -> AgentId:
    return AgentId(f"a{secrets.token_hex(6)}")


def new_places(count: int, tags: tuple[str, ...] = ()) -> tuple[WorkerPlace, ...]:
    return tuple(WorkerPlace(WorkerId(f"w{secrets.token_hex(4)}"), tags) for _ in range(count))
