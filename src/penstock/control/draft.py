"""A decision in the making.

A decision often takes several events, each of which depends on the ones before: a job is created, its epoch started,
its streams made and bound. A draft tries them on a copy of the state; the real state sees them when the caller applies
the decision's events. At the end it compares what consumers would see with what they saw, and tells those whose view
changed.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from penstock.control import events as e
from penstock.control.records import Iteration, Job
from penstock.control.state import ClusterState
from penstock.control.views import view_of
from penstock.core.ids import AgentId, AttemptId, JobName, WorkerId
from penstock.wire.messages import Answer, Push, ViewChanged


class Decision(msgspec.Struct, frozen=True):
    """What follows from a request: apply the events, commit the journaled ones, then let answer and pushes go."""

    events: tuple[e.AnyEvent, ...]
    answer: Answer | None = None
    pushes: tuple[tuple[str, Push], ...] = ()


class Draft:
    """See the module."""

    __slots__ = ("before", "draw", "events", "now", "pushes", "state")

    def __init__(self, state: ClusterState, *, now: float, draw: Callable[[], str]) -> None:
        self.before = state
        self.state = state.copy()
        self.now = now
        self.draw = draw
        self.events: list[e.AnyEvent] = []
        self.pushes: list[tuple[str, Push]] = []

    def emit(self, event: e.AnyEvent) -> None:
        self.state.apply(event)
        self.events.append(event)

    def job(self, job: JobName) -> Job:
        return self.state.jobs[job]

    def iterations(self, job: JobName) -> list[Iteration]:
        found = self.state.jobs.get(job)
        return [] if found is None else list(found.iterations.values())

    def push_to_agent(self, agent: AgentId | None, push: Push) -> None:
        if agent is not None and agent in self.state.agents:
            self.pushes.append((self.state.agents[agent].peer, push))

    def push_to_worker(self, worker: WorkerId, push: Push) -> None:
        found = self.state.workers.get(worker) or self.before.workers.get(worker)
        self.push_to_agent(None if found is None else found.agent, push)

    def publish(self) -> None:
        """Raise the version of every view that changed, and push it to those who had the old one."""
        state, before = self.state, self.before
        soft_changed = (
            state.workers != before.workers
            or state.agents.keys() != before.agents.keys()
            or state.drained != before.drained
        )
        for name, job in state.jobs.items():
            old = before.jobs.get(name)
            if old is None:
                continue
            if (
                old is job
                and not soft_changed
                and state.runners.get(name) is before.runners.get(name)
                and state.failed_starts == before.failed_starts
            ):
                continue
            for attempt in job.iterations:
                if attempt in old.iterations:
                    self._publish(name, attempt)

    def _publish(self, job: JobName, attempt: AttemptId) -> None:
        view = view_of(self.state, job, attempt)
        if view == view_of(self.before, job, attempt):
            return
        self.emit(e.ViewRaised(attempt, view.version + 1))
        leases = self.before.clients.get(job, {})
        new = msgspec.structs.replace(view, version=view.version + 1)
        for client, lease in self.state.clients.get(job, {}).items():
            if client in leases and lease.attempt == attempt:
                self.pushes.append((lease.peer, ViewChanged(view=new)))

    def decision(self, answer: Answer | None = None) -> Decision:
        return Decision(tuple(self.events), answer, tuple(self.pushes))
