"""A decision in the making.

A decision often takes several events, each of which depends on the ones before: a job is created, its epoch started,
its streams made and bound. A draft tries them on a copy of the state; the real state sees them when the caller applies
the decision's events. At the end it compares what consumers would see with what they saw, and tells those whose view
changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from penstock.control import events as e
from penstock.control.records import Iteration, Job, Stream
from penstock.control.state import ClusterState
from penstock.control.views import about_epoch, change_since, shown_differently
from penstock.core.ids import AgentId, AttemptId, JobName, WorkerId
from penstock.wire.messages import Answer, Push, ViewMoved
from penstock.wire.principals import Principal


class Asker(NamedTuple):
    """Who asks, with which key, and where the answer goes."""

    principal: Principal
    key: str
    """The verifier of the key that was shown."""
    peer: str


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
        """Raise the version of every view that changed, and push what did to those who had the old one.

        What is the same object has not changed, so that this costs what has.
        """
        state, before = self.state, self.before
        fleet_changed = state.workers is not before.workers or state.drained is not before.drained
        fleet_changed |= state.failed_starts is not before.failed_starts
        fleet_changed |= state.allotted is not before.allotted
        for name, job in state.jobs.items():
            old = before.jobs.get(name)
            same = old is job and state.runners.get(name) is before.runners.get(name) and not fleet_changed
            if old is not None and not same:
                for attempt in job.iterations:
                    if attempt in old.iterations:
                        self._publish(name, attempt)

    def _publish(self, job: JobName, attempt: AttemptId) -> None:
        streams = self.state.jobs[job].iterations[attempt].streams
        old = self.before.jobs[job].iterations[attempt].streams
        changed = [] if streams is old else sorted((streams[key] for key in streams.differing(old)), key=_by_number)
        made = tuple(stream.stream for stream in changed if stream.stream not in old)
        moved = tuple(
            stream.stream
            for stream in changed
            if (was := old.get(stream.stream)) is not None and shown_differently(was, stream)
        )
        about, old_about = (about_epoch(state, job, attempt) for state in (self.state, self.before))
        if not made and not moved and about == old_about:
            return
        since = self.state.view_version(attempt)
        self.emit(e.ViewRaised(attempt, since + 1, made, moved, about.dropped != old_about.dropped))
        change = change_since(self.state, job, attempt, since)
        assert change is not None
        push = ViewMoved(change=change)
        for lease in self.state.leases(job):
            if lease.attempt == attempt and self.before.reads(job, lease.client):
                self.pushes.append((lease.peer, push))

    def decision(self, answer: Answer | None = None) -> Decision:
        return Decision(tuple(self.events), answer, tuple(self.pushes))


def _by_number(stream: Stream) -> int:
    return stream.number
