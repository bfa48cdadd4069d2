"""What follows when keys are taken back.

Its leases end at once. A reader on the job's own host may have a process's memory mapped, and nothing takes that away
but the process's end: so the processes of jobs that it read are replaced, and their streams go on elsewhere, at the
positions that the other readers hold. An agent that is known by no key any more is lost, with what it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from penstock.control import events as e
from penstock.control.agents import remove_agent
from penstock.control.draft import Decision, Draft
from penstock.control.fitting import runners_of
from penstock.control.records import Job, Opened
from penstock.control.runners import settle, settle_all, stop_runner
from penstock.control.state import ClusterState
from penstock.core.ids import AttemptId
from penstock.wire.jobs import Slot
from penstock.wire.messages import Superseded
from penstock.wire.principals import Principal

REASON = "the key that it was opened with has been revoked; ask who runs the service for another"


def revoke(
    state: ClusterState,
    *,
    keys: frozenset[str],
    gone: frozenset[Principal],
    now: float,
    draw: Callable[[], str],
) -> Decision:
    """Return what follows from these verifiers being of no use any more; `gone` are those who have no other key."""
    draft = Draft(state, now=now, draw=draw)
    names = frozenset(principal.name for principal in gone if principal.role in ("trainer", "operator"))
    for name in list(draft.state.jobs):
        revoked = list(_readers(draft, draft.job(name), keys, names))
        for attempt, slot, held in revoked:
            leases = draft.state.clients.get(name)
            lease = None if leases is None else leases.get(held.client)
            if not held.closed:
                draft.emit(e.ConsumerClosed(name, attempt, slot, held.client, held.finished))
            if lease is not None:
                draft.emit(e.ClientGone(name, held.client, now))
                draft.pushes.append((lease.peer, Superseded(client=held.client, reason=REASON)))
        if revoked:
            for runner in list(runners_of(draft.state, name).values()):
                stop_runner(draft, runner, "stopped: somebody whose key was revoked may have its memory mapped")
            settle(draft, name)
    lost = [agent.agent for agent in draft.state.agents.values() if agent.principal in gone]
    for agent in lost:
        remove_agent(draft, agent, f"the key of agent {agent!r} was revoked")
    if lost:
        settle_all(draft)
    if draft.events:
        draft.publish()
    return draft.decision()


def _readers(
    draft: Draft, job: Job, keys: frozenset[str], names: frozenset[str]
) -> Iterator[tuple[AttemptId, Slot, Opened]]:
    """Go over those who read a job with such a key. Which one, a lease tells; of one without, its name has to do."""
    for iteration in job.iterations.values():
        for slot, held in iteration.opened.items():
            leases = draft.state.clients.get(job.name)
            lease = None if leases is None else leases.get(held.client)
            if held.by in names or (lease is not None and lease.key in keys):
                yield iteration.attempt, slot, held
